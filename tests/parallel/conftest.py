"""Followers shared by all tests of ranks that need no harm done to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.engine_models import make_tiny_model
from tests.support.ranks import Followers


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Ranks and their references have one thread each; set before any fixture of a module."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def followers() -> Iterator[Followers]:
    """Processes that are ranks of one model after another."""
    started = Followers()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny model folder of an architecture, once for each set of overrides."""
    made: dict[str, Path] = {}

    def find(architecture: str, **overrides: object) -> Path:
        key = f"{architecture} {overrides}"
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(architecture), architecture, **overrides)
        return made[key]

    return find
