"""The gRPC server of every service: health, reflection, TLS, limits, draining, and errors with their causes.

Methods take bytes and parse them, so malformed messages are answered INVALID_ARGUMENT like any other bad input. A
handler raises SpecdecError; any other exception is logged, answered INTERNAL without details, and ends that call only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from specdec.config import ServiceSettings, split_address
from specdec.errors import ConfigError, DeliveryStalled, PeerRefused, ReplicaUnavailable, SpecdecError
from specdec.rpc import reflection
from specdec.rpc.admission import Admission
from specdec.rpc.delivery import Delivery
from specdec.rpc.field_count import check_field_count
from specdec.rpc.health import HEALTH_SERVICE, Health
from specdec.rpc.limits import (
    CONNECTION_OPTIONS,
    MESSAGE_BYTES_MIN,
    METADATA_OPTIONS,
    PATIENT_KEEPALIVE_OPTIONS,
    PING_OPTIONS,
    STREAMS_PER_CONNECTION_MAX,
)
from specdec.rpc.parsing import AnyMessage, parse, parse_small
from specdec.rpc.ports import HealthPort, bracketed, check_port
from specdec.rpc.silence import end_silent
from specdec.rpc.status import abort
from specdec.rpc.tls import ServerCertificates
from specdec.telemetry.logs import get_logger

MESSAGE_BYTES_PER_POSITION = 16  # a token id takes at most 5 bytes, a token's text seldom more than 16

_SERVER_OPTIONS = (
    *CONNECTION_OPTIONS,
    *PATIENT_KEEPALIVE_OPTIONS,
    *METADATA_OPTIONS,
    *PING_OPTIONS,
    ("grpc.so_reuseport", 0),  # two services on one port would share its connections without an error
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small compressed message may unpack to a huge one
)

ALIVE = "alive"  # a name in the health service that is SERVING until the drain, for liveness probes
PEER_NAME_KEYS = "peer_dns", "x509_common_name"  # of gRPC's view of a certificate: DNS names and the common name
LAST_WORDS_S = 1.0  # for the last messages of calls that are cancelled at the end of the grace

Context: TypeAlias = grpc.aio.ServicerContext
Write: TypeAlias = Callable[[bytes], Awaitable[None]]


def message_bytes_max(positions_max: int) -> int:
    """Returns the message size limit for a model of `positions_max` positions."""
    return max(MESSAGE_BYTES_MIN, MESSAGE_BYTES_PER_POSITION * positions_max)


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a service: its kind, its request's class (unused for bytes), its handler, and the sizes of strings
    that depend on the served model."""

    kind: str
    request_class: type[Message]
    handler: Callable[..., Any]
    bytes_max: Callable[[], Mapping[str, float]] = dict


def unary(request_class: type[AnyMessage], handler: Callable[[AnyMessage, Context], Awaitable[Message]]) -> Method:
    """Returns a method with one request, of HELPER_REQUEST_BYTES_MAX at most, and one answer."""
    return Method("unary", request_class, handler)


def unary_stream(
    request_class: type[AnyMessage],
    handler: Callable[[AnyMessage, Context], AsyncGenerator[Message, None]],
    bytes_max: Callable[[], Mapping[str, float]] = dict,
) -> Method:
    """Returns a method with one request, checked by `check_field_count` with the `bytes_max` of this moment, and a
    stream of answers. The client's disconnection closes the generator."""
    return Method("unary_stream", request_class, handler, bytes_max)


def stream_stream(handler: Callable[[AsyncIterator[bytes], Write, Context], Awaitable[None]]) -> Method:
    """Returns a link: bytes in, bytes out. `requests` ends with the client's; its disconnection cancels the handler.

    The handler parses each message itself, so that a bad one is answered and the link continues. A link has no end of
    its own: draining waits for the work it carries if `stop` gets `links_idle`.
    """
    return Method("stream_stream", Message, handler)


