"""Bars: the goals of a benchmark, in one form for all benchmarks, and the exit code of `--check`.

A benchmark makes its bars from its measurements, shows them with `conclude` and writes `as_json` of these into its
results, where `python -m bench --bars` finds them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.results import Ratio, geometric_mean

OF_OFF, OF_BEST_FIXED = 0.98, 0.97  # of auto: plain decoding, and the best fixed plan


@dataclass(frozen=True, slots=True)
class Bar:
    """One goal. `reached` counts, the worst of the values in `shown`; None without measurement.

    It is met at or above `bound`, or at or below it if `is_limit`.
    """

    claim: str
    bound: float
    reached: float | None
    shown: str = ""
    is_limit: bool = False
    stretch: float | None = None

    @property
    def state(self) -> str:
        """`not measured`, `missed`, `met` or `stretch`."""
        if self.reached is None:
            return "not measured"
        if self.stretch is not None and self._passes(self.stretch):
            return "stretch"
        return "met" if self._passes(self.bound) else "missed"

    def _passes(self, bound: float) -> bool:
        assert self.reached is not None
        return self.reached <= bound if self.is_limit else self.reached >= bound


def of_ratio(claim: str, bound: float, ratio: Ratio | None, told: str = "") -> Bar:
    """A bar of a ratio's median; `told` beside its interval."""
    return Bar(claim, bound, ratio.median if ratio else None, f"{ratio}{told}" if ratio else "")


def worst_of(
    claim: str, bound: float, values: Mapping[str, float], is_limit: bool = False, stretch: float | None = None
) -> Bar:
    """A bar of several values by name: the worst counts."""
    if not values:
        return Bar(claim, bound, None, "", is_limit, stretch)
    worst = max(values.values()) if is_limit else min(values.values())
    shown = "; ".join(f"{name} {value:.3g}" for name, value in values.items())
    return Bar(claim, bound, worst, shown, is_limit, stretch)


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


def table_of(bars: Iterable[Bar]) -> Table:
    """One line per bar."""
    table = Table(title="bars", show_lines=True)
    for name in ("bar", "to reach", "stretch", "reached", "", "of"):
        table.add_column(name, justify="right" if name in ("to reach", "stretch", "reached") else "left")
    for bar in bars:
        sign = "≤" if bar.is_limit else "≥"
        reached = "" if bar.reached is None else f"{bar.reached:.3g}"
        stretch = "" if bar.stretch is None else f"{sign} {bar.stretch:g}"
        table.add_row(bar.claim, f"{sign} {bar.bound:g}", stretch, reached, bar.state, bar.shown)
    return table


def as_json(bars: Iterable[Bar]) -> list[dict[str, Any]]:
    """For a benchmark's results, under `bars`."""
    return [asdict(bar) for bar in bars]


def add_check_flag(parser: argparse.ArgumentParser) -> None:
    """`--check`, the same in every benchmark that has bars."""
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")


def conclude(bars: Iterable[Bar], console: Console, is_checked: bool) -> int:
    """Shows bars and returns the exit code: 1 if they are checked and one is missed. Unmeasured bars are not missed."""
    shown = list(bars)
    console.print(table_of(shown))
    return int(is_checked and any(bar.state == "missed" for bar in shown))
