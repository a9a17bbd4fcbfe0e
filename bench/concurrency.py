"""`python -m bench.concurrency`: many streams at once, speculation on and off in turns.

Throughput is counted while all streams are past their first token and none has ended, so that every step could be full.
Beside it: time to first token, time per output token, gaps between deltas, and how full the target's steps were:
sessions in a step beside sessions that had work then. Prompts are held-out ones, cut short so that what is measured is
decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.deepened import EXTRA_LAYERS_DEFAULT, write_deepened
from bench.harness import heldout_prompts
from bench.pipeline.figures import Ratio, ratio_of
from bench.pipeline.placement import Placed, description, placed
from bench.pipeline.variants import AUTO, OFF, RULES_DEFAULT, Variant, request_of
from bench.processes import cpu_seconds
from specdec.errors import SpecdecError
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc

STREAM_COUNTS = (1, 2, 4, 8, 16, 32)
PROMPT_CHARACTERS = 200
RATIO_SUSPECT = 0.98


@dataclass(frozen=True, slots=True)
class Stream:
    """One generation as its reader saw it: when it was asked for, when deltas came and with how many tokens, and when
    messages of all kinds came and with how many bytes."""

    asked_s: float
    deltas: tuple[tuple[float, int], ...]
    finished: pb.Finished
    messages: tuple[tuple[float, int], ...] = ()
    token_ids: tuple[int, ...] = ()

    @property
    def first_s(self) -> float:
        return self.deltas[0][0]

    @property
    def last_s(self) -> float:
        return self.deltas[-1][0]


@dataclass(frozen=True, slots=True)
class Block:
    """So many streams of one variant, begun together. Times in milliseconds."""

    variant: str
    tokens_per_s: float
    first_token_ms: float
    per_token_ms: float
    gap_p99_ms: float
    step_sessions: float
    active_sessions: float
    acceptance: float
    rounds_off: float
    coordinator_us_per_token: float


async def read(stub: pb_grpc.CoordinatorServiceStub, request: pb.GenerateRequest) -> Stream:
    """Runs one generation."""
    asked_s = time.perf_counter()
    deltas: list[tuple[float, int]] = []
    messages: list[tuple[float, int]] = []
    token_ids: list[int] = []
    finished = pb.Finished()
    async for response in stub.Generate(request, timeout=600):
        now_s = time.perf_counter()
        messages.append((now_s, response.ByteSize()))
        if response.HasField("delta"):
            deltas.append((now_s, len(response.delta.token_ids)))
            token_ids += response.delta.token_ids
        elif response.HasField("finished"):
            finished = response.finished
    return Stream(asked_s, tuple(deltas), finished, tuple(messages), tuple(token_ids))


async def run_streams(
    addresses: Sequence[str], variant: Variant, rule: str, prompts: Sequence[str], max_tokens: int
) -> list[Stream]:
    """One stream per prompt, all at once, dealt out to the coordinators."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(address)) for address in addresses]
        stubs = itertools.cycle(map(pb_grpc.CoordinatorServiceStub, channels))
        requests = [request_of(variant, rule, prompt, max_tokens) for prompt in prompts]
        return await asyncio.gather(*(read(stub, request) for stub, request in zip(stubs, requests)))


def run_block(
    place: Placed, variant: Variant, rule: str, prompts: Sequence[str], max_tokens: int
) -> tuple[Block, list[Stream]]:
    """Runs a block. Raises grpc.RpcError."""
    coordinator = place.coordinator_of(variant)
    before_s = cpu_seconds(coordinator.process.pid)
    streams = asyncio.run(run_streams([coordinator.address], variant, rule, prompts, max_tokens))
    return block_of(variant.name, streams, cpu_seconds(coordinator.process.pid) - before_s), streams


def measure(place: Placed, variant: Variant, rule: str, prompts: Sequence[str], max_tokens: int) -> Block:
    """Runs a block. Raises grpc.RpcError."""
    return run_block(place, variant, rule, prompts, max_tokens)[0]


def block_of(variant: str, streams: Sequence[Stream], coordinator_cpu_s: float) -> Block:
    """The figures of streams begun together."""
    began_s, ended_s = max(stream.first_s for stream in streams), min(stream.last_s for stream in streams)
    if ended_s <= began_s:  # too few tokens for all to run together: from the first token of all to the last
        began_s, ended_s = min(stream.first_s for stream in streams), max(stream.last_s for stream in streams)
    moments = [(moment_s, count) for stream in streams for moment_s, count in stream.deltas]
    together = sum(count for moment_s, count in moments if began_s < moment_s <= ended_s)
    gaps_s = [b - a for stream in streams for (a, _), (b, _) in zip(stream.deltas, stream.deltas[1:])]
    counts = [stream.finished.statistics for stream in streams]
    rounds = sum(own.rounds for own in counts)
    tokens = sum(count for _, count in moments)
    per_token_s = [
        (stream.last_s - stream.first_s) / sum(count for _, count in stream.deltas[1:]) for stream in streams
    ]
    return Block(
        variant=variant,
        tokens_per_s=together / (ended_s - began_s),
        first_token_ms=statistics.median(stream.first_s - stream.asked_s for stream in streams) * 1e3,
        per_token_ms=statistics.median(per_token_s) * 1e3,
        gap_p99_ms=sorted(gaps_s)[int(0.99 * (len(gaps_s) - 1))] * 1e3,
        step_sessions=sum(own.step_sessions for own in counts) / rounds,
        active_sessions=sum(own.active_sessions for own in counts) / rounds,
        acceptance=sum(own.num_accepted_draft_tokens for own in counts)
        / max(1, sum(own.num_draft_tokens for own in counts)),
        rounds_off=sum(own.num_rounds_off for own in counts) / rounds,
        coordinator_us_per_token=coordinator_cpu_s / tokens * 1e6,
    )


