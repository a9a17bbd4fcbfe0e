"""Kernels in Triton's interpreter, and compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.interpreter import own_process


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """The process of interpreted tests, if one was started, ends with them."""
    yield
    if own_process.cache_info().currsize:
        own_process().shutdown()
        own_process.cache_clear()
