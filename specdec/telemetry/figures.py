"""What a process counts, as plain values: changed by one thread while it works, read by another when somebody asks.

Counting is an addition and takes no lock. A reader may find one figure an event ahead of another, never a wrong one.
Names, help texts and the page are made elsewhere (metrics.py), and only when they are asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

LATENCY_BOUNDS_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
COUNT_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observation that stands for its bucket, and the trace to look at; `wall_s` since 1970."""

    trace_id: str
    value: float
    wall_s: float


@dataclass(slots=True)
class Histogram:
    """Observations by size. `counts[i]` are those above `bounds[i - 1]` and at most `bounds[i]`; the last are above all
    bounds. `exemplars` are the newest of each bucket that has one."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0
    exemplars: dict[int, Exemplar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, count: int = 1) -> int:
        """Counts `count` observations of one value; returns the index of their bucket."""
        index = bisect_left(self.bounds, value)
        self.counts[index] += count
        self.total += value * count
        return index

    def add_traced(self, value: float, trace_id: str, wall_s: float) -> None:
        """Counts one observation whose trace is recorded."""
        self.exemplars[self.add(value)] = Exemplar(trace_id, value, wall_s)
