"""`python -m bench.gateway`: what the gateway adds to gRPC.

The same texts through `Generate` and through HTTP, in turns, on the same services. CPU times are those of a process
that does nothing else: the gateway, and a bare gRPC reader. `--model FOLDER`: start and memory with another vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.bars import Bar
from bench.results import Cell, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from specdec.client.request import make_request
from specdec.client.stream import Client
from specdec.gateway_settings import GatewaySettings
from specdec.launch.children import start
from specdec.settings import split_address
from tests.support import harness
from tests.support.processes import cpu_seconds

Way = Callable[[str, int], AsyncGenerator[float, None]]  # address and number of a text to the times of its events

PROMPT, TOKENS = [7, 300, 1200, 45, 9] * 40, 150
WIDTHS = (1, 32)
GRPC, HTTP = "gRPC", "HTTP"
BODY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": TOKENS}


async def through_grpc(address: str, number: int) -> AsyncGenerator[float, None]:
    """Yields the time of the start of a text, and that of each event, in seconds."""
    request = make_request(PROMPT, temperature=0.0, ignore_eos=True, max_tokens=TOKENS, cache_salt=str(number))
    async with Client(address, resume_s=0.0) as client:
        yield time.perf_counter()
        async with aclosing(client.messages(request)) as messages:
            async for message in messages:
                if message.HasField("delta"):
                    yield time.perf_counter()


async def through_http(address: str, number: int) -> AsyncGenerator[float, None]:
    """As `through_grpc`, over HTTP."""
    reader, writer = await asyncio.open_connection(*split_address(address))
    data = json.dumps(BODY | {"prompt": PROMPT, "cache_salt": str(number)}).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close")
    head = "\r\n".join([*lines, f"Content-Length: {len(data)}"])
    yield time.perf_counter()
    writer.write(head.encode() + b"\r\n\r\n" + data)
    while line := await reader.readline():
        if line.startswith(b'data: {"id"') and b'"finish_reason":null' in line:
            yield time.perf_counter()
    writer.close()


def read_texts(way: Way, address: str, width: int, turn: int) -> tuple[dict[str, float], int]:
    """Reads texts, `width` at once; returns what was measured, with this process's CPU an event, and the events."""

    async def one(number: int) -> list[float]:
        return [moment_s async for moment_s in way(address, 1000 * turn + number)]

    async def every() -> list[list[float]]:
        return await asyncio.gather(*map(one, range(width)))

    began_s, before_s = time.perf_counter(), time.process_time()
    texts = asyncio.run(every())
    spent_s, took_s = time.process_time() - before_s, time.perf_counter() - began_s
    count = sum(len(times) - 1 for times in texts)
    gaps_s = [later - sooner for times in texts for sooner, later in zip(times[1:], times[2:])]
    values = {"tokens_per_s": width * TOKENS / took_s, "cpu_us": 1e6 * spent_s / count}
    values["first_ms"] = 1e3 * statistics.median(times[1] - times[0] for times in texts)
    return values | {"between_ms": 1e3 * statistics.median(gaps_s)}, count


class Gateway:
    """See the module."""

    name = "gateway"
    about = "what HTTP adds to gRPC"
    turns, quick_turns, minutes = 5, 2, 3

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", type=Path, help="of the services (the embedded pair)")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        return [{"streams": width} for width in WIDTHS]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        target, draft = (asked.model, None) if asked.model else (harness.TARGET_MODEL, harness.DRAFT_MODEL)
        policy = {"speculation_policy": "auto"}
        with ExitStack() as stack:
            client = stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
            services = stack.enter_context(harness.running(target, draft, policy, threads=1))
            address = services.coordinator.address
            own = GatewaySettings(port=0, address=(address,), model=str(target), log_level="error")
            began_s = time.monotonic()
            gateway = stack.enter_context(start("gateway", own))
            gateway.wait_ready()
            start_s = time.monotonic() - began_s

            def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                width = int(cell["streams"])

                def read(way: Way, at: str, turn: int) -> Values:
                    before_s = cpu_seconds(gateway.process.pid)
                    values, count = client.submit(read_texts, way, at, width, turn).result()
                    if way is through_http:
                        values["cpu_us"] = 1e6 * (cpu_seconds(gateway.process.pid) - before_s) / count
                        values["memory_mb"] = gateway.memory_peak_bytes / 1e6
                    return values

                results.notes["start_s"] = start_s
                return {GRPC: partial(read, through_grpc, address), HTTP: partial(read, through_http, gateway.address)}

            yield contenders

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for cell in results.cells():
            first, between = (
                [results.median(cell, way, measure) or 0.0 for way in (HTTP, GRPC)]
                for measure in ("first_ms", "between_ms")
            )
            speed, cpu = (results.ratio(cell, HTTP, GRPC, measure) for measure in ("tokens_per_s", "cpu_us"))
            ratios = [ratio.short() if ratio else "" for ratio in (speed, cpu)]
            memory = shown(results.median(cell, HTTP, "memory_mb"))
            rows.append(
                [f"{cell['streams']}", shown(first[0] - first[1]), shown(between[0] - between[1]), *ratios, memory]
            )
        columns = ["streams", "to the first event, ms", "between events, ms", "tokens/s, HTTP / gRPC"]
        columns += ["CPU of an event / a bare gRPC reader's", "resident memory, MB"]
        return [
            Table("cost", f"{self.about}; the gateway starts in {shown(results.notes.get('start_s'))} s", columns, rows)
        ]

    def bars(self, results: Results) -> list[Bar]:
        return []


BENCHMARK = Gateway()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
