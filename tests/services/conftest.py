"""Running services shared by the tests of this folder, started once: these send requests, and end or alter nothing. A
test that needs other settings of the coordinator starts a further one on the same replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.engine.table_model import write_table_model
from tests.support.services import MODELS, Services, running

TABLE_VOCABULARY_SIZE = 7


@pytest.fixture(scope="session")
def table_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft table model with clearly different distributions."""
    folder = tmp_path_factory.mktemp("tables")
    write_table_model(folder / "target", TABLE_VOCABULARY_SIZE, seed=1)
    write_table_model(folder / "draft", TABLE_VOCABULARY_SIZE, seed=2)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="session")
def table_services(table_models: tuple[Path, Path]) -> Iterator[Services]:
    """Services on table models: protocol tests only."""
    with running(*table_models, threads=1) as services:
        yield services


@pytest.fixture(scope="session")
def shipped_pair() -> Iterator[Services]:
    """The shipped pair and its heads, in float32; its greedy texts repeat themselves."""
    heads = {"heads": str(MODELS / "target-heads")}
    with running(MODELS / "target", MODELS / "draft", threads=1, dtype="float32", target=heads) as services:
        yield services
