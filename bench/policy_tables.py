"""Results of the cells of bench/policy_cells.py as a table and as bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from rich.table import Table

from bench.bars import Bar, worst_of

OF_OFF, OF_BEST, OF_BEST_LATER = 0.98, 0.97, 0.9
OF_OFF_FIRST, OF_BEST_FIRST = 0.96, 0.92  # of a first text


@dataclass(frozen=True, slots=True)
class Result:
    """Tokens per second of a cell, means of some seeds. `best`: of the best fixed plan, if it was searched; `other`: of
    the policy of another checkout. `share`: of what the bar, `bound`, is of."""

    name: str
    off: float
    auto: float
    best: float | None
    plan: str
    share: float
    bound: float
    other: float | None = None


def table_of(results: Sequence[Result]) -> Table:
    """A line for each cell, and the geometric means of all."""
    table, all_ratios = Table(title="the policy in a simulated service; tokens per second"), []
    for name in ("cell", "off", "auto", "auto / off", "auto / best", "auto / other", "best fixed plan", ""):
        table.add_column(name, justify="left" if name in ("cell", "best fixed plan") else "right")
    for line in results:
        all_ratios.append([line.auto / base if base else math.nan for base in (line.off, line.best, line.other)])
        missed = "" if line.share >= line.bound else "below"
        table.add_row(line.name, f"{line.off:.1f}", f"{line.auto:.1f}", *_shown(all_ratios[-1]), line.plan, missed)
    means = [mean_of(ratio for ratio in column if ratio == ratio) for column in zip(*all_ratios)]
    table.add_row("geometric mean", "", "", *_shown(means), style="bold")
    return table


def _shown(ratios: Iterable[float | None]) -> list[str]:
    return ["" if ratio is None or math.isnan(ratio) else f"{ratio:.3f}" for ratio in ratios]


def mean_of(ratios: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    known = [*ratios]
    return geometric_mean(known) if known else None


def bars_of(results: Sequence[Result]) -> list[Bar]:
    """Each cell without gain, those with gain together, and each after odd requests."""

    def shares(bound: float) -> dict[str, float]:
        return {line.name: line.share for line in results if line.bound == bound}

    return [
        worst_of("simulated: auto / off where speculation gains nothing", OF_OFF, shares(OF_OFF)),
        Bar("simulated: auto / best fixed where it pays", OF_BEST, mean_of(shares(OF_BEST).values())),
        worst_of("simulated: auto / best fixed a minute after odd requests", OF_BEST_LATER, shares(OF_BEST_LATER)),
        worst_of("simulated: first text, auto / off with a useless head", OF_OFF_FIRST, shares(OF_OFF_FIRST)),
        worst_of("simulated: first text, auto / best fixed with a good head", OF_BEST_FIRST, shares(OF_BEST_FIRST)),
    ]
