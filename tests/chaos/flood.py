"""Floods of mutated messages over real sockets, and a count of every answer.

Items of a stream travel in batches, each with a last valid item whose answer proves that all before it were handled. A
message that cannot be parsed, or has too many items, ends its stream, so it has a stream of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2

from specdec.errors import InvalidRequest
from specdec.rpc.field_count import check_large
from specdec.rpc.limits import MESSAGE_BYTES_SOFT
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb
from tests.chaos.clients import details_of
from tests.chaos.mutations import Mutator
from tests.chaos.traffic import DRAFT, VERIFY
from tests.chaos.wire import VARINT, Node, read, write

CALL_S_MAX = 60.0
PING_S = 1.0  # as a link
BATCH_ITEM_COUNT = 300
BATCH_BYTES_MAX = MESSAGE_BYTES_SOFT - 256  # a batch and one more item are no large message, whose fields are limited
BATCHES_PER_STREAM = 20
MUTATED_SHARE = 0.75  # of a stream's items: the others keep sessions going, so that mutated ones meet a state
BROKEN_SHARE = 0.2  # of the messages that end their stream: the others are left out, for streams take long to open
CUT_SHARE = 0.9  # of generations, cancelled at the first message
SESSION_COUNT = 40
LAST_SESSION = 4_000_000_000  # of the items whose answer ends a batch
LONG_BYTES, LONG_SHARE = 1024, 0.02  # recorded messages beyond this size are drawn in this share only
FAULTS = (2, 13)  # UNKNOWN and INTERNAL, as numbers
FAULT_SAMPLES_MAX = 20


@dataclass
class Counts:
    """Answers by service: statuses of calls and of items, fields that refusals name, and faults with their bytes. Under
    malformed answers: texts compared, texts that changed, coordinators that ended."""

    sent: Counter[str] = field(default_factory=Counter)
    answers: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    refused_fields: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0
    text_count: int = 0
    changed_count: int = 0
    ended_count: int = 0
    on_sent: Callable[[str, int], None] = lambda service, count: None

    def add_sent(self, service: str, count: int) -> None:
        """Counts mutated messages that were sent and answered."""
        self.sent[service] += count
        self.on_sent(service, count)

    def add_fault(self, service: str, what: str, data: bytes) -> None:
        """Records an answer, or a silence, that no client may cause."""
        self.fault_count += 1
        if len(self.faults) < FAULT_SAMPLES_MAX:
            self.faults.append(f"{service}: {what}; {len(data)} bytes: {data[:2000].hex()}")

    def add_error(self, service: str, error: grpc.RpcError, data: bytes) -> None:
        """Records the status of a failed call."""
        self.answers[service][f"call {error.code().name}"] += 1
        if error.code().value[0] in FAULTS or error.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ):
            self.add_fault(service, f"{error.code().name} {error.details()}", data)
        for name in fields_of(error):
            self.refused_fields[service][without_index(name)] += 1


def without_index(name: str) -> str:
    """The name of a field without the index of an entry, and without numbers of unknown fields."""
    return name.partition("[")[0] if not name.rpartition("field ")[2].isdigit() else "unknown field"


def fields_of(error: grpc.RpcError) -> Iterator[str]:
    """The fields that a refusal names."""
    for detail in details_of(error):
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            yield from (violation.field for violation in bad.field_violations)


Message = TypeVar("Message", bound=Sequence[Node])


class Source(Generic[Message]):
    """Draws recorded messages, or sessions; seldom a long one, whose valid parts are much work."""

    def __init__(self, messages: Sequence[Message], seed: int) -> None:
        self._random = random.Random(seed)
        self._short = [message for message in messages if len(write(list(message))) <= LONG_BYTES]
        self._long = [message for message in messages if len(write(list(message))) > LONG_BYTES]

    def draw(self) -> Message:
        """One message."""
        is_long = bool(self._long) and self._random.random() < LONG_SHARE
        return self._random.choice(self._long if is_long else self._short)


class UnaryFlood:
    """Calls of one method with mutated requests; some are cancelled at their first answer."""

    def __init__(self, service: str, method: str, addresses: Sequence[str], mutator: Mutator, seed: int) -> None:
        self.service, self.mutator = service, mutator
        self._method, self._addresses, self._random = method, addresses, random.Random(seed)

    async def run(self, messages: Sequence[Sequence[Node]], count: int, counts: Counts, width: int = 48) -> None:
        """Sends `count` mutated messages, `width` at a time, each worker over a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        addresses = itertools.islice(itertools.cycle(self._addresses), width)
        channels = [grpc.aio.insecure_channel(address, options=options) for address in addresses]
        left, source = iter(range(count)), Source(messages, self._random.getrandbits(32))

        async def work(channel: grpc.aio.Channel) -> None:
            call = channel.unary_stream(self._method)
            for _ in left:
                await self._one(call, self.mutator.mutate(source.draw()), counts)

        try:
            await asyncio.gather(*map(work, channels))
        finally:
            for channel in channels:
                await channel.close()

    async def _one(self, call: Any, data: bytes, counts: Counts) -> None:
        is_cut = self._random.random() < CUT_SHARE
        try:
            async for _ in (running := call(data, timeout=CALL_S_MAX)):
                if is_cut:
                    running.cancel()
                    break
            counts.answers[self.service]["cancelled" if is_cut else "call OK"] += 1
        except grpc.aio.AioRpcError as error:
            counts.add_error(self.service, error, data)
        counts.add_sent(self.service, 1)


