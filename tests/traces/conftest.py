"""Models and services shared by the tests of traces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.engine.table_model import write_table_model
from tests.support.otlp_receiver import Receiver
from tests.support.services import Services
from tests.support.traces import traced

VOCABULARY_SIZE = 11
POSITIONS = 8192  # enough for 2,000 rounds of a few tokens each


@pytest.fixture(scope="session")
def table_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft that agree now and then; protocol tests only."""
    folder = tmp_path_factory.mktemp("tables")
    write_table_model(folder / "target", VOCABULARY_SIZE, seed=1, positions_max=POSITIONS)
    write_table_model(folder / "draft", VOCABULARY_SIZE, seed=2, positions_max=POSITIONS)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """A collector that answers."""
    with Receiver() as started:
        yield started


@pytest.fixture(scope="module")
def services(table_models: tuple[Path, Path], receiver: Receiver) -> Iterator[Services]:
    """Traced services on table models."""
    with traced(table_models, receiver.endpoint) as started:
        yield started
