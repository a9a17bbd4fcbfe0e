"""Services and a gateway shared by the tests of this folder, started once: these send requests, and end or alter
nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateways import chat_folder, gateway
from tests.support.services import MODELS, Services, running


@pytest.fixture(scope="session")
def services() -> Iterator[Services]:
    """The embedded pair in float32."""
    with running(MODELS / "target", MODELS / "draft", threads=1, dtype="float32") as started:
        yield started


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded pair's tokenizer with a chat template."""
    return chat_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def address(services: Services, chat_model: Path) -> Iterator[str]:
    """The address of a gateway before them, without keys."""
    with gateway(services.coordinator.address, model=chat_model) as child:
        yield child.address
