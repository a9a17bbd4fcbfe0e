"""`python -m bench.pipeline`: the policy across machines, by round trip and rule, beside every fixed plan.

Three services on three emulated machines, the target on one core, draft and coordinator on the other; a target made
deeper by layers that add nothing (tests/support/deepened.py): a step costs what steps cost, acceptance stays real;
held-out prompts, one stream. Variants take turns on every prompt: plain decoding (off), the policy's own choice (auto),
a streamed chain, a streamed tree, and synchronous rounds at fixed draft lengths.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.bars import OF_BEST_FIXED, OF_OFF, Bar, against_fixed, never_slower, worst_of
from bench.placement import description, placed
from bench.results import Cell, Ratio, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from tests.support.deepened import write_deepened
from tests.support.harness import heldout_prompts
from tests.support.samples import measure
from tests.support.variants import AUTO, CHAIN, OFF, RULE_NAMES, TREE, Variant, synchronous

GREEDY, COUPLED, _, _, REJECTION = RULE_NAMES
RULES = (GREEDY, COUPLED, REJECTION)
RTTS_MS, QUICK_RTTS_MS = (0.0, 1.0, 5.0, 20.0, 100.0), (0.0, 20.0)
TARGET_RTT_MS = 0.2
FIXED = (CHAIN, TREE, *map(synchronous, (1, 2, 3, 4, 6, 8)))
OTHERS = tuple(variant.name for variant in (OFF, *FIXED))  # plain decoding is a fixed plan, too
MAX_TOKENS = 64
RATE, OF_PREDICTED = "tokens_per_s", "over_predicted"  # what the policy had said that the text would reach


def name_of(cell: Cell) -> str:
    """Returns the name of a cell in a bar."""
    return f"{cell['rule']} at {cell['rtt_ms']:g} ms"


def over_off(results: Results, cell: Cell) -> Ratio | None:
    return results.ratio(cell, AUTO.name, OFF.name, RATE)


def over_best(results: Results, cell: Cell) -> Ratio | None:
    return results.over_best(cell, AUTO.name, OTHERS, RATE)


class Pipeline:
    """See the module."""

    name = "pipeline"
    about = "auto / off and auto / best fixed plan by round trip to the draft and rule, one stream, emulated machines"
    turns, quick_turns, minutes = 9, 2, 25

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rtt-ms", type=float, nargs="+", help=f"to the draft {RTTS_MS}")
        parser.add_argument("--rules", nargs="+", choices=RULE_NAMES, help=f"{RULES}")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        rtts_ms = asked.rtt_ms or (QUICK_RTTS_MS if asked.quick else RTTS_MS)
        return [{"rule": rule, "rtt_ms": rtt_ms} for rtt_ms, rule in product(rtts_ms, asked.rules or RULES)]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        prompts = list(heldout_prompts().items())
        with TemporaryDirectory() as scratch:
            with placed(write_deepened(Path(scratch)), "bfloat16", "float32") as place:

                def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                    rule, rtt_ms = str(cell["rule"]), float(cell["rtt_ms"])
                    results.notes["placement"] = description(place)
                    place.set_rtt(rtt_ms, TARGET_RTT_MS)

                    def rate(variant: Variant, turn: int) -> Values:
                        prompt = prompts[turn % len(prompts)]
                        sample = measure(place.stub_of(variant), variant, rule, rtt_ms, prompt, MAX_TOKENS)
                        values = {RATE: sample.tokens_per_s}
                        if sample.predicted_tokens_per_s:
                            values[OF_PREDICTED] = sample.tokens_per_s / sample.predicted_tokens_per_s
                        return values

                    return {variant.name: partial(rate, variant) for variant in (OFF, AUTO, *FIXED)}

                yield contenders

    def tables(self, results: Results) -> list[Table]:
        rules = list(dict.fromkeys(str(cell["rule"]) for cell in results.cells()))
        rtts_ms = sorted({float(cell["rtt_ms"]) for cell in results.cells()})

        def by_rule(ratio_of: Callable[[Results, Cell], Ratio | None], bound: float) -> list[list[str]]:
            def text(rule: str, rtt_ms: float) -> str:
                ratio = ratio_of(results, {"rule": rule, "rtt_ms": rtt_ms})
                return ratio.short(bound) if ratio else ""

            return [[f"{rtt_ms:g}", *(text(rule, rtt_ms) for rule in rules)] for rtt_ms in rtts_ms]

        names = [OFF.name, AUTO.name, *(variant.name for variant in FIXED)]
        rates = [
            [name_of(cell), *(shown(results.median(cell, name, RATE), form=".0f") for name in names)]
            for cell in results.cells()
        ]
        columns = ["round trip, ms", *rules]
        of_best = f"auto / best fixed plan, chosen on other prompts (bar {OF_BEST_FIXED})"
        return [
            Table("auto_over_off", f"auto / off (bar {OF_OFF})", columns, by_rule(over_off, OF_OFF)),
            Table("auto_over_best", of_best, columns, by_rule(over_best, OF_BEST_FIXED)),
            Table("rates", "tokens/s", ["", *names], rates),
        ]

    def bars(self, results: Results) -> list[Bar]:
        cells = {name_of(cell): cell for cell in results.cells()}
        of_off, of_best = (
            {name: ratio for name, cell in cells.items() if (ratio := ratio_of(results, cell))}
            for ratio_of in (over_off, over_best)
        )
        predicted: dict[str, list[float]] = {}
        for cell in results.cells():
            found = results.samples(cell).get(AUTO.name, {}).get(OF_PREDICTED, [])
            predicted.setdefault(str(cell["rule"]), []).extend(found)
        medians = {rule: median(found) for rule, found in predicted.items() if found}
        return [
            *never_slower(of_off),
            *against_fixed(of_best),
            worst_of("tokens/s / predicted by the policy, median, at least", 0.9, medians),
            worst_of("tokens/s / predicted by the policy, median, at most", 1.1, medians, is_limit=True),
        ]


BENCHMARK = Pipeline()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
