"""Peers that are silent, and processes that only lacked the processor to hear them: real processes and signals."""

from __future__ import annotations

import asyncio
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from specdec.rpc.limits import PING_OPTIONS
from specdec.rpc.server import Context, Write
from specdec.rpc.silence import SILENT_S
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb
from tests.chaos.processes import PROXY
from tests.support.echo_service import VERIFY, Echo
from tests.support.network.machines import Emulator

DELAY_MS = 200  # each way: answers to pings arrive while the process that sent them is paused
PAUSE_S, TURN_S, PAUSES = 1.3, 0.25, 2  # longer than gRPC's own limit was; less than a peer's silence may last


class Process:
    """A Python module as a process whose lines are kept, from its first one on."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
        self.lines = [self._process.stdout.readline().strip()]
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        self.lines.extend(line.strip() for line in self._process.stdout)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def starve(self, pauses: Sequence[float] = (PAUSE_S,) * PAUSES) -> None:
        """Gives it the processor between these pauses only, for moments."""
        for pause_s in pauses:
            self.signal(signal.SIGSTOP)
            time.sleep(pause_s)
            self.signal(signal.SIGCONT)
            time.sleep(TURN_S)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def link_process(address: str) -> Process:
    """A link that is up."""
    return Process("tests.support.link_process", address)


def news(process: Process) -> list[str]:
    """What a link process reported: "up", and reasons of "down"; lines of its log stand between."""
    return [line for line in process.lines if line and "peer=" not in line]


@contextmanager
def delayed(address: str, delay_ms: int = DELAY_MS) -> Iterator[tuple[str, Emulator]]:
    """The address of a proxy that delays both ways, and the proxy."""
    proxy = Emulator(PROXY, ["--to", address, "--delay", str(delay_ms)], ())
    try:
        yield proxy.ready.split()[1], proxy
    finally:
        proxy.signal(signal.SIGCONT)
        proxy.stop()


@contextmanager
def patient_server() -> Iterator[str]:
    """The address of a server that answers each message and never loses a silent client."""

    def answer(messages: Iterator[bytes], _context: object) -> Iterator[bytes]:
        return (b"" for _ in messages)

    server = grpc.server(ThreadPoolExecutor(2), options=PING_OPTIONS)
    service, method = VERIFY[1:].split("/")
    handlers = {method: grpc.stream_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0.0)


@pytest.mark.lengthy
@pytest.mark.parametrize("pauses", [(PAUSE_S,) * PAUSES, pytest.param((4.0, 4.0), marks=pytest.mark.more)])
def test_a_starved_link_blames_no_peer(pauses: Sequence[float]) -> None:
    """Claim: a link in a process that gets the processor for moments only, or not at all for 4 s, stays up: the peer
    did not lose it, and the answers to its pings wait in the kernel.

    Source: on a busy machine both links of a coordinator fell in the same millisecond, by the ping timeout of gRPC,
    whose timer ran while nothing was read. Conclusive: the answers come 0.4 s after the pings, so most arrive in a
    pause, and the timer's second is over when the process goes on; the server would wait for hours.
    """
    with patient_server() as server, delayed(server) as (address, _), link_process(address) as own:
        time.sleep(1.5)
        own.starve(pauses)
        time.sleep(1.0)
        assert news(own) == ["up"]


@pytest.mark.more
def test_a_starved_server_blames_no_client() -> None:
    """Claim: a server in such a process keeps the connection of a client that answers its pings, though the answers
    wait while it is paused, and one that was idle for longer than a silence. Conclusive: the stream of before answers
    after the pauses; the client has no keepalive of its own, so its connection is never lost by it."""
    requests: queue.Queue[bytes | None] = queue.Queue()
    with Process("tests.support.echo_service", "0") as server, delayed(server.lines[0]) as (address, _):
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            answers = channel.stream_stream(VERIFY)(iter(requests.get, None), timeout=60)

            def check_answered(session: int) -> None:
                item = target_pb.VerifyRequestItem(close=types_pb.CloseItem(session=session))
                requests.put(target_pb.VerifyRequest(items=[item]).SerializeToString())
                assert target_pb.VerifyResponse.FromString(next(answers)).items[0].error.session == session

            check_answered(1)
            time.sleep(SILENT_S + 1.0)
            check_answered(2)
            server.starve()
            check_answered(3)
            requests.put(None)


class Watched(Echo):
    """An echo that counts its open streams."""

    stream_count = 0

    async def verify(self, requests: AsyncIterator[bytes], write: Write, context: Context) -> None:
        self.stream_count += 1
        try:
            await super().verify(requests, write, context)
        finally:
            self.stream_count -= 1


@pytest.mark.lengthy
@pytest.mark.parametrize("what", ["process", pytest.param("network", marks=pytest.mark.more)])
async def test_a_server_notices_a_frozen_client_and_a_cut_network_within_three_seconds(what: str) -> None:
    """Claim: the server ends the stream of a client that is frozen, or behind a network that is cut, within 3 s; a
    stall of a second ends nothing. Half a second is left for a busy machine. Conclusive: no socket is closed, the
    kernel acknowledges all data, and before the end the same stream outlives the stall."""
    echo = Watched()
    server = echo.server()
    address = await server.start()
    with delayed(address, 0) as (link_address, proxy), await asyncio.to_thread(link_process, link_address) as own:
        stricken = own if what == "process" else proxy
        assert echo.stream_count == 1
        stricken.signal(signal.SIGSTOP)
        await asyncio.sleep(0.9)
        stricken.signal(signal.SIGCONT)
        await asyncio.sleep(1.0)
        assert echo.stream_count == 1 and news(own) == ["up"]
        stricken.signal(signal.SIGSTOP)
        began_s = time.monotonic()
        while echo.stream_count and time.monotonic() - began_s < 10:
            await asyncio.sleep(0.02)
        assert time.monotonic() - began_s < 3.5
        stricken.signal(signal.SIGCONT)
    await server.stop(0)
