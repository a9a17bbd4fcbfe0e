"""Generations and their links to replicas that misbehave: what one can cost the coordinator, and what its users read.

The link, the sockets and the generation are real; the draft is scripted, the target only records what it is sent.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from specdec.config import CoordinatorSettings, TlsSettings
from specdec.coordinator.discovery import Member
from specdec.coordinator.ejection import PoolHealth
from specdec.coordinator.fleet import Choice, Fleet
from specdec.coordinator.generation import Generation
from specdec.coordinator.peers import NODES_PER_MESSAGE_MAX, Peer
from specdec.coordinator.replicas import Draft, Target
from specdec.coordinator.statistics import CoordinatorMetrics, RequestStatistics
from specdec.errors import ReplicaUnavailable, SpecdecError
from specdec.policy.fixed_policy import FixedPolicy
from specdec.protocol.events import DraftFound, DraftLost, Event, FromDraft, FromTarget, TargetLost
from specdec.protocol.items import NO_TRACE, Close, Failure, Nodes, Open, PromptPart, VerificationResult
from specdec.protocol.limits import ITEM_COUNT_MAX, UINT32_MAX
from specdec.protocol.report import Started
from specdec.protocol.session import Session
from specdec.protocol.types import (
    PROTOCOL_VERSION,
    DraftNode,
    PromptLogprobs,
    ResolvedSamplingParams,
    Rule,
    SamplerOutput,
)
from specdec.rpc.convert_generate import statistics_to_message
from specdec.rpc.limits import MESSAGE_BYTES_SOFT, STREAM_RESPONSE_BYTES_MAX
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb
from tests.chaos.bomb_list import framed
from tests.simulation.client import Output
from tests.support.fleets import MODEL
from tests.support.scripted_draft import FINGERPRINT, ScriptedDraft

VOCABULARY_SIZE = 50_000
CONTEXT_LENGTH = 20_000
ADDRESS = "127.0.0.1"


class Recorder:
    """A replica that answers nothing: items are recorded."""

    is_up = True
    description = None

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.link = SimpleNamespace(stamps=SimpleNamespace(network_s=0.0), is_up=True)
        self.health = PoolHealth().add()

    def attach(self, session: int, listener: Generation) -> None: ...

    def detach(self, session: int) -> None: ...

    def send(self, item: Any) -> int:
        self.sent.append(item)
        return 0

    def measure_step(self, *_: Any) -> None: ...

    def measure_network(self) -> None: ...


class Listener:
    """Stands for a generation: `news` holds what it is told."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.news: list[str] = []

    def take(self, event: Event, byte_count: int = 0) -> None:
        is_loss = isinstance(event, (DraftLost, TargetLost))
        self.news.append("down" if is_loss else "up" if isinstance(event, DraftFound) else "item")


def generation_of(target: Any, draft: Any, context_length: int = 3, wait_s: float = 0.0) -> Generation:
    """A generation that is not begun."""
    params = ResolvedSamplingParams(Rule.GREEDY, seed=1, prompt_length=context_length, temperature=0.0)
    policy, prompt = FixedPolicy(2, wait_s=wait_s), [7] * context_length
    session = Session(1, params, context_length + 100, VOCABULARY_SIZE, policy, prompt)
    settings = CoordinatorSettings(target=("localhost:1",), tokenizer="none")
    request = RequestStatistics(CoordinatorMetrics(), NO_TRACE, "")
    started = Started("", 1, Rule.GREEDY, context_length, 100)
    choice = Choice(target, MODEL, draft, Rule.GREEDY, "", policy, frozenset())
    return Generation(session, Output(100, 100), started, choice, Fleet(settings, "", lambda: None), request)


def made(kind: type[Peer], address: str) -> Any:
    """A peer of this kind, whose link does not run yet."""
    more = (None,) if kind is Draft else ()
    return kind(Member(address), TlsSettings(), FINGERPRINT, lambda peer: None, PoolHealth().add(), *more)


