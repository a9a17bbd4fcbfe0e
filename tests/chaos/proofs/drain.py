"""SIGTERM under load with stalled readers, of texts and of health: what fits the grace finishes, the rest says how to
resume, and the process ends with code 0 while those readers stay."""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from bench.bars import Bar
from specdec.engine.table_model import write_table_model
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.chaos.clients import OPTIONS, Stream, read, with_stub
from tests.chaos.texts import Text
from tests.support import harness
from tests.support.services import fixed

SHORT_TOKENS, LONG_TOKENS = 200, 30_000
STALLED_OPTIONS = [
    ("grpc.http2.lookahead_bytes", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SPECULATIVE = fixed(4)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its sizes."""
    parser.add_argument("--short", type=int, default=8, help="streams that fit the grace (%(default)s)")
    parser.add_argument("--long", type=int, default=4, help="streams that do not (%(default)s)")
    parser.add_argument("--stalled", type=int, default=4, help="streams that are not read (%(default)s)")
    parser.add_argument("--grace-s", type=float, default=8.0, help="of the coordinator (%(default)s)")


async def until_not_serving(address: str) -> float:
    """Seconds until the health service says NOT_SERVING."""
    began_s = time.monotonic()
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while (await stub.Check(health_pb2.HealthCheckRequest())).status != NOT_SERVING:
            await asyncio.sleep(0.002)
    return time.monotonic() - began_s


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Stops a coordinator on table models under three kinds of readers; of long texts the end is checked, they
    are not resumed."""
    shorts = [Text((1, 2, 3), 1.0, number, SHORT_TOKENS, True) for number in range(asked.short)]
    longs = [Text((3, 2, 1), 1.0, number, LONG_TOKENS, True) for number in range(asked.long + asked.stalled)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for role, seed in (("target", 1), ("draft", 2)):
            write_table_model(folder / role, 7, positions_max=LONG_TOKENS + 16, seed=seed)
        own = {"drain_grace_s": asked.grace_s}
        with harness.running(folder / "target", folder / "draft", own, threads=1) as services:
            coordinator = services.coordinator

            async def work(stub: Any) -> tuple[list[Stream], list[Stream], list[Stream], float, float, int]:
                expected = await asyncio.gather(*(read(stub, text.request({"enabled": False})) for text in shorts))
                async with grpc.aio.insecure_channel(coordinator.address, options=STALLED_OPTIONS) as channel:
                    stalled_stub = pb_grpc.CoordinatorServiceStub(channel)
                    stalled = [stalled_stub.Generate(text.request(SPECULATIVE)) for text in longs[asked.long :]]
                    health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
                    late = [asyncio.create_task(read(stub, t.request(SPECULATIVE))) for t in longs[: asked.long]]
                    await asyncio.sleep(0.5)
                    soon = [asyncio.create_task(read(stub, text.request(SPECULATIVE))) for text in shorts]
                    await asyncio.sleep(0.05)
                    watching = asyncio.create_task(until_not_serving(coordinator.address))
                    await asyncio.sleep(0.1)
                    assert not watching.done(), "NOT_SERVING before the signal"
                    signalled_s = time.monotonic()
                    coordinator.signal(signal.SIGTERM)
                    await watching
                    flip_s = time.monotonic() - signalled_s
                    found = await asyncio.gather(*soon), await asyncio.gather(*late)
                    ended_s = time.monotonic()
                    code = await asyncio.to_thread(coordinator.process.wait, asked.grace_s + 10)
                    exit_s = time.monotonic() - ended_s
                    for call in (*stalled, health):
                        call.cancel()
                return expected, *found, flip_s, exit_s, code

            expected, soon, late, flip_s, exit_s, code = with_stub(coordinator.address, work)
    errors = [one.error for one in late if one.error is not None]
    resumable = sum(
        error.code() is grpc.StatusCode.UNAVAILABLE
        and f"resume.output_token_ids, the {len(one.token_ids)} received" in (error.details() or "")
        for one in late
        if (error := one.error) is not None
    )
    console.print(f"readiness after {1000 * flip_s:.0f} ms, exit {exit_s:.1f} s after the last stream, code {code}")
    return [
        Bar("readers that fit the grace: finished, as undisturbed", len(shorts), same(soon, expected)),
        Bar("readers that do not: UNAVAILABLE with what to resume", len(late), resumable, f"{len(errors)} errors"),
        Bar("seconds until NOT_SERVING", 0.1, flip_s, is_limit=True),
        Bar("seconds from the last stream to the exit, stalled readers open", asked.grace_s, exit_s, is_limit=True),
        Bar("exit code", 0, code, is_limit=True),
    ]


def same(streams: list[Stream], expected: list[Stream]) -> int:
    """Streams that finished with the tokens expected."""
    return sum(one.finished is not None and one.token_ids == own.token_ids for one, own in zip(streams, expected))
