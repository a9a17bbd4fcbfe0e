"""Texts that must come out the same whatever happens meanwhile, and a client that resumes them.

A text is a request under GREEDY or COUPLED, so it is one function of model, prompt, parameters and seed. `read` sends
the request again with the tokens it has (`GenerateRequest.resume`) after every error that says so.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc

from specdec.client.request import make_request
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.services import fixed

RESUME_WAIT_S = 0.1
BURST = 48  # requests at a time
PATIENCE_S = 300.0  # beyond two services that start one after the other on a busy machine
RESUMED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
)
SPECULATIVE: tuple[dict[str, Any], ...] = (
    fixed(3),
    fixed(8, draft_window=12, draft_nodes_per_step=4, draft_wait_ms=0),
    {"policy": "POLICY_AUTO", "proposers": ["PROPOSER_DRAFT"]},  # earlier texts would end a text before its trouble
)


@dataclass(frozen=True, slots=True)
class Text:
    """A request whose text is one function of its fields."""

    prompt: str | tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int
    ignore_eos: bool = False

    def request(self, speculative: Mapping[str, Any], received: Sequence[int] = ()) -> pb.GenerateRequest:
        """The message; `received`: output tokens of an earlier stream."""
        own = {"max_tokens": self.max_tokens, "temperature": self.temperature, "ignore_eos": self.ignore_eos}
        return make_request(self.prompt, received, seed=self.seed if self.temperature else None, **own, **speculative)


@dataclass(frozen=True, slots=True)
class Content:
    """What a client received: this alone is compared."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    reason: int = 0


@dataclass(slots=True)
class Reading:
    """The reading of one text: its content so far, and the errors it met. `times_s`: of each message with tokens;
    `moved_count`: times that it was told of a target of other numerics."""

    content: Content = Content()
    is_complete: bool = False
    times_s: list[float] = field(default_factory=list)
    moved_count: int = 0
    errors: list[grpc.RpcError] = field(default_factory=list)
    last: pb.Finished = field(default_factory=pb.Finished)

    def take(self, response: pb.GenerateResponse) -> None:
        """Adds one message. AssertionError where tokens are doubled or missing."""
        event = response.WhichOneof("event")
        old = self.content
        if event == "delta":
            delta = response.delta
            assert delta.first_output_index == len(old.token_ids), "tokens doubled or missing"
            self.content = Content((*old.token_ids, *delta.token_ids), old.text + delta.text)
            self.times_s.append(time.monotonic())
        elif event == "moved":
            assert response.moved.first_output_index == len(old.token_ids), "told of a move too early or too late"
            self.moved_count += 1
        elif event == "finished":
            self.content = replace(old, reason=response.finished.reason)
            self.last = response.finished
            self.is_complete = True