async def until(condition: Any, timeout_s: float = 10.0) -> None:
    """Waits for a condition; the test fails when it takes too long."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def connected(script: ScriptedDraft) -> AsyncIterator[Draft]:
    """A draft in use, over real sockets."""
    server = script.server()
    address = await server.start()
    replica = made(Draft, address)
    running = asyncio.create_task(replica.link.run())
    try:
        await until(lambda: replica.is_up)
        yield replica
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)


def missing(incarnation: int, unknown: bool = False) -> draft_pb.DraftResponseItem:
    """A MissingTokens item of session 1 that asks for everything."""
    return draft_pb.DraftResponseItem(
        missing_tokens=types_pb.MissingTokensItem(session=1, incarnation=incarnation, unknown=unknown)
    )


@pytest.mark.parametrize("unknown", [False, True])
async def test_a_draft_that_asks_for_everything_again_and_again_gets_it_once_per_commit(unknown: bool) -> None:
    """Claim: a commit answered by 12,000 MissingTokens makes a session send its context once more, also where each
    names the incarnation that the one before it would lead to.

    Source: a draft could make one session send 12,000 times its context at once, while all others stood. Conclusive:
    the bytes that leave the socket are counted, after an answer that comes behind all of these.
    """
    asked = [[missing(1 + unknown * (start + n), unknown) for n in range(1000)] for start in range(0, 12_000, 1000)]
    end = [[draft_pb.DraftResponseItem(error=types_pb.ErrorItem(session=2, reason="REPLICA_UNAVAILABLE"))]]
    commits: list[int] = []

    def answers(item: draft_pb.DraftRequestItem) -> list[list[draft_pb.DraftResponseItem]]:
        if not item.HasField("commit"):
            return []
        commits.append(item.commit.committed_length)
        return [*asked, *end] if len(commits) == 1 else []

    async with connected(ScriptedDraft(answers)) as draft:
        other: Any = Listener()
        draft.attach(2, other)
        generation = generation_of(Recorder(), draft, CONTEXT_LENGTH)
        generation.begin()
        await until(lambda: other.news and len(commits) == 2)
        await until(lambda: not draft.link._queue)
        assert draft.link.is_up and commits == [CONTEXT_LENGTH] * 2
        assert draft.link.bytes_sent < 2.5 * 2 * CONTEXT_LENGTH, "the context is one byte per token in each copy"
        generation.close()


@pytest.mark.parametrize("kind", ["items", "nodes"])
async def test_a_message_beyond_its_limits_costs_the_connection_before_it_is_read(kind: str) -> None:
    """Claim: a message with more items, or more nodes in them, than a sound draft can make is refused by number and
    limit, and none of its items reaches a session.

    Source: 300,000 nodes or 12,000 items of one message were read, and filed, before a limit was checked. Conclusive:
    the listener of the session hears of the loss, and of no item.
    """
    if kind == "items":
        items = [missing(1)] * (ITEM_COUNT_MAX + 1)
    else:
        node = types_pb.TreeNode(node_id=1)
        half = draft_pb.NodesItem(session=1, incarnation=1, nodes=[node] * (NODES_PER_MESSAGE_MAX // 2 + 1))
        items = [draft_pb.DraftResponseItem(nodes=half)] * 2
    async with connected(ScriptedDraft(lambda item: [items])) as draft:
        listener: Any = Listener()
        draft.attach(1, listener)
        with capture_logs() as logs:
            draft.send(Close(1, 1))
            await until(lambda: listener.news)
        assert listener.news[0] == "down" and "item" not in listener.news
        (line,) = [line for line in logs if line["event"] == "malformed answer"]
        assert f"{kind} is" in line["error"] and "at most" in line["error"]


def flood(response: Any, size: int, **content: int) -> bytes:
    """A message of `size` bytes of the answer that the parser makes most of: items, each with a part, empty or of a
    number."""
    name = "result" if response is target_pb.VerifyResponse else "nodes"
    data = bytes(response(items=[{name: content}]).SerializeToString())
    return data * (size // len(data))


HOSTILE = {
    "items is 2730; it must be at most": lambda response: flood(response, MESSAGE_BYTES_SOFT, session=1),
    "one part too many": lambda response: flood(response, 6000),
    "one field too many": lambda response: flood(response, STREAM_RESPONSE_BYTES_MAX - 64, session=1),
    "larger than max": lambda response: flood(response, 64 * STREAM_RESPONSE_BYTES_MAX),
    "malformed": lambda response: b"\x12\xff",
}


@pytest.mark.parametrize("kind", [Draft, Target], ids=lambda kind: kind.name)
@pytest.mark.parametrize("words", HOSTILE)
async def test_a_flood_in_one_answer_costs_the_connection(kind: type[Peer], words: str) -> None:
    """Claim: a draft or a target that answers with floods of items, below the size at which fields are counted, full
    and empty, above it, and above the cap of a message, or with malformed bytes, loses its connection each time, and no
    session hears of an item.

    Conclusive: the bytes come over a real socket, twice, and the log has the reason, by which the larger ones were not
    parsed; what the parser makes of the smaller ones is counted in tests/rpc/test_limits.py.
    """
    data = HOSTILE[words](kind.response)
    listener: Any = Listener()

    async def converse(requests: AsyncIterator[bytes], context: Any) -> None:
        await context.write(kind.response(stamp={"sequence": 1}).SerializeToString())
        await context.write(data)
        await asyncio.sleep(60)

    server = grpc.aio.server()
    handlers = {kind.stream_method: grpc.stream_stream_rpc_method_handler(converse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(kind.service, handlers),))
    port = server.add_insecure_port(f"{ADDRESS}:0")
    await server.start()
    replica = made(kind, f"{ADDRESS}:{port}")
    replica.attach(1, listener)
    with capture_logs() as logs:
        running = asyncio.create_task(replica.link.run())
        await until(lambda: listener.news.count("down") >= 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
    assert "item" not in listener.news
    assert any(words in line.get("reason", "") for line in logs), logs


async def hollow(sound: Any) -> types_pb.DescribeResponse:
    """A description with more step times than a message may have fields."""
    description: types_pb.DescribeResponse = await sound
    field = description.DESCRIPTOR.fields_by_name["step_times"]
    description.MergeFromString(framed(field, b"") * (STREAM_RESPONSE_BYTES_MAX // 2 - 500))
    return description


async def test_a_hostile_description_is_not_parsed() -> None:
    """Claim: a description of 180,000 empty step times is refused before it is parsed, and its replica is not used.
    Conclusive: the same script is used when it describes itself without them."""
    script = ScriptedDraft()
    async with connected(script):
        pass
    sound = script.describe
    script.describe = lambda *arguments: hollow(sound(*arguments))  # type: ignore[method-assign]  # of this script only
    server = script.server()
    replica = made(Draft, await server.start())
    with capture_logs() as logs:
        running = asyncio.create_task(replica.link.run())
        await until(lambda: any("malformed" in line.get("why", "") for line in logs))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
    assert replica.description is None


@pytest.mark.parametrize("kind", [Target, Draft], ids=["target", "draft"])
@pytest.mark.parametrize(
    "own, words",
    [
        ({"protocol_version": PROTOCOL_VERSION + 1}, "speaks protocol version"),
        ({"fingerprint": "1" * 64}, "is not the coordinator's"),
    ],
    ids=["protocol", "tokenizer"],
)
async def test_a_replica_that_does_not_fit_is_not_used(kind: type[Peer], own: dict[str, Any], words: str) -> None:
    """Claim: a target or draft of another protocol version or tokenizer is connected to, and not used: requests are
    refused with the kind of the difference, the log names both sides. Conclusive: the same script is used when it fits,
    over real sockets."""
    service = kind.service.removeprefix("specdec.v1.").removesuffix("Service")

    async def used(changed: dict[str, Any]) -> tuple[bool, str, list[str]]:
        """Whether the replica is used, or else why not; and the log's reasons."""
        server = ScriptedDraft(service=service, **changed).server()
        replica = made(kind, await server.start())
        with capture_logs() as logs:
            running = asyncio.create_task(replica.link.run())
            await until(lambda: replica.is_up or any("not used" in line["event"] for line in logs))
            found = replica.is_up, replica.absent_reason
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)
        return *found, [line["why"] for line in logs if "not used" in line["event"]]

    is_used, _, reasons = await used({})
    assert is_used and not reasons
    is_used, absent_reason, (reason,) = await used(own)
    assert not is_used and "has another tokenizer or protocol version" in absent_reason
    assert words in reason and str(own.get("protocol_version", "1" * 12)) in reason


