"""Channels, and calls that raise specdec's own errors.

A channel reconnects by itself and notices a dead peer within seconds, as the server's side does. Calls go by bytes, so
generated stubs are not needed. Certificates are read when a channel is made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from specdec.config import TlsSettings
from specdec.errors import InvalidRequest, ReplicaUnavailable, SpecdecError
from specdec.rpc.field_count import check_field_count
from specdec.rpc.limits import KEEPALIVE_OPTIONS, MESSAGE_BYTES_MIN, PATIENT_KEEPALIVE_OPTIONS
from specdec.rpc.status import error_from_rpc
from specdec.rpc.tls import channel_credentials

HEALTH_CHECK_METHOD = "/grpc.health.v1.Health/Check"
HEALTH_POLL_S = 0.05  # short beside a model's loading, long beside a loopback call of 0.4 ms

_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # one connection per channel: links fail independently
    ("grpc.enable_retries", 0),  # sending again is the decision of the session, which has the fences
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_http_proxy", 0),  # an environment variable must not send prompts elsewhere
)

Response = TypeVar("Response", bound=Message)


def open_channel(
    address: str, tls: TlsSettings, message_bytes: int = MESSAGE_BYTES_MIN, is_patient: bool = False, tls_name: str = ""
) -> grpc.aio.Channel:
    """Returns a channel to HOST:PORT, not yet connected. Close it. ConfigError when a TLS file cannot be read.
    `is_patient`: its user finds a silent peer by itself; `tls_name`: the name that the peer's certificate must have, in
    place of the address."""
    keepalive = PATIENT_KEEPALIVE_OPTIONS if is_patient else KEEPALIVE_OPTIONS
    options = (*keepalive, *_CHANNEL_OPTIONS, ("grpc.max_receive_message_length", message_bytes))
    if tls.has_tls:
        named = (("grpc.ssl_target_name_override", tls_name),) if tls_name else ()
        return grpc.aio.secure_channel(address, channel_credentials(tls), options=(*options, *named))
    return grpc.aio.insecure_channel(address, options=options)


async def call_unary(
    channel: grpc.aio.Channel, method: str, request: Message, response_class: type[Response], timeout_s: float
) -> Response:
    """Sends one request, returns its answer; `method` is "/package.Service/Method". Raises the peer's SpecdecError."""
    try:
        data = await channel.unary_unary(method)(request.SerializeToString(), timeout=timeout_s)
        check_field_count(response_class.DESCRIPTOR, data)
        response: Response = response_class.FromString(data)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    except (DecodeError, InvalidRequest) as error:
        raise ReplicaUnavailable(f"the answer to {method} is malformed") from error
    return response


async def call_stream(
    channel: grpc.aio.Channel,
    method: str,
    request: Message,
    response_class: type[Response],
    timeout_s: float | None = None,
    metadata: Sequence[tuple[str, str]] = (),
) -> AsyncGenerator[Response, None]:
    """Sends one request, yields its answers. Closing the generator cancels the call. Raises as `call_unary` does."""
    call = channel.unary_stream(method)(request.SerializeToString(), timeout=timeout_s, metadata=tuple(metadata))
    try:
        async for data in call:
            yield response_class.FromString(data)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    except DecodeError as error:
        raise ReplicaUnavailable(f"an answer to {method} is malformed") from error
    finally:
        call.cancel()


async def wait_serving(channel: grpc.aio.Channel, service: str, timeout_s: float) -> None:
    """Returns when the peer's health of `service` is SERVING; raises ReplicaUnavailable after `timeout_s`."""
    request = health_pb2.HealthCheckRequest(service=service)
    deadline_s = time.monotonic() + timeout_s
    seen = "unreachable"
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            response = await call_unary(channel, HEALTH_CHECK_METHOD, request, health_pb2.HealthCheckResponse, left_s)
            seen = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return
        except SpecdecError as error:
            seen = str(error)
        await asyncio.sleep(min(HEALTH_POLL_S, left_s))
    raise ReplicaUnavailable(f"{service or 'the server'} was not ready within {timeout_s:g} s: {seen}")