def longest_gap_s(times_s: Sequence[float], since_s: float, until_s: float) -> float:
    """The longest time without a token of those that end within these times, or last beyond them. `times_s`: of the
    tokens of one text, in order."""
    times = [moment_s for moment_s in times_s if moment_s < since_s][-1:]
    for moment_s in (moment_s for moment_s in times_s if moment_s >= since_s):
        times.append(moment_s)
        if moment_s > until_s:
            break
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def open_channel(address: str) -> grpc.Channel:
    """A channel that soon finds a server that is back."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


def read(
    stub: pb_grpc.CoordinatorServiceStub,
    text: Text,
    speculative: Mapping[str, Any],
    patience_s: float = PATIENCE_S,
    on_message: Callable[[Reading], None] = lambda reading: None,
    on_error: Callable[[grpc.RpcError], None] = lambda error: None,
) -> Reading:
    """Reads a text to its end, resuming it where a stream ends early; gives up after `patience_s`, or at an error that
    resuming does not mend."""
    reading = Reading()
    deadline_s = time.monotonic() + patience_s
    while not reading.is_complete and (left_s := deadline_s - time.monotonic()) > 0:
        try:
            request = text.request(speculative, reading.content.token_ids)
            for response in stub.Generate(request, timeout=left_s):
                reading.take(response)
                on_message(reading)
        except grpc.RpcError as error:
            reading.errors.append(error)
            on_error(error)
            if error.code() not in RESUMED:
                break
            time.sleep(RESUME_WAIT_S)
    return reading


class Readers:
    """Clients that read texts one after another, with pauses, and compare each with its reference."""

    def __init__(
        self,
        references: Mapping[Text, Content],
        pause_s: tuple[float, float],
        seed: int,
        speculative: Sequence[Mapping[str, Any]] = SPECULATIVE,
    ) -> None:
        self._speculative = speculative
        self._references = references
        self._pause_s = pause_s
        self._seed = seed
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.text_count = self.token_count = self.resumed_count = self.draft_tokens_accepted = 0
        self.target_changes = self.draft_changes = self.moved_count = 0  # `moved_count`: of texts told of a move
        self._under_way: dict[int, tuple[Text, Reading]] = {}
        self.wrong: list[str] = []  # a text that differs, has tokens doubled or missing, or did not end
        self.codes: collections.Counter[str] = collections.Counter()
        self.details: dict[str, str] = {}  # of the first error of each code

    def start(self, addresses: Sequence[str]) -> None:
        """One reader for each address."""
        for number, address in enumerate(addresses):
            chance = random.Random(f"{self._seed} reader {number}")
            thread = threading.Thread(target=self._run, args=(address, chance), name=f"reader {number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Waits until each has ended its text."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, address: str, chance: random.Random) -> None:
        texts = list(self._references)
        with open_channel(address) as channel:
            stub = pb_grpc.CoordinatorServiceStub(channel)
            while not self._is_over.is_set():
                text = chance.choice(texts)
                try:
                    speculative = chance.choice(self._speculative)
                    told = partial(self._on_message, text)
                    self._note(text, read(stub, text, speculative, on_message=told, on_error=self._on_error))
                except AssertionError as error:
                    with self._lock:
                        self.wrong.append(f"{text}: {error}")
                self._is_over.wait(chance.uniform(*self._pause_s))

    def _on_message(self, text: Text, reading: Reading) -> None:
        self._under_way[threading.get_ident()] = (text, reading)

    def _on_error(self, error: grpc.RpcError) -> None:
        with self._lock:
            self.codes[error.code().name] += 1
            self.details.setdefault(error.code().name, error.details() or "")

    def under_way(self) -> list[tuple[Text, Reading]]:
        """The texts that have tokens and are under way now."""
        return [
            (text, reading)
            for text, reading in list(self._under_way.values())
            if not reading.is_complete and reading.content.token_ids
        ]

    def points(self) -> set[tuple[Text, int]]:
        """The texts under way now, and how many tokens each has."""
        return {(text, len(reading.content.token_ids)) for text, reading in self.under_way()}

    def _note(self, text: Text, reading: Reading) -> None:
        expected = self._references[text]
        with self._lock:
            self.text_count += 1
            self.token_count += len(reading.content.token_ids)
            self.resumed_count += bool(reading.errors)
            own = reading.last.statistics
            self.draft_tokens_accepted += own.num_accepted_draft_tokens
            self.target_changes += own.num_target_changes
            self.draft_changes += own.num_draft_changes
            self.moved_count += bool(reading.moved_count)
            if not reading.is_complete:
                last = reading.errors[-1] if reading.errors else "no error"
                count = len(reading.content.token_ids)
                self.wrong.append(f"{text} did not end: {count} tokens, {len(reading.errors)} errors, at last {last}")
            elif reading.content != expected:
                self.wrong.append(f"{text}: {reading.content} is not {expected}")


def references_of(address: str, texts: Sequence[Text], width: int = 1) -> dict[Text, Content]:
    """Each text, undisturbed and without speculation; `width` are read at a time."""
    with open_channel(address) as channel, ThreadPoolExecutor(width) as pool:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        readings = list(pool.map(lambda text: read(stub, text, {"enabled": False}), texts))
    for reading in readings:
        assert reading.is_complete, f"no reference: {reading.errors}"
    return {text: reading.content for text, reading in zip(texts, readings)}


def send_burst(address: str, texts: list[Text], speculative: Sequence[Mapping[str, Any]] = ({},)) -> None:
    """Sends a burst of requests, which makes the services allocate what they keep, and reads the answers, of which some
    may be refused. `speculative`: of the requests, in turn."""
    with open_channel(address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        asked = zip(range(BURST), itertools.cycle(texts), itertools.cycle(speculative))
        calls = [stub.Generate(text.request(own), timeout=300) for _, text, own in asked]
        for call in calls:
            with contextlib.suppress(grpc.RpcError):
                for _ in call:
                    pass
