"""A link: the long-lived stream between a coordinator and one replica, which reconnects by itself.

It carries items of many sessions and knows nothing about them. An item is queued as the bytes of a request with it
alone; the concatenated bytes of several are one request with all items, so those queued in one turn of the event loop
are one message. A message without items is a ping and is answered by one, so that an idle link is measured and a silent
peer is detected. A lost connection drops all queued items: the owner opens its sessions again on `on_up`. The pause
before the next connection doubles unless the last one was up for HEALTHY_S, so that a peer which is lost after each
`on_up` does not make the owner send everything ten times a second.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from specdec.errors import InvalidRequest, ReplicaUnavailable, SpecdecError
from specdec.protocol.limits import ITEM_COUNT_MAX
from specdec.rpc.client import Response, call_unary
from specdec.rpc.field_count import check_large
from specdec.rpc.limits import MESSAGE_BYTES_SOFT, UNTAKEN_ITEM_COUNT_MAX
from specdec.rpc.rates import message_rate
from specdec.rpc.stamps import Stamps, load_of
from specdec.rpc.status import error_from_rpc
from specdec.telemetry.clock import wall_offset_ns
from specdec.telemetry.logs import get_logger

BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 2.0
HEALTHY_S = 10.0  # five times the longest back-off: a connection that is lost earlier does not reset it
TICK_S = 0.25
PING_TICKS = 4  # an idle link is pinged once a second
SILENT_TICKS = 11  # 2.75 s without a message although pings were sent: the peer counts as dead
LATE_S = 1.0  # a tick that is so late: this process was paused, and silence is counted anew
CLOSED = "closed"  # by this side


def check_item_count(count: int) -> None:
    """Raises InvalidRequest for a message with too many items, before any is read."""
    if count > ITEM_COUNT_MAX:
        raise InvalidRequest("items", count, f"at most {ITEM_COUNT_MAX} in one message")


class LinkDown(Exception):
    """The connection is over; the message is the reason."""


class Link:
    """One link. All methods and callbacks belong to the event loop's thread; callbacks must not block.

    `connect` makes a fresh channel for each connection, which `ask` uses too. `on_up()`: the peer has answered.
    `on_items(items, bytes_received)`: one message's items, in order; InvalidRequest from it drops the connection as
    malformed. `on_down(reason)`: after every `on_up`, once. `load`: (sessions, load) of the peer by its last report on
    this connection, None before the first; `load_count`: reports on all connections.
    """

    def __init__(
        self,
        peer: str,
        connect: Callable[[], grpc.aio.Channel],
        method: str,
        request_class: type[Message],
        response_class: type[Message],
        on_up: Callable[[], None],
        on_items: Callable[[Sequence[Any], int], None],
        on_down: Callable[[str], None],
    ) -> None:
        self.peer = peer
        self.is_up = False
        self.down_reason = f"{peer} was not reached yet"
        self.bytes_sent = 0
        self.bytes_received = 0
        self.stamps = Stamps(wall_offset_ns)
        self.load: tuple[int, float] | None = None
        self.load_count = 0
        self._connect = connect
        self._channel: grpc.aio.Channel | None = None
        self._up_s = 0.0
        self._method = method
        self._request_class = request_class
        self._response_class = response_class
        self._on_up, self._on_items, self._on_down = on_up, on_items, on_down
        self._queue: list[bytes] = []
        self._wake = asyncio.Event()
        self.heard_s = 0.0  # when the last message came, by the monotonic clock
        self._silent_ticks = 0
        self._idle_ticks = 0

    def __repr__(self) -> str:
        return f"Link({self.peer}, {'up' if self.is_up else 'down: ' + self.down_reason})"

    def send(self, request: bytes, is_timed: bool = False) -> bool:
        """Queues the item of a serialised request for the next message, which gets a stamp if `is_timed`; returns False
        and drops it while the link is down."""
        if self.is_up:
            if is_timed:
                self.stamps.force()
            if not self._queue:
                self._wake.set()
            self._queue.append(request)
        return self.is_up

    async def ask(self, method: str, request: Message, response_class: type[Response], timeout_s: float) -> Response:
        """Calls a unary method of the process at the other end of the stream. Raises the peer's SpecdecError, and
        ReplicaUnavailable without a connection. It is cancelled when the connection is lost."""
        if self._channel is None:
            raise ReplicaUnavailable(self.down_reason)
        return await call_unary(self._channel, method, request, response_class, timeout_s)

    async def run(self) -> None:
        """Keeps the link up until cancelled; then the connection is closed and `on_down` has been called."""
        backoff_s = BACKOFF_MIN_S
        while True:
            self._up_s = float("inf")
            try:
                await self._connection()
            except LinkDown as down:
                self._set_down(str(down))
            except SpecdecError as error:  # such as a TLS file that cannot be read just then
                self._set_down(str(error))
            except Exception as error:
                self._set_down(f"{self.peer}: {type(error).__name__}")
                get_logger().exception("link failed", peer=self.peer)
            finally:
                self._set_down(CLOSED)
            backoff_s = BACKOFF_MIN_S if time.monotonic() - self._up_s >= HEALTHY_S else backoff_s
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _set_down(self, reason: str) -> None:
        """Marks the link as down; idempotent: the first reason after a connection counts."""
        if self.is_up:
            self.is_up = False
            self._queue.clear()
            self.down_reason = reason
            try:
                self._on_down(reason)
            except Exception:  # it would end `run`
                get_logger().exception("the loss of a link was not handled", peer=self.peer)
            log = get_logger().info if reason == CLOSED else get_logger().warning
            log("link down", peer=self.peer, reason=reason)
        elif reason not in (CLOSED, self.down_reason):
            self.down_reason = reason
            get_logger().warning("link not up", peer=self.peer, reason=reason)

    async def _connection(self) -> None:
        """Runs one connection, from its first ping to its loss. Always raises LinkDown, or the cancellation."""
        self.stamps, self.load = Stamps(wall_offset_ns), None
        self._queue.clear()
        self._silent_ticks = self._idle_ticks = 0
        channel = self._channel = self._connect()
        call = channel.stream_stream(self._method)()
        is_lost = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(self._read(call, is_lost))
        others = [asyncio.create_task(part(call)) for part in (self._write, self._watch)]
        try:
            parts = is_lost, reading, *others
            await asyncio.wait(parts, return_when=asyncio.FIRST_EXCEPTION)
            for part in parts:
                if part.done():
                    part.result()
            raise LinkDown(f"{self.peer} ended the stream")
        finally:
            for part in others:
                part.cancel()
            call.cancel()
            self._channel = None
            is_lost.cancel()
            try:
                await asyncio.wait((reading,), timeout=TICK_S)
            finally:
                reading.cancel()
                await asyncio.gather(reading, is_lost, *others, return_exceptions=True)
                await channel.close()

    async def _read(self, call: grpc.aio.StreamStreamCall, is_lost: asyncio.Future[None]) -> None:
        """Takes messages until one is malformed, which `is_lost` then says, and reads on to the end: after a failed
        write gRPC ends a call, and its own task, no sooner. By iteration, as `read` refuses to go on then."""
        rate = message_rate()
        try:
            async for data in call:
                if is_lost.done():
                    continue
                await rate.admit()
                self._silent_ticks, self.heard_s = 0, time.monotonic()
                self.bytes_received += len(data)
                try:
                    self._take(data)
                except LinkDown as down:
                    is_lost.set_exception(down)
        except grpc.aio.AioRpcError as error:
            raise LinkDown(f"{self.peer}: {error_from_rpc(error)}") from error
        raise LinkDown(f"{self.peer} ended the stream")

    def _take(self, data: bytes) -> None:
        """Handles one message: measures it, calls `on_up` at the first, passes its items on."""
        try:
            check_large(self._response_class, data)
            response = self._response_class.FromString(data)
            check_item_count(len(response.items))
            self.stamps.received(response, time.monotonic_ns())
            if (load := load_of(response)) is not None:
                self.load, self.load_count = load, self.load_count + 1
            if not self.is_up:
                self.is_up, self._up_s = True, time.monotonic()
                self._on_up()
                get_logger().info("link up", peer=self.peer)
            if response.items:
                self._on_items(response.items, len(data))
        except (DecodeError, SpecdecError) as error:
            get_logger().error("malformed answer", peer=self.peer, error=str(error))
            raise LinkDown(f"{self.peer} sent a malformed message: {error}") from error
        except Exception as error:
            get_logger().exception("answer not handled", peer=self.peer)
            raise LinkDown(f"an answer of {self.peer} could not be handled") from error

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        """Sends a first ping, then all queued items. When the call is over, the reader has the reason."""
        self._wake.set()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                data = self._next_message()
                self._idle_ticks = 0
                self.bytes_sent += len(data)
                await call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    def _next_message(self) -> bytes:
        """Returns the queued items that fit one message, at least one if there is any, with a stamp if one is due; a
        ping if there is none."""
        parts, self._queue = self._queue[:ITEM_COUNT_MAX], self._queue[ITEM_COUNT_MAX:]
        if sum(map(len, parts)) > MESSAGE_BYTES_SOFT:
            sizes = itertools.accumulate(map(len, parts))
            count = max(1, sum(size <= MESSAGE_BYTES_SOFT for size in sizes))
            parts, self._queue = parts[:count], parts[count:] + self._queue
        if self._queue:
            self._wake.set()
        now_ns = time.monotonic_ns()
        if not parts or self.stamps.is_due(now_ns):
            request = self._request_class()
            self.stamps.stamp(request, now_ns)
            parts.append(request.SerializeToString())
        return b"".join(parts)

    async def _watch(self, _call: grpc.aio.StreamStreamCall) -> None:
        """Sends pings and detects silence. It counts its own ticks, so a pause of this process is no peer's silence,
        nor is what came before the pause, since no ping was sent in it."""
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._silent_ticks = self._silent_ticks + 1 if time.monotonic() < due_s + LATE_S else 0
            self._idle_ticks += 1
            if self._silent_ticks >= SILENT_TICKS:
                raise LinkDown(f"{self.peer} has been silent for {SILENT_TICKS * TICK_S:g} s")
            if len(self._queue) > UNTAKEN_ITEM_COUNT_MAX:
                raise LinkDown(f"{self.peer} leaves {len(self._queue)} items untaken")
            if self._idle_ticks >= PING_TICKS or self._silent_ticks % PING_TICKS == 0:
                self._wake.set()
