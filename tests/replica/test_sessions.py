"""The places of a replica's sessions, shared by coordinators that may take more than they use; and answers that cannot
be sent. Time is an argument, the service behind does nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.scheduler import Engine
from specdec.engine.table_model import write_table_model
from specdec.errors import CacheExhausted, DeliveryStalled, InvalidRequest, SpecdecError
from specdec.protocol.items import Close, Failure, MissingTokens, Nodes, Open, Verification
from specdec.protocol.limits import ITEM_COUNT_MAX
from specdec.protocol.types import ResolvedSamplingParams, Rule
from specdec.replica import stream as stream_module
from specdec.replica.handler import ABANDONED_S, ASKING_S, HELD_S, ItemHandler, ReplicaService, ReplicaSession
from specdec.replica.stream import ReplicaStream
from specdec.rpc.convert_items import item_to_bytes
from specdec.rpc.limits import UNHANDLED_BYTES_MAX, UNHANDLED_BYTES_MIN
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb

PARAMS = ResolvedSamplingParams(Rule.GREEDY, seed=1, prompt_length=1, temperature=0.0)
PLACES = 8


class BusySession(ReplicaSession):
    """A session whose last request may be unanswered."""

    is_busy = False  # type: ignore[assignment]  # set by the test


class Idle(ReplicaService):
    """Holds sessions. `share`: its usage."""

    waiting_count = 0
    share = 0.0

    def usage(self) -> float:
        return self.share

    def open(self, item: Open, reply: Any) -> BusySession:
        return BusySession(item, SimpleNamespace(), reply)


class Coordinators:
    """A handler and the coordinators that open sessions on it, each a stream of its own."""

    def __init__(self) -> None:
        self.handler = ItemHandler(Idle(), PLACES)

    def tell(self, stream: str, *items: Any, at_s: float = 0.0) -> list[Any]:
        """Returns the answers to one message."""
        answers: list[Any] = []
        self.handler.handle(stream, list(items), answers.append, at_s)
        return answers

    def open(self, stream: str, session: int, at_s: float = 0.0, works: bool = True) -> bool:
        """Opens a session, with a verification behind it if it `works`; returns whether it has a place."""
        items = [Open(session, 1, PARAMS, 9, 9), Verification(session, 1, 0, 1, (1,))]
        answers = self.tell(stream, *items[: 1 + works], at_s=at_s)
        assert all(answer.reason == CacheExhausted.reason for answer in answers if isinstance(answer, Failure))
        return not answers

    def held(self, stream: str) -> list[int]:
        """The sessions of a stream."""
        return [number for holder, number in self.handler.sessions if holder == stream]


def test_sessions_without_work_lock_no_other_coordinator_out() -> None:
    """Claim: places taken without work, and places idle for ABANDONED_S, go to the sessions that ask, the longest idle
    first; a session that works, or worked a moment ago, keeps its place; one that lost it is opened again at will.

    Source: 64 idle opens locked a target out. Conclusive: each kind is present, and the names of those left are
    compared.
    """
    both = Coordinators()
    assert all(both.open("a", session, works=session > 4) for session in range(1, 9))
    assert all(both.open("b", session, at_s=1.0) for session in range(1, 5))
    assert both.held("a") == [5, 6, 7, 8], "those that never worked have gone"
    assert not both.open("b", 5, at_s=ABANDONED_S - 1)
    both.handler.sessions["a", 6].is_busy = True
    assert both.open("b", 5, at_s=ABANDONED_S) and both.open("b", 6, at_s=ABANDONED_S) and both.held("a") == [6, 8]
    (answer,) = both.tell("a", Verification(5, 1, 1, 1, (1,)), at_s=ABANDONED_S)
    assert isinstance(answer, MissingTokens) and answer.unknown
    assert both.open("a", 5, at_s=ABANDONED_S) and both.held("a") == [6, 5]


def test_a_stream_takes_no_more_than_its_share_while_another_asks() -> None:
    """Claim: of two coordinators that both want every place, the one that came first gets no further session from the
    other's refusal on, until that one has half of the places or asks no more; an opened session may be opened again.

    Source: one stream could take every place for ever, by opening a session for each that ends. Conclusive: every
    place that becomes free is asked for by the first one first.
    """
    both = Coordinators()
    assert all(both.open("a", session) for session in range(1, 9))
    assert not both.open("b", 1)
    assert not both.tell("a", Open(1, 2, PARAMS, 9, 9), Verification(1, 2, 0, 1, (1,))), "its own place again"
    for session in range(1, 5):
        both.tell("a", Close(session, 2))
        assert not both.open("a", 10 + session) and both.open("b", session)
        assert not both.open("b", 99)
    assert len(both.held("a")) == len(both.held("b")) == 4
    both.tell("a", Close(5, 1))
    assert both.open("a", 20), "the other has its share"
    assert not both.open("c", 1)
    both.tell("a", Close(6, 1))
    assert not both.open("a", 21) and both.open("a", 21, at_s=ASKING_S), "the other asks no more"


def test_a_stream_keeps_no_more_than_its_share_by_working() -> None:
    """Claim: places beyond a stream's share that it holds by working on and on, or by opening its sessions again, go to
    another that asks, the oldest first and only HELD_S after they were taken, until that one has its share; the first
    is told, and gets no place back meanwhile.

    Source: a token every few seconds in each session kept all places from others for ever. Conclusive: every session
    worked at this moment.
    """
    both = Coordinators()
    for session in range(1, 9):
        assert both.open("a", session, at_s=float(session))
    both.tell("a", Open(1, 2, PARAMS, 9, 9), Verification(1, 2, 0, 1, (1,)), at_s=20.0)
    for session in both.handler.sessions.values():
        session.active_s, session.is_busy = HELD_S, True
    assert not both.open("b", 1, at_s=HELD_S)
    told: list[Any] = []
    both.handler.sessions["a", 1].reply = told.append
    assert both.open("b", 1, at_s=HELD_S + 1) and both.held("a") == [2, 3, 4, 5, 6, 7, 8]
    assert isinstance(told[0], MissingTokens) and told[0].unknown and told[0].incarnation == 2
    assert not both.open("b", 2, at_s=HELD_S + 1) and not both.open("a", 1, at_s=HELD_S + 1)
    assert all(both.open("b", session, at_s=HELD_S + session) for session in (2, 3, 4))
    assert both.held("a") == [5, 6, 7, 8] and not both.open("b", 5, at_s=HELD_S + 9), "each has its share"


def test_the_load_is_the_largest_share_and_what_waits() -> None:
    """Claim: the load is the share of places taken, or that of cache or time if it is larger, and that of waiting
    sessions beside it; 1 where every place is taken. Conclusive: each part decides once, by numbers that are exact."""
    one = Coordinators()
    assert one.handler.load() == (0, 0.0)
    assert one.open("a", 1) and one.open("b", 1)
    assert one.handler.load() == (2, 2 / PLACES)
    service: Any = one.handler.service
    service.share = 0.5
    assert one.handler.load() == (2, 0.5)
    service.waiting_count = 1
    assert one.handler.load() == (2, 0.5 + 1 / PLACES)
    assert all(one.open("a", session) for session in range(2, PLACES))
    service.waiting_count = 0
    assert one.handler.load() == (PLACES, 1.0) and not one.open("a", PLACES)


class Stream:
    """A replica's stream of the draft's messages, without sockets and engine: `sent` are the items it answered."""

    def __init__(self, handler: Any = None, streams: list[ReplicaStream] | None = None) -> None:
        engine: Any = SimpleNamespace(post=self.post)
        self.are_urgent: list[bool] = []
        self.failures: list[Failure] = []
        self.sent: list[draft_pb.DraftResponseItem] = []
        messages = draft_pb.DraftRequest, draft_pb.DraftResponse
        handler = handler or SimpleNamespace(close_stream=lambda stream: None, load=lambda: (0, 0.0))
        streams = [] if streams is None else streams
        self.stream = ReplicaStream(engine, handler, messages, self.failures.append, streams)
        streams.append(self.stream)

    def post(self, function: Callable[[], None], is_urgent: bool = False) -> None:
        self.are_urgent.append(is_urgent)
        function()

    async def write(self, data: bytes) -> None:
        self.sent += draft_pb.DraftResponse.FromString(data).items

    async def run(self, *requests: bytes, answers: tuple[Any, ...] = ()) -> None:
        """Reads requests, answers, and runs until all are sent."""

        async def arriving() -> AsyncIterator[bytes]:
            for request in requests:
                yield request
            for answer in answers:
                self.stream.reply(answer)
            while len(self.sent) < len(answers):
                await asyncio.sleep(0)

        async with asyncio.timeout(10):
            await self.stream.run(arriving(), self.write)


@pytest.mark.parametrize("write_s, is_ended", [(0.05, False), (60.0, True)])
async def test_a_coordinator_that_takes_no_answer_is_ended(
    monkeypatch: pytest.MonkeyPatch, write_s: float, is_ended: bool
) -> None:
    """Claim: a stream whose coordinator sends pings and takes no answer for READER_STALL_S_MAX ends; one that takes
    each answer late does not, though all together take longer. Source: answers of such a stream were kept for ever.

    Conclusive: both streams get the same answers; the clock is the watch's own ticks, shortened here."""
    monkeypatch.setattr(stream_module, "READER_STALL_S_MAX", 0.2)
    monkeypatch.setattr(stream_module, "TICK_S", 0.01)
    monkeypatch.setattr(stream_module, "MESSAGE_BYTES_SOFT", 1)  # an answer a message
    own = Stream()

    async def write(data: bytes) -> None:
        await asyncio.sleep(write_s)
        own.sent += draft_pb.DraftResponse.FromString(data).items

    own.write = write
    answers = (Nodes(1, 1, 1, 1, ()),) * 10
    if not is_ended:
        await own.run(answers=answers)
        assert len(own.sent) == len(answers)
        return
    with pytest.raises(DeliveryStalled, match="took nothing"):
        await own.run(answers=answers)


