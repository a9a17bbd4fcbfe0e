"""Models and services shared by the tests of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.engine.table_model import write_table_model
from tests.support.pages import Watched, watched


@pytest.fixture(scope="session")
def table_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft that agree now and then; protocol tests only."""
    folder = tmp_path_factory.mktemp("tables")
    write_table_model(folder / "target", 5, seed=1)
    write_table_model(folder / "draft", 5, seed=2)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="session")
def services(table_models: tuple[Path, Path]) -> Iterator[Watched]:
    """Services with pages, started once: a test of counters compares with what they were before."""
    with watched(table_models) as started:
        yield started
