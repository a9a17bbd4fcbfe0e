"""The time from the start of a process to SERVING, by phase."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT_START_TIME = 19  # index of the start time, in clock ticks since boot, after the name of /proc/self/stat


class StartupTimes:
    """Seconds of each phase, in order; the first, "imports", begins with the process. `begin` ends the phase before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"imports": process_age_s()}
        self._phase, self._began_s = "", time.perf_counter()

    def begin(self, phase: str) -> None:
        """Begins a phase; the current one continues if it is the same."""
        if phase != self._phase:
            self.end()
            self._phase = phase

    def end(self) -> None:
        """Ends the current phase; a phase that ran twice has the sum."""
        now_s = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now_s - self._began_s
        self._phase, self._began_s = "", now_s


def process_age_s() -> float:
    """Seconds since this process started; on a system without /proc its CPU time, which is at most that."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started_s = int(fields[STAT_START_TIME]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, AttributeError):
        return time.process_time()
