"""Bars of the policy: auto against plain decoding and against the best fixed plan, by cell."""

from __future__ import annotations

from collections.abc import Mapping

from bench.bars import Bar
from bench.results import Ratio, geometric_mean

OF_OFF, OF_BEST_FIXED = 0.98, 0.97


def never_slower(ratios: Mapping[str, Ratio]) -> list[Bar]:
    """Auto / off by cell: no interval may lie wholly below the bar; and no mean gain is lost over all."""
    return [
        _no_interval_below("auto / off", OF_OFF, ratios),
        Bar("auto / off: geometric mean over cells", 1.0, _mean(ratios)),
    ]


def against_fixed(ratios: Mapping[str, Ratio]) -> list[Bar]:
    """Auto / best fixed by cell, chosen on other prompts: the mean over cells, and no cell's interval below."""
    claim = "auto / best fixed, chosen on other prompts"
    return [
        Bar(f"{claim}: geometric mean over cells", OF_BEST_FIXED, _mean(ratios), stretch=1.0),
        _no_interval_below(claim, OF_BEST_FIXED, ratios),
    ]


def _mean(ratios: Mapping[str, Ratio]) -> float | None:
    return geometric_mean([ratio.median for ratio in ratios.values()]) if ratios else None


def _no_interval_below(claim: str, bound: float, ratios: Mapping[str, Ratio]) -> Bar:
    below = [f"{name} {ratio}" for name, ratio in ratios.items() if ratio.median < bound]
    shown = f"{len(ratios)} cells; medians below {bound}: {', '.join(below) or 'none'}"
    highs = [ratio.high for ratio in ratios.values()]
    return Bar(f"{claim}: least upper end of an interval", bound, min(highs, default=None), shown)
