"""A gRPC server as every service runs it: health, reflection, TLS, limits, draining, and errors that say what is wrong.

Methods are registered by bytes and parse for themselves, so malformed messages are answered INVALID_ARGUMENT like any
other bad input. A handler raises SpecdecError; whatever else it raises is logged and answered INTERNAL without details,
and costs that call only.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specdec.config import ServiceSettings
from specdec.errors import ConfigError, DeliveryStalled, InvalidRequest, ReplicaUnavailable, SpecdecError
from specdec.rpc.limits import KEEPALIVE_OPTIONS, MESSAGE_BYTES_MIN
from specdec.rpc.ports import HealthPort, bracketed, check_port
from specdec.rpc.status import abort
from specdec.rpc.tls import ServerCertificates
from specdec.telemetry.logs import get_logger

MESSAGE_BYTES_PER_POSITION = 16  # a token id takes at most 5 bytes, a token's text seldom more than 16

_SERVER_OPTIONS = (
    *KEEPALIVE_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.so_reuseport", 0),  # two services on one port would share its connections in silence
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small compressed message may unpack to a huge one
)

ALIVE = "alive"  # a name in the health service that is SERVING until the drain, for probes of whether to restart
LAST_WORDS_S = 1.0  # of calls that are given up when the grace is over
READER_STALL_S_MAX = 30.0  # a reader that takes nothing for so long loses its generation

AnyMessage = TypeVar("AnyMessage", bound=Message)
Context: TypeAlias = grpc.aio.ServicerContext
Write: TypeAlias = Callable[[bytes], Awaitable[None]]


def message_bytes_max(positions_max: int) -> int:
    """The largest message to take for a model of so many positions."""
    return max(MESSAGE_BYTES_MIN, MESSAGE_BYTES_PER_POSITION * positions_max)


def parse(message_class: type[AnyMessage], data: bytes) -> AnyMessage:
    """The message in `data`; InvalidRequest naming the message when the bytes are not one."""
    try:
        message: AnyMessage = message_class.FromString(data)
    except DecodeError:
        name = message_class.DESCRIPTOR.full_name
        raise InvalidRequest(name, f"{len(data)} malformed bytes", f"a valid {name} with UTF-8 strings") from None
    return message


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a service: its kind, its request's class (of no meaning for bytes) and its handler."""

    kind: str
    request_class: type[Message]
    handler: Callable[..., Any]


def unary(request_class: type[AnyMessage], handler: Callable[[AnyMessage, Context], Awaitable[Message]]) -> Method:
    """A method with one request and one answer."""
    return Method("unary", request_class, handler)


def unary_stream(
    request_class: type[AnyMessage], handler: Callable[[AnyMessage, Context], AsyncGenerator[Message, None]]
) -> Method:
    """A method with one request and a stream of answers. The generator is closed when the client is gone."""
    return Method("unary_stream", request_class, handler)


def stream_stream(handler: Callable[[AsyncIterator[bytes], Write, Context], Awaitable[None]]) -> Method:
    """A link: bytes in, bytes out. `requests` ends when the client has; the handler is cancelled when it is gone.

    The handler parses each message itself, so that a bad one is answered and the link goes on. A link has no end of
    its own: draining waits for the work it carries, where `stop` is told of some.
    """
    return Method("stream_stream", Message, handler)


class Delivery:
    """The stream of one call. When its reader takes nothing for long, the work behind the messages ends at once."""

    def __init__(self, responses: AsyncGenerator[Message, None], context: Context) -> None:
        self._responses = responses
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._written_s: float | None = None  # since when a message has been waiting to be taken
        self._ending: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(READER_STALL_S_MAX, self._look)

    async def run(self) -> None:
        """Writes all. Raises DeliveryStalled once a stalled reader took what was written: no status leaves before."""
        try:
            async for response in self._responses:
                self._written_s = self._loop.time()
                await self._context.write(response.SerializeToString())
                self._written_s = None
                if self._ending is not None:
                    await self._ending
                    raise DeliveryStalled(f"the reader took nothing for {READER_STALL_S_MAX:g} s")
        finally:
            self._timer.cancel()

    def _look(self) -> None:
        """Gives up on a message that waited too long, or looks again when it will have."""
        waited_s = 0.0 if self._written_s is None else self._loop.time() - self._written_s
        if waited_s >= READER_STALL_S_MAX:
            self._ending = self._loop.create_task(self._responses.aclose())
            return
        self._timer = self._loop.call_later(READER_STALL_S_MAX - waited_s, self._look)


