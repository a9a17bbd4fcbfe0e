"""One torch thread for tests that compute in their own process: two wait for each other at every operation, and on
a busy machine ten times as long as they compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Every test starts with one torch thread and leaves the count as it was. For a conftest to import."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