async def test_an_answer_that_cannot_be_sent_fails_alone() -> None:
    """Claim: an answer with a number beyond its field becomes a Failure of its session, the text of the exception stays
    in the log, and the answers beside it are sent.

    Source: from the 2^32nd epoch on every message failed, and with it the stream of all sessions, for ever.
    """
    own = Stream()
    beyond, sound = Nodes(1, 1, 1 << 32, 1, ()), Nodes(2, 1, 1, 1, ())
    with capture_logs() as logs:
        await own.run(answers=(sound, beyond, sound))
    assert [item.WhichOneof("item") for item in own.sent] == ["nodes", "error", "nodes"]
    error = own.sent[1].error
    assert (error.session, error.incarnation, error.reason) == (1, 1, SpecdecError.reason)
    assert "log" in error.message and "range" not in error.message
    assert [failure.session for failure in own.failures] == [1]
    assert any(line["event"] == "an answer cannot be sent" for line in logs)


async def test_an_item_that_cannot_be_read_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a defect in the reading of an item is answered by a Failure of its session; the items beside it are
    handled, and the stream goes on.

    Source: only errors of the sender were caught there; any other would have ended the stream of all sessions.
    """
    handled: list[Any] = []
    read = stream_module.item_from_message

    def planted(message: Any) -> Any:
        item = read(message)
        if item.session == 2:
            raise ZeroDivisionError("a secret")
        return item

    monkeypatch.setattr(stream_module, "item_from_message", planted)
    handle, load = (lambda _, items, *__: handled.extend(items)), lambda: (0, 0.0)
    handler = SimpleNamespace(close_stream=lambda _: None, handle=handle, load=load)
    own = Stream(handler)
    data = b"".join(item_to_bytes(draft_pb.DraftRequest, Close(session, 1)) for session in (1, 2, 3))
    with capture_logs() as logs:
        await own.run(data, data, answers=(Nodes(1, 1, 1, 1, ()),))
    assert [item.session for item in handled] == [1, 3, 1, 3]
    assert [(failure.session, failure.reason) for failure in own.failures] == [(2, SpecdecError.reason)] * 2
    assert all("a secret" not in failure.message for failure in own.failures)
    assert any(line["event"] == "an item cannot be read" for line in logs)


async def test_a_message_with_too_many_items_ends_its_stream() -> None:
    """Claim: a message with more items than ITEM_COUNT_MAX is refused by field, value and limit before any is read, one
    with as many is answered item by item; answers leave in messages that the coordinator's same limit admits.

    Source: 600 kB of empty items silenced a target for longer than 3 s.
    """
    own = Stream(SimpleNamespace(close_stream=lambda _: None, handle=lambda *_: None, load=lambda: (0, 0.0)))
    unlawful = draft_pb.DraftRequestItem(close={"incarnation": 1 << 28})  # of no session
    many = draft_pb.DraftRequest(items=[unlawful] * ITEM_COUNT_MAX).SerializeToString()
    await own.run(many, answers=(Nodes(1, 1, 1, 1, ()),) * 2)
    assert len(own.failures) == ITEM_COUNT_MAX
    own = Stream()
    with pytest.raises(InvalidRequest, match=f"items is {ITEM_COUNT_MAX + 1}; it must be at most {ITEM_COUNT_MAX}"):
        await own.run(many + draft_pb.DraftRequest(items=[unlawful]).SerializeToString())
    assert not own.failures
    own.stream._answers.extend([Nodes(1, 1, 1, 1, ())] * (ITEM_COUNT_MAX + 1))
    sizes = [len(draft_pb.DraftResponse.FromString(own.stream._message()).items) for _ in range(2)]
    assert sizes == [ITEM_COUNT_MAX, 1]


async def test_the_event_loop_has_turns_while_a_message_is_read() -> None:
    """Claim: others of the event loop have a turn after every ITEMS_PER_TURN items of a message, good or bad ones.

    Source: 1,024 empty items held the loop for 23 ms on a loaded machine. Conclusive: turns are counted, not timed.
    """
    own = Stream(SimpleNamespace(close_stream=lambda _: None, handle=lambda *_: None, load=lambda: (0, 0.0)))
    empty, close = (draft_pb.DraftRequestItem(**own) for own in ({}, {"close": {"session": 1, "incarnation": 1}}))
    for one, count in ((empty, 0), (close, ITEM_COUNT_MAX)):
        turns = 0
        reading = asyncio.ensure_future(own.stream._items_of([one] * ITEM_COUNT_MAX))
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= ITEM_COUNT_MAX // stream_module.ITEMS_PER_TURN
        assert len(reading.result()) == count


async def test_a_verification_is_urgent_and_nothing_else() -> None:
    """Claim: a message with a verification is posted to the engine as work that a large step of prompts is abandoned
    for; one that opens and closes sessions is not. Conclusive: both messages of one stream, as bytes."""
    own = Stream(SimpleNamespace(close_stream=lambda _: None, handle=lambda *_: None, load=lambda: (0, 0.0)))
    others = Open(1, 1, PARAMS, 9, 9), Close(1, 1)
    for items in (others, (*others, Verification(1, 1, 1, 1, (5,)))):
        data = b"".join(item_to_bytes(target_pb.VerifyRequest, item) for item in items)
        own.stream._post(await own.stream._items_of(target_pb.VerifyRequest.FromString(data).items), 0.0, len(data))
    assert own.are_urgent == [False, True] and not own.failures


async def test_who_leaves_answers_unread_ends_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: when the streams of a replica together have more than UNTAKEN_ITEM_COUNT_MAX answers that were not taken,
    one that has more than its share of them ends at its next message; one within its share, or with many alone, goes
    on.

    Source: each stream had a bound of its own, so their number decided the memory. Conclusive: the same streams are
    asked at the bound, and one answer beyond it.
    """
    monkeypatch.setattr(stream_module, "UNTAKEN_ITEM_COUNT_MAX", 8)
    streams: list[ReplicaStream] = []
    greedy, modest = (Stream(streams=streams).stream for _ in range(2))
    answer = Nodes(1, 1, 1, 1, ())
    greedy._answers.extend([answer] * 6)
    modest._answers.extend([answer] * 2)
    assert not greedy._is_unread() and not modest._is_unread()
    modest._answers.append(answer)
    assert not modest._is_unread()

    async def arriving() -> AsyncIterator[bytes]:
        yield b""

    with pytest.raises(InvalidRequest, match="6 answers untaken"):
        await greedy._read(arriving())
    await modest._read(arriving())


