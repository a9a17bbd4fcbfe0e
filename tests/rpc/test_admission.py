"""What a client may do to others by calls that are of no use: without a request, of no method, ended at once.

The calls are written frame by frame, as libraries for clients send their request with each call.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from specdec.config import ServiceSettings, TlsSettings
from specdec.errors import CacheExhausted
from specdec.rpc import admission, ports, rates
from specdec.rpc.client import HEALTH_CHECK_METHOD, open_channel
from specdec.rpc.connections import close_connections
from specdec.rpc.limits import WASTED_CALLS_PER_S_MAX
from specdec.rpc.rates import CallRates
from specdec.rpc.status import error_from_rpc
from tests.support.certificates import Authority
from tests.support.echo_service import DESCRIBE, SERVICE, VERIFY, listening
from tests.support.pages import free_address
from tests.support.raw_calls import DATA, RST_STREAM, RawConnection

INSECURE = TlsSettings()
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
SOON_S = 30.0  # for what takes milliseconds, or a second where thousands of calls come first


async def code_of(call) -> grpc.StatusCode:
    """The status that a call ends with."""
    try:
        await asyncio.wait_for(call, SOON_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("connection_count", [2, pytest.param(16, marks=pytest.mark.more)])
async def test_a_burst_of_calls_cancels_none_of_another_client(connection_count: int) -> None:
    """Claim: while connections send 1,000 calls each without a request, all of 36 calls of other clients are answered.
    Source: gRPC keeps calls that no handler has yet in one queue for all clients and, by default, cancels some beyond
    1000 in it and all beyond 3000: 1 to 33 of these 36. Conclusive: the same calls of the same method."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(listening())
        bursts = [RawConnection(address, DESCRIBE) for _ in range(connection_count)]
        for burst in bursts:
            await stack.enter_async_context(burst)
        for burst in bursts:
            burst.call(1000)
        await asyncio.sleep(0)  # they are under way

        async def describe() -> grpc.StatusCode:
            async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
                return await code_of(channel.unary_unary(DESCRIBE)(b""))

        assert await asyncio.gather(*(describe() for _ in range(36))) == [grpc.StatusCode.OK] * 36


