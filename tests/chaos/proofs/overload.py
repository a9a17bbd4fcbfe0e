"""Ten times as many requests as the services can take: speculation shrinks, the surplus is refused, goodput stays."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console

from bench.bars import Bar, worst_of
from tests.chaos.clients import Stream, percentile, prompts, read, retry_after_s, with_stub
from tests.chaos.processes import peak_of
from tests.chaos.texts import Text
from tests.support import harness
from tests.support.services import fixed

WIDE = fixed(16, draft_window=32, draft_nodes_per_step=8, draft_wait_ms=0)
TEXT_COUNT = 16
TICK_S = 0.02


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its sizes."""
    parser.add_argument("--target", type=Path, default=harness.TARGET_MODEL, help="target model (%(default)s)")
    parser.add_argument("--draft", type=Path, default=harness.DRAFT_MODEL, help="draft model (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload (%(default)s)")
    parser.add_argument("--peak-seconds", type=float, default=30.0, help="of each of two measured peaks (%(default)s)")
    parser.add_argument("--places", type=int, default=12, help="generations at a time (%(default)s)")
    parser.add_argument("--factor", type=float, default=10.0, help="of the overload (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of a text (%(default)s)")


@dataclass(slots=True)
class Tally:
    """The streams of one phase, by text, and the delays of the client's own event loop."""

    streams: list[tuple[int, Stream]] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)

    def goodput(self, from_s: float, to_s: float) -> float:
        """Tokens per second of texts that were not refused."""
        return sum(stream.rate(from_s, to_s) for _, stream in self.streams)

    @property
    def finished(self) -> list[tuple[int, Stream]]:
        return [(number, stream) for number, stream in self.streams if stream.finished is not None]


async def _watch_lag(tally: Tally) -> None:
    while True:
        began_s = time.monotonic()
        await asyncio.sleep(TICK_S)
        tally.lags_s.append(time.monotonic() - began_s - TICK_S)


async def closed_loop(stub: Any, texts: list[Text], width: int, seconds: float) -> Tally:
    """The peak: as many clients as places, each with the next text once it has one."""
    tally, numbers, ends_s = Tally(), itertools.count(), time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < ends_s:
            number = next(numbers) % len(texts)
            tally.streams.append((number, await read(stub, texts[number].request(WIDE))))

    await asyncio.gather(*(one() for _ in range(width)))
    return tally


async def open_loop(stub: Any, texts: list[Text], rate: float, seconds: float) -> Tally:
    """The overload: `rate` requests a second, whatever becomes of them."""
    tally, tasks, began_s = Tally(), [], time.monotonic()

    async def one(number: int) -> None:
        tally.streams.append((number, await read(stub, texts[number].request(WIDE))))

    watching = asyncio.create_task(_watch_lag(tally))
    for index in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began_s + index / rate - time.monotonic()))
        tasks.append(asyncio.create_task(one(index % len(texts))))
    await asyncio.gather(*tasks)
    watching.cancel()
    return tally


def separate(engines: list[int], others: list[int]) -> None:
    """Gives target and draft one core, and the coordinator and its clients another, as machines of their own would:
    answering a refused request then takes no time from the models."""
    first, *rest = sorted(os.sched_getaffinity(0))
    for pids, cores in ((engines, {first}), (others, set(rest) or {first})):
        for task in (path for pid in pids for path in Path(f"/proc/{pid}/task").iterdir()):
            os.sched_setaffinity(int(task.name), cores)


def offered(streams: list[Stream]) -> float:
    """Draft tokens per round."""
    counts = [one.finished.statistics for one in streams if one.finished is not None]
    return sum(own.num_draft_tokens for own in counts) / max(1, sum(own.rounds for own in counts))


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Alone, at the peak, in overload, and at the peak again, on the same services: the peak is the mean of both, as
    the machine's speed changes meanwhile."""
    size = 4000 if asked.target == harness.TARGET_MODEL else 7
    texts = [Text(prompt, 0.0, 0, asked.tokens, True) for prompt in prompts(TEXT_COUNT, 12, size)]
    own = {"max_num_seqs": asked.places}
    with harness.running(asked.target, asked.draft, own, threads=1) as services:
        assert services.draft is not None
        children = {"target": services.target, "draft": services.draft, "coordinator": services.coordinator}
        pids = {name: child.process.pid for name, child in children.items()}
        separate([pids["target"], pids["draft"]], [pids["coordinator"], os.getpid()])

        async def work(stub: Any) -> tuple[list[Stream], Tally, list[float], Tally, float, dict[str, float]]:
            alone = [await read(stub, text.request(WIDE)) for text in texts]
            peak, rates = Tally(), []

            async def measure_peak() -> None:
                began_s = time.monotonic()
                found = await closed_loop(stub, texts, asked.places, asked.peak_seconds)
                peak.streams.extend(found.streams)
                rates.append(found.goodput(began_s, began_s + asked.peak_seconds))

            await measure_peak()
            rate = asked.factor * rates[0] / asked.tokens
            with contextlib.ExitStack() as stack:
                growth = {name: stack.enter_context(peak_of(pid)) for name, pid in pids.items()}
                began_s = time.monotonic()
                over = await open_loop(stub, texts, rate, asked.seconds)
            goodput = over.goodput(began_s, began_s + asked.seconds)
            await measure_peak()
            return alone, peak, rates, over, goodput, {name: own[0] / 1e6 for name, own in growth.items()}

        alone, peak, peak_rates, over, goodput, grown_mb = with_stub(services.coordinator.address, work)
    refused = [stream for _, stream in over.streams if stream.error is not None]
    others = sum(one.error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED for one in refused if one.error)
    silent = sum(not retry_after_s(one.error) for one in refused if one.error)
    wrong = sum(one.token_ids != alone[number].token_ids for number, one in over.finished + peak.finished)
    wide, narrow = offered(alone), offered([one for _, one in over.finished])
    console.print(
        f"peak {peak_rates[0]:.0f} and after {peak_rates[1]:.0f} tokens/s; {len(over.streams)} requests, "
        f"{len(refused)} refused; draft tokens a round {wide:.1f} alone, {narrow:.1f} in overload; "
        f"the client's own loop was late by {1000 * percentile(over.lags_s, 0.99):.0f} ms p99"
    )
    refusal_ms = [1000 * (one.ended_s - one.requested_s) for one in refused]
    return [
        Bar("goodput, share of the peak", 0.9, goodput / statistics.mean(peak_rates)),
        Bar("requests refused", 1, len(refused)),
        Bar("refusals in ms, p99", 50, percentile(refusal_ms, 0.99) if refused else None, is_limit=True),
        Bar("other errors", 0, others, is_limit=True),
        Bar("refusals that do not say when to retry", 0, silent, is_limit=True),
        Bar("texts that differ from those alone", 0, wrong, f"of {len(over.finished)}", is_limit=True),
        Bar("draft tokens a round, share of those alone", 0.9, narrow / wide if wide else None, is_limit=True),
        worst_of("memory in MB, at its peak over before", 20, grown_mb, is_limit=True),
    ]