async def test_a_draft_is_described_by_the_process_that_serves_its_stream() -> None:
    """Claim: the description comes over the stream's own connection.

    Source: behind one name description and stream could be different processes. Conclusive: the peer of both calls is
    one socket, as the server sees it.
    """
    script = ScriptedDraft()
    async with connected(script):
        assert script.describe_peers == script.stream_peers and len(script.stream_peers) == 1


async def test_users_read_no_inner_address() -> None:
    """Claim: a request without a target is refused, and a text whose target is lost ends, in sentences without address
    or system error; these are in the log.

    Source: inner addresses reached users. Conclusive: the target's address is a port nothing listens on, and the log
    line that has it is shown.
    """
    target = made(Target, f"{ADDRESS}:1")
    with capture_logs() as logs:
        running = asyncio.create_task(target.link.run())
        await until(lambda: any(line["event"] == "link not up" for line in logs))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert any("refused" in line.get("reason", "") and ADDRESS in line["peer"] for line in logs)
    with pytest.raises(ReplicaUnavailable) as refused:
        target.usable()
    generation = generation_of(target, None)
    generation.begin()
    target._on_down(f"{ADDRESS}:1: Connection reset by peer")
    assert isinstance(await generation.next_event(), Started)
    with pytest.raises(ReplicaUnavailable) as lost:
        await generation.next_event()
    with pytest.raises(ReplicaUnavailable) as still:
        target.usable()
    assert "resume" in str(lost.value)
    for caught in (refused, lost, still):
        assert ADDRESS not in str(caught.value) and "onnection re" not in str(caught.value), caught.value


