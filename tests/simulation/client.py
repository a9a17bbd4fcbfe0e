"""Coordinators and their clients on virtual time.

A generation is the real `coordinator.generation.Generation` over the real session and the real `Fleet` with its pools
and peers; only the event loop and the links are simulated. A client reads what it emits, and when a generation is
lost with its coordinator, or ends with an error that it may have, it resumes after the tokens received. It checks that
no token is wrong, doubled or missing, and none comes from other numerics unannounced.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.config import CoordinatorSettings
from specdec.coordinator.fleet import Fleet
from specdec.coordinator.generation import Generation
from specdec.coordinator.output import Appended, Ending
from specdec.coordinator.statistics import CoordinatorMetrics, RequestStatistics
from specdec.errors import ReplicaUnavailable, SpecdecError
from specdec.policy.fixed_policy import FixedPolicy
from specdec.protocol.events import Event
from specdec.protocol.items import NO_TRACE
from specdec.protocol.noise import Lane, hash64
from specdec.protocol.policy import Policy
from specdec.protocol.proposers import LocalProposer, NgramProposer, PredictionProposer
from specdec.protocol.report import Delta, Finished, Moved, Started
from specdec.protocol.request import GenerationRequest, SamplingParams, SpeculativePolicy
from specdec.protocol.session import Session
from specdec.protocol.suffix_store import STORED_TOKEN_BYTES, SuffixProposer, SuffixStore
from specdec.protocol.tree_shape import path_count_max
from specdec.protocol.types import Description, FinishReason, PromptLogprobs, Proposer, ResolvedSamplingParams, Rule
from tests.simulation.clock import Clock, Loop, Violation
from tests.simulation.model import FINGERPRINT, VOCABULARY_SIZE
from tests.simulation.network import SimulatedLink
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
    encoder_length: int = 0

    @property
    def prompt_logprobs(self) -> int | None:
        """A quarter of all texts ask for those of their prompt."""
        return 2 if self.seed // 2 % 4 == 0 else None

    @property
    def first_scored(self) -> int:
        """Index of the first prompt token that has log-probabilities; 0 if none has."""
        return self.encoder_length + 1 if len(self.prompt) > self.encoder_length + 1 else 0

    @property
    def has_feature_head(self) -> bool:
        """Of the texts with heads, a third are drafted by a feature head in the draft's place."""
        return Proposer.HEADS in self.proposers and self.seed // 2 % 3 == 0

    def request(self) -> GenerationRequest:
        """The request as a client sends it."""
        sampling = SamplingParams(
            temperature=0.0 if self.rule is Rule.GREEDY else 1.0,
            seed=self.seed if self.rule is Rule.COUPLED else None,
            prompt_logprobs=self.prompt_logprobs,
        )
        return GenerationRequest(
            token_ids=self.prompt, sampling=sampling, speculative=SpeculativePolicy(rule=self.rule)
        )

    def policy_of(self, attempt: int) -> Policy | None:
        """The policy of one generation; None for the service's own."""
        if self.policy is Choosing.WANDERING:
            return WanderingPolicy(self.seed + 1000 * attempt)
        return None if self.policy is Choosing.AUTO else self.policy

    def params(self, attempt: int) -> ResolvedSamplingParams:
        """The resolved sampling parameters; without a seed each attempt draws another."""
        seed = hash64(self.seed, Lane.NEXT, attempt, 0) if self.rule is Rule.REJECTION else self.seed
        temperature = 0.0 if self.rule is Rule.GREEDY else 1.0
        more: dict[str, Any] = {"temperature": temperature, "prompt_logprobs": self.prompt_logprobs}
        more["encoder_length"] = self.encoder_length
        return ResolvedSamplingParams(self.rule, seed, len(self.prompt), **more)


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


def earlier_text(order: Order) -> list[int]:
    """A text that was generated before. After a token come three others only, so that half of all neighbours stay
    unknown, and nearly every run of four of the known ones stands in it."""
    draw, text = random.Random(order.seed), [0]
    while len(text) < EARLIER_LENGTH:
        text.append((text[-1] + draw.randrange(1, 4)) % VOCABULARY_SIZE)
    return text


