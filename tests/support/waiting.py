"""Waiting in tests for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Returns when `condition` holds. Raises TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.02)