async def test_places_to_wait_are_shared_by_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: once all places of calls that wait are taken, a call of the connection that has the most of them is
    refused with RESOURCE_EXHAUSTED and the time to wait; a call of another connection is answered. Conclusive: the two
    calls are equal."""
    monkeypatch.setattr(rates, "WAITING_CALL_COUNT_MAX", 8)
    async with (
        listening() as address,
        grpc.aio.insecure_channel(address, options=OPTIONS) as holding,
        grpc.aio.insecure_channel(address, options=OPTIONS) as other,
    ):
        held = [holding.stream_unary(DESCRIBE)() for _ in range(8)]  # their headers are sent, their request is not
        while True:
            try:
                await holding.unary_unary(DESCRIBE)(b"", timeout=SOON_S)
            except grpc.aio.AioRpcError as error:
                refused = error_from_rpc(error)
                break
        assert isinstance(refused, CacheExhausted) and refused.retry_after_s > 0
        assert "of this connection, more than its share" in str(refused)
        assert await code_of(other.unary_unary(DESCRIBE)(b"")) is grpc.StatusCode.OK
        assert not any(call.done() for call in held)


WASTEFUL = {
    "unknown method": (f"/{SERVICE}/Nothing", (DATA,), {}),
    "unknown service": ("/no.such.Service/Method", (DATA,), {}),
    "unknown and reset": ("/no.such.Service/Method", (RST_STREAM,), {}),
    "reset without a request": (DESCRIBE, (RST_STREAM,), {}),
    "reset after the request": (DESCRIBE, (DATA, RST_STREAM), {}),
    "health, reset": (HEALTH_CHECK_METHOD, (RST_STREAM,), {}),
    "stream, reset": (VERIFY, (RST_STREAM,), {}),
    "expired": (DESCRIBE, (), {"grpc-timeout": "1n"}),
}
ON_PROBES = ("unknown method", "unknown and reset", "health, reset")


@pytest.mark.parametrize(
    "what, port", [*((what, "service") for what in WASTEFUL), *((what, "probes") for what in ON_PROBES)]
)
async def test_a_connection_that_wastes_calls_is_closed(monkeypatch: pytest.MonkeyPatch, what: str, port: str) -> None:
    """Claim: a connection that sends thousands of calls of no use a second, of each kind and on both ports, is closed;
    a stream of another client is answered before and after, over the connection that it had. Source: 8,000 such calls a
    second took half of another client's tokens, as no rate counted them. Conclusive: the end of the connection is read
    at its own socket; without the limit it would go on, as the age of connections to the probes' port is not bounded
    here."""
    ages = ("grpc.max_connection_age_ms", "grpc.max_connection_age_grace_ms")
    monkeypatch.setattr(ports, "_HEALTH_OPTIONS", tuple(one for one in ports._HEALTH_OPTIONS if one[0] not in ages))
    settings = ServiceSettings(port=0, health_address=free_address())
    path, tail, more = WASTEFUL[what]
    async with (
        listening(settings) as address,
        grpc.aio.insecure_channel(address, options=OPTIONS) as channel,
        RawConnection(settings.health_address if port == "probes" else address, path, tail, **more) as wasteful,
    ):
        stream = channel.stream_stream(VERIFY)()
        await stream.write(b"")
        await stream.read()
        async with asyncio.timeout(SOON_S):
            while not wasteful.ended.done():
                wasteful.call(25)
                await asyncio.sleep(0.01)
        await stream.write(b"")
        assert await asyncio.wait_for(stream.read(), SOON_S) is not grpc.aio.EOF
        stream.cancel()


async def test_a_connection_with_tls_is_closed_too(tmp_path: Path) -> None:
    """Claim: of 1,000 calls of no method over one connection with TLS the last fail with their connection, those before
    are UNIMPLEMENTED unless their answer was under way; the next connection of this host is served. Conclusive: a
    library reports both."""
    files = dict(Authority("specdec test authority").issue(tmp_path))
    tls = TlsSettings(**files)
    async with listening(ServiceSettings(port=0, **files)) as address:
        async with open_channel(address, tls) as channel:
            calls = [channel.unary_unary("/no.such.Service/Method")(b"") for _ in range(1000)]
            codes = await asyncio.gather(*map(code_of, calls))
        assert grpc.StatusCode.UNAVAILABLE in codes
        assert set(codes) <= {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE}
        async with open_channel(address, tls) as channel:
            assert await code_of(channel.unary_unary(HEALTH_CHECK_METHOD)(b"")) is grpc.StatusCode.OK


async def test_a_few_wasted_calls_close_nothing() -> None:
    """Claim: a connection with half of the wasted calls that a host may have in a second stays open, and each is
    answered. Conclusive: an open stream of the same connection is answered afterwards."""
    async with listening() as address, grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stream = channel.stream_stream(VERIFY)()
        calls = [channel.unary_unary("/no.such.Service/Method")(b"") for _ in range(WASTED_CALLS_PER_S_MAX // 2)]
        assert set(await asyncio.gather(*map(code_of, calls))) == {grpc.StatusCode.UNIMPLEMENTED}
        await stream.write(b"")
        assert await asyncio.wait_for(stream.read(), SOON_S) is not grpc.aio.EOF
        stream.cancel()


def test_a_host_is_charged_beyond_each_connections_own() -> None:
    """Claim: the first two wasted calls of a connection are its own, further ones its host's, 100 at once; then the
    connection of each further one is closed, once, and that of another host is not. A second later all may go on.
    Conclusive: times are given, results exact."""
    known = CallRates()
    first, second, other = "ipv4:10.0.0.1:1", "ipv4:10.0.0.1:2", "ipv4:10.0.0.2:1"
    assert not any(known.must_close(first, 100.0) for _ in range(2 + WASTED_CALLS_PER_S_MAX))
    assert [known.must_close(first, 100.0) for _ in range(5)].count(True) == 1
    assert [known.must_close(second, 100.0) for _ in range(4)] == [False, False, True, False]
    assert not any(known.must_close(other, 100.0) for _ in range(10))
    assert not any(known.must_close("ipv4:10.0.0.1:3", 101.5) for _ in range(50))


async def test_a_call_without_a_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a call whose client ends its side without a request is INVALID_ARGUMENT, one that sends nothing for
    READER_STALL_S_MAX is ABORTED, on methods of all kinds. Source: both kept their place for ever, without a status.
    Conclusive: the statuses name the causes."""
    monkeypatch.setattr(admission, "READER_STALL_S_MAX", 0.2)
    async with listening() as address, grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        for method in (DESCRIBE, HEALTH_CHECK_METHOD, "/grpc.health.v1.Health/Watch"):
            silent, ended = (channel.stream_unary(method)() for _ in range(2))
            await ended.done_writing()
            for call, code, words in (
                (ended, grpc.StatusCode.INVALID_ARGUMENT, "request is 'no message'"),
                (silent, grpc.StatusCode.ABORTED, "no request came for 0.2 s"),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match=words) as raised:
                    await asyncio.wait_for(call, SOON_S)
                assert raised.value.code() is code


@pytest.mark.parametrize(
    "listen, connect, named",
    [
        ("127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1:{}"),
        ("::1", "::1", "ipv6:%5B::1%5D:{}"),
        ("::", "127.0.0.1", "ipv4:127.0.0.1:{}"),  # an IPv4 client of a socket for both
    ],
)
def test_one_connection_is_closed_by_its_peers_name(listen: str, connect: str, named: str) -> None:
    """Claim: of two connections of a host to a port, that of the named peer is closed at both ends and no other; with
    another port none is. Conclusive: the sockets are the test's own, in this process."""
    try:
        server = socket.create_server(
            (listen, 0), family=socket.AF_INET6 if ":" in listen else socket.AF_INET, dualstack_ipv6=listen == "::"
        )
    except OSError:
        pytest.skip("the machine has IPv6 switched off")
    with server:
        port = server.getsockname()[1]
        pairs = [(socket.create_connection((connect, port)), server.accept()[0]) for _ in range(2)]
        peer = named.format(pairs[0][0].getsockname()[1])
        for client, accepted in pairs:
            client.settimeout(SOON_S)
            accepted.settimeout(SOON_S)
        close_connections(peer, {port + 1})
        pairs[0][0].sendall(b"x")
        assert pairs[0][1].recv(1) == b"x"
        close_connections(peer, {port})
        assert pairs[0][0].recv(1) == pairs[0][1].recv(1) == b""
        pairs[1][0].sendall(b"x")
        assert pairs[1][1].recv(1) == b"x"
        for pair in pairs:
            for end in pair:
                end.close()