@dataclass(frozen=True, slots=True)
class StreamKind:
    """A stream between services: its messages, and the item that every replica answers at once."""

    service: str
    method: str
    request: type
    response: type
    last: Callable[[int], Any]


TARGET_STREAM = StreamKind(
    "target",
    VERIFY,
    target_pb.VerifyRequest,
    target_pb.VerifyResponse,
    lambda number: target_pb.VerifyRequest(
        items=[
            {
                "verify": {
                    "session": LAST_SESSION,
                    "incarnation": number,
                    "base_position": 1,
                    "suffix_token_ids": [1],
                }
            }
        ]
    ),
)
DRAFT_STREAM = StreamKind(
    "draft",
    DRAFT,
    draft_pb.DraftRequest,
    draft_pb.DraftResponse,
    lambda number: draft_pb.DraftRequest(
        items=[
            {
                "commit": {
                    "session": LAST_SESSION,
                    "incarnation": number,
                    "committed_length": 1,
                    "suffix_token_ids": [1],
                }
            }
        ]
    ),
)
GENERATE_REQUEST = coordinator_pb.GenerateRequest


def sessions_of(kind: StreamKind, messages: Sequence[bytes]) -> list[list[Node]]:
    """The recorded items of each session, in order, each as a field of the stream's message."""
    found: dict[int, list[Node]] = defaultdict(list)
    for data in messages:
        for node in read(kind.request.DESCRIPTOR, data):  # type: ignore[attr-defined]  # a message class
            if node.number == 2 and isinstance(node.value, list):
                item = node.value[0].value
                assert isinstance(item, list) and isinstance(item[0].value, int)
                found[item[0].value].append(node)
    return list(found.values())


