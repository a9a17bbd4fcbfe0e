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
SLOW_STREAMS = 8  # cells with more, or with odd requests, take a minute


def over(results: Results, cell: Cell, other: str) -> Ratio | None:
    return results.ratio(cell, AUTO, other, RATE)


def medians(results: Results, kind: str, other: str) -> dict[str, float]:
    """Returns auto's share of another's rate in the cells of a kind."""
    found = {str(cell["cell"]): over(results, cell, other) for cell in results.cells(kind=kind)}
    return {name: ratio.median for name, ratio in found.items() if ratio}


class PolicyCells:
    """See the module."""

    name = "policy_cells"
    about = "the policy in a simulated service, beside plain decoding and the best fixed plan"
    turns, quick_turns, minutes = 3, 1, 10

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
        def line(cell: Cell) -> list[str]:
            bound, name = BOUNDS[str(cell["kind"])], str(cell["cell"])
            best = over(results, cell, BEST)
            rates = [shown(results.median(cell, variant, RATE), form=".1f") for variant in (OFF, AUTO)]
            ratios = [(over(results, cell, OFF), None if best else bound), (best, bound)]
            texts = [shown(ratio.median if ratio else None, least, form=".3f") for ratio, least in ratios]
            return [name, *rates, *texts, f"{bound:g}", results.notes.get("plans", {}).get(name, "")]

        columns = ["", "off, tokens/s", "auto", "auto / off", "auto / best fixed", "bar", "best fixed plan"]
        names = {
            NO_GAIN: "no_gain",
            GAIN: "gain",
            AFTER_ODD: "after_odd",
            USELESS_HEAD: "first",
            GOOD_HEAD: "first_gain",
        }
        return [Table(names[kind], kind, columns, [*map(line, results.cells(kind=kind))]) for kind in BOUNDS]

    def bars(self, results: Results) -> list[Bar]:
        where_it_pays = medians(results, GAIN, BEST)
        mean = geometric_mean([*where_it_pays.values()]) if where_it_pays else None
        others = [(kind, OFF if kind in (NO_GAIN, USELESS_HEAD) else BEST) for kind in BOUNDS if kind != GAIN]
        return [
            Bar(f"simulated: auto / best fixed, {GAIN}: geometric mean", BOUNDS[GAIN], mean),
            *(
                worst_of(f"simulated: auto / {other}, {kind}", BOUNDS[kind], medians(results, kind, other))
                for kind, other in others
            ),
        ]


BENCHMARK = PolicyCells()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
