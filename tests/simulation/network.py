"""The links on virtual time, with every fault of the items they carry.

A stream is one connection: two pipes, first in first out unless a fault says otherwise. gRPC gives exactly that order;
the fences promise more, so single items are doubled, held back and overtaken here too. Close alone is never overtaken:
the protocol does not cover an item that arrives after its Close. A stream can be lost on one side before
the other; items under way are lost then. `SimulatedLink` stands for the link of a real `Peer`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from specdec.errors import ReplicaUnavailable
from specdec.protocol.items import Close, Nodes, VerificationResult
from specdec.protocol.types import Description, SamplerOutput
from specdec.rpc.link import CLOSED
from tests.simulation.clock import Clock
from tests.simulation.replica import Process

SILENT_S = 3.0  # a peer silent for this long counts as dead (specdec/rpc/link.py)
BEHIND_S = 1e-6  # keeps the last item behind the rest despite rounding
NO_NODES, NO_OUTPUT = Nodes(0, 0, 0, 0, ()), SamplerOutput(())
RECONNECT_S = 0.01  # a tenth of the real one, so that a draft takes part in more of a short text


@dataclass(slots=True)
class Pipe:
    """One direction of a stream. Items arrive no earlier than `next_s`, a Close not before `last_s`."""

    latency_s: float
    next_s: float = 0.0
    last_s: float = 0.0

    def arrival_s(self, now_s: float, item: Any, held_s: float = 0.0) -> float:
        """When an item sent now arrives; one that is held back lets later ones overtake."""
        earliest_s = self.last_s + BEHIND_S if isinstance(item, Close) else self.next_s
        arrival_s = max(now_s + self.latency_s, earliest_s)
        if not held_s:
            self.next_s = max(self.next_s, arrival_s)
        self.last_s = max(self.last_s, arrival_s + held_s)
        return arrival_s + held_s


@dataclass(slots=True)
class Carriage:
    """The effect of a fault on one item. `copies_s`: when further copies of it arrive, in seconds after the first."""

    is_lost: bool = False
    held_s: float = 0.0
    copies_s: tuple[float, ...] = ()
    instead: Any = None  # this item arrives in its place


class Carrying(Protocol):
    """Who is told of items: the world."""

    def on_carry(self, stream: Stream, item: Any, is_request: bool) -> Carriage:
        """An item leaves."""

    def on_arrive(self, stream: Stream, item: Any, is_request: bool) -> None:
        """An item arrives."""

    def on_close(self, stream: Stream) -> None:
        """The coordinator closes a connection."""

    def deliver(self, stream: Stream, answer: Any, load: tuple[int, float]) -> None:
        """An answer is handed to the coordinator: calls `SimulatedLink.on_answer`."""


@dataclass(slots=True, eq=False, repr=False)
class Stream:
    """One connection of a coordinator to a process; a session on a process belongs to it."""

    link: SimulatedLink
    process: Process
    life: int
    requests: Pipe
    answers: Pipe
    is_open: bool = True  # at the coordinator
    is_served: bool = True  # at the process

    def __repr__(self) -> str:
        return f"Stream({self.process.traits.name}, {'open' if self.is_open else 'lost'})"

    def send(self, item: Any) -> None:
        """The coordinator sends an item."""
        carriage = self.link.carrying.on_carry(self, item, True)
        if self.is_open and self.is_served and not carriage.is_lost:
            clock = self.link.clock
            delay_s = self.requests.arrival_s(clock.now_s, item, carriage.held_s) - clock.now_s
            for extra_s in (0.0, *carriage.copies_s):
                self.requests.last_s = max(self.requests.last_s, clock.now_s + delay_s + extra_s)
                self.process.later(delay_s + extra_s, lambda: self._take(item))

    def _take(self, item: Any) -> None:
        if self.is_served:
            self.link.carrying.on_arrive(self, item, True)
            if self.process.is_alive:
                self.process.take(self, item)

    def send_answer(self, answer: Any) -> None:
        """The process answers."""
        carriage = self.link.carrying.on_carry(self, answer, False)
        if self.is_open and self.is_served and not carriage.is_lost:
            clock, load = self.link.clock, self.process.load
            answer = carriage.instead or answer
            delay_s = self.answers.arrival_s(clock.now_s, answer, carriage.held_s) - clock.now_s
            for extra_s in (0.0, *carriage.copies_s):
                clock.call_later(delay_s + extra_s, self._take_answer, answer, load)

    def _take_answer(self, answer: Any, load: tuple[int, float]) -> None:
        if self.is_open:
            self.link.carrying.on_arrive(self, answer, False)
            self.link.carrying.deliver(self, answer, load)

    def block(self, for_s: float) -> None:
        """Nothing gets through, either way, for a while; a long silence is noticed at the coordinator."""
        now_s = self.link.clock.now_s
        for pipe in (self.requests, self.answers):
            pipe.next_s = max(pipe.next_s, now_s + for_s)
        if for_s >= SILENT_S:
            self.lose(SILENT_S, for_s)

    def lose(self, here_in_s: float, there_in_s: float) -> None:
        """The connection is lost; coordinator and process notice after the given seconds."""
        self.link.clock.call_later(here_in_s, self.close_here, "lost")
        self.process.later(there_in_s, self.close_there)

    def on_process_gone(self) -> None:
        """The process died; its machine lives and says so at once."""
        self.is_served = False
        self.link.clock.call_later(self.answers.latency_s, self.close_here, "the process is gone")

    def close_here(self, reason: str) -> None:
        """The coordinator notices; idempotent."""
        if self.is_open:
            self.is_open = False
            self.link.on_lost(self, reason)

    def close_there(self) -> None:
        """The process notices; idempotent."""
        if self.is_served and self.life == self.process.life:
            self.is_served = False
            self.process.close_stream(self)


@dataclass(slots=True)
class Message:
    """A message with one item, which is not encoded: its only byte stands for it."""

    item: Any

    def __len__(self) -> int:
        return 1

    @property
    def nodes(self) -> Any:
        """The nodes in it."""
        return self.item if isinstance(self.item, Nodes) else NO_NODES

    @property
    def result(self) -> Any:
        """The sampler output in it."""
        return self.item.output if isinstance(self.item, VerificationResult) else NO_OUTPUT


class Times(NamedTuple):
    """Stands for `specdec.rpc.stamps.Stamps`."""

    network_s: float


class SimulatedLink:
    """`specdec.rpc.link.Link` on virtual time. `carrying` is told of every item that leaves and arrives."""

    def __init__(self, carrying: Carrying, process: Process, latency_s: float, *callbacks: Callable[..., None]) -> None:
        self.process = process
        self.carrying = carrying
        self.loop: Any = asyncio.get_running_loop()
        self.clock: Clock = self.loop.clock
        self.latency_s = latency_s
        self.stream: Stream | None = None
        self.stamps = Times(2 * latency_s)
        self.load: tuple[int, float] | None = None
        self.load_count = 0
        self.blocked_until_s = 0.0
        self._is_wanted = False
        self._on_up, self._on_items, self._on_down = callbacks

    @property
    def is_up(self) -> bool:
        """As `Link.is_up`."""
        return self.stream is not None

    @property
    def heard_s(self) -> float:
        """As `Link.heard_s`: of a peer that answers pings just now."""
        is_heard = self.stream is not None and self.process.is_alive and not self.process.is_frozen
        return self.clock.now_s if is_heard and self.clock.now_s >= self.blocked_until_s else -math.inf

    async def run(self) -> None:
        """As `Link.run`."""
        self._is_wanted = True
        self._connect()
        try:
            await self.loop.create_future()
        except asyncio.CancelledError:
            self._is_wanted = False
            if self.stream is not None:
                self.carrying.on_close(self.stream)
                self._close(self.stream)
                self._on_down(CLOSED)
            raise

    def send(self, message: Message, is_timed: bool = False) -> bool:
        """As `Link.send`."""
        if self.stream is not None:
            self.stream.send(message.item)
        return self.stream is not None

    async def ask(self, method: str, request: Any, response_class: type, timeout_s: float) -> Description:
        """As `Link.ask`: the description of the process at the other end. A lost connection cancels it."""
        if self.stream is None:
            raise ReplicaUnavailable("not connected")
        answer, stream = self.loop.create_future(), self.stream

        def take() -> None:
            if not answer.done() and stream.is_open and not self.loop.is_gone:
                answer.set_result(self.process.description)

        delay_s = max(self.latency_s, stream.answers.next_s - self.clock.now_s)
        self.process.later(self.latency_s, lambda: self.clock.call_later(delay_s, take))
        found: Description = await answer
        return found

    def _connect(self) -> None:
        """Tries until a connection stands, which takes a round trip."""
        process = self.process
        if self.loop.is_gone or not self._is_wanted:
            return
        if self._is_reachable():
            self.clock.call_later(2 * self.latency_s, self._connected, process.life)
        else:
            self.clock.is_remote = True
            self.clock.call_later(10 * RECONNECT_S, self._connect)

    def _is_reachable(self) -> bool:
        process = self.process
        is_there = process.is_alive and not process.is_frozen and not process.is_stopping
        return is_there and self.clock.now_s >= self.blocked_until_s

    def _connected(self, life: int) -> None:
        process = self.process
        if process.life != life or not self._is_reachable() or self.loop.is_gone or not self._is_wanted:
            self._connect()
            return
        self.load = None
        self.stream = Stream(self, process, life, Pipe(self.latency_s), Pipe(self.latency_s))
        process.streams.append(self.stream)
        self._on_up()

    def on_lost(self, stream: Stream, reason: str) -> None:
        """A connection is over; another is made."""
        if self.stream is stream:
            self.stream = None
            self.clock.call_later(RECONNECT_S, self._connect)
            self._on_down(reason)

    def on_answer(self, answer: Any, load: tuple[int, float]) -> None:
        """Hands an answer over, with the load that came with it."""
        self.load, self.load_count = load, self.load_count + 1
        self._on_items([Message(answer)], 1)

    def crash(self) -> None:
        """The coordinator is gone: its connection too, which the process notices."""
        if self.stream is not None:
            self._close(self.stream)

    def _close(self, stream: Stream) -> None:
        self.stream, stream.is_open = None, False
        stream.process.later(self.latency_s, stream.close_there)
