"""Cancels at random points: requests, sessions, blocks, threads, tasks and descriptors are back at their baseline."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import re
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.bars import Bar
from specdec.engine.table_model import write_table_model
from tests.chaos.clients import percentile, with_stub
from tests.chaos.processes import descriptor_count, metric_values, thread_count
from tests.chaos.texts import Text
from tests.support import harness
from tests.support.ports import free_port
from tests.support.services import SHAPES

WARM_UP = 1000
CANCEL_S_MAX = 0.05
SETTLE_S = 10.0
HELD = re.compile(r'specdec_kv_cache_blocks\{[^}]*state="held"[^}]*\} (\S+)')


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its sizes."""
    parser.add_argument("--cancels", type=int, default=10_000, help="generations cancelled (%(default)s)")
    parser.add_argument("--width", type=int, default=32, help="at a time (%(default)s)")
    parser.add_argument("--timed", type=int, default=200, help="cancels whose blocks are timed (%(default)s)")


def held_blocks(metrics_address: str) -> float:
    """Blocks of a cache that sessions hold."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=10) as page:
        found = HELD.search(page.read().decode())
    assert found is not None
    return float(found[1])


async def cancel_one(stub: Any, chance: random.Random, number: int) -> None:
    """Begins a generation and cancels it after a random time, or number of messages."""
    shape = chance.choice(list(SHAPES.values()))
    prompt = tuple(chance.randrange(1, 7) for _ in range(chance.randrange(1, 80)))
    call = stub.Generate(Text(prompt, 1.0, number, 400, True).request(shape))
    if number % 2:
        await asyncio.sleep(chance.uniform(0, CANCEL_S_MAX))
    else:
        for _ in range(1 + chance.randrange(8)):  # none is wasted: many wasted calls a second cost their connection
            await call.read()
    call.cancel()


def cancel(address: str, count: int, width: int, seed: int) -> None:
    """Cancels `count` generations, `width` at a time, from a process of its own, whose end closes its connections."""
    client = multiprocessing.get_context("spawn").Process(target=cancel_all, args=(address, count, width, seed))
    client.start()
    client.join()
    assert client.exitcode == 0, "the client failed"


def cancel_all(address: str, count: int, width: int, seed: int) -> None:
    """Cancels `count` generations, `width` at a time."""

    async def work(stub: Any) -> None:
        chance, numbers = random.Random(seed), iter(range(count))

        async def one() -> None:
            for number in numbers:
                await cancel_one(stub, chance, number)

        await asyncio.gather(*(one() for _ in range(width)))

    with_stub(address, work)


def times_to_free(address: str, metrics_address: str, count: int) -> list[float]:
    """Seconds from a cancel to a cache without held blocks, of generations one after another."""

    async def work(stub: Any) -> list[float]:
        chance, found = random.Random(1), []
        for number in range(count):
            call = stub.Generate(Text((1, 2, 3) * 20, 1.0, number, 400, True).request(SHAPES["tree"]))
            for _ in range(2 + chance.randrange(6)):
                await call.read()
            began_s = time.monotonic()
            call.cancel()
            while await asyncio.to_thread(held_blocks, metrics_address):
                assert time.monotonic() < began_s + SETTLE_S, "blocks are not free"
            found.append(time.monotonic() - began_s)
        return found

    return with_stub(address, work)


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Counts before and after the cancels, on table models."""
    pages = {name: f"127.0.0.1:{free_port()}" for name in ("target", "draft", "coordinator")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for role, seed in (("target", 1), ("draft", 2)):
            write_table_model(folder / role, 7, seed=seed)
        own = {role: {"metrics_address": page, "max_num_seqs": 256} for role, page in pages.items()}
        with harness.running(folder / "target", folder / "draft", threads=1, **own) as services:
            assert services.draft is not None
            processes = {"target": services.target, "draft": services.draft, "coordinator": services.coordinator}
            pids = {role: child.process.pid for role, child in processes.items()}
            address = services.coordinator.address

            def counts() -> dict[str, float]:
                found = {f"{role} descriptors": float(descriptor_count(pid)) for role, pid in pids.items()}
                found |= {f"{role} threads": float(thread_count(pid)) for role, pid in pids.items()}
                found |= {f"{role} tasks": metric_values(page, "specdec_tasks") for role, page in pages.items()}
                for role in ("target", "draft"):
                    found[f"{role} sessions"] = metric_values(pages[role], "specdec_sessions")
                    found[f"{role} held blocks"] = held_blocks(pages[role])
                for name in ("running", "waiting"):
                    found[f"{name} requests"] = metric_values(pages["coordinator"], f"vllm:num_requests_{name}")
                return found

            def settled(limit: dict[str, float]) -> dict[str, float]:
                deadline_s = time.monotonic() + SETTLE_S
                while True:
                    found = counts()
                    if all(found[key] <= limit[key] for key in found) or time.monotonic() > deadline_s:
                        return found
                    time.sleep(0.1)

            cancel(address, WARM_UP, asked.width, -1)
            time.sleep(1.0)
            before = counts()
            began_s = time.monotonic()
            cancel(address, asked.cancels, asked.width, 1)
            seconds = time.monotonic() - began_s
            after = settled(before)
            free_s = times_to_free(address, pages["target"], asked.timed)
    console.print(f"{asked.cancels} cancels in {seconds:.0f} s; blocks free after {statistics.median(free_s):.3f} s")
    grown = {key: after[key] - before[key] for key in before if after[key] > before[key]}
    held = sum(after[key] for key in after if key.endswith(("sessions", "blocks", "requests")))
    return [
        Bar("requests, sessions and held blocks after the cancels", 0, held, is_limit=True),
        Bar("growth of threads, tasks and descriptors", 0, sum(grown.values()), str(grown or ""), is_limit=True),
        Bar("seconds until blocks are free, p99", 0.1, percentile(free_s, 0.99), is_limit=True),
    ]
