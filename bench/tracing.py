"""`python -m bench.tracing`: what tracing costs, and how many spans a generation makes.

Three sets of services run on the shipped pair: without tracing, with 1 % of requests sampled, and with all. Blocks of
streams go to each in turns, in an order that changes, and what counts are ratios of neighbours: whatever else the
machine does meets all three. Spans go to a collector in a process of its own. What a round costs the coordinator is
timed alone too. Then generations of 10, 100 and 2,000 rounds are counted, on table models, which compute nothing, so
that there are as many messages as there can be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from bench import harness
from bench.otlp_receiver import Receiver
from bench.processes import cpu_seconds
from coordinator.request_trace import RequestTrace
from coordinator.tracing import GenerationTrace
from specdec.engine.table_model import write_table_model
from specdec.protocol.items import EvidenceAnswer, Trace
from specdec.protocol.policy import FixedPolicy
from specdec.protocol.session import Session
from specdec.protocol.types import Evidence, Law, Rule, TokenKind, Verdict
from specdec.rpc.stamps import Stamps
from specdec.telemetry.tracing import Tracing
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc

SAMPLERS = {
    "1 %": {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
    "100 %": {"OTEL_TRACES_SAMPLER": "parentbased_always_on"},
}
OFF = "off"
FIXED = {"speculation_policy": "fixed"}  # one that learns would end up elsewhere in each of the three
TOLD_ROUND_COUNT, TRY_COUNT = 8_000, 5
ROUND_COUNTS = (10, 100, 2000)
VOCABULARY_SIZE, POSITIONS = 11, 8192
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Block:
    """Streams begun together: tokens a second of all, and CPU seconds of all three services per 1,000 tokens."""

    tokens_per_s: float
    cpu_per_1000: float


@contextlib.contextmanager
def variables(added: dict[str, str]) -> Iterator[None]:
    """Processes begun meanwhile have these in their environment."""
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """A collector in a process of its own; yields its endpoint."""
    command = [sys.executable, "-m", "bench.otlp_receiver"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


async def run_streams(address: str, prompts: Sequence[str], max_tokens: int) -> int:
    """One stream per prompt, all at once; returns the tokens of all."""

    async def read(stub: pb_grpc.CoordinatorServiceStub, prompt: str) -> int:
        request = pb.GenerateRequest(text=prompt)
        request.sampling.max_tokens = max_tokens
        request.sampling.temperature = 0.0
        request.sampling.ignore_eos = True
        count = 0
        async for response in stub.Generate(request, timeout=600):
            count += len(response.delta.token_ids)
        return count

    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        return sum(await asyncio.gather(*(read(stub, prompt) for prompt in prompts)))


def measure(services: harness.Services, prompts: Sequence[str], max_tokens: int) -> Block:
    """Runs one block. Raises grpc.RpcError."""
    pids = [child.process.pid for child in (services.coordinator, services.target, services.draft) if child is not None]
    before_s, began_s = sum(map(cpu_seconds, pids)), time.perf_counter()
    token_count = asyncio.run(run_streams(services.coordinator.address, prompts, max_tokens))
    took_s, spent_s = time.perf_counter() - began_s, sum(map(cpu_seconds, pids)) - before_s
    return Block(token_count / took_s, 1000 * spent_s / token_count)


def cost(block_count: int, stream_count: int, max_tokens: int) -> dict[str, list[Block]]:
    """Blocks of every way of sampling, as many of each, in turns."""
    prompts = list(harness.heldout_prompts().values())[:stream_count]
    prompts = [prompt[:200] for prompt in prompts]
    blocks: dict[str, list[Block]] = {name: [] for name in (OFF, *SAMPLERS)}
    with collector() as endpoint, contextlib.ExitStack() as stack:
        running = {OFF: stack.enter_context(harness.running(coordinator=FIXED, threads=1))}
        told: dict[str, Any] = {"otlp_traces_endpoint": endpoint}
        for name, sampler in SAMPLERS.items():
            with variables(sampler):
                running[name] = stack.enter_context(harness.running(coordinator={**FIXED, **told}, threads=1, **told))
        for services in running.values():
            measure(services, prompts, 32)
        orders = itertools.cycle(itertools.permutations(running))
        for order in itertools.islice(orders, block_count):
            for name in order:
                blocks[name].append(measure(running[name], prompts, max_tokens))
    return blocks


def told_us() -> float:
    """CPU microseconds that a sampled round costs the coordinator, the sending of its spans included: the least of some
    loops with a trace, less the least without."""
    context = Trace(bytes(15) + b"\1", bytes(7) + b"\1", sampled=True)
    plain_s = min(told_s(GenerationTrace(context, "")) for _ in range(TRY_COUNT))
    with collector() as endpoint:
        traced_s = min(told_s_with_sending(endpoint, context) for _ in range(TRY_COUNT))
    return 1e6 * (traced_s - plain_s) / TOLD_ROUND_COUNT


def told_s_with_sending(endpoint: str, context: Trace) -> float:
    """CPU seconds of this process for the rounds, and until their spans are sent."""
    tracing = Tracing.open("bench", endpoint, {})
    before_s = time.process_time()
    told_s(RequestTrace(tracing, context, "", b""))
    tracing.close()
    return time.process_time() - before_s


def told_s(trace: GenerationTrace) -> float:
    """CPU seconds that so many rounds of plain decoding take a session, with what they tell its trace."""
    law = Law(rule=Rule.GREEDY, seed=0, prompt_length=2, temperature=0.0)
    session = Session(1, law, 2 + TOLD_ROUND_COUNT, VOCABULARY_SIZE, FixedPolicy(3), [1, 2], trace.context)
    link: Any = SimpleNamespace(stamps=Stamps())
    trace.began(session)
    session.begin()
    began_s = time.process_time()
    for index in range(TOLD_ROUND_COUNT - 1):
        now_s = time.monotonic()
        trace.sent(session, now_s)
        trace.answered()
        answer = EvidenceAnswer(1, 1, index, Evidence((3,)), 10, 100, 10, server_us=150)
        trace.verdict(session, answer, now_s, 0.0, False)
        session.on_verdict(Verdict(0, 3, TokenKind.BONUS), 1, False)
        trace.committed(session, link)
    return time.process_time() - began_s


def report_cost(blocks: dict[str, list[Block]], console: Console) -> None:
    """Medians of ratios to the untraced block of the same turn, with their quartiles."""
    table = Table(title="Cost of tracing, relative to none", box=None, title_justify="left")
    for name in ("sampled", "tokens/s", "of off", "quartiles", "CPU s/1000", "of off"):
        table.add_column(name, justify="right")
    for name, own in blocks.items():
        speed = [block.tokens_per_s / off.tokens_per_s for block, off in zip(own, blocks[OFF])]
        cpu = [block.cpu_per_1000 / off.cpu_per_1000 for block, off in zip(own, blocks[OFF])]
        low, middle, high = statistics.quantiles(speed, n=4)
        table.add_row(
            name,
            f"{statistics.median(block.tokens_per_s for block in own):.0f}",
            f"{middle:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{statistics.median(block.cpu_per_1000 for block in own):.2f}",
            f"{statistics.median(cpu):.3f}",
        )
    console.print(table)


def count_spans(console: Console) -> None:
    """Spans of generations of so many rounds, by service and name."""
    table = Table(title="Spans of one generation", box=None, title_justify="left")
    for name in ("rounds", "spans", "of which"):
        table.add_column(name, justify="left" if name == "of which" else "right")
    with tempfile.TemporaryDirectory() as folder, Receiver() as receiver:
        paths = Path(folder) / "target", Path(folder) / "draft"
        for seed, path in enumerate(paths):
            write_table_model(path, VOCABULARY_SIZE, seed=seed, positions_max=POSITIONS)
        told: dict[str, Any] = {"otlp_traces_endpoint": receiver.endpoint}
        with variables({"OTEL_BSP_SCHEDULE_DELAY": "100"}):
            stack = harness.running(*paths, {**told, "speculation_policy": "fixed"}, threads=1, **told)
            with stack as services, grpc.insecure_channel(services.coordinator.address) as channel:
                for round_count in ROUND_COUNTS:
                    table.add_row(*spans_of(pb_grpc.CoordinatorServiceStub(channel), receiver, round_count))
    console.print(table)


def spans_of(stub: pb_grpc.CoordinatorServiceStub, receiver: Receiver, round_count: int) -> tuple[str, str, str]:
    """Runs one generation, cancelled after so many rounds, and counts its spans."""
    request = pb.GenerateRequest()
    request.token_ids.ids.extend([1, 2, 3])
    request.sampling.max_tokens = POSITIONS - 3
    request.sampling.ignore_eos = True
    request.sampling.seed = 1
    call = stub.Generate(request, timeout=600)
    trace_id, count = b"", 0
    for response in call:
        if response.HasField("started"):
            trace_id = bytes.fromhex(response.started.request_id)
        count += response.HasField("delta")
        if count >= round_count:
            break
    call.cancel()
    time.sleep(SETTLE_S)
    spans = list(receiver.spans(trace_id))
    by_name = Counter(f"{service.removeprefix('specdec-')} {span.name}" for service, span in spans)
    parts = ", ".join(f"{number} {name}" for name, number in by_name.most_common())
    return str(round_count), str(len(spans)), parts


def main() -> int:
    parser = argparse.ArgumentParser(prog="specdec bench tracing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=40, help="blocks of each way (40)")
    parser.add_argument("--streams", type=int, default=4, help="streams of a block (4)")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of a stream (48)")
    parser.add_argument("--spans-only", action="store_true", help="count spans, and time nothing")
    asked = parser.parse_args()
    console = Console()
    if not asked.spans_only:
        console.print(
            f"A sampled round costs the coordinator {told_us():.0f} us of CPU, its spans and their sending included."
        )
        report_cost(cost(asked.blocks, asked.streams, asked.max_tokens), console)
    count_spans(console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
