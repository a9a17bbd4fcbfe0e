"""`python -m bench.policy_cells`: the policy in a simulated service, beside plain decoding and the best fixed plan.

No models, no services, no real clock: tests/support/simulation.py. The cells are in tests/support/policy_cells.py; a
turn is a seed, and the best fixed plan is found on other seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from bench.bars import Bar, worst_of
from bench.results import Cell, Ratio, Results, Table, geometric_mean, shown
from bench.runner import Contender, Prepared, Values, main
from tests.support.policy_cells import (
    AFTER_ODD,
    BOUNDS,
    CELLS,
    GAIN,
    GOOD_HEAD,
    NO_GAIN,
    USELESS_HEAD,
    auto_rate,
    best_fixed_plan,
    fixed_rate,
    off_rate,
)

OFF, AUTO, BEST = "off", "auto", "best fixed plan"
RATE = "tokens_per_s"
NAMES = {NO_GAIN: "no_gain", GAIN: "gain", AFTER_ODD: "after_odd", USELESS_HEAD: "first", GOOD_HEAD: "first_gain"}
SLOW_STREAMS = 8  # cells with more, or with odd requests, take a minute


def over(results: Results, cell: Cell, other: str) -> Ratio | None:
    return results.ratio(cell, AUTO, other, RATE)


def reference_of(kind: str) -> str:
    """Returns what the bound of a kind is of."""
    return OFF if kind in (NO_GAIN, USELESS_HEAD) else BEST


def medians(results: Results, kind: str) -> dict[str, float]:
    """Returns auto's share of that in each cell of a kind."""
    found = {str(cell["cell"]): over(results, cell, reference_of(kind)) for cell in results.cells(kind=kind)}
    return {name: ratio.median for name, ratio in found.items() if ratio}


def mean_gain(results: Results) -> float | None:
    """Returns the mean of these where speculation pays."""
    found = medians(results, GAIN)
    return geometric_mean([*found.values()]) if found else None


class PolicyCells:
    """See the module."""

    name = "policy_cells"
    about = "the policy in a simulated service, beside plain decoding and the best fixed plan"
    turns, quick_turns, minutes = 3, 1, 6

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default="", help="cells whose names hold this")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        chosen = [cell for cell in CELLS.values() if asked.only in cell.name]
        if asked.quick:
            chosen = [cell for cell in chosen if len(cell.world.texts) <= SLOW_STREAMS and not cell.bursts_s]
        return [{"kind": cell.kind, "cell": cell.name} for cell in chosen]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        yield self._contenders

    def _contenders(self, cell: Cell, results: Results) -> dict[str, Contender]:
        own = CELLS[str(cell["cell"])]
        rates: dict[str, Callable[[Sequence[int]], float]] = {
            OFF: partial(off_rate, own),
            AUTO: partial(auto_rate, own),
        }
        if own.pays:
            plan = best_fixed_plan(own)
            results.notes.setdefault("plans", {})[own.name] = plan.description
            rates[BEST] = partial(fixed_rate, own, plan)

        def contender(rate: Callable[[Sequence[int]], float], turn: int) -> Values:
            return {RATE: rate(own.seeds(turn))} if turn else {}  # nothing to warm up

        return {name: partial(contender, rate) for name, rate in rates.items()}

    def tables(self, results: Results) -> list[Table]:
        plans = results.notes.get("plans", {})

        def line(cell: Cell, other: str, bound: float | None) -> list[str]:
            ratio, name = over(results, cell, other), str(cell["cell"])
            rates = [shown(results.median(cell, variant, RATE), form=".1f") for variant in (OFF, AUTO)]
            text = shown(ratio.median if ratio else None, bound, form=".3f")
            return [name, *rates, text, *([plans.get(name, "")] if other == BEST else [])]

        def table(kind: str, bound: float) -> Table:
            other = reference_of(kind)
            rows = [line(cell, other, None if kind == GAIN else bound) for cell in results.cells(kind=kind)]
            if kind == GAIN:
                rows.append(["geometric mean", "", "", shown(mean_gain(results), bound, form=".3f"), ""])
            columns = ["", "off, tokens/s", "auto", f"auto / {other}"]
            return Table(NAMES[kind], f"{kind} (bar {bound:g})", [*columns, *([BEST] if other == BEST else [])], rows)

        return [table(kind, bound) for kind, bound in BOUNDS.items() if results.cells(kind=kind)]

    def bars(self, results: Results) -> list[Bar]:
        return [
            Bar(f"simulated: auto / {BEST}, {GAIN}: geometric mean", BOUNDS[GAIN], mean_gain(results)),
            *(
                worst_of(f"simulated: auto / {reference_of(kind)}, {kind}", bound, medians(results, kind))
                for kind, bound in BOUNDS.items()
                if kind != GAIN
            ),
        ]


BENCHMARK = PolicyCells()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
