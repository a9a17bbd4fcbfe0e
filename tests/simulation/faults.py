"""Faults and their times: they strike at points of a run, and count only when they had an effect.

Every item that leaves a coordinator or a process is a point, and so is every step a process begins. A plan says which
fault is due at which point; one that does nothing there (a lost reply where a request leaves) waits for the next point.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.coordinator import deadlines
from specdec.protocol.items import Close, Open, PromptPart, Verification, VerificationResult
from tests.simulation.network import SILENT_S, Carriage, Stream
from tests.simulation.replica import Process

CARRIED = Carriage()
LOST = Carriage(is_lost=True)
PATIENCE = 4  # points at which a fault may have no effect before another is tried
OVERDUE_S = 6.0  # an answer is overdue by then: Deadlines, with the bounds of schedule.made_repeatable
GRACES_S = (0.02, 0.1, 0.5, 2.0)
LASTING_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.2, 0.8, 1.1 * SILENT_S, 2 * SILENT_S)


class Fault(enum.Enum):
    """One kind of fault."""

    DUPLICATE = "an item arrives twice, or again much later"
    DELAY = "an item, and all behind it, arrives late"
    REORDER = "an item is overtaken by those behind it"
    DROP = "the connection is lost with a request"
    REPLY_LOST = "the connection is lost with an answer"
    CRASH_BEFORE = "a process dies before an item, or a step, is done"
    CRASH_AFTER = "a process dies after it, before its answer leaves"
    CRASH_ALL = "every target dies, or every draft and target"
    PURSUE = "the targets that texts go on at die, too"
    MUTE = "a target never answers a verification"
    MALFORMED = "a target answers a verification with a row too few"
    STOP = "a process stops: it says farewell, drains and ends"
    LEAVE = "a process is no member of its pool for a while"
    FREEZE = "a process stops and goes on later"
    PARTITION = "nothing gets through, and later all of it does, unless the link was given up"
    SLOW = "a process computes many times slower for a while"
    FORGET = "a process drops a session, as a preemption does"
    STALE = "an answer arrives after its session was dropped and opened again"
    CANCEL = "a client cancels, and resumes after the tokens it received"
    COORDINATOR_CRASH = "the coordinator dies; its clients come back"


class Plan(Protocol):
    """A plan of faults."""

    def due(self, point: int) -> Fault | None:
        """The fault to strike at this point, if it has an effect there."""

    def struck(self, point: int) -> None:
        """Notes that the fault had an effect."""


@dataclass(slots=True)
class NoFaults:
    """A run in which nothing goes wrong."""

    def due(self, point: int) -> Fault | None:
        return None

    def struck(self, point: int) -> None:
        """Never called."""


@dataclass(slots=True)
class OneFault:
    """One fault at one point; where it has no effect there, none."""

    fault: Fault
    point: int

    def due(self, point: int) -> Fault | None:
        return self.fault if point == self.point else None

    def struck(self, point: int) -> None:
        """Once is enough: the point does not come again."""


@dataclass(slots=True)
class RandomFaults:
    """`count` faults of some kinds, a random gap of at most `gap_max` points between two.

    With few kinds at a time, several faults of one kind are likelier than with a mixture of all.
    """

    rng: random.Random
    kinds: tuple[Fault, ...]
    count: int
    gap_max: int
    next_point: int = 0
    fault: Fault | None = None

    def __post_init__(self) -> None:
        self._draw(0)

    def _draw(self, point: int) -> None:
        self.next_point = point + self.rng.randint(1, self.gap_max)
        self.fault = self.rng.choice(self.kinds)

    def due(self, point: int) -> Fault | None:
        if self.count and point >= self.next_point:
            if point > self.next_point + PATIENCE:
                self.fault = self.rng.choice(FAULTS)
            return self.fault
        return None

    def struck(self, point: int) -> None:
        self.count -= 1
        self._draw(point)


FAULTS = tuple(Fault)
# Bounds of an unanswered verification from the first muted answer on. Before it they are longer than any run may take,
# so that a replica which forgets a session is noticed, not mended.
SOON_OVERDUE = {"QUIET_S": 2.0, "FACTOR": 2.0, "TURN_FACTOR": 3.0}
OF_AN_ANSWER = (Fault.MUTE, Fault.MALFORMED)
SPOILING = (Fault.DUPLICATE, Fault.DELAY, Fault.REORDER, Fault.STALE, Fault.DROP, Fault.REPLY_LOST, *OF_AN_ANSWER)


@dataclass(slots=True, eq=False)
class Faults:
    """Strikes. `world` is what there is to strike at (schedule.World)."""

    world: Any
    plan: Plan
    rng: random.Random
    pursued_count: int = 0  # of the next verifications that leave, each kills its target
    points: list[str] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    healed_s: float = 0.0

    @property
    def point(self) -> int:
        """The number of the point reached, from 1."""
        return len(self.points)

    def on_carry(self, stream: Stream, item: Any, is_request: bool) -> Carriage:
        """An item is about to leave."""
        self.points.append(f"{'ask' if is_request else 'answer'} {type(item).__name__}")
        if self.pursued_count and isinstance(item, Verification) and stream.process.dies_after is None:
            self.pursued_count -= 1
            stream.process.dies_after = item
        fault = self.plan.due(self.point)
        if fault is None:
            return CARRIED
        if fault in SPOILING:
            carriage = self._spoil(fault, stream, item, is_request)
        else:
            carriage = self._strike_at_item(fault, stream, item, is_request)
        return carriage or CARRIED

    def on_step(self, process: Process) -> None:
        """A process is about to compute."""
        self.points.append(f"step {process.traits.name}")
        fault = self.plan.due(self.point)
        if fault is None:
            return
        if fault is Fault.CRASH_BEFORE:
            self._struck(fault, 0.0, process)
            self.world.crash(process)
        elif fault is Fault.CRASH_AFTER:
            self._struck(fault, 0.0, process)
            process.is_dying = True
        else:
            self._strike_anywhere(fault, process)

    def _struck(self, fault: Fault, heals_in_s: float, what: Any) -> None:
        self.counts[fault] += 1
        self.plan.struck(self.point)
        self.healed_s = max(self.healed_s, self.world.clock.now_s + heals_in_s)
        self.world.note(f"FAULT {fault.name} for {heals_in_s:.3f} s:", what)

    def _while(self) -> float:
        """A duration: mostly shorter, at times longer, than the time until the fault is noticed."""
        return self.rng.choice(LASTING_S) * self.rng.uniform(0.5, 1.1)

    def _spoil(self, fault: Fault, stream: Stream, item: Any, is_request: bool) -> Carriage | None:
        """Faults of single items."""
        rng, pipe = self.rng, stream.requests if is_request else stream.answers
        if fault in OF_AN_ANSWER:
            return self._spoil_answer(fault, item)
        if isinstance(item, PromptPart) and fault in (Fault.DUPLICATE, Fault.REORDER, Fault.STALE):
            return None  # see the package docstring for this limit
        late_s = rng.choice((0.0, 0.001, 0.01, 0.05, 0.3))
        if fault is Fault.DUPLICATE:
            late_s = 0.0 if isinstance(item, Open) else late_s  # see the package docstring for this limit
            self._struck(fault, late_s, item)
            return Carriage(copies_s=(late_s,) if rng.random() < 0.7 else (late_s, 2 * late_s))
        if fault is Fault.DELAY:
            late_s = self._while()
            self._struck(fault, late_s, item)
            pipe.next_s = max(pipe.next_s, self.world.clock.now_s + late_s)
            return None
        if fault is Fault.REORDER and not isinstance(item, Close):
            late_s = max(late_s, 0.0005)
            self._struck(fault, late_s, item)
            return Carriage(held_s=late_s)
        if fault is Fault.STALE and not is_request and self.world.forget(stream.process, stream, item.session, True):
            late_s = rng.choice((0.01, 0.05, 0.3))
            self._struck(fault, late_s, item)
            return Carriage(held_s=late_s)
        if fault is (Fault.DROP if is_request else Fault.REPLY_LOST):
            here_s, there_s = rng.choice((0.0, 0.02, SILENT_S)), rng.choice((0.0, 0.02, SILENT_S))
            self._struck(fault, max(here_s, there_s), item)
            self.world.lose(stream, here_s, there_s)
            return LOST
        return None

    def _spoil_answer(self, fault: Fault, item: Any) -> Carriage | None:
        """Faults of a target's verification results."""
        if not isinstance(item, VerificationResult):
            return None
        self._struck(fault, OVERDUE_S if fault is Fault.MUTE else 0.0, item)
        if fault is Fault.MUTE:
            for name, bound in SOON_OVERDUE.items():
                setattr(deadlines, name, bound)
            return LOST
        output = item.output._replace(recovered_token_ids=item.output.recovered_token_ids[1:])
        return Carriage(instead=item._replace(output=output))

    def _strike_at_item(self, fault: Fault, stream: Stream, item: Any, is_request: bool) -> Carriage | None:
        """Faults of processes and links, timed by an item."""
        process, world = stream.process, self.world
        if fault is Fault.CRASH_BEFORE:
            self._struck(fault, 0.0, process)
            world.crash(process, stream.requests.latency_s if is_request else 0.0)
            return CARRIED if is_request else LOST
        if fault is Fault.CRASH_AFTER:
            self._struck(fault, 0.0, process)
            if is_request:
                process.dies_after = item
            else:
                world.clock.call_later(0.0, world.crash, process)
        elif fault is Fault.PARTITION:
            for_s = self._while()
            self._struck(fault, for_s, process)
            world.partition(stream, for_s)
        else:
            self._strike_anywhere(fault, process)
        return None

    def _strike_anywhere(self, fault: Fault, process: Process) -> None:
        world = self.world
        if fault is Fault.CRASH_ALL:
            self._struck(fault, 0.0, "all")
            for each in world.targets if self.rng.random() < 0.5 else world.processes:
                world.crash(each)
        elif fault is Fault.PURSUE:
            self.pursued_count = self.rng.choice((1, 2, 2, 3, 3))
            self._struck(fault, 0.0, f"the next {self.pursued_count}")
        elif fault is Fault.STOP:
            grace_s = self.rng.choice(GRACES_S)
            if process.is_alive and not process.is_stopping:
                self._struck(fault, grace_s, process)
                process.stop(grace_s)
        elif fault is Fault.LEAVE:
            for_s = self._while()
            if world.unlist(process, for_s):
                self._struck(fault, for_s, process)
        elif fault is Fault.FREEZE:
            for_s = self._while()
            self._struck(fault, for_s, process)
            world.freeze(process, for_s)
        elif fault is Fault.SLOW:
            for_s = self._while()
            self._struck(fault, for_s, process)
            world.slow(process, self.rng.choice((5.0, 30.0, 100.0)), for_s)
        elif fault is Fault.FORGET:
            chosen = self.rng.choice((process, process, *world.processes))  # a peer may forget meanwhile
            names = list(chosen.held) if chosen.is_alive else []
            if names and world.forget(chosen, *self.rng.choice(names), self.rng.random() < 0.5):
                self._struck(fault, 0.0, chosen)
        elif fault is Fault.CANCEL:
            if world.cancel():
                self._struck(fault, 0.0, "a client")
        elif fault is Fault.COORDINATOR_CRASH and world.crash_coordinator():
            self._struck(fault, 0.0, "the coordinator")