class Server:
    """One listening service. `services`: methods by name, by full service name. `allowed_peers`: names of the
    certificates of those who may call them; none: everyone."""

    def __init__(
        self,
        settings: ServiceSettings,
        services: Mapping[str, Mapping[str, Method]],
        message_bytes: int = MESSAGE_BYTES_MIN,
        allowed_peers: Collection[str] = (),
    ) -> None:
        self.address = ""
        self._settings = settings
        self._allowed_peers = frozenset(allowed_peers)
        self._service_names = tuple(services)
        self._calls: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._grace_over = False
        self.is_serving = False
        self._ending_silent: asyncio.Task[None] | None = None
        self._health = Health()
        self._admission = Admission()
        options = (
            *_SERVER_OPTIONS,
            ("grpc.max_receive_message_length", message_bytes),
            ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
        )
        self._server = grpc.aio.server(options=options, interceptors=(self._admission,))
        self._health_port = HealthPort(self._health, (self._admission,)) if settings.health_address else None
        for service, methods in services.items():
            handlers = {name: self._handler(f"{service}/{name}", method) for name, method in methods.items()}
            self._server.add_registered_method_handlers(service, handlers)
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self._server.add_generic_rpc_handlers(
            (self._health.handlers(has_watch=True), *reflection.handlers((*services, HEALTH_SERVICE)))
        )

    async def start(self) -> str:
        """Listens, NOT_SERVING; returns HOST:PORT. Raises ConfigError, one line, if the port cannot be bound."""
        await self.set_serving(False)
        host, port = self._settings.host, self._settings.port
        certificates = ServerCertificates(self._settings) if self._settings.has_tls else None
        check_port(host, port)
        if self._health_port is not None and self._settings.health_address:
            address = await self._health_port.start(self._settings.health_address)
            self._admission.ports.add(split_address(address)[1])
            get_logger().info("health", address=address)
        try:
            if certificates:
                port = self._server.add_secure_port(f"{bracketed(host)}:{port}", certificates.credentials())
            else:
                port = self._server.add_insecure_port(f"{bracketed(host)}:{port}")
        except RuntimeError as error:
            remedy = "check the TLS files" if certificates else "choose another with --port"
            raise ConfigError(f"cannot listen on port {port} of {host}; {remedy}") from error
        self._admission.ports.add(port)
        await self._server.start()
        self._ending_silent = asyncio.create_task(end_silent(port))
        self.address = f"{bracketed(host)}:{port}"
        return self.address

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of every service and of the server as a whole; NOT_SERVING in a drain."""
        self.is_serving = serving and not self._draining
        self._health.set({**dict.fromkeys(("", *self._service_names), self.is_serving), ALIVE: not self._draining})

    async def stop(
        self,
        grace_s: float,
        links_idle: Awaitable[object] | None = None,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        """Stops: NOT_SERVING and refused calls at once; running calls get `grace_s` to finish, then UNAVAILABLE.

        `links_idle`: ends when links carry no more work; awaited for the same time. `give_up` is called when the grace
        is over; running calls then have LAST_WORDS_S for their last messages before they are cancelled.
        """
        self._draining = True
        await self.set_serving(False)
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
        if self._ending_silent is not None:
            self._ending_silent.cancel()

    def _handler(self, name: str, method: Method) -> grpc.RpcMethodHandler:
        async def answer_once(data: bytes, context: Context) -> Any:
            async with self._answering(name, context):
                response = await method.handler(parse_small(method.request_class, data), context)
                return response.SerializeToString()

        async def answer_stream(data: bytes, context: Context) -> None:
            async with self._answering(name, context):
                check_field_count(method.request_class.DESCRIPTOR, data, method.bytes_max())
                responses = method.handler(parse(method.request_class, data), context)
                async with aclosing(responses):
                    with Delivery(context) as delivery:
                        async for response in responses:
                            await delivery.write(response.SerializeToString())

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
        """The context of every handler: counts it while it runs, and turns its exceptions into a status."""
        task = asyncio.current_task()
        assert task is not None
        try:
            self._check_peer(context)
            if self._draining:
                raise ReplicaUnavailable("the service is stopping")
            if counted:
                self._calls.add(task)
                self._idle.clear()
            yield
        except SpecdecError as error:
            if isinstance(error, DeliveryStalled):
                self._uncount(task)  # its work has ended; its status may wait behind unread messages for ever
            await abort(context, error)
        except asyncio.CancelledError:
            if not (self._grace_over and counted):
                raise
            await abort(context, ReplicaUnavailable("the service stopped before the text was finished; resume it"))
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError:  # written to a call that has ended, which its context learns later
            raise asyncio.CancelledError from None
        except Exception:
            if context.done():  # the client has disconnected during a write
                raise
            get_logger().exception("call failed", method=name)
            await abort(context, SpecdecError("the service failed at this call; its log says why"))
        finally:
            self._uncount(task)

    def _check_peer(self, context: Context) -> None:
        """Raises PeerRefused unless the client's certificate has an allowed name."""
        if not self._allowed_peers:
            return
        found: Mapping[str, Iterable[bytes]] = context.auth_context()
        own = [name.decode("utf-8", "replace") for key in PEER_NAME_KEYS for name in found.get(key, ())]
        if self._allowed_peers.isdisjoint(own):
            names = ", ".join(own) or "it has none"
            raise PeerRefused(f"no name of this certificate is one of --allow-peer: {names}")

    def _uncount(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not self._calls:
            self._idle.set()


async def _wait(conditions: Iterable[Awaitable[object]], timeout_s: float) -> None:
    """Waits for all conditions, `timeout_s` at most."""
    _, unmet = await asyncio.wait([asyncio.ensure_future(one) for one in conditions], timeout=timeout_s)
    for one in unmet:
        one.cancel()