class Observed(Generation):
    """A generation; `told(event)` is called with every event before it takes it."""

    def __init__(self, *arguments: Any, told: Callable[[Event], None], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._told = told

    def take(self, event: Event, byte_count: int = 0) -> None:
        self._told(event)
        super().take(event, byte_count)


class ObservedStatistics(RequestStatistics):
    """The statistics of a generation; `on_failed(error)` is called with the error that ends it."""

    def __init__(self, on_failed: Callable[[SpecdecError], None]) -> None:
        super().__init__(CoordinatorMetrics(), NO_TRACE, "")
        self._on_failed = on_failed

    def failed(self, error: SpecdecError) -> None:
        self._on_failed(error)
        super().failed(error)


@dataclass(slots=True, eq=False)
class Coordinator:
    """One coordinator process: its fleet and its running generations."""

    clock: Clock
    watch: Any  # sees every session from its birth: ledger.Ledger
    wait_s: float
    loop: Loop = field(init=False)
    fleet: Fleet = field(init=False)
    links: list[SimulatedLink] = field(default_factory=list)
    numbers: itertools.count = field(default_factory=lambda: itertools.count(1))
    generations: dict[int, Generation] = field(default_factory=dict)
    is_alive: bool = True

    def __post_init__(self) -> None:
        self.loop = Loop(self.clock)
        self.fleet = Fleet(SETTINGS, FINGERPRINT, lambda: None)
        self.fleet.store = SuffixStore(STORE_BYTES_MAX)

    def start(self) -> None:
        """Its event loop is the running one from now on, and its pools connect their members."""
        asyncio._set_running_loop(self.loop)
        self.fleet.targets.start()
        self.fleet.drafts.start()

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
        fleet, number = self.fleet, next(self.numbers)
        model = fleet.served()
        if model is None:
            raise ReplicaUnavailable("no target")
        text = Output(order.output_length, order.max_tokens)
        resumed = text.append(tuple(output))
        params = order.params(attempt)
        committed = [*order.prompt, *output]
        length_max = len(order.prompt) + order.max_tokens
        choice = fleet.choose(order.request(), number, model, committed, length_max, order.encoder_length)
        policy = order.policy_of(attempt) or choice.policy
        draft = choice.draft if policy.draft_length_cap and not order.has_feature_head else None
        choice = replace(choice, draft=draft, policy=policy, proposers=frozenset(order.proposers))
        session = Session(
            number,
            params,
            length_max,
            VOCABULARY_SIZE,
            policy,
            committed,
            proposers=self._proposers(order, committed),
            path_max=path_count_max(choice.model.cache, length_max, policy.draft_length_cap),
            asks_heads=Proposer.HEADS in order.proposers and not order.has_feature_head,
            head_drafts=order.has_feature_head,
            scored_index=order.first_scored if order.prompt_logprobs is not None and not output else 0,
        )
        watched = self.watch.on_session(self, session, order)
        request = ObservedStatistics(watched.moves.failed)
        started = Started("", params.seed, params.rule, len(order.prompt), order.max_tokens)
        generation = Observed(
            session,
            text,
            started,
            choice,
            fleet,
            request,
            target_wait_s=self.wait_s,
            told=watched.moves.told,
        )
        watched.moves.begin(generation, request.statistics)
        self.generations[number] = generation
        generation.begin(resumed.ending)
        return generation

    def end(self, generation: Generation) -> None:
        """The reader is gone or has all."""
        generation.close()
        self.generations.pop(generation._session.number, None)

    def crash(self) -> None:
        """The process is gone; only the peers of its connections notice."""
        self.is_alive = False
        self.loop.is_gone = True
        self.generations.clear()
        for link in self.links:
            link.crash()


@dataclass(slots=True, eq=False)
class Client:
    """Reads one text to its end. `watch` is told of each delta; `profile`: the numerics that it was told of last."""

    clock: Clock
    order: Order
    current_coordinator: Callable[[], Coordinator]
    watch: Any
    output: list[int] = field(default_factory=list)
    checked_count: int = 0
    scored_index: int = 1  # of the prompt token whose log-probabilities come next
    profile: Description | None = None
    attempt: int = 0
    coordinator: Coordinator | None = None
    generation: Generation | None = None
    is_done: bool = False
    is_reading: bool = False

    def request(self) -> None:
        """Sends the request, repeatedly until it is admitted."""
        coordinator = self.current_coordinator()
        if not coordinator.is_alive or not coordinator.fleet.targets.up():
            self.clock.is_remote = True
            self.clock.call_later(RETRY_S, self.request)
            return
        self.coordinator = coordinator
        self.scored_index = self.order.encoder_length + 1 if not self.output else self.scored_index
        self.generation = coordinator.generate(self.order, self.output, self.attempt)
        self.profile = self.generation._model  # as `started` says
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
            elif isinstance(event, PromptLogprobs):
                self._take_scores(event)
            elif isinstance(event, Moved):
                self._move(event)
            elif isinstance(event, Finished):
                self._finish(event)
                return
            elif isinstance(event, Exception):  # one that it may end with: moves.Moves.failed
                self.coordinator.end(generation)
                self._request_again()
                return

    def _take(self, delta: Delta) -> None:
        if delta.first_output_index != len(self.output):
            raise Violation(f"a delta begins at {delta.first_output_index} after {len(self.output)} tokens")
        if self.order.prompt_logprobs is not None and self.scored_index != len(self.order.prompt):
            raise Violation(f"a delta comes after {self.scored_index} scores of {len(self.order.prompt)} prompt tokens")
        self.output += delta.token_ids
        self.watch.on_tokens(self)

    def _take_scores(self, found: PromptLogprobs) -> None:
        if self.output or self.order.prompt_logprobs is None or found.first_index != self.scored_index:
            raise Violation(f"scores of the prompt from {found.first_index} on, {self.scored_index} are next")
        self.scored_index = found.end_index
        self.watch.on_scores(self, found)

    def _move(self, moved: Moved) -> None:
        if moved.first_output_index != len(self.output):
            raise Violation(f"other numerics from {moved.first_output_index} on, after {len(self.output)} tokens")
        if moved.target.numerics == self.profile.numerics:
            raise Violation("other numerics are announced that are the same")
        self.profile = moved.target

    def _finish(self, event: Finished) -> None:
        if len(self.output) != self.order.output_length:
            raise Violation(f"finished with {len(self.output)} tokens of {self.order.output_length}")
        if event.output_tokens != len(self.output):
            raise Violation(f"usage says {event.output_tokens} tokens of {len(self.output)}")
        self.coordinator.end(self.generation)
        self.generation, self.is_done = None, True
