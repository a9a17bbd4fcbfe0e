"""`python -m bench.tracing`: the cost of tracing, and the number of spans of a generation.

Three sets of services run: without tracing, with 1 % of requests sampled, and with all. Blocks of requests go to each
in turns, in an order that changes, and what counts are ratios of neighbours: whatever else the machine does meets all
three. Spans go to a collector in a process of its own. First plain decoding on a table model, which computes nothing: a
round for every token and nothing but rounds, so every microsecond of tracing shows, and what is lost there is more than
any real pair loses; blocks are short and many. Then the shipped pair, as users run it, with one stream and with 32:
these have bars. What a round costs the coordinator is timed alone too. At last generations of several lengths are
counted.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec.bench import harness
from specdec.bench.bars import Bar, add_check_flag, as_json, conclude, worst_of
from specdec.bench.pipeline.measurements import Ratio, ratio_of
from specdec.bench.processes import cpu_seconds
from specdec.bench.rounds import table_models
from specdec.bench.trace_counts import (
    POSITIONS,
    VOCABULARY_SIZE,
    collector,
    count_spans,
    counting_us,
    traced_us,
    variables,
)
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc

SAMPLERS = {
    "1 %": {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
    "100 %": {"OTEL_TRACES_SAMPLER": "parentbased_always_on"},
}
OFF = "off"
PAIR_STREAMS = {1: 128, 32: 48}  # tokens of a request, by number of streams
SPEED_MIN, WORK_MAX = 0.95, 1.10
FIXED = {"speculation_policy": "fixed"}  # one that learns would end up elsewhere in each of the three


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a block: concurrent streams, each with one request after another."""

    name: str
    target: Path
    draft: Path | None
    prompts: Sequence[str]
    requests_per_stream: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens a second of all streams, and CPU seconds of all three services per 1,000 tokens."""

    tokens_per_s: float
    cpu_per_1000: float


async def run_streams(address: str, load: Load) -> int:
    """One stream per prompt, all at once; returns the tokens of all."""

    async def read(stub: pb_grpc.CoordinatorServiceStub, prompt: str) -> int:
        request = pb.GenerateRequest(text=prompt)
        request.sampling.max_tokens = load.max_tokens
        request.sampling.temperature = 0.0
        request.sampling.ignore_eos = True
        count = 0
        for _ in range(load.requests_per_stream):
            async for response in stub.Generate(request, timeout=600):
                count += len(response.delta.token_ids)
        return count

    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        return sum(await asyncio.gather(*(read(stub, prompt) for prompt in load.prompts)))


def measure(services: harness.Services, load: Load) -> Block:
    """Runs one block. Raises grpc.RpcError."""
    pids = [child.process.pid for child in (services.coordinator, services.target, services.draft) if child is not None]
    before_s, began_s = sum(map(cpu_seconds, pids)), time.perf_counter()
    token_count = asyncio.run(run_streams(services.coordinator.address, load))
    took_s, spent_s = time.perf_counter() - began_s, sum(map(cpu_seconds, pids)) - before_s
    return Block(token_count / took_s, 1000 * spent_s / token_count)


def cost(load: Load, block_count: int, samplers: Mapping[str, dict[str, str]] = SAMPLERS) -> dict[str, list[Block]]:
    """Blocks of every way of sampling, as many of each, in turns."""
    blocks: dict[str, list[Block]] = {name: [] for name in (OFF, *samplers)}
    begin = harness.running
    models = load.target, load.draft
    with collector() as endpoint, contextlib.ExitStack() as stack:
        running = {OFF: stack.enter_context(begin(*models, coordinator=FIXED, threads=1))}
        told: dict[str, Any] = {"otlp_traces_endpoint": endpoint}
        for name, sampler in samplers.items():
            with variables(sampler):
                running[name] = stack.enter_context(begin(*models, coordinator={**FIXED, **told}, threads=1, **told))
        for services in running.values():
            measure(services, load)
        orders = itertools.islice(itertools.cycle(itertools.permutations(running)), block_count)
        for order in track(list(orders), description=f"turns, {load.name}"):
            for name in order:
                blocks[name].append(measure(running[name], load))
    return blocks


def ratios_of(own: Sequence[Block], off: Sequence[Block], measurement: str) -> Ratio:
    """The ratio to the untraced block of the same turn: the median, and where it lies with 95 % certainty."""
    return ratio_of([getattr(one, measurement) / getattr(other, measurement) for one, other in zip(own, off)])


def bars_of(found: Mapping[str, dict[str, list[Block]]]) -> list[Bar]:
    """The bars over the loads on the shipped pair, every request sampled."""
    every = {name: (blocks["100 %"], blocks[OFF]) for name, blocks in found.items()}
    speed = {name: ratios_of(*pair, "tokens_per_s").median for name, pair in every.items()}
    work = {name: ratios_of(*pair, "cpu_per_1000").median for name, pair in every.items()}
    return [
        worst_of("tokens/s, all sampled / none", SPEED_MIN, speed),
        worst_of("CPU of all services per token, all sampled / none", WORK_MAX, work, is_limit=True),
    ]


def report_cost(name: str, blocks: dict[str, list[Block]], console: Console) -> None:
    """Medians of ratios to the untraced block of the same turn, and where they lie with 95 % certainty."""
    turn_count = len(blocks[OFF])
    table = Table(title=f"{name}: cost of tracing, {turn_count} turns", box=None, title_justify="left")
    for heading in ("sampled", "tokens/s", "of off", "95 %", "CPU s/1000", "of off", "95 %"):
        table.add_column(heading, justify="right")
    for sampled, own in blocks.items():
        cells = [sampled]
        for measurement in ("tokens_per_s", "cpu_per_1000"):
            ratio = ratios_of(own, blocks[OFF], measurement)
            middle = statistics.median(getattr(block, measurement) for block in own)
            cells += [f"{middle:.4g}", f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"]
        table.add_row(*cells)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="specdec bench tracing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=200, help="blocks of each way on a table model (200)")
    parser.add_argument("--pair-turns", type=int, default=12, help="blocks of each way on the shipped pair (12)")
    parser.add_argument("--spans-only", action="store_true", help="count spans, and time nothing")
    parser.add_argument("--pair-only", action="store_true", help="time the shipped pair only, which has the bars")
    parser.add_argument("--json", type=Path, default=Path("out/tracing.json"), help="file (%(default)s)")
    add_check_flag(parser)
    asked = parser.parse_args()
    console = Console()
    if asked.spans_only:
        count_spans(console)
        return 0
    if not asked.pair_only:
        console.print(f"A sampled round costs the coordinator {traced_us():.0f} us of CPU, spans and sending included.")
        counting = ", ".join(f"a {what} {cost_us:.1f} us" for what, cost_us in counting_us().items())
        console.print(f"Metrics, beside what is counted for responses anyway: {counting}.")
        with tempfile.TemporaryDirectory() as folder:
            target, _ = table_models(Path(folder), VOCABULARY_SIZE, POSITIONS)
            empty = Load("a table model", target, None, ["<1><2><3>"] * 4, 8, 32)
            report_cost(empty.name, cost(empty, asked.turns), console)
        count_spans(console)
    every = {"100 %": SAMPLERS["100 %"]}
    prompts = [prompt[:200] for prompt in harness.heldout_prompts().values()][: max(PAIR_STREAMS)]
    found = {}
    for stream_count, token_count in PAIR_STREAMS.items():
        name = f"{stream_count} streams"
        load = Load(name, harness.TARGET_MODEL, harness.DRAFT_MODEL, prompts[:stream_count], 1, token_count)
        found[name] = cost(load, asked.pair_turns, every)
        report_cost(f"the shipped pair, {name}", found[name], console)
    bars = bars_of(found)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    blocks = {name: {way: list(map(asdict, own)) for way, own in ways.items()} for name, ways in found.items()}
    asked.json.write_text(json.dumps({"blocks": blocks, "bars": as_json(bars)}, indent=2) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
