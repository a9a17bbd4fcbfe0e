"""Connections to a port, and the rates of calls and messages: one client has its share, however much it sends.

Times are lower bounds only: a slow machine makes them longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from specdec.config import ServiceSettings, TlsSettings
from specdec.replica.stream import ReplicaStream
from specdec.rpc import rates
from specdec.rpc import server as server_module
from specdec.rpc.client import HEALTH_CHECK_METHOD, open_channel
from specdec.rpc.limits import CALL_BURST_S, CONNECTION_COUNT_MAX, PROBE_COUNT_MAX
from specdec.rpc.link import Link
from specdec.rpc.rates import CallRates, Rate
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb
from tests.support.echo_service import DESCRIBE, VERIFY, Echo, listening
from tests.support.pages import free_address

OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
SOON_S = 10.0  # for what takes milliseconds
CHECK = health_pb2.HealthCheckRequest().SerializeToString()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server closes a connection at once; else it sends its settings."""
    return not await asyncio.wait_for(reader.read(1), SOON_S)


def test_a_rate_counts_every_event() -> None:
    """Claim: a second's number of events at once conform, each further one 1 / rate later; a pause earns one second's
    number and no more (the generic cell rate algorithm, ITU-T I.371). Conclusive: times are given, results exact."""
    rate = Rate(4)
    assert [rate.wait_s(100.0) for _ in range(8)] == [0, 0, 0, 0, 0, 0.25, 0.5, 0.75]
    assert rate.wait_s(101.0) == 0.0  # what was announced has passed
    assert [rate.wait_s(1000.0) for _ in range(6)] == [0, 0, 0, 0, 0, 0.25]
    shared = Rate(4, burst_s=0.0)
    assert [shared.wait_s(100.0, share_count=2) for _ in range(3)] == [0, 0.5, 1.0]
    policed = Rate(4)
    assert [policed.conforms(100.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert policed.conforms(100.25)  # what was refused is not due


async def test_the_rates_of_connections_that_are_gone_are_forgotten() -> None:
    """Claim: a server remembers the rates of CONNECTION_COUNT_MAX connections, the last that called, and as many hosts;
    no place of a call is lost with them."""
    known = CallRates()
    for number in range(CONNECTION_COUNT_MAX + 5):
        for peer in (f"ipv4:10.0.0.1:{number}", "ipv4:10.0.0.2:1"):
            with known.place(peer) as caller:
                await known.turn(caller)
        for _ in range(3):
            known.must_close(f"ipv4:10.1.{number // 256}.{number % 256}:1", 0.0)
    assert len(known._callers) == len(known._wasted) == CONNECTION_COUNT_MAX
    assert "ipv4:10.1.2.4:1" in known._callers and "ipv4:10.0.0.1:0" not in known._callers
    assert known._waiting_count == known._waiting_caller_count == known._queued_caller_count == 0


async def test_turns_are_shared_by_the_connections_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a connection with 10 calls does not wait for the 1,000 of another: it has half of the turns until it is
    through. Conclusive: time stands still and what a call is to wait is recorded, so results are exact: at most 40 of
    the 1,000 are due before the last of the 10; without shares by connection the 1,000 would be."""
    waits_s: dict[str, list[float]] = {"many": [], "few": []}
    never = asyncio.Event()

    async def call(peer: str) -> None:
        async def sleep(wait_s: float) -> None:
            waits_s[peer].append(wait_s)
            await never.wait()

        with known.place(peer) as caller:
            monkeypatch.setattr(rates, "asyncio", SimpleNamespace(sleep=sleep))
            await known.turn(caller)

    monkeypatch.setattr(rates, "CALLS_PER_S_MAX", 50)
    monkeypatch.setattr(rates, "time", SimpleNamespace(monotonic=lambda: 100.0))
    known = CallRates()
    calls = [asyncio.create_task(call(peer)) for peer in ["many"] * 1000 + ["few"] * 10]
    await asyncio.sleep(0)
    assert len(waits_s["many"]) > 950 and waits_s["few"]
    last_s = max(waits_s["few"])
    assert 10 <= sum(wait_s <= last_s for wait_s in waits_s["many"]) <= 40
    for task in calls:
        task.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert known._queued_caller_count == 0


@pytest.mark.parametrize("port", ["service", "probes"])
async def test_connections_of_a_port_are_bounded(port: str) -> None:
    """Claim: of 520 connections that stay open 512 are taken and 8 are closed at once; when some of the first end, new
    ones are served. Source: nothing bounded them, so they took all files that a process may open. Conclusive: the
    connections are counted, and the call at the end is answered."""
    settings = ServiceSettings(port=0, health_address=free_address() if port == "probes" else None)
    async with listening(settings) as address, AsyncExitStack() as stack:
        host, number = (settings.health_address or address).rsplit(":", 1)
        opened = []
        for _ in range(CONNECTION_COUNT_MAX + 8):
            reader, writer = await asyncio.open_connection(host, int(number))
            stack.callback(writer.close)
            opened.append((reader, writer, asyncio.create_task(is_closed(reader))))
            if len(opened) % 64 == 0:
                await opened[-1][2]  # the server accepts in order, a full queue would lose some
        closed = [await task for _, _, task in opened]
        assert closed.count(True) == 8
        for (_, writer, _), was_closed in list(zip(opened, closed))[:16]:
            assert not was_closed
            writer.close()
        options = [*OPTIONS, ("grpc.min_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]
        async with grpc.aio.insecure_channel(f"{host}:{number}", options=options) as channel:
            call = channel.unary_unary(HEALTH_CHECK_METHOD)
            assert await call(CHECK, wait_for_ready=True, timeout=SOON_S)


async def test_a_silent_connection_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a connection that sends nothing for HANDSHAKE_S_MAX is closed (here 0.2 s, an option of the server)."""
    short = [(name, 200 if name == "grpc.server_handshake_timeout_ms" else value) for name, value in options_of()]
    monkeypatch.setattr(server_module, "_SERVER_OPTIONS", tuple(short))
    async with listening() as address:
        host, number = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(number))
        with pytest.raises(TimeoutError):  # open, with nothing more than settings and pings to read
            await asyncio.wait_for(asyncio.shield(reading := asyncio.ensure_future(reader.read())), 0.1)
        await asyncio.wait_for(reading, SOON_S)
        writer.close()


def options_of() -> tuple[tuple[str, int], ...]:
    names = [name for name, _ in server_module._SERVER_OPTIONS]
    assert {"grpc.server_handshake_timeout_ms", "grpc.max_connection_idle_ms"} <= set(names)
    return server_module._SERVER_OPTIONS


@pytest.mark.parametrize(
    "method, port",
    [
        (HEALTH_CHECK_METHOD, "service"),
        (DESCRIBE, "service"),
        ("/no.such.Service/Method", "service"),
        (HEALTH_CHECK_METHOD, "probes"),
        ("/no.such.Service/Method", "probes"),
    ],
)
async def test_calls_of_a_connection_have_a_rate(monkeypatch: pytest.MonkeyPatch, method: str, port: str) -> None:
    """Claim: of a service's own methods, of health and of methods that there are not, 60 calls at once over one
    connection to either port take as long as 40 calls a second allow, and each has its answer; another connection is
    answered meanwhile. Conclusive: the time is at least that of 60 turns less those at once, a bound that no slow
    machine breaks, and the other connection's call ends while calls of the first wait."""
    monkeypatch.setattr(rates, "CALLS_PER_S_MAX", 40)
    settings = ServiceSettings(port=0, health_address=free_address())
    expected = {grpc.StatusCode.UNIMPLEMENTED if method.startswith("/no") else grpc.StatusCode.OK}
    async with listening(settings) as address, AsyncExitStack() as stack:
        if port == "probes" and settings.health_address:
            address = settings.health_address
        flooding, other = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=OPTIONS)) for _ in range(2)
        ]
        began_s, width = time.monotonic(), asyncio.Semaphore(PROBE_COUNT_MAX // 2)

        async def code() -> grpc.StatusCode:
            async with width:
                return await flooding.unary_unary(method)(CHECK).code()

        calls = [asyncio.create_task(code()) for _ in range(60)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert await asyncio.wait_for(other.unary_unary(method)(CHECK).code(), SOON_S) in expected
        assert not all(call.done() for call in calls)
        assert set(await asyncio.gather(*calls)) == expected
        assert time.monotonic() - began_s >= (60 - 1) / 40 - CALL_BURST_S


MESSAGE_COUNT, PER_S = 60, 20
MESSAGES_S_MIN = (MESSAGE_COUNT - PER_S - 1) / PER_S


async def test_messages_of_a_stream_have_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a replica reads 60 messages of a stream no faster than 20 a second allow. Source: pings, which no queue
    bounds, were answered as fast as they came. Conclusive: the messages are there at once, and the time is a lower
    bound. Only the reader runs, without an engine, which pings do not reach."""
    monkeypatch.setattr(rates, "MESSAGES_PER_S_MAX", PER_S)

    async def pings() -> AsyncIterator[bytes]:
        for _ in range(MESSAGE_COUNT):
            yield b""

    nothing: Any = None  # no engine, no handler
    messages = (target_pb.VerifyRequest, target_pb.VerifyResponse)
    stream = ReplicaStream(nothing, nothing, messages, lambda failure: None, [])
    began_s = time.monotonic()
    await stream._read(pings())
    assert time.monotonic() - began_s >= MESSAGES_S_MIN


async def test_messages_of_a_link_have_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a coordinator reads the messages of a replica that floods it no faster than the rate, and the link stays
    up. Conclusive: the server writes all of them at once, over a real socket, and the time is a lower bound."""
    monkeypatch.setattr(rates, "MESSAGES_PER_S_MAX", PER_S)
    item = target_pb.VerifyResponseItem(error=types_pb.ErrorItem(session=1))
    answer = target_pb.VerifyResponse(items=[item]).SerializeToString()

    class Flooding(Echo):
        async def verify(self, requests, write, _context) -> None:
            for _ in range(MESSAGE_COUNT):
                await write(answer)
            async for _ in requests:
                await write(b"")

    counts: list[int] = []
    news: list[str] = []
    server = Flooding().server()
    address = await server.start()
    link = Link(
        address,
        lambda: open_channel(address, TlsSettings()),
        VERIFY,
        target_pb.VerifyRequest,
        target_pb.VerifyResponse,
        lambda: news.append("up"),
        lambda items, byte_count: counts.append(len(items)),
        news.append,
    )
    running = asyncio.create_task(link.run())
    began_s = time.monotonic()
    while sum(counts) < MESSAGE_COUNT:
        assert time.monotonic() - began_s < SOON_S
        await asyncio.sleep(0.01)
    assert time.monotonic() - began_s >= MESSAGES_S_MIN and news == ["up"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
