"""One coordinator's stream to a replica: bytes in, items to the engine thread, answers back in as few messages as fit.

Parsing and serialising run on the event loop, everything else on the engine thread. A bad item is answered by a Failure
and affects no other; bytes that are no message end the stream, and so does a coordinator that sends nothing for
SILENCE_S_MAX, not even the pings of its link, or takes nothing for READER_STALL_S_MAX. A stream is not read while the
engine thread has its share of UNHANDLED_BYTES_MAX to handle: its coordinator waits, and this process holds no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Any

from specdec.engine.scheduling.scheduler import Engine
from specdec.errors import CacheExhausted, DeliveryStalled, InvalidRequest, ReplicaUnavailable, SpecdecError
from specdec.protocol.items import Commit, DraftItem, Failure, TargetItem, Verification
from specdec.protocol.limits import ITEM_COUNT_MAX
from specdec.replica.handler import STOPPING, ItemHandler
from specdec.rpc.convert_items import item_from_message, item_name, item_to_bytes
from specdec.rpc.field_count import check_large
from specdec.rpc.limits import (
    MESSAGE_BYTES_SOFT,
    READER_STALL_S_MAX,
    SILENCE_S_MAX,
    UNHANDLED_BYTES_MAX,
    UNHANDLED_BYTES_MIN,
    UNTAKEN_ITEM_COUNT_MAX,
)
from specdec.rpc.link import TICK_S, check_item_count
from specdec.rpc.parsing import parse
from specdec.rpc.rates import message_rate
from specdec.rpc.server import Write
from specdec.rpc.stamps import Stamps, tell_load
from specdec.rpc.status import failure_from_error
from specdec.telemetry.clock import wall_offset_ns
from specdec.telemetry.logs import get_logger

ITEMS_PER_TURN = 64  # half a millisecond


class ReplicaStream:
    """The state of one stream. `reply` may be called from any thread; `run` is awaited once. `failed` is called with
    every Failure sent; `messages`: the stream's request and response; `streams`: all of this replica, with this one."""

    def __init__(
        self,
        engine: Engine[Any, Any],
        handler: ItemHandler,
        messages: tuple[type, type],
        failed: Callable[[Failure], None],
        streams: Collection[ReplicaStream],
    ) -> None:
        self._engine = engine
        self._failed = failed
        self._streams = streams
        self._handler = handler
        self._request, self._response = messages
        self._stamps = Stamps(wall_offset_ns)
        self._loop = asyncio.get_running_loop()
        self._answers: deque[object] = deque()
        self._wake = asyncio.Event()
        self._is_woken = False
        self._is_pinged = False
        self._silence_s = self._stall_s = 0.0
        self._is_writing = False
        self._posted_bytes = self._handled_bytes = 0  # written by the event loop, and by the engine thread
        self._has_space = asyncio.Event()
        self._is_held = False
        self._is_replaced = asyncio.Event()
        self.began_s = time.monotonic()

    def reply(self, item: object) -> None:
        """Queues an answer. Thread-safe; one wake-up serves all answers of a step."""
        if isinstance(item, Failure):
            self._failed(item)
        self._answers.append(item)
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the stream has ended
                self._loop.call_soon_threadsafe(self._wake.set)

    def say_farewell(self) -> None:
        """Tells the coordinator that this replica stops: it accepts no more sessions, and finishes those it has."""
        self._answers.append(failure_from_error(ReplicaUnavailable(STOPPING), 0, 0))
        self._wake.set()

    def give_place(self) -> None:
        """Ends the stream, whose place another one takes."""
        self._is_replaced.set()

    async def run(self, requests: AsyncIterator[bytes], write: Write) -> None:
        """Reads and answers until the coordinator ends the stream. Raises InvalidRequest for malformed bytes,
        DeliveryStalled when nothing comes, CacheExhausted when another took its place."""
        reading = asyncio.create_task(self._read(requests))
        parts = self._write(reading, write), self._watch(), self._until_replaced()
        ends = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in (reading, *ends):
                part.cancel()
            with contextlib.suppress(ReplicaUnavailable):  # a stopped engine has no sessions left to end
                self._engine.post(lambda: self._handler.close_stream(self))

    async def _write(self, reading: asyncio.Task[None], write: Write) -> None:
        while not reading.done():
            await self._wake.wait()
            self._wake.clear()
            self._is_woken = False
            while self._answers or self._is_pinged:
                self._stall_s, self._is_writing = 0.0, True
                await write(self._message())
                self._is_writing = False
        reading.result()

    async def _until_replaced(self) -> None:
        await self._is_replaced.wait()
        raise CacheExhausted("a stream without work: another coordinator took its place")

    async def _watch(self) -> None:
        """Raises DeliveryStalled after a silence of the coordinator, or when it does not take a message. The time is
        that of its own ticks, so a pause of this process is no silence; nor is a stream that is not read, whose pings
        are answered meanwhile."""
        while self._silence_s < SILENCE_S_MAX:
            await asyncio.sleep(TICK_S)
            self._stall_s += TICK_S if self._is_writing else 0.0
            if self._stall_s >= READER_STALL_S_MAX:
                get_logger().warning("a coordinator does not read; its sessions end", stall_s=self._stall_s)
                raise DeliveryStalled(f"the coordinator took nothing for {READER_STALL_S_MAX:g} s")
            if self._is_held:
                self._silence_s, self._is_pinged = 0.0, True
                self._wake.set()
            self._silence_s += TICK_S
        get_logger().warning("a coordinator is silent; its sessions end", silence_s=self._silence_s)
        raise DeliveryStalled(f"the coordinator sent nothing for {SILENCE_S_MAX:g} s, not even a ping")

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        rate = message_rate()
        try:
            async for data in requests:
                await rate.admit()
                self._silence_s = 0.0
                check_large(self._request, data)
                message: Any = parse(self._request, data)
                arrived_ns = time.monotonic_ns()
                self._stamps.received(message, arrived_ns)
                if self._is_unread():
                    raise InvalidRequest("stream", f"{len(self._answers)} answers untaken", "read as it is written")
                check_item_count(len(message.items))
                if message.items:
                    items = await self._items_of(message.items)
                    self._post(items, arrived_ns / 1e9, max(len(data), UNHANDLED_BYTES_MIN))
                    await self._until_handled()
                else:
                    self._is_pinged = True
                    self._wake.set()
        finally:
            self._wake.set()

    async def _until_handled(self) -> None:
        """Waits while the engine thread has too much of this stream before it."""
        while self._has_too_much():
            self._has_space.clear()
            self._is_held = True  # before the second look: `handle` writes the count first, and reads this then
            if self._has_too_much():
                await self._has_space.wait()
            self._is_held = False

    def _is_unread(self) -> bool:
        """Whether too many answers are untaken, and this stream has more than its share of them."""
        is_more = len(self._answers) * len(self._streams) > UNTAKEN_ITEM_COUNT_MAX
        return is_more and sum(len(stream._answers) for stream in self._streams) > UNTAKEN_ITEM_COUNT_MAX

    def _has_too_much(self) -> bool:
        return (self._posted_bytes - self._handled_bytes) * len(self._streams) > UNHANDLED_BYTES_MAX

    async def _items_of(self, messages: Iterable[Any]) -> list[TargetItem | DraftItem]:
        """Returns the readable items and answers the others; the event loop has a turn every ITEMS_PER_TURN."""
        items: list[TargetItem | DraftItem] = []
        for number, message in enumerate(messages, 1):
            if number % ITEMS_PER_TURN == 0:
                await asyncio.sleep(0)
            try:
                item: TargetItem | DraftItem = item_from_message(message)
            except InvalidRequest as error:
                self.reply(failure_from_error(error, *item_name(message)))
                continue
            except Exception:
                defect = SpecdecError("the replica failed at this item; its log says why")
                self.reply(failure_from_error(defect, *item_name(message)))
                get_logger().exception("an item cannot be read")
                continue
            items.append(item)
            if isinstance(item, (Verification, Commit)) and item.trace.detailed:
                self._stamps.force()  # so that the answer measures the network time
        return items

    def _post(self, items: list[TargetItem | DraftItem], arrived_s: float, byte_count: int) -> None:
        def handle() -> None:
            try:
                self._handler.handle(self, items, self.reply, arrived_s)
            finally:
                self._handled_bytes += byte_count
                if self._is_held:
                    with contextlib.suppress(RuntimeError):  # as in `reply`
                        self._loop.call_soon_threadsafe(self._has_space.set)

        self._engine.post(handle, is_urgent=any(isinstance(item, Verification) for item in items))
        self._posted_bytes += byte_count

    def _message(self) -> bytes:
        """Returns one message with the ready answers that fit; for a ping, and if a stamp is due, stamp and load."""
        self._is_pinged = False
        parts: list[bytes] = []
        byte_count = 0
        while self._answers and len(parts) < ITEM_COUNT_MAX:
            data = self._bytes_of(self._answers[0])
            byte_count += len(data)
            if parts and byte_count > MESSAGE_BYTES_SOFT:
                break
            parts.append(data)
            self._answers.popleft()
        now_ns = time.monotonic_ns()
        if not parts or self._stamps.is_due(now_ns):
            message = self._response()
            self._stamps.stamp(message, now_ns)
            tell_load(message, *self._handler.load())
            parts.append(message.SerializeToString())
        return b"".join(parts)

    def _bytes_of(self, answer: Any) -> bytes:
        """Returns a serialised answer; in place of one with a value that its field cannot hold, a Failure."""
        try:
            return item_to_bytes(self._response, answer)
        except Exception:
            defect = SpecdecError("the replica failed at an answer; its log says why")
            failure = failure_from_error(defect, answer.session, answer.incarnation)
            self._failed(failure)
            get_logger().exception("an answer cannot be sent", session=answer.session)
            return item_to_bytes(self._response, failure)
