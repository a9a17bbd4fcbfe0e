"""How this process's monotonic clock stands to wall time.

Durations and decisions use the monotonic clock (`time.monotonic` and `time.perf_counter`, one clock on Linux); only
what leaves the machine to be read by people, such as the times of spans, is in wall time.
"""

from __future__ import annotations

import time

READING_COUNT = 3  # a reading that was interrupted is told from one that was not


def wall_offset_ns() -> int:
    """Nanoseconds to add to the monotonic clock to have wall time since 1970, by the quickest of a few readings.

    It changes when the wall clock is set: whoever wants spans that agree with each other reads it once for all of them.
    """
    readings = []
    for _ in range(READING_COUNT):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(readings)[1]
