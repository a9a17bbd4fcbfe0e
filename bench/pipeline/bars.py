"""The bars of the pipeline from the cells of a run: against off, the best fixed variant, the simulator, the policy.

Pure: cells in, bars out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from bench.bars import Bar, worst_of
from bench.pipeline.sweep import Cell
from bench.pipeline.variants import AUTO, OFF, TREE
from bench.results import Ratio, geometric_mean

OF_OFF, OF_BEST_FIXED = 0.98, 0.97


def never_slower(ratios: Mapping[str, Ratio]) -> list[Bar]:
    """Auto / off by cell: no interval may lie wholly below the bar; and no mean gain is lost over all."""
    highs = {name: ratio.high for name, ratio in ratios.items()}
    below = [f"{name} {ratio}" for name, ratio in ratios.items() if ratio.median < OF_OFF]
    shown = f"{len(ratios)} cells; medians below {OF_OFF}: {', '.join(below) or 'none'}"
    mean = geometric_mean([ratio.median for ratio in ratios.values()]) if ratios else None
    return [
        Bar("auto / off: least upper end of an interval", OF_OFF, min(highs.values(), default=None), shown),
        Bar("auto / off: geometric mean over cells", 1.0, mean),
    ]


def against_fixed(ratios: Mapping[str, Ratio]) -> list[Bar]:
    """Auto / best fixed by cell, the best chosen on other pairs: the mean over cells, and no cell's interval below."""
    mean = geometric_mean([ratio.median for ratio in ratios.values()]) if ratios else None
    below = [f"{name} {ratio}" for name, ratio in ratios.items() if ratio.median < OF_BEST_FIXED]
    shown = f"{len(ratios)} cells; medians below {OF_BEST_FIXED}: {', '.join(below) or 'none'}"
    highs = {name: ratio.high for name, ratio in ratios.items()}
    return [
        Bar(
            "auto / best fixed, chosen on other pairs: geometric mean over cells",
            OF_BEST_FIXED,
            mean,
            shown,
            False,
            1.0,
        ),
        Bar("auto / best fixed: least upper end of an interval", OF_BEST_FIXED, min(highs.values(), default=None)),
    ]


def name_of(cell: Cell) -> str:
    """Returns the name of a cell in a bar."""
    far = f", target at {cell.target_rtt_ms:g} ms" if cell.target_rtt_ms >= 1 else ""
    return f"{cell.rule} at {cell.rtt_ms:g} ms{far}"


def half_step(cells: Sequence[Cell], half_step_ms: float | None) -> list[Bar]:
    """At half a target step of round trip: against synchronous rounds over the same link, and beside the target."""
    over_link: dict[str, float] = {}
    over_near: dict[str, float] = {}
    complete = [(cell, best) for cell in cells if AUTO.name in cell.comparable and (best := cell.best_synchronous())]
    near = {cell.rule: cell.gain(best, OFF.name) for cell, best in complete if cell.rtt_ms == 0}
    for cell, best in complete:
        if cell.rtt_ms == half_step_ms:
            over_link[cell.rule] = cell.gain(AUTO.name, best)
            if cell.rule in near:
                over_near[cell.rule] = cell.gain(AUTO.name, OFF.name) / near[cell.rule]
    return [
        worst_of("auto / best synchronous at RTT = T/2", 1.2, over_link, stretch=1.4),
        worst_of("auto / co-located best synchronous at RTT = T/2", 0.85, over_near, stretch=1.0),
    ]


def predictions(cells: Sequence[Cell], simulated: Sequence[Mapping[str, float]]) -> list[Bar]:
    """Against the simulator, and the policy against itself: medians over round trips by rule."""

    def medians(ratio_of: Callable[[Cell, Mapping[str, float]], float | None]) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for cell, rates in zip(cells, simulated, strict=True):
            if (ratio := ratio_of(cell, rates)) is not None:
                found.setdefault(cell.rule, []).append(ratio)
        return {rule: statistics.median(values) for rule, values in found.items()}

    def over_simulated(cell: Cell, rates: Mapping[str, float]) -> float | None:
        own = cell.measurements
        return own[TREE.name].tokens_per_s / rates[TREE.name] if TREE.name in own else None

    def over_predicted(cell: Cell, _rates: Mapping[str, float]) -> float | None:
        auto = cell.measurements.get(AUTO.name)
        return auto.tokens_per_s / auto.predicted_tokens_per_s if auto and auto.predicted_tokens_per_s else None

    return [
        worst_of("streamed tree / simulator (median over RTT)", 0.85, medians(over_simulated), stretch=0.95),
        worst_of("observed / predicted by the policy, at least", 0.9, medians(over_predicted)),
        worst_of("observed / predicted by the policy, at most", 1.1, medians(over_predicted), is_limit=True),
    ]


def bars_of(cells: Sequence[Cell], simulated: Sequence[Mapping[str, float]], half_step_ms: float | None) -> list[Bar]:
    """All bars of a run."""
    against_best = {name_of(cell): ratio for cell in cells if (ratio := cell.over_best_fixed)}
    return [
        *never_slower({name_of(cell): cell.ratio for cell in cells if cell.ratio}),
        *against_fixed(against_best),
        *half_step(cells, half_step_ms),
        *predictions(cells, simulated),
    ]
