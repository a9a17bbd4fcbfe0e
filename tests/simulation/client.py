"""Coordinators and their clients on virtual time.

A generation is the real `coordinator.generation.Generation` over the real session; only the event loop and the
replicas it is given are simulated. A client reads what it emits, and when a generation is lost, with its target or its
coordinator, it resumes after the tokens received. It checks that no token is wrong, doubled or missing.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec.config import CoordinatorSettings
from specdec.coordinator.fleet import Choice, Fleet
from specdec.coordinator.generation import Generation
from specdec.coordinator.output import Appended, Ending
from specdec.coordinator.statistics import CoordinatorMetrics, RequestStatistics
from specdec.errors import CacheExhausted, ReplicaUnavailable
from specdec.policy.fixed_policy import FixedPolicy
from specdec.protocol.events import WaitExpired
from specdec.protocol.items import NO_TRACE
from specdec.protocol.noise import Lane, hash64
from specdec.protocol.policy import Policy
from specdec.protocol.proposers import LocalProposer, NgramProposer, PredictionProposer
from specdec.protocol.report import Delta, Finished, Started
from specdec.protocol.request import GenerationRequest, SamplingParams, SpeculativePolicy
from specdec.protocol.session import Session
from specdec.protocol.suffix_store import STORED_TOKEN_BYTES, SuffixProposer, SuffixStore
from specdec.protocol.tree_shape import path_count_max
from specdec.protocol.types import CacheSize, FinishReason, Proposer, ResolvedSamplingParams, Rule
from tests.simulation.clock import Clock, Violation
from tests.simulation.model import VOCABULARY_SIZE, describe
from tests.simulation.network import SimulatedReplica
from tests.simulation.wandering import WanderingPolicy

RETRY_S = 0.15
READ_S = 0.002
EARLIER_LENGTH = 600
STORE_BYTES_MAX = 3 * EARLIER_LENGTH * STORED_TOKEN_BYTES // 2  # the text of another order does not fit beside it
SETTINGS = CoordinatorSettings(
    target=("localhost:1",), draft=("localhost:2",), tokenizer="none", speculation_policy="auto", suffix_store_mb=1
)


class Choosing(enum.Enum):
    """Policies that are not fixed; each generation has its own."""

    AUTO = "the service's own"
    WANDERING = "any plan, another one every other round"


@dataclass(frozen=True, slots=True)
class Order:
    """A client's request: a text of `output_length` tokens, ended there by a stop or by `max_tokens`."""

    table: int
    rule: Rule
    seed: int
    prompt: tuple[int, ...]
    output_length: int
    max_tokens: int
    policy: FixedPolicy | Choosing
    proposers: tuple[Proposer, ...] = ()
    prediction: tuple[int, ...] = ()

    def policy_of(self, attempt: int, fleet: Fleet) -> Policy:
        """The policy of one generation."""
        if self.policy is Choosing.AUTO:
            sampling = SamplingParams(
                temperature=0.0 if self.rule is Rule.GREEDY else 1.0,
                seed=self.seed if self.rule is Rule.COUPLED else None,
            )
            own = SpeculativePolicy(rule=self.rule)
            request = GenerationRequest(token_ids=self.prompt, sampling=sampling, speculative=own)
            return fleet.choose(request, 1, describe(0)).policy
        return WanderingPolicy(self.seed + 1000 * attempt) if self.policy is Choosing.WANDERING else self.policy

    def params(self, attempt: int) -> ResolvedSamplingParams:
        """The resolved sampling parameters; without a seed each attempt draws another."""
        seed = hash64(self.seed, Lane.NEXT, attempt, 0) if self.rule is Rule.REJECTION else self.seed
        return ResolvedSamplingParams(self.rule, seed, len(self.prompt), 0.0 if self.rule is Rule.GREEDY else 1.0)