def median_block(blocks: Sequence[Block]) -> dict[str, Any]:
    """Medians over blocks of one variant."""
    names = [name for name in asdict(blocks[0]) if name != "variant"]
    return {name: statistics.median(getattr(block, name) for block in blocks) for name in names}


def cell(
    place: Placed, stream_count: int, rule: str, asked: argparse.Namespace, progress: Progress, task: Any
) -> dict[str, Any]:
    """Pairs of blocks at one concurrency; more of them where auto seems slower."""
    prompts = [prompt[:PROMPT_CHARACTERS] for prompt in heldout_prompts().values()]
    blocks: dict[str, list[Block]] = {OFF.name: [], AUTO.name: []}

    def pairs(numbers: range) -> Ratio:
        ratios = []
        for number in numbers:
            chosen = [prompts[(number * stream_count + index) % len(prompts)] for index in range(stream_count)]
            for variant in (OFF, AUTO) if number % 2 else (AUTO, OFF):
                blocks[variant.name].append(measure(place, variant, rule, chosen, asked.max_tokens))
            progress.advance(task)
            ratios.append(blocks[AUTO.name][-1].tokens_per_s / blocks[OFF.name][-1].tokens_per_s)
        return ratio_of(ratios)

    measure(place, AUTO, rule, prompts[:stream_count], asked.max_tokens)
    ratio = pairs(range(asked.pairs))
    first_ratio = None
    if ratio.median < RATIO_SUSPECT and asked.again:
        first_ratio, ratio = ratio, pairs(range(asked.pairs, asked.pairs + asked.again))
    return {
        "streams": stream_count,
        "rule": rule,
        "ratio": asdict(ratio),
        "first_ratio": asdict(first_ratio) if first_ratio else None,
        "figures": {name: median_block(own) for name, own in blocks.items()},
    }


def table_of(cells: Sequence[dict[str, Any]], rtt_ms: float) -> Table:
    """Two lines per concurrency."""
    table = Table(title=f"many streams; round trip to the draft {rtt_ms:g} ms")
    numbers = (
        "tok/s",
        "first tok ms",
        "ms/tok",
        "gap p99 ms",
        "in step",
        "with work",
        "accept",
        "off rounds",
        "CPU µs/tok",
    )
    for name in ("rule", "streams", "", *numbers, "auto/off [95 %]"):
        table.add_column(name, justify="left" if name in ("rule", "") else "right")
    for own in cells:
        for name, block in own["figures"].items():
            values = list(block.values())
            ratio = own["ratio"]
            shown = f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if name == AUTO.name else ""
            formats = (".0f", ".0f", ".1f", ".0f", ".1f", ".1f", ".2f", ".2f", ".0f")
            columns = [format(value, form) for value, form in zip(values, formats, strict=True)]
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
    parser.add_argument("--again", type=int, default=30, help="pairs where auto is below 0.98 of off (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of a generation (%(default)s)")
    parser.add_argument("--extra-layers", type=int, default=EXTRA_LAYERS_DEFAULT, help="of the target (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of the target (%(default)s)")
    parser.add_argument("--draft-dtype", default="float32", help="of the draft (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    return parser.parse_args()


def main() -> int:
    asked = options()
    cells: list[dict[str, Any]] = []
    rules = [RULES_DEFAULT[number] for number in asked.rules]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            model = write_deepened(Path(scratch), asked.extra_layers)
            with placed(model, asked.dtype, asked.draft_dtype) as place, Progress(console=Console(stderr=True)) as bar:
                task = bar.add_task("measuring", total=len(rules) * len(asked.streams) * asked.pairs)
                hardware = description(place)
                place.set_rtt(asked.rtt_ms, asked.target_rtt_ms)
                for rule in rules:
                    for stream_count in asked.streams:
                        cells.append(cell(place, stream_count, rule, asked, bar, task))
    except SpecdecError as error:
        print(f"concurrency: {error}", file=sys.stderr)
        return 1
    Console(width=170).print(table_of(cells, asked.rtt_ms))
    asked.out.mkdir(parents=True, exist_ok=True)
    written = {"hardware": hardware, "rtt_ms": asked.rtt_ms, "extra_layers": asked.extra_layers, "cells": cells}
    (asked.out / "concurrency.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
