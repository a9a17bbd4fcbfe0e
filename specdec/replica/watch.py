"""The watch over the engine: ends a replica whose engine thread hangs or has died, and says why.

A thread of its own, since the event loop cannot see a hang and the engine thread cannot end one. Its clock is its own
ticks: time in which the process was stopped, or did not get the processor, does not count. A hang that holds the
interpreter's lock stops this thread too; `specdec.process_watch` ends such a process, and one whose event loop hangs.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from specdec.engine.scheduling.heartbeat import Work
from specdec.engine.scheduling.scheduler import Engine
from specdec.errors import ENGINE_LOST_EXIT_CODE
from specdec.process_watch import ProcessWatch
from specdec.telemetry.logs import flush_logs, get_logger

TICK_S = 0.1
END_GRACE_S = 0.7  # from the finding to the end of the process; streams are notified in half of it
LAST_WORDS_S = 0.2  # beyond it, for the line that says why, where standard error is slow


class HangTimer:
    """Counts the ticks that each piece of work takes."""

    def __init__(self) -> None:
        self._work: Work | None = None
        self._tick_count = 0

    def tick(self, work: Work | None) -> str:
        """Takes the work seen at a tick; returns a reason once it has taken longer than it may, "" before."""
        if work is not self._work:
            self._work, self._tick_count = work, 0
        self._tick_count += 1
        if work is None or self._tick_count * TICK_S <= work.seconds_max:
            return ""
        return f"the engine hangs: {work} took longer than {work.seconds_max:.1f} s"


class EngineWatch:
    """The thread that watches a started engine. It calls `on_lost` once, with the reason, and END_GRACE_S later ends
    the process with ENGINE_LOST_EXIT_CODE, regardless of other threads. `loop`: for the watch over the process."""

    def __init__(
        self, engine: Engine[Any, Any], on_lost: Callable[[str], object], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._engine = engine
        self._on_lost = on_lost
        self._process_watch = ProcessWatch(loop)
        self._timer = HangTimer()
        self._is_stopping = threading.Event()
        self._is_lost = False
        self._thread = threading.Thread(target=self._run, name="engine watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops watching, before the engine is stopped; ends the process at once if the engine is lost."""
        self._is_stopping.set()
        if self._is_lost:
            self._end()
        self._thread.join()

    def _run(self) -> None:
        with self._process_watch:
            while not self._is_stopping.wait(TICK_S):
                reason = self._look()
                if reason:
                    self._is_lost = True
                    try:
                        self._on_lost(reason)
                        get_logger().error("the engine is lost", reason=reason)
                        time.sleep(END_GRACE_S)
                    finally:
                        self._end()

    def _look(self) -> str:
        """Returns why the engine is lost; "" if it is not."""
        if not self._engine.is_alive:
            return "the engine thread has died; the log has its error"
        return self._timer.tick(self._engine.heartbeat.work)

    def _end(self) -> NoReturn:
        try:
            flush_logs(LAST_WORDS_S)
        finally:
            os._exit(ENGINE_LOST_EXIT_CODE)