@dataclass(slots=True)
class Output:
    """Stands for `coordinator.output.OutputProcessor`: the text ends after any `output_length` tokens."""

    output_length: int
    max_tokens: int
    count: int = 0

    def append(self, token_ids: tuple[int, ...]) -> Appended:
        """As `OutputProcessor.append`, with a letter for each token."""
        count = min(len(token_ids), self.output_length - self.count)
        self.count += count
        reason = FinishReason.LENGTH if self.count == self.max_tokens else FinishReason.STOP
        return Appended(("x",) * count, Ending(reason) if self.count == self.output_length else None)


@dataclass(slots=True)
class Timer:
    """A timer of the event loop."""

    function: Callable[[WaitExpired], None] | None

    def run(self, expired: WaitExpired) -> None:
        """Its time has come."""
        if self.function is not None:
            self.function(expired)

    def cancel(self) -> None:
        """As `asyncio.TimerHandle.cancel`."""
        self.function = None


@dataclass(slots=True)
class Loop:
    """The event loop of one generation. `wait_ends_s`: when each wait for draft tokens is over, by its index."""

    clock: Clock
    wait_ends_s: dict[int, float] = field(default_factory=dict)

    def call_later(self, delay_s: float, function: Callable[..., None], expired: WaitExpired) -> Timer:
        """As an event loop's; a generation has no other timers than its waits."""
        self.wait_ends_s[expired.wait_index] = self.clock.now_s + delay_s
        timer = Timer(function)
        self.clock.call_later(delay_s, timer.run, expired)
        return timer

    def call_soon(self, function: Callable[..., None], *values: Any) -> None:
        """As an event loop's: after all that is due at this moment."""
        self.clock.call_later(0.0, function, *values)

    def time(self) -> float:
        """As an event loop's."""
        return self.clock.now_s


def earlier_text(order: Order) -> list[int]:
    """A text that was generated before. After a token come three others only, so that half of all neighbours stay
    unknown, and nearly every run of four of the known ones stands in it."""
    draw, text = random.Random(order.seed), [0]
    while len(text) < EARLIER_LENGTH:
        text.append((text[-1] + draw.randrange(1, 4)) % VOCABULARY_SIZE)
    return text


@dataclass(slots=True, eq=False)
class Coordinator:
    """One coordinator process: its links and its running generations."""

    clock: Clock
    target: SimulatedReplica
    draft: SimulatedReplica
    watch: Any  # sees every session from its birth: ledger.Ledger
    numbers: itertools.count = field(default_factory=lambda: itertools.count(1))
    generations: dict[int, Generation] = field(default_factory=dict)
    fleet: Fleet = field(default_factory=lambda: Fleet(SETTINGS, "", lambda: None))
    is_alive: bool = True
    target_cache: CacheSize | None = None

    def __post_init__(self) -> None:
        self.fleet.store = SuffixStore(STORE_BYTES_MAX)

    def _proposers(self, order: Order, committed: list[int]) -> list[LocalProposer]:
        """The coordinator's own proposers of an order."""
        made: list[LocalProposer] = []
        if Proposer.PREDICTION in order.proposers:
            made.append(PredictionProposer(list(order.prediction), len(order.prompt)))
        if Proposer.SUFFIX in order.proposers:
            store = self.fleet.store  # which ended generations fill, too
            store.add("", earlier_text(order))
            while store.work():
                pass
            made.append(SuffixProposer(store, ""))
        if Proposer.NGRAM in order.proposers:
            made.append(NgramProposer(committed))
        return made

    def generate(self, order: Order, output: list[int], attempt: int) -> Generation:
        """Admits a request, with the tokens it resumes after. Raises SpecdecError while there is no target."""
        self.target.usable()
        number = next(self.numbers)
        text = Output(order.output_length, order.max_tokens)
        resumed = text.append(tuple(output))
        params = order.params(attempt)
        committed = [*order.prompt, *output]
        length_max = len(order.prompt) + order.max_tokens
        policy = order.policy_of(attempt, self.fleet)
        session = Session(
            number,
            params,
            length_max,
            VOCABULARY_SIZE,
            policy,
            committed,
            proposers=self._proposers(order, committed),
            path_max=path_count_max(self.target_cache, length_max, policy.draft_length_cap),
            asks_heads=Proposer.HEADS in order.proposers,
        )
        choice = Choice(self.target, self.draft, params.rule, "", policy, frozenset(order.proposers))
        started = Started("", params.seed, params.rule, len(order.prompt), order.max_tokens)
        request = RequestStatistics(CoordinatorMetrics(), NO_TRACE, "")
        loop = Loop(self.clock)
        asyncio._set_running_loop(loop)
        try:
            generation = Generation(session, text, started, choice, self.fleet, request)
        finally:
            asyncio._set_running_loop(None)
        self.generations[number] = generation
        self.watch.statistics.append(request.statistics)
        self.watch.on_session(self, session, order, loop.wait_ends_s)
        generation.begin(resumed.ending)
        return generation

    def end(self, generation: Generation) -> None:
        """The reader is gone or has all."""
        generation.close()
        self.generations.pop(generation._session.number, None)

    def crash(self) -> None:
        """The process is gone; only the peers of its connections notice."""
        self.is_alive = False
        self.generations.clear()
        self.target.crash()
        self.draft.crash()


