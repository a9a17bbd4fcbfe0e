"""`python -m bench.concurrency`: many streams at once, speculation on and off in turns.

Throughput is counted while all streams are past their first token and none has ended, so that every step could be full.
Beside it: time to the first token, time per output token, gaps between deltas, and how full the target's steps were.
Prompts are held-out ones, cut short so that what is measured is decoding. A load that jumps lets one stream run and
then begins the others at once: what counts is the time from two seconds after.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.bars import OF_OFF, Bar, never_slower
from bench.placement import Placed, placed
from bench.results import Cell, Ratio, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from bench.streams import chosen_prompts, jump_rate, run_block
from tests.support.deepened import write_deepened
from tests.support.variants import AUTO, OFF, RULE_NAMES, Variant

RULES = (RULE_NAMES[0], RULE_NAMES[1], RULE_NAMES[4])
STREAM_COUNTS, QUICK_STREAM_COUNTS = (1, 8, 32), (1, 8)
JUMP = "1, then 32"
JUMP_TOKENS = 1500, 300  # the first stream's, and those of the others, for over two seconds of any text
MAX_TOKENS = 128
RTT_MS, TARGET_RTT_MS = 5.0, 0.2
TIMES = {"first_token_ms": "first token, ms", "per_token_ms": "a token, ms", "gap_p99_ms": "gap, p99 ms"}


def rate(place: Placed, cell: Cell, variant: Variant, turn: int) -> Values:
    """Measures the streams of a turn."""
    rule = str(cell["rule"])
    if cell["streams"] == JUMP:
        prompts, address = chosen_prompts(turn, max(STREAM_COUNTS)), place.coordinator_of(variant).address
        return {"tokens_per_s": asyncio.run(jump_rate(address, variant, rule, prompts, JUMP_TOKENS))}
    block, _ = run_block(place, variant, rule, chosen_prompts(turn, int(cell["streams"])), MAX_TOKENS)
    return {name: value for name, value in asdict(block).items() if name != "variant"}


class Concurrency:
    """See the module."""

    name = "concurrency"
    about = "auto / off with 1, 8 and 32 streams at once, emulated machines, 5 ms to the draft"
    turns, quick_turns, minutes = 9, 2, 12

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--streams", type=int, nargs="+", help=f"at once {STREAM_COUNTS}")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        counts = asked.streams or (QUICK_STREAM_COUNTS if asked.quick else STREAM_COUNTS)
        rules = RULES[:1] if asked.quick else RULES
        jump: list[Cell] = [] if asked.streams or asked.quick else [{"rule": RULES[0], "streams": JUMP}]
        return [*({"rule": rule, "streams": count} for rule in rules for count in counts), *jump]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        with TemporaryDirectory() as scratch:
            with placed(write_deepened(Path(scratch)), "bfloat16", "float32") as place:
                place.set_rtt(RTT_MS, TARGET_RTT_MS)

                def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                    return {variant.name: partial(rate, place, cell, variant) for variant in (OFF, AUTO)}

                yield contenders

    def tables(self, results: Results) -> list[Table]:
        counts = list(dict.fromkeys(cell["streams"] for cell in results.cells()))

        def text(count: float | str, rule: str) -> str:
            ratio = ratio_of(results, {"rule": rule, "streams": count})
            return ratio.short(OF_OFF) if ratio else ""

        def rates(count: float | str) -> list[str]:
            cell = {"rule": RULES[0], "streams": count}
            return [shown(results.median(cell, variant.name, "tokens_per_s"), form=",.0f") for variant in (OFF, AUTO)]

        ratios = [[str(count), *rates(count), *(text(count, rule) for rule in RULES)] for count in counts]
        columns = ["streams", f"off, {RULES[0]}, tokens/s", "auto", *RULES]
        times = [
            [name_of(cell), *(shown(results.median(cell, own.name, time)) for time in TIMES for own in (OFF, AUTO))]
            for cell in results.cells()
            if cell["streams"] != JUMP
        ]
        pairs = [f"{variant.name}: {time}" for time in TIMES.values() for variant in (OFF, AUTO)]
        return [
            Table("auto_over_off", f"{self.about} (bar {OF_OFF})", columns, ratios),
            Table("times", "what a client waits for", ["", *pairs], times),
        ]

    def bars(self, results: Results) -> list[Bar]:
        cells = results.cells()
        return never_slower({name_of(cell): ratio for cell in cells if (ratio := ratio_of(results, cell))})


def ratio_of(results: Results, cell: Cell) -> Ratio | None:
    return results.ratio(cell, AUTO.name, OFF.name, "tokens_per_s")


def name_of(cell: Cell) -> str:
    """Returns the name of a cell in a bar or a table."""
    return f"{cell['rule']}, {cell['streams']} streams"


BENCHMARK = Concurrency()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
