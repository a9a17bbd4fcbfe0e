"""Fixtures of the tests of native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specdec.engine.cpu.kernels import Kernels, kernels


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    """Afterwards torch, and so the kernels, have as many threads as before."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture
def native() -> Kernels:
    """The kernels of this process; the test is skipped where there are none."""
    found = kernels()
    if found is None:
        pytest.skip("native kernels are off")
    return found
