"""The offset of wall time to this process's monotonic clock.

Durations and decisions use the monotonic clock (`time.monotonic` and `time.perf_counter`, one clock on Linux); only
times that people read, such as those of spans, are in wall time.
"""

from __future__ import annotations

import time

READING_COUNT = 3  # the quickest was not interrupted


def wall_offset_ns() -> int:
    """Returns the nanoseconds from the monotonic clock to wall time since 1970, by the quickest of a few readings.

    It changes when the wall clock is set: read it once for all spans that must agree.
    """
    readings = []
    for _ in range(READING_COUNT):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(readings)[1]
