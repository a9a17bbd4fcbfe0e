"""`python -m bench.tracing`: the cost of tracing, and the number of spans of a generation.

The same services serve requests of which none, 1 % or all are sampled, as the trace context of each says. Blocks go in
turns, in an order that changes, and what counts are ratios of neighbours: whatever else the machine does meets all
alike. Spans go to a collector in a process of its own, within the block they are of. First plain decoding on a table
model, which computes nothing: a round for every token and nothing but rounds, so every microsecond of tracing shows,
and what is lost there is more than any real pair loses. Then the shipped pair, as users run it, with one stream and
with 32: these have bars. What a round costs the coordinator is timed alone too. At last generations of several lengths
are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import secrets
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

from bench.bars import Bar, add_check_flag, as_json, conclude, worst_of
from bench.results import Ratio, ratio_of
from bench.rounds import table_models
from bench.trace_counts import (
    POSITIONS,
    VOCABULARY_SIZE,
    collector,
    count_spans,
    counting_us,
    traced_us,
    variables,
)
from specdec.client.request import make_request
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support import harness
from tests.support.processes import cpu_seconds

OFF, ALL = "off", "100 %"
SHARES = {OFF: 0.0, "1 %": 0.01, ALL: 1.0}  # of requests that are sampled
PAIR_STREAMS = {1: 128, 32: 48}  # tokens of a request, by number of streams
SPEED_MIN, WORK_MAX = 0.95, 1.10
COORDINATOR = {"speculation_policy": "fixed", "trace_parent_sampling": True}  # one that learns drifts between blocks
EXPORT_MS, SETTLE_S = 1000, 1.5  # spans leave soon, so that their cost falls into their own block


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


async def run_streams(address: str, load: Load, share: float) -> int:
    """One stream per prompt, all at once, a `share` of the requests sampled; returns the tokens of all."""

    async def read(stub: pb_grpc.CoordinatorServiceStub, prompt: str) -> int:
        request = make_request(prompt, max_tokens=load.max_tokens, temperature=0.0, ignore_eos=True)
        count = 0
        for _ in range(load.requests_per_stream):
            flag = int(random.random() < share)
            caller = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flag:02x}"
            async for response in stub.Generate(request, metadata=(("traceparent", caller),), timeout=600):
                count += len(response.delta.token_ids)
        return count

    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        return sum(await asyncio.gather(*(read(stub, prompt) for prompt in load.prompts)))


def measure(services: harness.Services, load: Load, share: float) -> Block:
    """Runs one block. Raises grpc.RpcError."""
    pids = [child.process.pid for child in (services.coordinator, services.target, services.draft) if child is not None]
    before_s, began_s = sum(map(cpu_seconds, pids)), time.perf_counter()
    token_count = asyncio.run(run_streams(services.coordinator.address, load, share))
    took_s = time.perf_counter() - began_s
    time.sleep(SETTLE_S)
    spent_s = sum(map(cpu_seconds, pids)) - before_s
    return Block(token_count / took_s, 1000 * spent_s / token_count)


def cost(load: Load, block_count: int, ways: Sequence[str] = tuple(SHARES)) -> dict[str, list[Block]]:
    """Blocks of each way of sampling, as many of each, in turns."""
    blocks: dict[str, list[Block]] = {name: [] for name in ways}
    with collector() as endpoint, variables({"OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_MS)}):
        told: dict[str, Any] = {"otlp_traces_endpoint": endpoint}
        with harness.running(load.target, load.draft, {**COORDINATOR, **told}, threads=1, **told) as services:
            for name in ways:
                measure(services, load, SHARES[name])
            orders = itertools.islice(itertools.cycle(itertools.permutations(ways)), block_count)
            for order in track(list(orders), description=f"turns, {load.name}"):
                for name in order:
                    blocks[name].append(measure(services, load, SHARES[name]))
    return blocks


def ratios_of(own: Sequence[Block], off: Sequence[Block], measurement: str) -> Ratio:
    """The ratio to the untraced block of the same turn: the median, and where it lies with 95 % certainty."""
    return ratio_of([getattr(one, measurement) / getattr(other, measurement) for one, other in zip(own, off)])


def bars_of(found: Mapping[str, dict[str, list[Block]]]) -> list[Bar]:
    """The bars over the loads on the shipped pair, every request sampled."""
    every = {name: (blocks[ALL], blocks[OFF]) for name, blocks in found.items()}
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
    prompts = [prompt[:200] for prompt in harness.heldout_prompts().values()][: max(PAIR_STREAMS)]
    found = {}
    for stream_count, token_count in PAIR_STREAMS.items():
        name = f"{stream_count} streams"
        load = Load(name, harness.TARGET_MODEL, harness.DRAFT_MODEL, prompts[:stream_count], 2, token_count)
        found[name] = cost(load, asked.pair_turns, (OFF, ALL))
        report_cost(f"the shipped pair, {name}", found[name], console)
    bars = bars_of(found)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    blocks = {name: {way: list(map(asdict, own)) for way, own in ways.items()} for name, ways in found.items()}
    asked.json.write_text(json.dumps({"blocks": blocks, "bars": as_json(bars)}, indent=2) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