async def test_users_read_no_text_of_an_exception() -> None:
    """Claim: an internal failure of the target reaches the user as a sentence, and the coordinator's log as it is.

    Source: the text of internal exceptions reached users.
    """
    target = Recorder()
    generation = generation_of(target, None)
    generation.begin()
    with capture_logs() as logs:
        generation.take(FromTarget(Failure(1, 1, 13, SpecdecError.reason, "RuntimeError: a secret")))
    await generation.next_event()
    with pytest.raises(SpecdecError) as caught:
        await generation.next_event()
    assert "secret" not in str(caught.value)
    assert any("secret" in str(line) for line in logs)


@pytest.mark.parametrize("token_ids", [(), (5, 6, 7)], ids=["too few", "too many"])
async def test_a_target_that_answers_with_other_rows_is_no_fault_of_the_request(token_ids: tuple[int, ...]) -> None:
    """Claim: a verification result that does not fit its verification ends the text UNAVAILABLE with how to resume.

    Source: mutated answers of a target (proof `malformed`) ended texts INVALID_ARGUMENT, with a field that no client
    has sent. Conclusive: the answer is read as any other, and is of the round in flight.
    """
    target = Recorder()
    generation = generation_of(target, None)
    generation.begin()
    generation.take(FromTarget(VerificationResult(1, 1, 0, SamplerOutput(token_ids))))
    assert isinstance(await generation.next_event(), Started)
    with pytest.raises(ReplicaUnavailable, match=r"malformed answer; send .* resume\.output_token_ids"):
        await generation.next_event()


async def test_a_target_that_counts_too_far_ends_no_text() -> None:
    """Claim: counts of a target that are valid one by one, and together beyond a field of the statistics, stay within
    it.

    Source: mutated answers of a target (proof `malformed`) failed the last message of a whole text, INTERNAL.
    """
    target = Recorder()
    generation = generation_of(target, None)
    generation.begin()
    for round_index in range(2):
        counts = {"preemptions": UINT32_MAX, "cached_prompt_tokens": UINT32_MAX}
        generation.take(FromTarget(VerificationResult(1, 1, round_index, SamplerOutput((8,)), **counts)))
    message = statistics_to_message(generation._request.statistics)
    assert message.rounds == 2 and message.preemptions == message.cached_prompt_tokens == UINT32_MAX


async def test_an_ended_generation_is_held_by_no_timer() -> None:
    """Claim: a generation that waited for draft tokens is free memory when it is closed, however long it would have
    waited, and so are the waits that ended before.

    Source: wait timers were never cancelled, and each held its generation for the rest of its time. Conclusive: the
    loop runs on, both kinds of wait are seen to have begun, and nothing but a timer could hold the generation.
    """
    target, draft = Recorder(), Recorder()
    generation = generation_of(target, draft, wait_s=600.0)
    generation.begin()
    both = DraftNode(1, 0, 9, True), DraftNode(2, 1, 9, True)
    generation.take(FromDraft(Nodes(1, 1, 1, 3, both)))
    generation.take(FromTarget(VerificationResult(1, 1, 0, SamplerOutput((8,)))))  # 8 is not in the tree
    assert generation._session.waiting
    first = generation._wait_timer
    generation.take(FromDraft(Nodes(1, 1, 2, 4, both)))
    assert not generation._session.waiting and first.cancelled()
    generation.take(FromTarget(VerificationResult(1, 1, 1, SamplerOutput((8, 8, 8)))))
    assert generation._session.waiting and generation._wait_timer is not first
    generation.close()
    await asyncio.sleep(0)  # the turn of the policy, after each round
    gone = weakref.ref(generation)
    del generation
    gc.collect()
    assert gone() is None


