"""The plain port that answers health checks only, beside a port with mutual TLS and beside a plain one."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest

from specdec.config import ServiceSettings, TlsSettings
from specdec.errors import ConfigError, ReplicaUnavailable
from specdec.rpc.client import HEALTH_CHECK_METHOD, open_channel, wait_serving
from specdec.rpc.server import ALIVE
from tests.support.certificates import Authority
from tests.support.echo_service import DESCRIBE, SERVICE, VERIFY, Echo
from tests.support.pages import free_address

INSECURE = TlsSettings()
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


async def code_of(call) -> grpc.StatusCode:
    """The status a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def check_health_only(address: str) -> None:
    """Every other method is UNIMPLEMENTED, reflection included; malformed bytes are the sender's fault."""
    async with open_channel(address, INSECURE) as channel:
        assert await code_of(channel.unary_unary(DESCRIBE)(b"")) is grpc.StatusCode.UNIMPLEMENTED
        assert await code_of(channel.unary_stream(WATCH)(b"").read()) is grpc.StatusCode.UNIMPLEMENTED
        for method in (VERIFY, REFLECTION):
            call = channel.stream_stream(method)()
            assert await code_of(call.read()) is grpc.StatusCode.UNIMPLEMENTED
        malformed = channel.unary_unary(HEALTH_CHECK_METHOD)(b"\x0a\xff")
        assert await code_of(malformed) is grpc.StatusCode.INVALID_ARGUMENT


async def test_it_reports_the_main_ports_health_and_nothing_else(tmp_path: Path):
    """Claim: without a certificate the health port reports the main port's health, for each service and as a whole,
    before, while and after it serves, and accepts nothing else; the main port still demands a certificate."""
    files = dict(Authority("specdec test authority").issue(tmp_path))
    settings = ServiceSettings(port=0, health_address=free_address(), **files)
    server = Echo().server(settings)
    main = await server.start()
    health_address = settings.health_address
    async with open_channel(health_address, INSECURE) as channel, open_channel(main, INSECURE) as refused:
        with pytest.raises(ReplicaUnavailable, match="NOT_SERVING"):
            await wait_serving(channel, SERVICE, 0.1)
        await wait_serving(channel, ALIVE, 5.0)  # whether to restart it is another question
        await server.set_serving(True)
        for name in ("", SERVICE):
            await wait_serving(channel, name, 5.0)
        with pytest.raises(ReplicaUnavailable):
            await wait_serving(refused, SERVICE, 0.3)
        await check_health_only(health_address)
        await server.set_serving(False)
        with pytest.raises(ReplicaUnavailable, match="NOT_SERVING"):
            await wait_serving(channel, SERVICE, 0.1)
        await wait_serving(channel, ALIVE, 5.0)
    await server.stop(0)


async def test_without_an_address_there_is_no_such_port():
    """Claim: a server opens the configured ports and no other: with the flag one listening socket more."""
    counts = []
    for health_address in (None, free_address()):
        before = listening_count()
        server = Echo().server(ServiceSettings(port=0, health_address=health_address))
        await server.start()
        counts.append(listening_count() - before)
        await server.stop(0)
    assert counts == [1, 2]


def listening_count() -> int:
    """Listening TCP sockets of this machine's loopback, by the kernel's own table."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    own = {
        Path(f"/proc/self/fd/{fd.name}").readlink().name for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()
    }
    return sum(line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in own for line in lines)


async def test_a_busy_port_is_reported_by_its_own_flag():
    """Claim: a health port in use ends the start with one line that names the flag to change."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Echo().server(ServiceSettings(port=0, health_address=f"127.0.0.1:{port}"))
        with pytest.raises(
            ConfigError, match=f"^port {port} on 127.0.0.1 is in use; choose another with --health-addr"
        ):
            await server.start()
    await server.stop(0)