@dataclass(slots=True, eq=False)
class Client:
    """Reads one text to its end. `on_tokens(self)` is called after each delta."""

    clock: Clock
    order: Order
    current_coordinator: Callable[[], Coordinator]
    on_tokens: Callable[[Client], None]
    output: list[int] = field(default_factory=list)
    attempt: int = 0
    coordinator: Coordinator | None = None
    generation: Generation | None = None
    is_done: bool = False
    is_reading: bool = False

    def request(self) -> None:
        """Sends the request, repeatedly until it is admitted."""
        coordinator = self.current_coordinator()
        if not coordinator.is_alive or not coordinator.target.is_up:
            self.clock.is_remote = True
            self.clock.call_later(RETRY_S, self.request)
            return
        self.coordinator = coordinator
        self.generation = coordinator.generate(self.order, self.output, self.attempt)
        self.attempt += 1

    def look(self) -> None:
        """Called after every event: emitted deltas are read a little later, or never where the coordinator dies."""
        generation = self.generation
        if generation is None or self.is_reading or self.is_done:
            return
        if not self.coordinator.is_alive:
            self._request_again()
        elif generation._undelivered:
            self.is_reading = True
            self.clock.call_later(READ_S, self._read, generation)

    def cancel(self) -> bool:
        """Cancels and requests again; False when there is nothing to cancel."""
        if self.generation is None or self.is_done or not self.coordinator.is_alive:
            return False
        self.coordinator.end(self.generation)
        self._request_again()
        return True

    def _request_again(self) -> None:
        self.generation = self.coordinator = None
        self.clock.call_later(RETRY_S, self.request)

    def _read(self, generation: Generation) -> None:
        self.is_reading = False
        if generation is not self.generation or not self.coordinator.is_alive:
            return
        while generation._undelivered:
            event = generation._undelivered.popleft()
            if isinstance(event, Delta):
                self._take(event)
            elif isinstance(event, Finished):
                self._finish(event)
                return
            elif isinstance(event, (ReplicaUnavailable, CacheExhausted)):
                self.coordinator.end(generation)
                self._request_again()
                return
            elif isinstance(event, Exception):
                raise Violation(f"a request failed: {event!r}")

    def _take(self, delta: Delta) -> None:
        if delta.first_output_index != len(self.output):
            raise Violation(f"a delta begins at {delta.first_output_index} after {len(self.output)} tokens")
        self.output += delta.token_ids
        self.on_tokens(self)

    def _finish(self, event: Finished) -> None:
        if len(self.output) != self.order.output_length:
            raise Violation(f"finished with {len(self.output)} tokens of {self.order.output_length}")
        if event.output_tokens != len(self.output):
            raise Violation(f"usage says {event.output_tokens} tokens of {len(self.output)}")
        self.coordinator.end(self.generation)
        self.generation, self.is_done = None, True
