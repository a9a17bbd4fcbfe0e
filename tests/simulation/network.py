"""The two links on virtual time, with every fault of the items they carry.

A stream is one connection: two pipes, first in first out unless a fault says otherwise. gRPC gives exactly that order;
the fences promise more, so single items are doubled, held back and overtaken here too. Close alone is never overtaken:
the protocol does not cover an item that arrives after its Close. A stream can be lost on one side before
the other; items under way are lost then. `SimulatedReplica` is a generation's view of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import SpecdecError
from specdec.protocol.events import DraftFound, DraftLost, Event, FromDraft, FromTarget, TargetLost
from specdec.protocol.items import Close, Nodes
from specdec.protocol.types import Rule
from tests.simulation.clock import Clock, Violation
from tests.simulation.replica import Process

SILENT_S = 3.0  # a peer silent for this long counts as dead (specdec/rpc/link.py)
BEHIND_S = 1e-6  # keeps the last item behind the rest despite rounding
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


@dataclass(slots=True, eq=False, repr=False)
class Stream:
    """One connection of a coordinator to a process; a session on a process belongs to it."""

    replica: SimulatedReplica
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
        carriage = self.replica.on_carry(self, item, True)
        if self.is_open and self.is_served and not carriage.is_lost:
            clock = self.replica.clock
            delay_s = self.requests.arrival_s(clock.now_s, item, carriage.held_s) - clock.now_s
            for extra_s in (0.0, *carriage.copies_s):
                self.requests.last_s = max(self.requests.last_s, clock.now_s + delay_s + extra_s)
                self.process.later(delay_s + extra_s, lambda: self._take(item))

    def _take(self, item: Any) -> None:
        if self.is_served:
            self.replica.on_arrive(self, item, True)
            if self.process.is_alive:
                self.process.take(self, item)

    def send_answer(self, answer: Any) -> None:
        """The process answers."""
        carriage = self.replica.on_carry(self, answer, False)
        if self.is_open and self.is_served and not carriage.is_lost:
            clock = self.replica.clock
            delay_s = self.answers.arrival_s(clock.now_s, answer, carriage.held_s) - clock.now_s
            for extra_s in (0.0, *carriage.copies_s):
                clock.call_later(delay_s + extra_s, self._take_answer, answer)

    def _take_answer(self, answer: Any) -> None:
        if self.is_open:
            self.replica.on_arrive(self, answer, False)
            self.replica.on_answer(self, answer)

    def block(self, for_s: float) -> None:
        """Nothing gets through, either way, for a while; a long silence is noticed at the coordinator."""
        now_s = self.replica.clock.now_s
        for pipe in (self.requests, self.answers):
            pipe.next_s = max(pipe.next_s, now_s + for_s)
        if for_s >= SILENT_S:
            self.lose(SILENT_S, for_s)

    def lose(self, here_in_s: float, there_in_s: float) -> None:
        """The connection is lost; coordinator and process notice after the given seconds."""
        self.replica.clock.call_later(here_in_s, self.close_here, "lost")
        self.process.later(there_in_s, self.close_there)

    def on_process_gone(self) -> None:
        """The process died; its machine lives and says so at once."""
        self.is_served = False
        self.replica.clock.call_later(self.answers.latency_s, self.close_here, "the process is gone")

    def close_here(self, reason: str) -> None:
        """The coordinator notices; idempotent."""
        if self.is_open:
            self.is_open = False
            self.replica.on_lost(self, reason)

    def close_there(self) -> None:
        """The process notices; idempotent."""
        if self.is_served and self.life == self.process.life:
            self.is_served = False
            self.process.close_stream(self)


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """A replica as a coordinator sees it: coordinator/peers.py and specdec/rpc/link.py on virtual time.

    `on_carry(stream, item, is_request)` is called for every item that leaves, `on_arrive` for every one that arrives.
    """

    clock: Clock
    process: Process
    latency_s: float
    on_carry: Callable[[Stream, Any, bool], Carriage]
    on_arrive: Callable[[Stream, Any, bool], None]
    coordinator: Any = None
    is_gone: bool = False  # the coordinator itself crashed
    stream: Stream | None = None
    blocked_until_s: float = 0.0
    listeners: dict[int, Any] = field(default_factory=dict)

    def measure_step(self, nodes: Nodes, rule: Rule, byte_count: int) -> None:
        """As `Draft.measure_step`, for the policy of the coordinator."""
        self.measure_network()
        self.coordinator.fleet.draft.measure_step(nodes, rule, byte_count)

    def measure_network(self) -> None:
        """As `Draft.measure_network`, by the latency of this link."""
        for times in self.coordinator.fleet.draft.times.values():
            times.on_network(2 * self.latency_s)

    @property
    def is_up(self) -> bool:
        """Whether it may be used."""
        return self.stream is not None

    def connect(self) -> None:
        """Tries until a connection stands; a stream and a description take a round trip each."""
        process = self.process
        if self.is_gone:
            return
        if process.is_alive and not process.is_frozen and self.clock.now_s >= self.blocked_until_s:
            self.clock.call_later(4 * self.latency_s, self._connected, process.life)
        else:
            self.clock.is_remote = True
            self.clock.call_later(10 * RECONNECT_S, self.connect)

    def _connected(self, life: int) -> None:
        process = self.process
        if process.life != life or process.is_frozen or self.is_gone or self.clock.now_s < self.blocked_until_s:
            self.connect()
            return
        self.stream = Stream(self, process, life, Pipe(self.latency_s), Pipe(self.latency_s))
        process.streams.append(self.stream)
        if process.traits.is_draft:
            self._tell_all(DraftFound())

    def _tell_all(self, event: Event) -> None:
        for listener in list(self.listeners.values()):
            listener.take(event)

    def on_lost(self, stream: Stream, reason: str) -> None:
        """A connection is over; another is made."""
        if self.stream is stream:
            self.stream = None
            self.clock.call_later(RECONNECT_S, self.connect)
            self._tell_all(DraftLost() if self.process.traits.is_draft else TargetLost())

    def on_answer(self, stream: Stream, answer: Any) -> None:
        """Hands an answer to its generation, under the eyes of the ledger."""
        listener = self.listeners.get(answer.session)
        if listener is not None:
            event = FromDraft(answer) if self.process.traits.is_draft else FromTarget(answer)
            self.coordinator.watch.deliver(stream, answer, lambda: listener.take(event))

    def crash(self) -> None:
        """The coordinator is gone: its connection too, which the process notices."""
        self.is_gone = True
        self.listeners.clear()
        if self.stream is not None:
            stream, self.stream = self.stream, None
            stream.is_open = False
            stream.process.later(self.latency_s, stream.close_there)

    def attach(self, session: int, listener: Any) -> None:
        """As `Peer.attach`."""
        self.listeners[session] = listener

    def detach(self, session: int) -> None:
        """As `Peer.detach`."""
        self.listeners.pop(session, None)

    def send(self, item: Any) -> int:
        """Sends, or drops while there is no connection; bytes are not counted."""
        if self.stream is not None:
            self.stream.send(item)
        return 0

    def usable(self) -> None:
        """As `Peer.usable`."""
        if self.stream is None:
            raise SpecdecError("not connected")

    def check_idle(self) -> None:
        """Raises Violation where a generation is still attached."""
        if self.listeners:
            raise Violation(f"sessions {list(self.listeners)} are still attached to the {self.process.traits.name}")
