"""The link against a real server, in this process and in others that are killed and frozen."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest

from specdec.config import ServiceSettings, TlsSettings
from specdec.errors import InvalidRequest
from specdec.protocol.limits import ITEM_COUNT_MAX
from specdec.rpc import link as link_module
from specdec.rpc.client import open_channel
from specdec.rpc.limits import MESSAGE_BYTES_SOFT, PING_OPTIONS
from specdec.rpc.link import SILENT_TICKS, TICK_S, Link
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb
from tests.support.echo_service import VERIFY, Echo


class Owner:
    """A link and its reports to its owner: `news` holds "up" and reasons of "down", `sessions` the echoed sessions."""

    def __init__(self, address: str) -> None:
        self.news: list[str] = []
        self.sessions: list[int] = []
        self.byte_count = 0
        self.refuse = False
        self.link = Link(
            address,
            lambda: open_channel(address, TlsSettings()),
            VERIFY,
            target_pb.VerifyRequest,
            target_pb.VerifyResponse,
            lambda: self.news.append("up"),
            self.take,
            self.news.append,
        )

    def take(self, items, byte_count: int) -> None:
        if self.refuse:
            raise InvalidRequest("item", 0, "anything else")
        self.sessions += [item.error.session for item in items]
        self.byte_count += byte_count

    def send(self, session: int) -> bool:
        item = target_pb.VerifyRequestItem(close=types_pb.CloseItem(session=session))
        return self.link.send(target_pb.VerifyRequest(items=[item]).SerializeToString())

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.link.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(condition, timeout_s: float = 5.0) -> float:
    """Waits for a condition; returns how long it took. The test fails when it takes too long."""
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < timeout_s, "it did not happen in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - begin_s


class Process:
    """The echo service as a process of its own."""

    def __init__(self, port: int = 0, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.support.echo_service", str(port), *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.address = self._process.stdout.readline().strip()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def processes():
    """A maker of processes; all are killed afterwards, frozen ones too."""
    made: list[Process] = []

    def make(*arguments) -> Process:
        made.append(Process(*arguments))
        return made[-1]

    yield make
    for process in made:
        process.end()


@pytest.fixture
def soon_silent(monkeypatch):
    """A link that takes one second for silence, so that tests need not wait for three."""
    assert SILENT_TICKS * TICK_S <= 3.0
    monkeypatch.setattr(link_module, "SILENT_TICKS", round(1.0 / TICK_S))


async def test_items_of_one_turn_are_one_message():
    """A hundred items queued together cross in one message, in order, and come back in one; all bytes are counted."""
    echo = Echo()
    server = echo.server()
    async with Owner(await server.start()).running() as owner:
        await until(lambda: owner.link.is_up)
        before = owner.link.bytes_received
        for session in range(1, 101):
            assert owner.send(session)
        await until(lambda: len(owner.sessions) == 100)
        assert owner.sessions == list(range(1, 101))
        assert [count for count in echo.messages if count] == [100]
        assert owner.byte_count == owner.link.bytes_received - before > 300
        assert owner.link.bytes_sent > 300
        assert 0 < owner.link.stamps.network_min_s < 1
    assert owner.news == ["up", "closed"]
    await server.stop(0)


async def test_a_burst_is_split_below_the_message_cap():
    """Items of a megabyte together cross in messages near MESSAGE_BYTES_SOFT, in order, none lost."""
    echo = Echo()
    server = echo.server()
    async with Owner(await server.start()).running() as owner:
        await until(lambda: owner.link.is_up)
        ids = [70000] * 2048
        size = 0
        for session in range(1, 151):
            item = target_pb.VerifyRequestItem(extend=types_pb.ExtendItem(session=session, token_ids=ids))
            request = target_pb.VerifyRequest(items=[item]).SerializeToString()
            size += len(request)
            owner.link.send(request)
        await until(lambda: len(owner.sessions) == 150)
        messages = [count for count in echo.messages if count]
        assert sum(messages) == 150
        assert len(messages) >= size // MESSAGE_BYTES_SOFT
    await server.stop(0)


async def test_a_burst_of_small_items_is_split_too():
    """Items queued together beyond ITEM_COUNT_MAX cross in several messages, in order, none lost: the peer would refuse
    one with all of them."""
    echo = Echo()
    server = echo.server()
    async with Owner(await server.start()).running() as owner:
        await until(lambda: owner.link.is_up)
        count = 2 * ITEM_COUNT_MAX + 1
        for session in range(1, count + 1):
            owner.send(session)
        await until(lambda: len(owner.sessions) == count)
        assert owner.sessions == list(range(1, count + 1)) and owner.news == ["up"]
        assert [count for count in echo.messages if count] == [ITEM_COUNT_MAX, ITEM_COUNT_MAX, 1]
    await server.stop(0)


@pytest.mark.parametrize(
    "healthy_s, expected", [(link_module.HEALTHY_S, [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]), (0.0, [0.1] * 6)]
)
async def test_the_pause_before_a_connection_is_short_again_after_health_only(monkeypatch, healthy_s, expected):
    """Claim: a peer that is lost after each connection is connected to ever more slowly, up to once in 2 s; only a
    connection of HEALTHY_S makes the next pause short again.

    Source: after a malformed item everything was sent again ten times a second, without end. Conclusive: the pauses
    themselves are recorded, over real connections each of which came up.
    """
    pauses, really_sleep = [], asyncio.sleep

    async def sleep(delay_s: float) -> None:
        is_pause = delay_s >= link_module.BACKOFF_MIN_S and delay_s != TICK_S
        pauses.extend([delay_s] * is_pause)
        await really_sleep(0 if is_pause else delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(link_module, "HEALTHY_S", healthy_s)
    server = Echo().server()
    owner = Owner(await server.start())
    owner.refuse = True
    owner.link._on_up = lambda: owner.news.append("up") or owner.send(1)
    async with owner.running():
        await until(lambda: len(pauses) >= 6)
    assert pauses[:6] == expected and owner.news.count("up") >= 6
    await server.stop(0)


async def test_an_idle_link_is_pinged_once_a_second():
    """Without any item, messages go both ways at about one a second, and each measures the hop."""
    echo = Echo()
    server = echo.server()
    async with Owner(await server.start()).running() as owner:
        await until(lambda: owner.link.is_up)
        await until(lambda: len(echo.messages) >= 3, timeout_s=4.0)
        assert owner.sessions == [] and echo.messages == [0, 0, 0]
    await server.stop(0)


async def test_what_is_sent_while_down_is_dropped():
    """Sessions are opened again on `on_up`; an item from before would arrive without its session."""
    owner = Owner("127.0.0.1:1")
    assert not owner.send(1)
    async with owner.running():
        await until(lambda: "refused" in owner.link.down_reason)
        assert not owner.send(2)
    assert owner.news == []


async def test_a_killed_peer_is_noticed_and_found_again(processes):
    """SIGKILL: down within a second, because the socket closes; up again within 3 s of the restart on the same port."""
    first = processes()
    async with Owner(first.address).running() as owner:
        await until(lambda: owner.link.is_up)
        first.end()
        assert await until(lambda: not owner.link.is_up) < 1.0
        await asyncio.sleep(0.5)
        processes(first.port)
        assert await until(lambda: owner.link.is_up) < 3.0
        owner.send(5)
        await until(lambda: owner.sessions == [5])
    assert [news == "up" for news in owner.news] == [True, False, True, False]


async def test_a_frozen_peer_is_noticed_within_three_seconds(processes):
    """SIGSTOP closes no socket: only unanswered pings tell. Afterwards SIGCONT is enough to be up again."""
    process = processes()
    async with Owner(process.address).running() as owner:
        await until(lambda: owner.link.is_up)
        process.signal(signal.SIGSTOP)
        assert await until(lambda: not owner.link.is_up) < 3.5
        process.signal(signal.SIGCONT)
        assert await until(lambda: owner.link.is_up) < 6.0


async def test_a_short_stall_drops_nothing(processes):
    """A peer frozen for 0.7 s is the same connection afterwards (reliability: a stall under 1 s aborts nothing)."""
    process = processes()
    async with Owner(process.address).running() as owner:
        await until(lambda: owner.link.is_up)
        process.signal(signal.SIGSTOP)
        owner.send(9)
        await asyncio.sleep(0.7)
        process.signal(signal.SIGCONT)
        await until(lambda: owner.sessions == [9])
        assert owner.news == ["up"]


async def test_a_peer_that_answers_no_more_is_taken_for_dead(processes, soon_silent):
    """A service whose connection lives but whose handler is stuck: transport keepalive cannot tell, our pings do."""
    process = processes(0, "MUTE")
    async with Owner(process.address).running() as owner:
        await until(lambda: owner.link.is_up)
        assert await until(lambda: not owner.link.is_up) < 1.5
        assert "silent" in owner.news[1]


async def test_a_pause_of_this_process_blames_no_peer(soon_silent):
    """When our own loop stood still for longer than the limit, the peer was not silent: this process did not read."""
    server = Echo().server()
    async with Owner(await server.start()).running() as owner:
        await until(lambda: owner.link.is_up)
        time.sleep(1.2)  # the event loop of both sides
        await asyncio.sleep(0.5)
        assert owner.news == ["up"]
    await server.stop(0)


@contextmanager
def talkative_peer(message: bytes, count: int) -> Iterator[str]:
    """The address of a peer, in threads of its own, that answers the first message and, to a second one, sends `count`
    at once and ends the stream."""

    def answer(messages: Iterator[bytes], _context: object) -> Iterator[bytes]:
        next(messages)
        yield b""
        next(messages)
        yield from [message] * count

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


def grpc_task_count() -> int:
    """Tasks of gRPC's own that wait for the end of a stream."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return names.count("_AioCall._handle_status_once_received")


