"""`python -m bench.tracing`: the cost of tracing, and the number of spans of a generation.

Three sets of services run: without tracing, with 1 % of requests sampled, and with all. Blocks of requests go to each
in turns, in an order that changes, and what counts are ratios of neighbours: whatever else the machine does meets all
three. Spans go to a collector in a process of its own. First plain decoding on a table model, which computes nothing: a
round for every token and nothing but rounds, so every microsecond of tracing shows, and what is lost there is more than
any real pair loses; blocks are short and many. Then the shipped pair, as users run it. What a round costs the
coordinator is timed alone too. At last generations of 10, 100 and 2,000 rounds are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec.bench import harness
from specdec.bench.pipeline.measurements import ratio_of
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


def cost(load: Load, block_count: int) -> dict[str, list[Block]]:
    """Blocks of every way of sampling, as many of each, in turns."""
    blocks: dict[str, list[Block]] = {name: [] for name in (OFF, *SAMPLERS)}
    begin = harness.running
    models = load.target, load.draft
    with collector() as endpoint, contextlib.ExitStack() as stack:
        running = {OFF: stack.enter_context(begin(*models, coordinator=FIXED, threads=1))}
        told: dict[str, Any] = {"otlp_traces_endpoint": endpoint}
        for name, sampler in SAMPLERS.items():
            with variables(sampler):
                running[name] = stack.enter_context(begin(*models, coordinator={**FIXED, **told}, threads=1, **told))
        for services in running.values():
            measure(services, load)
        orders = itertools.islice(itertools.cycle(itertools.permutations(running)), block_count)
        for order in track(list(orders), description=f"turns, {load.name}"):
            for name in order:
                blocks[name].append(measure(running[name], load))
    return blocks


def report_cost(name: str, blocks: dict[str, list[Block]], console: Console) -> None:
    """Medians of ratios to the untraced block of the same turn, and where they lie with 95 % certainty."""
    turn_count = len(blocks[OFF])
    table = Table(title=f"{name}: cost of tracing, {turn_count} turns", box=None, title_justify="left")
    for heading in ("sampled", "tokens/s", "of off", "95 %", "CPU s/1000", "of off", "95 %"):
        table.add_column(heading, justify="right")
    for sampled, own in blocks.items():
        cells = [sampled]
        for measurement in ("tokens_per_s", "cpu_per_1000"):
            ratios = [getattr(block, measurement) / getattr(off, measurement) for block, off in zip(own, blocks[OFF])]
            ratio = ratio_of(ratios)
            middle = statistics.median(getattr(block, measurement) for block in own)
            cells += [f"{middle:.4g}", f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"]
        table.add_row(*cells)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="specdec bench tracing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=200, help="blocks of each way on a table model (200)")
    parser.add_argument("--pair-turns", type=int, default=12, help="blocks of each way on the shipped pair (12)")
    parser.add_argument("--spans-only", action="store_true", help="count spans, and time nothing")
    asked = parser.parse_args()
    console = Console()
    if not asked.spans_only:
        console.print(f"A sampled round costs the coordinator {traced_us():.0f} us of CPU, spans and sending included.")
        counting = ", ".join(f"a {what} {cost_us:.1f} us" for what, cost_us in counting_us().items())
        console.print(f"Metrics, beside what is counted for responses anyway: {counting}.")
        with tempfile.TemporaryDirectory() as folder:
            target, _ = table_models(Path(folder), VOCABULARY_SIZE, POSITIONS)
            empty = Load("a table model", target, None, ["<1><2><3>"] * 4, 8, 32)
            report_cost(empty.name, cost(empty, asked.turns), console)
        prompts = [prompt[:200] for prompt in list(harness.heldout_prompts().values())[:4]]
        pair = Load("the shipped pair", harness.TARGET_MODEL, harness.DRAFT_MODEL, prompts, 1, 48)
        report_cost(pair.name, cost(pair, asked.pair_turns), console)
    count_spans(console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
