"""Ratios of two systems that were measured in turns: their median, and an interval that assumes no distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
PAIR_COUNT_MIN = 6  # fewer have no interval of this confidence


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median of ratios of pairs, and an interval that holds the true median with 95 % confidence; of fewer than six
    pairs the interval goes from the least to the highest."""

    median: float
    low: float
    high: float
    pair_count: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}] of {self.pair_count}"

    def short(self, bound: float | None = None, is_limit: bool = False) -> str:
        """Returns it for a table, in bold where its median misses `bound`."""
        return f"{shown(self.median, bound, is_limit)} [{self.low:.2f}, {self.high:.2f}]"


def ratio_of(values: Sequence[float]) -> Ratio:
    """The median and its distribution-free interval: order statistics, by the binomial distribution of those below."""
    ordered = sorted(values)
    count = len(ordered)
    rank, below = 0, 0.5**count
    while rank < (count - 1) // 2 and below + math.comb(count, rank + 1) * 0.5**count <= (1 - CONFIDENCE) / 2:
        rank += 1
        below += math.comb(count, rank) * 0.5**count
    return Ratio(statistics.median(ordered), ordered[rank], ordered[count - 1 - rank], count)


def shown(value: float | None, bound: float | None = None, is_limit: bool = False, form: str = "") -> str:
    """Returns a number for a table: three digits, or of another form; in bold where it misses `bound`; "" for None."""
    if value is None:
        return ""
    text = format(value, form) if form else f"{value:.2f}" if 0.1 <= abs(value) < 10 else f"{value:,.3g}"
    if not form and abs(value) >= 1000:
        text = f"{value:,.0f}"
    missed = bound is not None and (value > bound if is_limit else value < bound)
    return f"**{text}**" if missed else text
