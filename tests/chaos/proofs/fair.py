"""A short prompt behind long ones, and wide streams beside narrow ones: each gets its share of the steps."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.bars import Bar
from specdec.config import CoordinatorSettings
from specdec.launch.children import start
from tests.chaos.clients import Stream, prompts, read, with_stub
from tests.chaos.texts import Text
from tests.support import harness
from tests.support.services import fixed

OFF = {"enabled": False}
WIDE = fixed(16, draft_window=32, draft_nodes_per_step=8, draft_wait_ms=0)
SHORT_LENGTH, SHORT_COUNT = 3, 8
LATER_COUNT, LATER_S = 4, 8.0  # short prompts while long ones are far, and the time before each


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its sizes."""
    parser.add_argument("--target", type=Path, default=harness.TARGET_MODEL, help="target model (%(default)s)")
    parser.add_argument("--draft", type=Path, default=harness.DRAFT_MODEL, help="draft model (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=4000, help="of the prompts (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="pairs with and without sharing (%(default)s)")
    parser.add_argument("--shared-only", action="store_true", help="no comparison with prompts by age")
    parser.add_argument("--prompts", type=int, default=40, help="long prompts (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=1990, help="of a long prompt (%(default)s)")
    parser.add_argument("--cache-bytes", type=int, default=1_200_000_000, help="of the target (%(default)s)")
    parser.add_argument("--streams", type=int, default=12, help="half of them wide (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1900, help="of a stream (%(default)s)")


@dataclass(frozen=True, slots=True)
class Queue:
    """Short prompts alone and behind long ones: seconds to their first tokens, and those until all have ended; and how
    many long ones had ended when the first short one behind them had its token."""

    alone_s: list[float]
    behind_s: list[float]
    total_s: float
    ended_before_count: int

    def __str__(self) -> str:
        behind = ", ".join(f"{one_s:.3f}" for one_s in self.behind_s)
        alone_s = statistics.median(self.alone_s)
        return f"first token alone {alone_s:.3f} s, behind {behind} s; all prompts {self.total_s:.1f} s"


async def queue(stub: Any, asked: argparse.Namespace) -> Queue:
    """Sends all long prompts at once, and short ones while they run: one after another, later at times."""
    shorts = [Text(p, 0.0, 0, 1, True) for p in prompts(2 * SHORT_COUNT + LATER_COUNT, SHORT_LENGTH, asked.vocabulary)]
    longs = [Text(p, 0.0, 0, 1, True) for p in prompts(asked.prompts, asked.prompt_tokens, asked.vocabulary)]
    alone = [await first_token_s(stub, text) for text in shorts[:SHORT_COUNT]]
    began_s = time.monotonic()
    have_started = [asyncio.Event() for _ in longs]
    tasks = [
        asyncio.create_task(read(stub, text.request(OFF), on_started=has_started.set))
        for text, has_started in zip(longs, have_started)
    ]
    await asyncio.gather(*(has_started.wait() for has_started in have_started))
    behind, first_s = [], 0.0
    for index, text in enumerate(shorts[SHORT_COUNT:]):
        if index >= SHORT_COUNT:
            await asyncio.wait(tasks, timeout=LATER_S)
        if all(task.done() for task in tasks):
            break
        behind.append(await first_token_s(stub, text))
        first_s = first_s or time.monotonic()
    streams = await asyncio.gather(*tasks)
    assert all(one.error is None for one in streams), [str(one.error) for one in streams if one.error][:1]
    ended_before_count = sum(one.ended_s < first_s for one in streams)
    return Queue(alone, behind, max(one.ended_s for one in streams) - began_s, ended_before_count)


async def first_token_s(stub: Any, text: Text) -> float:
    """Seconds to the first token of one request."""
    stream = await read(stub, text.request(OFF))
    assert stream.error is None, stream.error
    return stream.first_token_s


async def beside(stub: Any, asked: argparse.Namespace) -> tuple[list[Stream], list[Stream]]:
    """Wide and narrow streams together, all of one text, so that those of a kind have the same work. A long one: the
    chance which draft tokens are in time moves the rate of a wide one, by less the more rounds it has."""
    text = Text(prompts(1, 12, asked.vocabulary)[0], 0.0, 0, asked.tokens, True)
    kinds = [WIDE if number % 2 else OFF for number in range(asked.streams)]
    streams = await asyncio.gather(*(read(stub, text.request(kind)) for kind in kinds))
    return streams[1::2], streams[::2]


@contextlib.contextmanager
def unshared(asked: argparse.Namespace) -> Iterator[str]:
    """The address of a coordinator whose target runs prompts by age."""
    command = [sys.executable, "-m", "tests.chaos.unshared_target", str(asked.target), str(asked.cache_bytes)]
    target = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert target.stdout is not None
        address = target.stdout.readline().strip()
        settings = CoordinatorSettings(port=0, target=address, tokenizer=str(asked.target), log_level="error")
        with start("coordinator", settings) as coordinator:
            yield coordinator.wait_ready()
    finally:
        target.terminate()
        target.wait()


def same_kind(streams: list[Stream]) -> float:
    """The least rate over the highest of streams of one kind, while all of them run."""
    from_s = max(one.token_times_s[0] for one in streams)
    to_s = min(one.token_times_s[-1] for one in streams)
    rates = [one.rate(from_s, to_s) for one in streams]
    return min(rates) / max(rates)


def steps_per_s(streams: list[Stream]) -> float:
    """Mean steps per second of streams."""
    rates = []
    for one in streams:
        assert one.finished is not None
        rates.append(one.finished.statistics.rounds / (one.ended_s - one.requested_s))
    return statistics.mean(rates)


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Prompts with and without sharing in turns, each time on services of their own; then streams."""
    target = {"kv_cache_bytes": asked.cache_bytes}
    by_age, shared, beside_each = [], [], []
    for _ in range(asked.repeats):
        if not asked.shared_only:
            with unshared(asked) as address:
                by_age.append(with_stub(address, lambda stub: queue(stub, asked)))
            console.print(f"by age: {by_age[-1]}")
        with harness.running(asked.target, asked.draft, threads=1, target=target) as services:
            shared.append(with_stub(services.coordinator.address, lambda stub: queue(stub, asked)))
            beside_each.append(with_stub(services.coordinator.address, lambda stub: beside(stub, asked)))
        console.print(f"shared: {shared[-1]}")
    alone_s = statistics.median(one_s for one in shared for one_s in one.alone_s)
    behind_s = max(one_s for one in shared for one_s in one.behind_s)
    share = max(steps_per_s(wide) / steps_per_s(narrow) for wide, narrow in beside_each)
    same_wide, same_narrow = (min(map(same_kind, kind)) for kind in zip(*beside_each))
    ended_before_count = max(one.ended_before_count for one in shared)
    shares = [other.total_s / own.total_s for other, own in zip(by_age, shared)]
    claim, each = "throughput of all prompts, share of that by age", ", ".join(f"{one:.3f}" for one in shares)
    compared = [Bar(claim, 0.95, statistics.median(shares), f"median of {each}")] if shares else []
    return [
        Bar("first token behind long prompts, times alone", 10, behind_s / alone_s, is_limit=True),
        Bar("long prompts that ended before it", 0, ended_before_count, is_limit=True),
        *compared,
        Bar("rates of wide streams, least over highest", 0.95, same_wide),
        Bar("rates of narrow streams, least over highest", 0.95, same_narrow),
        Bar(
            "steps of a wide stream, share of a narrow one's",
            1.05,
            share,
            is_limit=True,
        ),
    ]
