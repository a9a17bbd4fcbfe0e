"""`python -m bench.concurrency`: many streams at once, speculation on and off in turns.

Throughput is counted while all streams are past their first token and none has ended, so that every step could be full.
Beside it: time to first token, time per output token, gaps between deltas, and how full the target's steps were:
sessions in a step beside sessions that had work then. Prompts are held-out ones, cut short so that what is measured is
decoding. `--jump` lets one stream run and then begins the others at once: what counts is the time from two seconds
after. `--coordinators` deals the streams out to two coordinators that share target and draft.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.bars import Bar, add_check_flag, as_json, conclude
from bench.deepened import EXTRA_LAYERS_DEFAULT, write_deepened
from bench.pipeline.bars import OF_OFF, never_slower
from bench.pipeline.placement import Placed, description, placed
from bench.pipeline.variants import AUTO, OFF, RULES_DEFAULT, Variant, is_reproducible
from bench.results import Ratio, ratio_of
from bench.streams import PROMPT_CHARACTERS, Block, block_of, jump_rate, median_block, run_block, run_streams
from specdec.errors import SpecdecError
from tests.support.harness import heldout_prompts

STREAM_COUNTS = (1, 2, 4, 8, 16, 32)
JUMP_TOKENS = 1500, 300  # the first stream's, and those of the others, for over two seconds of any text
QUICK = {"streams": [1, 8], "pairs": 3, "pairs_max": 0, "max_tokens": 32}


def chosen_prompts(number: int, count: int) -> list[str]:
    """Returns the prompts of one turn."""
    prompts = [prompt[:PROMPT_CHARACTERS] for prompt in heldout_prompts().values()]
    return [prompts[(number * count + index) % len(prompts)] for index in range(count)]


def ratio_in_turns(
    rate: Callable[[Variant, int], float], asked: argparse.Namespace, advance: Callable[[], None]
) -> tuple[Ratio, Ratio | None]:
    """Auto / off over pairs, and the first ratio where it was below the bar: that is measured again, with more."""

    def pairs(numbers: range) -> Ratio:
        ratios = []
        for number in numbers:
            own = {variant: rate(variant, number) for variant in ((OFF, AUTO) if number % 2 else (AUTO, OFF))}
            ratios.append(own[AUTO] / own[OFF])
            advance()
        return ratio_of(ratios)

    ratio = pairs(range(asked.pairs))
    if ratio.median >= OF_OFF or not asked.pairs_max:
        return ratio, None
    return pairs(range(asked.pairs, asked.pairs + asked.pairs_max)), ratio


def cell(
    place: Placed, stream_count: int, rule: str, asked: argparse.Namespace, advance: Callable[[], None]
) -> dict[str, Any]:
    """Pairs of blocks at one concurrency; more of them where auto seems slower."""
    blocks: dict[str, list[Block]] = {OFF.name: [], AUTO.name: []}

    def rate(variant: Variant, number: int) -> float:
        block, _ = run_block(place, variant, rule, chosen_prompts(number, stream_count), asked.max_tokens)
        blocks[variant.name].append(block)
        return block.tokens_per_s

    run_block(place, AUTO, rule, chosen_prompts(0, stream_count), asked.max_tokens)
    ratio, first_ratio = ratio_in_turns(rate, asked, advance)
    return {
        "streams": stream_count,
        "rule": rule,
        "ratio": asdict(ratio),
        "first_ratio": asdict(first_ratio) if first_ratio else None,
        "measurements": {name: median_block(own) for name, own in blocks.items()},
    }


def jump(place: Placed, rule: str, asked: argparse.Namespace, advance: Callable[[], None]) -> Ratio:
    """Returns auto / off after the load jumped from one stream to the highest requested count."""
    count = max(asked.streams)

    def rate(variant: Variant, number: int) -> float:
        address = place.coordinator_of(variant).address
        return asyncio.run(jump_rate(address, variant, rule, chosen_prompts(number, count), JUMP_TOKENS))

    return ratio_in_turns(rate, asked, advance)[0]


def coordinators(place: Placed, rule: str, asked: argparse.Namespace, advance: Callable[[], None]) -> dict[str, Any]:
    """Auto's tokens a second through one coordinator and through all of them, and whether each prompt's text is one."""
    count = max(asked.streams)
    addresses = [child.address for child in place.services.coordinators]
    rates: dict[int, list[float]] = {1: [], len(addresses): []}
    is_same = True
    for number in range(asked.pairs):
        texts = []
        for used in rates:
            run = run_streams(addresses[:used], AUTO, rule, chosen_prompts(number, count), asked.max_tokens)
            streams = asyncio.run(run)
            rates[used].append(block_of(AUTO.name, streams, 0.0).tokens_per_s)
            texts.append([stream.token_ids for stream in streams])
        is_same = is_same and (texts[0] == texts[1] or not is_reproducible(rule))
        advance()
    ratio = ratio_of([both / one for one, both in zip(*rates.values(), strict=True)])
    medians = {str(used): ratio_of(own).median for used, own in rates.items()}
    return {"rule": rule, "streams": count, "tokens_per_s": medians, "ratio": asdict(ratio), "is_same_text": is_same}


def table_of(cells: Sequence[dict[str, Any]], rtt_ms: float) -> Table:
    """Two lines per concurrency."""
    table = Table(title=f"many streams; round trip to the draft {rtt_ms:g} ms")
    times = ("tok/s", "first tok ms", "ms/tok", "gap p99 ms")
    numbers = (*times, "in step", "with work", "accept", "off rounds", "CPU µs/tok")
    for name in ("rule", "streams", "", *numbers, "auto/off [95 %]"):
        table.add_column(name, justify="left" if name in ("rule", "") else "right")
    for own in cells:
        for name, block in own["measurements"].items():
            shown = str(Ratio(**own["ratio"])) if name == AUTO.name else ""
            formats = (".0f", ".0f", ".1f", ".0f", ".1f", ".1f", ".2f", ".2f", ".0f")
            columns = [format(value, form) for value, form in zip(block.values(), formats, strict=True)]
            table.add_row(own["rule"], str(own["streams"]), name, *columns, shown)
        table.add_section()
    return table


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.concurrency", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAM_COUNTS), help="at once (%(default)s)")
    parser.add_argument("--rules", type=int, nargs="+", default=[0], help="by number, as bench.pipeline lists them")
    parser.add_argument("--rtt-ms", type=float, default=5.0, help="coordinator-draft (%(default)s)")
    parser.add_argument("--target-rtt-ms", type=float, default=0.2, help="coordinator-target (%(default)s)")
    parser.add_argument("--pairs", type=int, default=9, help="blocks of each, in turns (%(default)s)")
    parser.add_argument("--pairs-max", type=int, default=60, help="where auto is below 0.98 of off (%(default)s)")
    parser.add_argument("--jump", action="store_true", help="also a load that jumps from 1 stream to the most")
    parser.add_argument("--coordinators", action="store_true", help="also two coordinators beside one, most streams")
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens of a generation (%(default)s)")
    parser.add_argument("--extra-layers", type=int, default=EXTRA_LAYERS_DEFAULT, help="of the target (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of the target (%(default)s)")
    parser.add_argument("--draft-dtype", default="float32", help="of the draft (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="about two minutes: 1 and 8 streams, three pairs")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    add_check_flag(parser)
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def bars_of(found: dict[str, Any]) -> list[Bar]:
    """Auto / off at every concurrency and after a jump, and texts that do not depend on the number of coordinators."""
    ratios = {f"{own['rule']}, {own['streams']} streams": Ratio(**own["ratio"]) for own in found["cells"]}
    ratios |= {f"{rule}, load jumped": Ratio(**own) for rule, own in found["jumps"].items()}
    same = [
        Bar(f"texts through two coordinators equal, {own['rule']}", 1.0, float(own["is_same_text"]))
        for own in found["coordinators"]
    ]
    return [*never_slower(ratios), *same]


def measure(asked: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Runs all requested measurements. Raises SpecdecError."""
    rules = [RULES_DEFAULT[number] for number in asked.rules]
    found: dict[str, Any] = {"rtt_ms": asked.rtt_ms, "extra_layers": asked.extra_layers, "cells": [], "jumps": {}}
    found["coordinators"] = []
    with placed(model, asked.dtype, asked.draft_dtype) as place, Progress(console=Console(stderr=True)) as bar:
        pieces = len(asked.streams) + asked.jump + asked.coordinators
        task = bar.add_task("measuring", total=len(rules) * pieces * asked.pairs)
        found["hardware"] = description(place)
        place.set_rtt(asked.rtt_ms, asked.target_rtt_ms)
        for rule in rules:
            for stream_count in asked.streams:
                found["cells"].append(cell(place, stream_count, rule, asked, lambda: bar.advance(task)))
            if asked.jump:
                found["jumps"][rule] = asdict(jump(place, rule, asked, lambda: bar.advance(task)))
            if asked.coordinators:
                found["coordinators"].append(coordinators(place, rule, asked, lambda: bar.advance(task)))
    return found


def main() -> int:
    asked = options()
    console = Console(width=170)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(asked, write_deepened(Path(scratch), asked.extra_layers))
    except SpecdecError as error:
        print(f"concurrency: {error}", file=sys.stderr)
        return 1
    console.print(table_of(found["cells"], asked.rtt_ms))
    for own in found["coordinators"]:
        rates = ", ".join(f"{used}: {rate:.0f}" for used, rate in own["tokens_per_s"].items())
        console.print(
            f"{own['rule']}, {own['streams']} streams, tokens/s by coordinators: {rates}; {Ratio(**own['ratio'])}"
        )
    bars = bars_of(found)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "concurrency.json").write_text(json.dumps(found | {"bars": as_json(bars)}, indent=2) + "\n", "utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
