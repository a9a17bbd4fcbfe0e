"""Virtual time: a heap of events, the clocks that the driven classes read, and an event loop for their tasks.

It runs as fast as Python does; ties go to the event scheduled first, so a run repeats.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
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

    def advance(self, until_s: float = float("inf")) -> bool:
        """Runs the next event; False when there is none before `until_s`."""
        if not self._coming or self._coming[0][0] > until_s:
            return False
        self.is_remote = False
        self.now_s, _, function, arguments = heapq.heappop(self._coming)
        function(*arguments)
        return True

    def perf_counter(self) -> float:
        """The time of the driven classes' stop watches and monotonic clocks."""
        return self.now_s + self.in_step_s


class Timer:
    """As `asyncio.TimerHandle`."""

    __slots__ = ("arguments", "function", "loop")

    def __init__(self, loop: Loop, function: Callable[..., Any], arguments: tuple) -> None:
        self.loop, self.function, self.arguments = loop, function, arguments

    def run(self) -> None:
        """Its time has come."""
        if self.function is not None and not self.loop.is_gone:
            self.function(*self.arguments)
        else:
            self.loop.clock.is_remote = True

    def cancel(self) -> None:
        """As `asyncio.TimerHandle.cancel`."""
        self.function, self.arguments = None, ()


class Loop:
    """The event loop of one coordinator: what its tasks, futures and generations use of one. Once it `is_gone`, nothing
    of it runs. `failure`: what ended a task."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.is_gone = False
        self.failure: BaseException | None = None

    def call_later(self, delay_s: float, function: Callable[..., Any], *arguments: Any, context: Any = None) -> Timer:
        """As an event loop's."""
        timer = Timer(self, function, arguments)
        self.clock.call_later(delay_s, timer.run)
        return timer

    def call_soon(self, function: Callable[..., Any], *arguments: Any, context: Any = None) -> Timer:
        """As an event loop's: after all that is due at this moment."""
        return self.call_later(0.0, function, *arguments)

    def time(self) -> float:
        """As an event loop's."""
        return self.clock.now_s

    def create_future(self) -> asyncio.Future:
        """As an event loop's."""
        return asyncio.Future(loop=self)

    def create_task(self, coroutine: Coroutine, **_named: Any) -> asyncio.Task:
        """As an event loop's; an exception ends the run."""
        task = asyncio.Task(coroutine, loop=self)
        task.add_done_callback(self._look)
        return task

    def _look(self, task: asyncio.Task) -> None:
        if not task.cancelled():
            self.failure = self.failure or task.exception()

    def get_debug(self) -> bool:
        """As an event loop's."""
        return False

    def call_exception_handler(self, context: dict) -> None:
        """Takes what a task leaves behind that a crash ended."""
