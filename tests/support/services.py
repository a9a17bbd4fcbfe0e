"""The three services as real processes, and a client that collects the responses of a generation.

Used by the service tests. Nothing here is a stand-in: processes are started as `specdec` starts them, and the client
speaks the public API over a real socket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from specdec.client.request import make_request
from specdec.config import CoordinatorSettings
from specdec.folders import EMBEDDED_MODELS
from specdec.launch.children import Child, start
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2 as types_pb
from tests.support import harness
from tests.support.waiting import until

MODELS = EMBEDDED_MODELS


def fixed(draft_length: int, **more: Any) -> dict[str, Any]:
    """`speculative` of a request with the fixed policy; by default it waits for its draft tokens."""
    return {"policy": "POLICY_FIXED", "num_speculative_tokens": draft_length, **more}


# Ways to speculate: draft tokens and their times differ, the text must not.
SHAPES: dict[str, dict[str, Any]] = {
    "off": {"policy": "POLICY_OFF"},
    "synchronous": fixed(3, draft_window=3),
    "ahead": fixed(2),
    "chain": fixed(8, draft_window=12, draft_wait_ms=0),
    "tree": fixed(8, draft_window=12, draft_nodes_per_step=8, draft_wait_ms=0),
    "waiting tree": fixed(4, draft_window=8, draft_nodes_per_step=4, draft_wait_ms=5),
    "siblings": fixed(8, draft_window=8, draft_nodes_per_step=4, draft_siblings=2, draft_wait_ms=0),
    "waiting siblings": fixed(15, draft_window=15, draft_nodes_per_step=8, draft_siblings=3, draft_wait_ms=5),
    "no draft": fixed(7, proposers=["PROPOSER_NGRAM", "PROPOSER_SUFFIX"]),
    "all proposers": fixed(
        12,
        draft_window=12,
        draft_nodes_per_step=4,
        draft_siblings=2,
        draft_wait_ms=1,
        proposers=["PROPOSER_DRAFT", "PROPOSER_NGRAM", "PROPOSER_SUFFIX", "PROPOSER_PREDICTION"],
    ),
    "auto": {"policy": "POLICY_AUTO"},
}


@dataclass
class Outcome:
    """The responses of one generation, deltas joined."""

    started: Any = None
    finished: Any = None
    token_ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    proposers: list[int] = field(default_factory=list)
    text: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[tuple] = field(default_factory=list)
    moved: list[Any] = field(default_factory=list)

    @property
    def comparable(self) -> tuple:
        """The values that must not depend on speculation, timing or resuming."""
        finished = self.finished
        stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
        usage = (finished.usage.prompt_tokens, finished.usage.output_tokens)
        return self.token_ids, self.text, finished.reason, finished.stop_string, stop_token_id, usage, self.logprobs


class Client:
    """A coordinator's user."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = pb_grpc.CoordinatorServiceStub(self.channel)

    def request(
        self,
        prompt: str | Sequence[int],
        speculative: dict | None = None,
        resume: Sequence[int] | None = None,
        cache_salt: str = "",
        prediction: str | Sequence[int] = (),
        decoder_prompt: str | Sequence[int] = (),
        **sampling: Any,
    ) -> pb.GenerateRequest:
        """The message; `sampling` by the names of SamplingParams."""
        fields = {**sampling, **(speculative or {})}
        own = {"cache_salt": cache_salt, "decoder_prompt": decoder_prompt}
        return make_request(prompt, resume or (), prediction, **own, **fields)

    def generate(self, prompt: str | Sequence[int], timeout_s: float = 120.0, **asked: Any) -> Outcome:
        """Runs one generation to its end. Raises grpc.RpcError."""
        outcome = Outcome()
        for response in self.stub.Generate(self.request(prompt, **asked), timeout=timeout_s):
            self.take(outcome, response)
        return outcome

    def choices(self, prompt: str | Sequence[int], n: int, timeout_s: float = 120.0, **asked: Any) -> list[Outcome]:
        """Runs a request of several choices to its end. Fails for an event before all have started, and for one after
        the end of its choice. Raises grpc.RpcError."""
        outcomes = [Outcome() for _ in range(n)]
        started_count = 0
        for response in self.stub.Generate(self.request(prompt, n=n, **asked), timeout=timeout_s):
            started_count += response.HasField("started")
            assert response.HasField("started") or started_count == n
            assert outcomes[response.choice].finished is None
            self.take(outcomes[response.choice], response)
        return outcomes

    @staticmethod
    def take(outcome: Outcome, response: pb.GenerateResponse) -> None:
        """Adds one message to an outcome."""
        event = response.WhichOneof("event")
        if event == "started":
            outcome.started = response.started
        elif event == "finished":
            outcome.finished = response.finished
        elif event == "moved":
            outcome.moved.append(response.moved)
        else:
            delta = response.delta
            assert delta.first_output_index >= len(outcome.token_ids)
            outcome.token_ids += delta.token_ids
            outcome.kinds += delta.kinds
            is_accepted = [int(kind == pb.TOKEN_KIND_ACCEPTED) for kind in delta.kinds]
            outcome.proposers += delta.proposers or is_accepted  # without any, the draft model's
            outcome.text += delta.text
            outcome.texts.append(delta.text)
            outcome.logprobs += [
                (entry.logprob, tuple(entry.top_token_ids), tuple(entry.top_logprobs)) for entry in delta.logprobs
            ]

    def generate_all(self, requests: Sequence[dict], width: int) -> list[Outcome]:
        """Runs generations, `width` at a time; each request is the arguments of `generate`."""
        with ThreadPoolExecutor(width) as pool:
            return list(pool.map(lambda ask: self.generate(**ask), requests))

    def wait_for_draft(self) -> None:
        """Returns once the coordinator has reached its draft, for which its own readiness does not wait. Raises
        TimeoutError."""

        def is_reached() -> bool:
            answer = self.described()
            return answer.HasField("draft") or "not reached yet" not in answer.draft_absent_reason

        until(is_reached, timeout_s=60.0)

    def described(self) -> pb.CoordinatorDescribeResponse:
        """Returns the replicas in use and the limits of speculation."""
        return self.stub.Describe(types_pb.DescribeRequest(), timeout=10)

    def close(self) -> None:
        self.channel.close()


