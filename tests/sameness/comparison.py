"""Generations with and without speculation through running services, many at a time, and their differences."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import grpc

from tests.sameness.generations import Generation
from tests.support.services import Client, Outcome

TIMEOUT_S = 900.0  # of one generation beside others on a busy machine
LOST_COUNT_MAX = 20
ASKED_AGAIN = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
REFUSAL_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt generated both ways."""

    generation: Generation
    on: Outcome
    off: Outcome

    @property
    def differing_token_count(self) -> int:
        """The number of positions at which token ids differ; missing positions of a shorter text included."""
        pairs = itertools.zip_longest(self.on.token_ids, self.off.token_ids)
        return sum(with_draft != without for with_draft, without in pairs)

    @property
    def is_same(self) -> bool:
        """Whether tokens, text, usage, finish reason and every log-probability are equal."""
        return self.on.comparable == self.off.comparable

    @property
    def drafted_count(self) -> int:
        return int(self.on.finished.statistics.num_draft_tokens)

    @property
    def accepted_count(self) -> int:
        return int(self.on.finished.statistics.num_accepted_draft_tokens)

    @property
    def heads_count(self) -> int:
        """The number of draft tokens from heads on the target."""
        return int(self.on.finished.statistics.num_heads_draft_tokens)

    def total(self, name: str) -> int:
        """The sum of a count in the statistics of both generations."""
        return sum(int(getattr(one.finished.statistics, name)) for one in (self.on, self.off))

    def __str__(self) -> str:
        own = self.generation
        pairs = enumerate(itertools.zip_longest(self.on.token_ids, self.off.token_ids))
        first = next((index for index, (on, off) in pairs if on != off), None)
        where = "in text, log-probabilities or usage only" if first is None else f"from output token {first} on"
        return f"prompt {own.index} ({own.params}, {own.way}, {len(own.prompt)} tokens) differs {where}"


def compare(
    client: Client, asked: Sequence[Generation], max_tokens: int, width: int, refused: Callable[[], None]
) -> Iterator[Comparison]:
    """Runs every generation both ways, `width` at a time in a random order that mixes both; yields finished pairs.

    A generation refused for lack of space is requested again; `refused` is called each time.
    """
    tasks = [(generation, speculates) for generation in asked for speculates in (True, False)]
    random.Random(0).shuffle(tasks)
    outcomes: dict[tuple[int, bool], Outcome] = {}
    with ThreadPoolExecutor(width) as pool:
        try:
            running = {
                pool.submit(generate, client, generation.request(speculates, max_tokens), refused): (
                    generation,
                    speculates,
                )
                for generation, speculates in tasks
            }
            for done in as_completed(running):
                generation, speculates = running[done]
                outcomes[generation.index, speculates] = done.result()
                if (generation.index, not speculates) in outcomes:
                    pair = (outcomes.pop((generation.index, way)) for way in (True, False))
                    yield Comparison(generation, *pair)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def generate(client: Client, request: dict, refused: Callable[[], None]) -> Outcome:
    """Returns one generation; requests it again while space is missing and after a link was lost on a busy machine.

    Its seed makes it the same generation. Raises grpc.RpcError for everything else, and when links are lost on and on.
    """
    lost_count = 0
    while True:
        try:
            return client.generate(timeout_s=TIMEOUT_S, **request)
        except grpc.RpcError as error:
            lost_count += error.code() is grpc.StatusCode.UNAVAILABLE
            if error.code() not in ASKED_AGAIN or lost_count > LOST_COUNT_MAX:
                raise
        refused()
        time.sleep(REFUSAL_PAUSE_S)