def with_pings(requests: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
    """The messages of a queue up to None, with pings in pauses: a replica ends a stream that is silent."""
    while True:
        try:
            data = requests.get(timeout=PING_S)
        except queue.Empty:
            data = b""
        if data is None:
            return
        yield data


class StreamFlood:
    """Streams of mutated items. Sessions of the recording are played again under other names, many at a time."""

    def __init__(self, kind: StreamKind, address: str, mutator: Mutator, seed: int) -> None:
        self.kind, self.mutator, self.service = kind, mutator, kind.service
        self._address = address
        self._random = random.Random(seed)
        self._numbers = itertools.count(1)
        self._broken: list[bytes] = []

    def run(self, sessions: Sequence[list[Node]], count: int, counts: Counts) -> None:
        """Sends at least `count` mutated messages."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        end = counts.sent[self.service] + count
        with grpc.insecure_channel(self._address, options=options) as channel:
            while counts.sent[self.service] < end:
                self._broken.clear()
                self._stream(channel, sessions, end, counts)
                for data in self._broken:
                    self._lone(channel, data, counts)

    def _items(self, sessions: Sequence[list[Node]]) -> Iterator[tuple[bytes, bool]]:
        """(field of the message, whether it is mutated), of sessions whose items alternate; without end."""
        waiting: list[Iterator[Node]] = []
        source = Source(sessions, self._random.getrandbits(32))
        while True:
            if len(waiting) < SESSION_COUNT // 4:
                played, number = source.draw(), next(self._numbers)
                waiting.append(iter([named(node, number) for node in played]))
            own = self._random.choice(waiting)
            node = next(own, None)
            if node is None:
                waiting.remove(own)
            elif self._random.random() < MUTATED_SHARE:
                yield self.mutator.mutate([node]), True
            else:
                yield write([node]), False

    def _stream(self, channel: grpc.Channel, sessions: Sequence[list[Node]], end: int, counts: Counts) -> None:
        """One stream. (By threads, because grpc.aio makes a status of its own where a write meets the stream's end.)"""
        requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call, items = channel.stream_stream(self.kind.method)(with_pings(requests)), self._items(sessions)
        data = b""
        try:
            for number in range(1, BATCHES_PER_STREAM + 1):
                data, count = self._batch(items)
                requests.put(data + self.kind.last(number).SerializeToString())
                is_late = threading.Timer(CALL_S_MAX, call.cancel)
                is_late.start()
                try:
                    self._answers(call, number, counts)
                finally:
                    is_late.cancel()
                counts.add_sent(self.service, count)
                if counts.sent[self.service] >= end:
                    break
        except (grpc.RpcError, StopIteration):
            counts.add_fault(self.service, f"a stream ended: {call.code()} {call.details()}", data)
        finally:
            requests.put(None)
            call.cancel()

    def _batch(self, items: Iterator[tuple[bytes, bool]]) -> tuple[bytes, int]:
        """A message of items that parse, and the number of mutated ones; those that do not parse are set aside, as are
        those with the most empty parts while their number would have the whole message refused."""
        parts: list[tuple[bytes, bool]] = []
        size = item_count = 0
        while item_count < BATCH_ITEM_COUNT:
            data, is_mutated = next(items)
            try:
                own_count = len(self.kind.request.FromString(data).items)  # type: ignore[attr-defined]  # a generated class
            except DecodeError:
                own_count = -1
            if not (0 <= own_count <= BATCH_ITEM_COUNT // 4 and len(data) < BATCH_BYTES_MAX):
                if self._random.random() < BROKEN_SHARE:
                    self._broken.append(data)
                continue
            if size + len(data) > BATCH_BYTES_MAX:
                break
            parts.append((data, is_mutated))
            size, item_count = size + len(data), item_count + own_count
        while True:
            message = b"".join(data for data, _ in parts)
            try:
                check_large(self.kind.request, message)
                return message, sum(is_mutated for _, is_mutated in parts)
            except InvalidRequest:
                emptiest = max(parts, key=lambda part: part[0].count(0))
                parts.remove(emptiest)
                self._broken.append(emptiest[0])

    def _answers(self, call: Any, number: int, counts: Counts) -> None:
        """Reads answers up to that of a batch's last item. Raises StopIteration at the stream's end."""
        answers, fields = counts.answers[self.service], counts.refused_fields[self.service]
        while True:
            data = next(call)
            for item in self.kind.response.FromString(data).items:  # type: ignore[attr-defined]  # a generated class
                name = item.WhichOneof("item")
                answer = getattr(item, name)
                if name == "error":
                    answers[f"item {grpc_name(answer.code)}"] += 1
                    fields[without_index(answer.field)] += 1
                    if answer.code in FAULTS:
                        counts.add_fault(self.service, f"item failed: {answer.message}", data)
                else:
                    answers[name] += 1
                    if answer.session == LAST_SESSION and answer.incarnation == number:
                        return

    def _lone(self, channel: grpc.Channel, data: bytes, counts: Counts) -> None:
        """Sends a message as the only one of its stream; a refused one ends it."""
        try:
            for _ in channel.unary_stream(self.kind.method)(data, timeout=CALL_S_MAX):
                pass
            counts.answers[self.service]["call OK"] += 1
        except grpc.RpcError as error:
            counts.add_error(self.service, error, data)
        counts.add_sent(self.service, 1)


def grpc_name(number: int) -> str:
    """The name of a status code."""
    return next((code.name for code in grpc.StatusCode if code.value[0] == number), str(number))


def named(node: Node, number: int) -> Node:
    """An item under the name of another session, so that names return in a higher incarnation."""
    copy = node.copy()
    assert isinstance(copy.value, list)
    item = copy.value[0].value
    assert isinstance(item, list)
    own = [part for part in item if part.number > 2]
    name = (1 + number % SESSION_COUNT, 1 + number // SESSION_COUNT)
    copy.value[0].value = [Node(part.known, part.number, VARINT, value) for part, value in zip(item, name)] + own
    return copy