@dataclass
class Services:
    """Running services and a client of their coordinator."""

    target: Child
    draft: Child | None
    coordinator: Child
    client: Client
    settings: CoordinatorSettings

    def start_coordinator(self, **own: Any) -> tuple[Child, Client]:
        """A second, fresh coordinator on the same replicas, but for its `own` settings. The caller stops it."""
        settings = self.settings.model_copy(update=own)
        child = start("coordinator", settings)
        child.wait_ready()
        client = Client(child.address)
        if settings.draft:
            client.wait_for_draft()
        return child, client

    @contextlib.contextmanager
    def coordinator_with(self, **own: Any) -> Iterator[Client]:
        """A client of a second coordinator (see `start_coordinator`), which is stopped at the end."""
        child, client = self.start_coordinator(**own)
        try:
            yield client
        finally:
            client.close()
            child.stop()


@contextlib.contextmanager
def running(
    target_model: Path, draft_model: Path | None, coordinator: dict | None = None, **replicas: Any
) -> Iterator[Services]:
    """The services on free loopback ports, and a client; all are stopped at the end, also after errors.

    Requests speculate by the fixed policy by default, so that there is speculation to test: table models compute
    nothing, so the automatic policy finds no gain in it. For the same reason the draft is connected, and a round waits
    long for it: beside a fast target on a busy machine a short text would be over before a draft that was late once is
    waited for again. Texts end at once when the only target is lost: tests/fleet has several.
    """
    own = {"speculation_policy": "fixed", "draft_wait_ms": 2000.0, "target_wait_s": 0.0, **(coordinator or {})}
    with harness.running(target_model, draft_model, own, **replicas) as started:
        client = Client(started.coordinator.address)
        try:
            if started.draft is not None:
                client.wait_for_draft()
            yield Services(started.target, started.draft, started.coordinator, client, started.settings)
        finally:
            client.close()
