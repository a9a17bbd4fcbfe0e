"""Virtual time: a heap of events, and the clocks that the driven classes read.

It runs as fast as Python does; ties go to the event scheduled first, so a run repeats.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Violation(BaseException):
    """A property does not hold. No `Exception`, so that no handler of the driven classes can swallow it."""


class Clock:
    """Seconds since the start of the run, and the events to come."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.is_remote = False  # the current event touches no session of a coordinator
        self.in_step_s = 0.0  # how far a step of an engine, which computes at once, has come
        self._coming: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._count = 0

    def call_later(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> None:
        """Runs `function` after `delay_s`; there is no way to cancel it."""
        self._count += 1
        heapq.heappush(self._coming, (self.now_s + max(0.0, delay_s), self._count, function, arguments))

    def advance(self) -> bool:
        """Runs the next event; False when there is none."""
        if not self._coming:
            return False
        self.is_remote = False
        self.now_s, _, function, arguments = heapq.heappop(self._coming)
        function(*arguments)
        return True

    def perf_counter(self) -> float:
        """The time of the driven classes' stop watches and monotonic clocks."""
        return self.now_s + self.in_step_s