async def test_a_verification_leaves_before_the_policy_learns_of_the_last_round() -> None:
    """Claim: the task that writes what a link has queued runs before the policy's update, so that the time of this is
    none of the round's. Conclusive: the writer here waits for its event as a link's does; before, the policy came
    first."""
    order: list[str] = []
    queued = asyncio.Event()

    class Queueing(Recorder):
        def send(self, item: Any) -> int:
            queued.set()
            return super().send(item)

    async def write() -> None:
        while True:
            await queued.wait()
            queued.clear()
            order.append("written")

    target = Queueing()
    generation = generation_of(target, None)
    generation.begin()
    writer = asyncio.create_task(write())
    await asyncio.sleep(0)
    order.clear()
    generation._session.policy.on_round = lambda record: order.append("learned")
    for round_index in range(2):
        generation.take(FromTarget(VerificationResult(1, 1, round_index, SamplerOutput((8,)))))
        await asyncio.sleep(0.01)
    writer.cancel()
    assert order == ["written", "learned"] * 2


def scored(first: int, *token_ids: int, top: int = 1, top_id: int = 5) -> PromptPart:
    """A part of session 1's prompt."""
    count = len(token_ids)
    tops = [top_id] * count * top, [-1.0] * count * top
    return PromptPart(1, 1, PromptLogprobs(first, token_ids, [-2.0] * count, [9] * count, *tops))


@pytest.mark.parametrize(
    "answer",
    [
        scored(2, 7),
        scored(4, 7),
        scored(1, 7),
        scored(3, 8),
        scored(3, 7, 7, 7),
        scored(3, 7, top=2),
        scored(3, 7, top_id=VOCABULARY_SIZE),
        VerificationResult(1, 1, 0, SamplerOutput((7,))),
    ],
    ids=["doubled", "a gap", "again", "other tokens", "beyond the prompt", "more likeliest", "no token", "a result"],
)
async def test_a_malformed_part_of_a_prompt_ends_the_target_for_the_text(answer: Any) -> None:
    """Claim: log-probabilities of other prompt tokens than the next, with other likeliest tokens than asked for, or a
    result before the last of them, are the target's fault: nothing of them reaches the client, and the text leaves the
    target. One of an older incarnation is dropped. The next ones pass before and instead, and the verification asks for
    what is left.

    Conclusive: one thing of each is wrong, and the sound part in its place is handed on.
    """
    for is_sound in (True, False):
        target: Any = Recorder()
        generation = generation_of(target, None, 5)
        session = generation._session
        session.params, session.scored_index = replace(session.params, prompt_logprobs=1), 1
        generation.begin()
        assert target.sent[-1].prompt_logprobs_start == 1
        generation.take(FromTarget(scored(1, 7, 7)))
        generation.take(FromTarget(scored(3, 7)._replace(incarnation=0)))
        generation.take(FromTarget(scored(3, 7) if is_sound else answer))
        events = [await generation.next_event() for _ in range(2 + is_sound)]
        assert [event.first_index for event in events[1:]] == [1, 3][: 1 + is_sound]
        if is_sound:
            assert session.scored_index == 4
            generation.take(FromTarget(scored(4, 7)))
            assert session.scored_index == 0 and (await generation.next_event()).end_index == 5
        else:
            with pytest.raises(ReplicaUnavailable, match="malformed"):
                await generation.next_event()
        generation.close()


async def test_a_further_choice_begins_where_the_first_is() -> None:
    """Claim: a further choice is opened at the target that the first one is at, with an age, so that it waits there
    for space as a text under way does; if that target takes no new text it waits for another one, and ends if none
    comes in time.

    Conclusive: what the targets are sent is recorded; the second target is not the one that was chosen.
    """
    chosen, other = Recorder(), Recorder()
    first, second, third = (generation_of(chosen, None, wait_s=0.01) for _ in range(3))
    first.begin()
    assert [item.age_ms for item in chosen.sent if isinstance(item, Open)] == [0]
    second.follow(first)
    assert [item.age_ms > 0 for item in chosen.sent if isinstance(item, Open)] == [False, True]
    first._target = other  # it has moved
    other.is_up = False
    third.follow(first)
    assert not other.sent and len([item for item in chosen.sent if isinstance(item, Open)]) == 2
    assert (await third.next_event()).max_tokens == 100
    with pytest.raises(ReplicaUnavailable, match="the target of the first choice"):
        await third.next_event()
    for generation in (first, second, third):
        generation.close()
