"""Clients that hold calls open and do not read them: what they may not take from other clients and from a stop.

A stalled client grants no bytes of flow control (an HTTP/2 window of 0), so the server can send it headers only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from specdec.config import ServiceSettings, TlsSettings
from specdec.errors import CacheExhausted
from specdec.rpc import admission, delivery, health
from specdec.rpc import server as server_module
from specdec.rpc.client import HEALTH_CHECK_METHOD, call_stream, call_unary, open_channel, wait_serving
from specdec.rpc.limits import HELPER_REQUEST_BYTES_MAX, METADATA_BYTES_MAX
from specdec.rpc.server import ALIVE, Server, unary_stream
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from tests.support.echo_service import SERVICE, VERIFY, Echo
from tests.support.pages import free_address

INSECURE = TlsSettings()
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GENERATE = "/specdec.v1.CoordinatorService/Generate"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SOON_S = 10.0  # for what takes milliseconds
NEVER_S = 3600.0


@asynccontextmanager
async def stalled_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel whose calls receive no message until they are read."""
    options = [
        ("grpc.http2.lookahead_bytes", 0),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    """The address of a server that is stopped at the end, also when the test fails."""
    address = await server.start()
    try:
        yield address
    finally:
        await asyncio.wait_for(server.stop(0), SOON_S)


async def hold(channel: grpc.aio.Channel, method: str, request: bytes = b"") -> grpc.aio.UnaryStreamCall:
    """A call whose handler has begun to answer, and is not read."""
    call = channel.unary_stream(method)(request)
    await asyncio.wait_for(call.initial_metadata(), SOON_S)
    return call


def watch(channel: grpc.aio.Channel, name: str = SERVICE):
    """The states of a service, one after the other."""
    request = health_pb2.HealthCheckRequest(service=name)
    return call_stream(channel, WATCH, request, health_pb2.HealthCheckResponse, SOON_S)


async def check(channel: grpc.aio.Channel, name: str = "") -> int:
    """The answer of Check."""
    request = health_pb2.HealthCheckRequest(service=name)
    return (await call_unary(channel, HEALTH_CHECK_METHOD, request, health_pb2.HealthCheckResponse, SOON_S)).status


async def error_of(channel: grpc.aio.Channel, method: str, request: bytes) -> grpc.aio.AioRpcError:
    """The error of a stream without messages."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_stream(method)(request, timeout=SOON_S).read()
    return raised.value


async def test_a_watcher_that_does_not_read_delays_no_client_and_no_stop():
    """Claim: with a stalled Watch on the service's port and held calls on the probe port, health changes at once, for
    Check and for other watchers, and the stop of SIGTERM ends. Source: the library's servicer wrote to a watcher under
    the lock that a change needs. Conclusive: every step waits for the event itself; with that lock none comes."""
    settings = ServiceSettings(port=0, health_address=free_address())
    server = Echo().server(settings)
    held = []
    async with listening(server) as address, AsyncExitStack() as stack:
        for one in (address, settings.health_address):
            stalled = await stack.enter_async_context(stalled_channel(one))
            held += [await hold(stalled, method) for method in (WATCH, HEALTH_CHECK_METHOD)]
        channel = await stack.enter_async_context(open_channel(address, INSECURE))
        watching = watch(channel, "")
        assert (await anext(watching)).status == NOT_SERVING
        await asyncio.wait_for(server.set_serving(True), SOON_S)
        assert (await anext(watching)).status == SERVING
        for one in (address, settings.health_address):
            probe = await stack.enter_async_context(open_channel(one, INSECURE))
            assert await check(probe) == await check(probe, ALIVE) == SERVING
        assert not held[0].done(), "the stalled watch was open all the time"
        stopping = asyncio.create_task(server.stop(NEVER_S))
        assert (await anext(watching)).status == NOT_SERVING
        await asyncio.wait_for(stopping, SOON_S)


async def test_a_stalled_watch_ends_and_its_client_learns_so(monkeypatch: pytest.MonkeyPatch):
    """Claim: a watcher that takes nothing for READER_STALL_S_MAX loses its place, so that another may watch; if it
    reads later, it gets the old state and then DELIVERY_STALLED, never a stream that is silent for ever. Conclusive:
    there is one place, and the second client's state comes through it."""
    monkeypatch.setattr(delivery, "READER_STALL_S_MAX", 0.1)
    monkeypatch.setattr(health, "WATCH_COUNT_MAX", 1)
    server = Echo().server()
    async with (
        listening(server) as address,
        stalled_channel(address) as stalled,
        open_channel(address, INSECURE) as channel,
    ):
        call = await hold(stalled, WATCH)
        await asyncio.wait_for(server.set_serving(True), SOON_S)
        assert await asyncio.wait_for(first_state(channel), SOON_S) == SERVING
        assert health_pb2.HealthCheckResponse.FromString(await call.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="took nothing for 0.1 s"):
            await asyncio.wait_for(call.read(), SOON_S)


async def first_state(channel: grpc.aio.Channel) -> int:
    """The first state of a watch, asked for until there is a place."""
    while True:
        async with aclosing(watch(channel)) as watching:
            try:
                return (await anext(watching)).status
            except CacheExhausted:
                await asyncio.sleep(0.01)


async def test_a_watcher_that_leaves_silences_no_other(monkeypatch: pytest.MonkeyPatch):
    """Claim: after one of two watchers of a name has left, the other still receives each change. Source: the library's
    servicer forgot all watchers of a name with the first that left. Conclusive: the server has
    noticed the departure before the change, as it has given the place to another."""
    monkeypatch.setattr(health, "WATCH_COUNT_MAX", 2)
    server = Echo().server()
    async with listening(server) as address, open_channel(address, INSECURE) as channel:
        leaving, staying = watch(channel), watch(channel)
        assert (await anext(leaving)).status == (await anext(staying)).status == NOT_SERVING
        await leaving.aclose()
        assert await asyncio.wait_for(first_state(channel), SOON_S) == NOT_SERVING
        await server.set_serving(True)
        assert (await anext(staying)).status == SERVING


async def test_watches_and_their_names_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """Claim: a health or reflection request above its limit is refused with its name, size and limit, before it is
    parsed; a watch above their number is refused until another ends. Source: 150 watches with names of 3.9 MB
    took 1.95 GB. Conclusive: a refused call holds nothing, so the memory is at most the product of the two limits."""
    monkeypatch.setattr(health, "WATCH_COUNT_MAX", 2)
    server = Echo().server()
    async with listening(server) as address, open_channel(address, INSECURE) as channel:
        for method in (HEALTH_CHECK_METHOD, WATCH, REFLECTION):
            error = await error_of(channel, method, bytes(3_900_000))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"is '3900000 bytes'; it must be at most {HELPER_REQUEST_BYTES_MAX} bytes" in error.details()
        longest = "x" * (HELPER_REQUEST_BYTES_MAX - 3)  # beside the field's number and length
        first, second = watch(channel, longest), watch(channel)
        assert (await anext(first)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert (await anext(second)).status == NOT_SERVING
        with pytest.raises(CacheExhausted, match="all 2 places for health watches"):
            await anext(watch(channel))
        await first.aclose()
        assert await asyncio.wait_for(first_state(channel), SOON_S) == NOT_SERVING


async def test_a_reflection_call_that_is_held_open_ends(monkeypatch: pytest.MonkeyPatch):
    """Claim: a reflection call ends after READER_STALL_S_MAX, whether its client is silent or does not read, and says
    so. Conclusive: without the limit the silent call gives no status, and the stop waits for neither."""
    monkeypatch.setattr(admission, "READER_STALL_S_MAX", 0.2)
    asked = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    server = Echo().server()
    async with (
        listening(server) as address,
        open_channel(address, INSECURE) as channel,
        stalled_channel(address) as stalled,
    ):
        silent = channel.stream_stream(REFLECTION)()
        await silent.write(asked)
        assert await asyncio.wait_for(silent.read(), SOON_S)
        unread = stalled.stream_stream(REFLECTION)()
        await unread.write(asked)
        with pytest.raises(grpc.aio.AioRpcError, match="open for 0.2 s"):
            await asyncio.wait_for(silent.read(), SOON_S)
        assert await asyncio.wait_for(unread.read(), SOON_S)
        with pytest.raises(grpc.aio.AioRpcError, match="open for 0.2 s"):
            await asyncio.wait_for(unread.read(), SOON_S)


async def test_metadata_of_a_call_is_bounded():
    """Claim: a call whose metadata have more than METADATA_BYTES_MAX is refused, on the service's port and on that of
    the probes; smaller ones are read. Conclusive: the calls differ in the length of one value only."""
    settings = ServiceSettings(port=0, health_address=free_address())
    async with listening(Echo().server(settings)) as address:
        for one in (address, settings.health_address):
            async with open_channel(one, INSECURE) as channel:
                call = channel.unary_unary(HEALTH_CHECK_METHOD)
                await call(b"", metadata=(("x-filler", "x" * (METADATA_BYTES_MAX // 2)),), timeout=SOON_S)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call(b"", metadata=(("x-filler", "x" * METADATA_BYTES_MAX),), timeout=SOON_S)
                assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_calls_of_one_connection_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """Claim: one connection has STREAMS_PER_CONNECTION_MAX calls open at most, another connection its own. Conclusive:
    the call above the limit is answered as soon as one of the others has ended, and not before."""
    monkeypatch.setattr(server_module, "STREAMS_PER_CONNECTION_MAX", 2)
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(listening(Echo().server()))
        channel, other = [await stack.enter_async_context(open_channel(address, INSECURE)) for _ in range(2)]
        calls = [channel.stream_stream(VERIFY)() for _ in range(2)]
        for call in calls:
            await call.write(b"")
            await asyncio.wait_for(call.read(), SOON_S)
        waiting = asyncio.create_task(channel.unary_unary(HEALTH_CHECK_METHOD)(b"", timeout=SOON_S).code())
        assert await check(other) == NOT_SERVING
        assert not waiting.done()
        for call in calls:
            call.cancel()
        assert await waiting is grpc.StatusCode.OK


async def test_held_calls_leave_the_probe_port_free():
    """Claim: 160 calls on the probe port that are not read leave it free for a probe, and Watch is not offered there.
    Source: 64 watches took all places of the port, and Kubernetes restarted a healthy pod. Conclusive: all calls are
    at the server, since it has sent their headers."""
    settings = ServiceSettings(port=0, health_address=free_address())
    held: list[grpc.aio.UnaryStreamCall] = []
    async with listening(Echo().server(settings)), AsyncExitStack() as stack:
        for _ in range(10):
            stalled = await stack.enter_async_context(stalled_channel(settings.health_address))
            held += await asyncio.gather(*(hold(stalled, HEALTH_CHECK_METHOD) for _ in range(16)))
        channel = await stack.enter_async_context(open_channel(settings.health_address, INSECURE))
        await wait_serving(channel, ALIVE, SOON_S)
        assert (await error_of(channel, WATCH, b"")).code() is grpc.StatusCode.UNIMPLEMENTED


class Endless:
    """A CoordinatorService whose Generate never ends by itself; `closed` counts those that were ended."""

    def __init__(self) -> None:
        self.closed = asyncio.Semaphore(0)

    async def generate(self, _request, _context):
        try:
            while True:
                yield coordinator_pb.GenerateResponse()
                await asyncio.sleep(0)
        finally:
            self.closed.release()


@pytest.mark.parametrize("begins_to_read", [False, True])
async def test_a_stalled_reader_loses_its_generation_and_delays_no_stop(
    monkeypatch: pytest.MonkeyPatch, begins_to_read: bool
):
    """Claim: a client that takes nothing for READER_STALL_S_MAX, from the first message or from a later one, loses its
    generation; a stop then does not wait for it, however long its grace; a client that reads again receives the
    messages sent before, then DELIVERY_STALLED. Source: the stalled call was counted as running until its client read.
    Conclusive: the grace is an hour, and nothing else runs."""
    monkeypatch.setattr(delivery, "READER_STALL_S_MAX", 0.1)
    service = Endless()
    methods = {"Generate": unary_stream(coordinator_pb.GenerateRequest, service.generate)}
    server = Server(ServiceSettings(port=0), {"specdec.v1.CoordinatorService": methods})
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(listening(server))
        channels = [await stack.enter_async_context(stalled_channel(address)) for _ in range(2)]
        calls = [await hold(channel, GENERATE) for channel in channels]
        if begins_to_read:
            assert await calls[1].read() == b""
        for _ in calls:
            await asyncio.wait_for(service.closed.acquire(), SOON_S)
        await check_stalled(calls[1])
        await asyncio.wait_for(server.stop(NEVER_S), SOON_S)


async def check_stalled(call: grpc.aio.UnaryStreamCall) -> None:
    """Reads to the end, which is the error of a stalled delivery."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        while await asyncio.wait_for(call.read(), SOON_S) is not grpc.aio.EOF:
            pass
    assert raised.value.code() is grpc.StatusCode.ABORTED
    assert "took nothing" in raised.value.details()
