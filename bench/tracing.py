"""`python -m bench.tracing`: what tracing costs the shipped pair, every request sampled over none, in turns.

The same services serve both, as the trace context of each request says. Spans go to a collector in a process of its
own, within the turn they are of.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc

from bench.bars import Bar, worst_of
from bench.results import Cell, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from specdec.client.request import make_request
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support import harness
from tests.support.otlp_receiver import collector
from tests.support.processes import cpu_seconds, variables

SAMPLED = {"none": "00", "all": "01"}  # the flags of a trace context
TOKENS = {1: 128, 32: 48}  # of a text, by number of streams
TEXTS = 2  # of a stream, one after another
PROMPT_CHARACTERS = 200
SPEED_MIN, CPU_MAX = 0.95, 1.10
EXPORT_MS, SETTLE_S = "1000", 1.5  # spans leave soon, so that their cost falls into their own turn
COORDINATOR = {"speculation_policy": "fixed", "trace_parent_sampling": True}  # one that learns drifts between turns


async def read_texts(address: str, prompts: Sequence[str], max_tokens: int, flags: str) -> int:
    """One stream per prompt, all at once; returns the tokens of all."""

    async def read(stub: pb_grpc.CoordinatorServiceStub, prompt: str) -> int:
        request = make_request(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        count = 0
        for _ in range(TEXTS):
            caller = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flags}"
            async for response in stub.Generate(request, metadata=(("traceparent", caller),), timeout=600):
                count += len(response.delta.token_ids)
        return count

    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        return sum(await asyncio.gather(*(read(stub, prompt) for prompt in prompts)))


def measure(services: harness.Services, prompts: Sequence[str], max_tokens: int, flags: str, turn: int) -> Values:
    """Tokens a second of all streams, and CPU seconds of all three services per 1,000 tokens."""
    pids = [child.process.pid for child in (services.coordinator, services.target, services.draft) if child is not None]
    before_s, began_s = sum(map(cpu_seconds, pids)), time.perf_counter()
    count = asyncio.run(read_texts(services.coordinator.address, prompts, max_tokens, flags))
    took_s = time.perf_counter() - began_s
    time.sleep(SETTLE_S)
    return {"tokens_per_s": count / took_s, "cpu_per_1000": 1000 * (sum(map(cpu_seconds, pids)) - before_s) / count}


class Tracing:
    """See the module."""

    name = "tracing"
    about = "the shipped pair with every request sampled / with none"
    turns, quick_turns, minutes = 40, 3, 14

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """None of its own."""

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        return [{"streams": count} for count in TOKENS]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        prompts = [prompt[:PROMPT_CHARACTERS] for prompt in harness.heldout_prompts().values()]
        with collector() as endpoint, variables({"OTEL_BSP_SCHEDULE_DELAY": EXPORT_MS}):
            told: dict[str, Any] = {"otlp_traces_endpoint": endpoint}
            with harness.running(coordinator=COORDINATOR | told, threads=1, **told) as services:

                def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                    count = int(cell["streams"])
                    own = (services, prompts[:count], TOKENS[count])
                    return {name: partial(measure, *own, flags) for name, flags in SAMPLED.items()}

                yield contenders

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for cell in results.cells():
            speed, cpu = (results.ratio(cell, "all", "none", name) for name in ("tokens_per_s", "cpu_per_1000"))
            if speed and cpu:
                plain = shown(results.median(cell, "none", "tokens_per_s"))
                rows.append([f"{cell['streams']}", plain, speed.short(SPEED_MIN), cpu.short(CPU_MAX, is_limit=True)])
        columns = ["streams", "tokens/s, none sampled", "tokens/s (bar 0.95)", "CPU of all services a token (bar 1.10)"]
        return [Table("cost", self.about, columns, rows)]

    def bars(self, results: Results) -> list[Bar]:
        def medians(measure: str) -> dict[str, float]:
            ratios = {cell["streams"]: results.ratio(cell, "all", "none", measure) for cell in results.cells()}
            return {f"{count} streams": ratio.median for count, ratio in ratios.items() if ratio}

        return [
            worst_of("tokens/s, all sampled / none", SPEED_MIN, medians("tokens_per_s")),
            worst_of("CPU of all services a token, all sampled / none", CPU_MAX, medians("cpu_per_1000"), True),
        ]


BENCHMARK = Tracing()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
