"""What every call passes before its handler, whatever its method, on every port of a server.

gRPC shows a handler the peer of a unary call only with its message, and no handler that of an unknown method. So the
handler of each call, or the lack of one, is replaced by one that runs as soon as the headers have come: it counts the
call, waits for its connection's turn, and reads the request. A call that ends before that is wasted. gRPC has no means
to close one connection of a server; one that wastes too many calls is shut down at its socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc

from specdec.errors import DeliveryStalled, InvalidRequest, SpecdecError
from specdec.rpc.connections import close_connections
from specdec.rpc.delivery import Delivery
from specdec.rpc.limits import READER_STALL_S_MAX
from specdec.rpc.rates import CallRates, Rate
from specdec.rpc.status import abort
from specdec.telemetry.logs import get_logger

Context: TypeAlias = grpc.aio.ServicerContext
Read: TypeAlias = Callable[[Context], Awaitable[Any]]


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """The interceptor of all ports of one server; `ports`: those that it listens on.

    A handler's deserializer may raise InvalidRequest, which is then the answer; a handler without one takes bytes. A
    stream of requests with a deserializer is reflection's: each request counts as a call, and the stream ends after
    READER_STALL_S_MAX.
    """

    def __init__(self) -> None:
        self.ports: set[int] = set()
        self._rates = CallRates()
        self._log_rate = Rate(1.0)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        """Returns a handler that admits the call, then calls that of its method."""
        handler = await continuation(details)
        if handler is None:
            return grpc.stream_unary_rpc_method_handler(self._refuse_unknown)
        if handler.stream_stream:

            async def converse(requests: AsyncIterator[bytes], context: Context) -> None:
                await self._converse(handler, requests, context)

            return grpc.stream_stream_rpc_method_handler(converse)
        inner = handler.unary_stream or handler.unary_unary

        async def answer(_requests: AsyncIterator[bytes], context: Context) -> Any:
            request = await self._admit(context, _first_message)
            if handler.request_deserializer is not None:
                try:
                    request = handler.request_deserializer(request)
                except InvalidRequest as error:
                    await _refuse(context, error)
            return await inner(request, context)

        if handler.unary_stream:
            return grpc.stream_stream_rpc_method_handler(answer)
        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    async def _admit(self, context: Context, read: Read | None = None) -> Any:
        """Returns what `read` does, once it is the call's turn; ends the call if it raises an error of specdec."""
        peer = context.peer()
        try:
            with self._rates.place(peer) as caller:
                await self._rates.turn(caller)
                return None if read is None else await read(context)
        except BaseException as error:
            self._count_wasted(peer)
            if isinstance(error, SpecdecError):
                await _refuse(context, error)
            raise

    def _count_wasted(self, peer: str) -> None:
        now_s = time.monotonic()
        if not self._rates.must_close(peer, now_s):
            return
        close_connections(peer, self.ports)
        if self._log_rate.conforms(now_s):
            get_logger().warning("connection closed", peer=peer, reason="too many calls that were of no use")

    async def _refuse_unknown(self, _requests: AsyncIterator[bytes], context: Context) -> None:
        self._count_wasted(context.peer())
        await self._admit(context)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no method has this name")

    async def _converse(self, handler: Any, requests: AsyncIterator[bytes], context: Context) -> None:
        """Passes a stream on, with requests as values if its handler parses them; then each counts as a call."""
        parse, peer, has_request = handler.request_deserializer, context.peer(), False

        async def passed_on() -> AsyncIterator[Any]:
            nonlocal has_request
            async for data in requests:
                has_request = True
                if parse is not None:
                    await self._admit(context)
                yield data if parse is None else parse(data)

        await self._admit(context)
        try:
            if parse is None:
                await handler.stream_stream(passed_on(), context)
            else:
                await _write_briefly(handler.stream_stream(passed_on(), context), handler.response_serializer, context)
        finally:
            if not has_request:
                self._count_wasted(peer)


async def _write_briefly(responses: AsyncIterator[Any], serialize: Callable[[Any], bytes], context: Context) -> None:
    """Writes what a stream answers, for READER_STALL_S_MAX at most."""
    try:
        with Delivery(context) as delivery:
            async with asyncio.timeout(READER_STALL_S_MAX):
                async for response in responses:
                    await delivery.write(serialize(response))
    except (TimeoutError, DeliveryStalled):
        await _refuse(context, DeliveryStalled(f"the call was open for {READER_STALL_S_MAX:g} s"))
    except InvalidRequest as error:
        await _refuse(context, error)


async def _first_message(context: Context) -> bytes:
    """Returns the request's bytes. Raises InvalidRequest if there are none, DeliveryStalled if none come in time."""
    try:
        async with asyncio.timeout(READER_STALL_S_MAX):
            data = await context.read()
    except TimeoutError:
        raise DeliveryStalled(f"no request came for {READER_STALL_S_MAX:g} s") from None
    if data is grpc.aio.EOF:
        raise InvalidRequest("request", "no message", "one message")
    return bytes(data)


async def _refuse(context: Context, error: SpecdecError) -> NoReturn:
    """Ends a call with an error. Always raises."""
    try:
        await abort(context, error)
    except grpc.aio.InternalError:  # the call has ended, which its context learns later
        raise asyncio.CancelledError from None