class Server:
    """One listening service. `services`: methods by name, by full service name."""

    def __init__(
        self,
        settings: ServiceSettings,
        services: Mapping[str, Mapping[str, Method]],
        message_bytes: int = MESSAGE_BYTES_MIN,
    ) -> None:
        self.address = ""
        self._settings = settings
        self._service_names = tuple(services)
        self._calls: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._grace_over = False
        self.is_serving = False
        self._health = health.aio.HealthServicer()
        options = (*_SERVER_OPTIONS, ("grpc.max_receive_message_length", message_bytes))
        interceptors = (_StrictParsing(),)
        self._server = grpc.aio.server(options=options, interceptors=interceptors)
        self._health_port = HealthPort(self._health, interceptors) if settings.health_address else None
        for service, methods in services.items():
            handlers = {name: self._handler(f"{service}/{name}", method) for name, method in methods.items()}
            self._server.add_registered_method_handlers(service, handlers)
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> str:
        """Listens, NOT_SERVING; returns HOST:PORT. ConfigError, one line, when the port cannot be had."""
        await self.set_serving(False)
        await self._health.set(ALIVE, health_pb2.HealthCheckResponse.SERVING)
        host, port = self._settings.host, self._settings.port
        certificates = ServerCertificates(self._settings) if self._settings.has_tls else None
        check_port(host, port)
        if self._health_port is not None and self._settings.health_address:
            get_logger().info("health", address=await self._health_port.start(self._settings.health_address))
        try:
            if certificates:
                port = self._server.add_secure_port(f"{bracketed(host)}:{port}", certificates.credentials())
            else:
                port = self._server.add_insecure_port(f"{bracketed(host)}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on port {port} of {host}; choose another with --port") from error
        await self._server.start()
        self.address = f"{bracketed(host)}:{port}"
        return self.address

    async def set_serving(self, serving: bool) -> None:
        """Says so in the health of every service and of the server as a whole."""
        self.is_serving = serving and not self._draining
        states = health_pb2.HealthCheckResponse
        for name in ("", *self._service_names):
            await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def stop(
        self,
        grace_s: float,
        links_idle: Awaitable[object] | None = None,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        """NOT_SERVING at once and calls refused; running ones get `grace_s` to finish, then UNAVAILABLE.

        `links_idle` is waited for as long, where links carry work. `give_up` is called when the grace is over, and what
        still runs gets a moment to say its last words, before it is cancelled.
        """
        self._draining = True
        await self.set_serving(False)
        await self._health.enter_graceful_shutdown()
        if links_idle is not None:
            await _wait((self._idle.wait(), links_idle), grace_s)
        elif self._calls:
            await _wait((self._idle.wait(),), grace_s)
        self._grace_over = True
        if self._calls and give_up is not None:
            give_up()
            await _wait((self._idle.wait(),), LAST_WORDS_S)
        if unfinished := set(self._calls):
            for call in unfinished:
                call.cancel()
            await asyncio.wait(unfinished, timeout=1.0)
        if self._health_port is not None:
            await self._health_port.stop()
        await self._server.stop(0.2)  # last answers are still being written

    def _handler(self, name: str, method: Method) -> grpc.RpcMethodHandler:
        async def answer_once(data: bytes, context: Context) -> Any:
            async with self._answering(name, context):
                response = await method.handler(parse(method.request_class, data), context)
                return response.SerializeToString()

        async def answer_stream(data: bytes, context: Context) -> None:
            async with self._answering(name, context):
                async with aclosing(method.handler(parse(method.request_class, data), context)) as responses:
                    await Delivery(responses, context).run()

        async def converse(requests: AsyncIterator[bytes], context: Context) -> None:
            async with self._answering(name, context, counted=False):
                await method.handler(requests, context.write, context)

        if method.kind == "unary":
            return grpc.unary_unary_rpc_method_handler(answer_once)
        if method.kind == "unary_stream":
            return grpc.unary_stream_rpc_method_handler(answer_stream)
        return grpc.stream_stream_rpc_method_handler(converse)

    @asynccontextmanager
    async def _answering(self, name: str, context: Context, counted: bool = True) -> AsyncIterator[None]:
        """Around every handler: counts it while it runs, and turns what it raises into a status."""
        task = asyncio.current_task()
        assert task is not None
        try:
            if self._draining:
                raise ReplicaUnavailable("the service is stopping")
            if counted:
                self._calls.add(task)
                self._idle.clear()
            yield
        except SpecdecError as error:
            await abort(context, error)
        except asyncio.CancelledError:
            if not (self._grace_over and counted):
                raise
            await abort(context, ReplicaUnavailable("the service stopped before the text was finished; resume it"))
        except grpc.aio.AbortError:
            raise
        except Exception:
            if context.done():  # the client is gone, and what was being written with it
                raise
            get_logger().exception("call failed", method=name)
            await abort(context, SpecdecError("the service failed at this call; its log says why"))
        finally:
            self._calls.discard(task)
            if not self._calls:
                self._idle.set()


async def _wait(conditions: Iterable[Awaitable[object]], timeout_s: float) -> None:
    """Waits until all hold, `timeout_s` at most."""
    _, unmet = await asyncio.wait([asyncio.ensure_future(one) for one in conditions], timeout=timeout_s)
    for one in unmet:
        one.cancel()


class _StrictParsing(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Lets the library services (health, reflection) answer malformed bytes as ours do."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        message_class = handler.request_deserializer.__self__  # `FromString`, bound to its class

        async def checked(data: bytes, context: Context) -> Message:
            try:
                return parse(message_class, data)
            except InvalidRequest as error:
                await abort(context, error)

        async def answer(data: bytes, context: Context) -> Any:
            inner = handler.unary_stream or handler.unary_unary
            return await inner(await checked(data, context), context)

        async def converse(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Message]:
            parsed = (await checked(data, context) async for data in requests)
            async for response in handler.stream_stream(parsed, context):
                yield response

        if handler.stream_stream:
            assert inspect.isasyncgenfunction(handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(converse, None, handler.response_serializer)
        make = grpc.unary_stream_rpc_method_handler if handler.unary_stream else grpc.unary_unary_rpc_method_handler
        return make(answer, None, handler.response_serializer)