def test_the_text_of_an_exception_stays_at_the_replica() -> None:
    """Claim: an internal error of a session's work is answered by a sentence, and its text is in the log; an error of
    another kind is answered as it is.

    Source: the text of internal exceptions reached users.
    """
    answers: list[Any] = []
    session = ReplicaSession(Open(1, 1, PARAMS, 9, 9), SimpleNamespace(), answers.append)
    with capture_logs() as logs:
        session.fail(SpecdecError("RuntimeError: a secret"))
        session.fail(CacheExhausted("full"))
    assert [answer.message for answer in answers] == ["the replica failed at this request; its log says why", "full"]
    assert "a secret" in logs[0]["error"]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine[Any, Any]]:
    """A running engine; its table model is for protocol tests only."""
    write_table_model(tmp_path / "table", vocabulary_size=7)
    running: Engine[Any, Any] = Engine(load_model(str(tmp_path / "table")), 8, 16, lambda payloads, *_: payloads)
    running.start()
    yield running
    running.stop()


@pytest.mark.parametrize("stream_count, token_count, item_count", [(1, 1000, 14), (8, 1000, 14), (1, 1, 1), (8, 1, 1)])
async def test_streams_are_not_read_while_their_items_wait(
    engine: Engine[Any, Any], stream_count: int, token_count: int, item_count: int
) -> None:
    """Claim: while the engine thread handles nothing, the streams of a replica are read up to UNHANDLED_BYTES_MAX
    together, each to its share and one message; then they are read to their ends. A short message counts as
    UNHANDLED_BYTES_MIN. Source: the inbox had no bound, so streams could fill the memory during one long step, and
    then none for the number of messages: one of 2 bytes costs some 500.

    Conclusive: the engine is a real one whose thread is held, three times the bound is sent, and every item answered.
    """
    names = range(1, 1 + item_count)
    item = Verification(1, 1, 0, 1000, (1,) * token_count)
    data = b"".join(item_to_bytes(target_pb.VerifyRequest, item._replace(session=name)) for name in names)
    weight = max(len(data), UNHANDLED_BYTES_MIN)
    count = 3 * UNHANDLED_BYTES_MAX // stream_count // weight
    read = answered = 0
    is_released = threading.Event()

    async def arriving() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(count):
            yield data
            read += 1
        while answered < stream_count * count * len(names):
            await asyncio.sleep(0.01)

    async def write(message: bytes) -> None:
        nonlocal answered
        answered += len(target_pb.VerifyResponse.FromString(message).items)

    messages = target_pb.VerifyRequest, target_pb.VerifyResponse
    handler, streams = ItemHandler(Idle(), PLACES), list[ReplicaStream]()
    for _ in range(stream_count):
        streams.append(ReplicaStream(engine, handler, messages, lambda failure: None, streams))
    engine.post(lambda: is_released.wait(30) and None)
    async with asyncio.timeout(60), asyncio.TaskGroup() as running:
        for stream in streams:
            running.create_task(stream.run(arriving(), write))
        while read * weight <= UNHANDLED_BYTES_MAX - stream_count * weight:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert read * weight <= UNHANDLED_BYTES_MAX + stream_count * weight and not answered
        is_released.set()
    assert (read, answered) == (stream_count * count, stream_count * count * len(names))
