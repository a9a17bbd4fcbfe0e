"""Load on a coordinator: blocks of requests, a limited number at once, that arrive at a rate or as places fall free.

Times are the client's, by the performance counter. What they mean is `client.serving_metrics`'.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from specdec.client.request import Request
from specdec.client.run import Run
from specdec.client.stream import Client
from specdec.errors import SpecdecError

ON, OFF = "on", "off"  # ways to answer: with speculation and without


@dataclass(slots=True)
class Answer(Run):
    """One request of a block: its number among those of its way, when it was sent and when its answer ended. `failure`:
    its error, None if it has none."""

    number: int = 0
    sent_s: float = 0.0
    ended_s: float = 0.0
    failure: SpecdecError | None = None


@dataclass(slots=True)
class Block:
    """Requests of one way whose answers were awaited together; `turn` is the number of the blocks of both ways with the
    same prompts. `answers`: in the order of their ends. `is_complete`: all have ended."""

    way: str
    turn: int
    began_s: float = 0.0
    is_complete: bool = False
    answers: list[Answer] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """From its beginning to the last end of an answer."""
        return max((answer.ended_s for answer in self.answers), default=self.began_s) - self.began_s


@dataclass(slots=True)
class Measured:
    """A load, of at most `concurrency` requests at once (0: no limit), and its blocks so far, without those that warm
    up."""

    concurrency: int
    blocks: list[Block] = field(default_factory=list)


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Returns when requests are due, in seconds after the first: those of a Poisson process of `rate` a second; all at
    once if it is infinite."""
    gaps = random.Random(seed)
    due_s = [0.0]
    for _ in range(count - 1):
        due_s.append(due_s[-1] + (gaps.expovariate(rate) if rate != float("inf") else 0.0))
    return due_s[:count]


async def run_block(
    client: Client,
    block: Block,
    requests: Sequence[tuple[int, Request]],
    due_s: Sequence[float],
    most: int,
    timeout_s: float | None,
    advance: Callable[[], None],
) -> None:
    """Sends requests, with their numbers, when they are due, `most` at once (0: without a limit), and adds each answer
    to the block when it ends, also a failed one; if it is cancelled those that have not ended are not in it."""
    places: AbstractAsyncContextManager[object] = asyncio.Semaphore(most) if most else nullcontext()
    block.began_s = time.perf_counter()

    async def ask(number: int, request: Request, due_s: float) -> None:
        await asyncio.sleep(block.began_s + due_s - time.perf_counter())
        async with places:
            answer = Answer(number=number, sent_s=time.perf_counter())
            try:
                await client.read(request, timeout_s, answer)
            except SpecdecError as error:
                answer.failure = error
            answer.ended_s = time.perf_counter()
        block.answers.append(answer)
        advance()

    tasks = [asyncio.create_task(ask(*own, due)) for own, due in zip(requests, due_s, strict=True)]
    try:
        await asyncio.gather(*tasks)
        block.is_complete = True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