@pytest.mark.parametrize("message", [b"", b"\xff"], ids=["sound", "malformed"])
async def test_a_lost_connection_leaves_no_task_behind(message: bytes, monkeypatch) -> None:
    """Claim: a stream that the peer has ended while messages of it are unread and one is to be written leaves nothing
    of it in this process.

    Source: the soak: one task of the coordinator more after one of some fifty losses. gRPC takes a failed write for the
    call's end, refuses `read` and `cancel` from then on, and keeps the call's task until all messages are read.
    Conclusive: this process stands still while the messages arrive, so that they are unread when the write fails; each
    connection of ten is lost so.
    """
    monkeypatch.setattr(link_module, "BACKOFF_MAX_S", 0.1)
    with talkative_peer(message, 300) as address:
        async with Owner(address).running() as owner:
            for _ in range(10):
                await until(lambda: owner.link.is_up)
                assert grpc_task_count() >= 1, "gRPC has a task for the stream, under this name"
                owner.send(1)
                await asyncio.sleep(0.001)
                time.sleep(0.05)  # the whole process: nothing is read meanwhile
                owner.send(2)
                await until(lambda: not owner.link.is_up)
        await until(lambda: grpc_task_count() == 0)  # fails after five seconds


async def test_a_malformed_answer_drops_the_connection():
    """An answer the owner cannot read ends this connection, not the link: it is up again by itself."""
    server = Echo().server()
    async with Owner(await server.start()).running() as owner:
        await until(lambda: owner.link.is_up)
        owner.refuse = True
        owner.send(1)
        await until(lambda: len(owner.news) > 1)
        assert "malformed" in owner.news[1]
        owner.refuse = False
        await until(lambda: owner.link.is_up)
        owner.send(2)
        await until(lambda: owner.sessions == [2])
    await server.stop(0)


async def test_a_bug_of_the_owner_at_a_loss_does_not_end_the_link(processes):
    """An exception in `on_down` is logged, and the link connects again: it is up a second time."""
    first = processes()
    owner = Owner(first.address)
    owner.link._on_down = lambda reason: [][0]
    async with owner.running():
        await until(lambda: owner.link.is_up)
        first.end()
        await until(lambda: not owner.link.is_up)
        processes(first.port)
        await until(lambda: len(owner.news) == 2)
        assert owner.news == ["up", "up"] and owner.link.is_up


async def test_a_bug_of_the_owner_does_not_end_the_link():
    """An exception in a callback is logged and costs the connection; `run` goes on."""
    server = Echo().server(ServiceSettings(port=0))
    owner = Owner(await server.start())

    def fail(items, byte_count):
        owner.link._on_items = owner.take
        raise ZeroDivisionError

    owner.link._on_items = fail
    async with owner.running():
        await until(lambda: owner.link.is_up)
        owner.send(1)
        await until(lambda: len(owner.news) == 3)
        assert owner.news[0] == owner.news[2] == "up" and "could not be handled" in owner.news[1]
        owner.send(2)
        await until(lambda: bool(owner.sessions))
        assert owner.sessions == [2]
    await server.stop(0)
