"""A draft or target process on virtual time: the real engine, cache and item handler, without thread and stream.

A process is one queue of tasks, as on its engine thread: between two steps it takes arrived items, then it runs one
step at once and is busy for as long as the step would take; the step's answers leave when it ends. A crash loses
everything, a freeze holds every task back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.draft_service.drafter import Drafter
from specdec.engine.scheduling.scheduler import Engine, Turn
from specdec.errors import CacheExhausted, ReplicaUnavailable
from specdec.protocol.items import Close, Failure, MissingTokens
from specdec.protocol.types import Description
from specdec.replica.handler import STOPPING, ItemHandler
from specdec.rpc.status import failure_from_error
from specdec.target_service.verifier import Verifier
from tests.simulation.clock import Clock, Violation
from tests.simulation.model import TableModel

BLOCK_SIZE = 8
DELAY_S_MIN = 1e-6  # the rest of a step delay may be too short to advance virtual time


class SimulatedEngine(Engine):
    """The engine without its thread: the caller does the work of `Engine._run`. An exception goes through."""

    def prepare(self, next_step: Callable[[], Turn]) -> Turn:
        """Runs posted functions, and the service's turn."""
        self._drain()
        return next_step()

    def step(self, turn: Turn) -> None:
        """One step."""
        if turn.feeds:
            self._run_turn(turn)
        else:
            self._step()

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        return function(*arguments)


@dataclass(slots=True)
class ProcessTraits:
    """The differences between processes. The engine calls `sampler` with payloads, row counts and rows,
    and `read_hidden` of a target with heads. `table`: of a target's weights; `places`: for sessions."""

    name: str
    is_draft: bool
    table: int
    block_count: int
    description: Description
    step_s: Callable[[int], float]
    sampler: Callable[..., list]
    read_hidden: Callable[..., list] | None = None
    chunk_size: int = 64
    rows_max: int = 512
    places: int = 64


def fenced(work: Callable[[Any, Any, float], Any]) -> Callable[[Any, Any, float], Any]:
    """Returns `work` with a check that an item belongs to the incarnation it is carried out for."""

    def checked(held: Any, item: Any, arrived_s: float) -> Any:
        if held.opened.incarnation != item.incarnation:
            raise Violation(f"{item} is carried out for incarnation {held.opened.incarnation}")
        return work(held, item, arrived_s)

    return checked


@dataclass(slots=True, eq=False)
class Process:
    """One replica process, through crashes and restarts. `life` counts them; tasks of an earlier life do not run."""

    clock: Clock
    traits: ProcessTraits
    on_step: Callable[[Process], None]
    after_step: Callable[[Process], None]
    on_crash: Callable[[Process], None]
    life: int = 0
    is_alive: bool = False
    is_frozen: bool = False
    is_busy: bool = False
    is_stopping: bool = False  # it takes no more sessions or connections
    is_dying: bool = False  # it crashes when the current step or task is done
    dies_after: Any = None  # the item that starts this
    slowness: float = 1.0
    streams: list = field(default_factory=list)
    answers: list = field(default_factory=list)
    engine: Any = None
    service: Any = None
    handler: Any = None
    description: Any = None
    _held_back: list = field(default_factory=list)

    def start(self) -> None:
        """A fresh process: no session, an empty cache."""
        self.life += 1
        self.is_alive, self.is_frozen, self.is_busy, self.is_dying, self.is_stopping = True, *4 * (False,)
        self.answers, self.streams, self._held_back, self.dies_after = [], [], [], None
        traits = self.traits
        model = TableModel(self.clock, lambda rows: traits.step_s(rows) * self.slowness)
        self.engine = SimulatedEngine(
            *(model, traits.block_count, BLOCK_SIZE, traits.sampler, traits.chunk_size, traits.rows_max),
            read_hidden=traits.read_hidden,
        )
        kind = Drafter if traits.is_draft else Verifier
        self.description = replace(traits.description, instance=f"{traits.name} {self.life}")
        self.service = kind(self.engine, self.description)
        self.service.work = fenced(self.service.work)
        self.handler = ItemHandler(self.service, traits.places)

    @property
    def held(self) -> dict:
        """The sessions it holds, by (stream, number)."""
        return self.handler.sessions

    @property
    def load(self) -> tuple[int, float]:
        """As a replica reports it: its sessions, and the share of it that is taken."""
        count = len(self.held)
        return count, max(count / self.traits.places, self.engine.cache.usage)

    def stop(self, grace_s: float) -> None:
        """As SIGTERM: it says farewell, finishes the sessions it has and ends, at the latest when its grace is over."""
        self.is_stopping = True
        farewell = failure_from_error(ReplicaUnavailable(STOPPING), 0, 0)
        for stream in self.streams:
            self.later(0.0, lambda stream=stream: stream.send_answer(farewell))
        life = self.life
        self.post(lambda: self.handler.drain(lambda: self.clock.call_later(0.0, self._exit, life)))
        self.clock.call_later(grace_s, self._exit, life)

    def _exit(self, life: int) -> None:
        if life == self.life:
            self.crash()

    def crash(self) -> None:
        """The process is gone, and its connections with it; nothing it computed leaves it."""
        if self.is_alive:
            self.is_alive = False
            self.life += 1
            for stream in self.streams:
                stream.on_process_gone()
            self.on_crash(self)

    def freeze(self) -> None:
        """As SIGSTOP: it keeps its state and does nothing until `thaw`."""
        self.is_frozen = self.is_alive

    def thaw(self) -> None:
        """As SIGCONT: everything held back happens now, in order."""
        if self.is_alive and self.is_frozen:
            self.is_frozen = False
            held_back, self._held_back = self._held_back, []
            for task in held_back:
                self._run(task)

    def later(self, delay_s: float, task: Callable[[], None]) -> None:
        """Runs a task of this life, when the process is not frozen."""
        self.clock.call_later(delay_s, self._enter, self.life, task)

    def _enter(self, life: int, task: Callable[[], None]) -> None:
        if life == self.life:
            self.clock.is_remote = True
            self._run(task)

    def _run(self, task: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self.is_frozen:
            self._held_back.append(task)
        else:
            task()

    def post(self, function: Callable[[], None]) -> None:
        """Posts a function to the engine's thread."""
        self.engine.post(function)
        if not self.is_busy:
            self._turn()

    def take(self, stream: Any, item: Any) -> None:
        """One item has arrived on a stream."""
        self.post(lambda: self._handle(stream, item))

    def _handle(self, stream: Any, item: Any) -> None:
        self.is_dying = self.is_dying or item is self.dies_after
        before = self.held.get((stream, item.session))
        self.handler.handle(stream, [item], lambda answer: self._reply(stream, answer), self.clock.now_s)
        is_older = before is not None and before.opened.incarnation > item.incarnation
        if is_older and self.held.get((stream, item.session)) is not before:
            raise Violation(f"{item} changed a session of incarnation {before.opened.incarnation}")

    def _reply(self, stream: Any, answer: Any) -> None:
        refusals = (CacheExhausted.reason, ReplicaUnavailable.reason if self.is_stopping else "")
        if isinstance(answer, Failure) and answer.reason not in refusals:
            raise Violation(f"the {self.traits.name} failed: {answer.message}")
        self.answers.append((stream, answer))

    def _turn(self) -> None:
        """One turn of the engine thread's loop: posted functions, then a step, which keeps it busy to its end."""
        self.is_busy = True
        engine = self.engine
        turn = engine.prepare(self.service.next_step)
        if not turn.feeds and engine.waiting_count and turn.delay_s > 0:
            self._send_answers()
            self.is_busy = False
            self.later(max(turn.delay_s, DELAY_S_MIN), self._wake)
        elif turn.feeds or engine.waiting_count:
            self._send_answers()
            self.on_step(self)
            self._run(lambda: self._step(turn))
        elif self.is_dying:
            self.crash()
        else:
            self.is_busy = False
            self._send_answers()
            if turn.wake_s is not None:
                self.later(turn.wake_s, self._wake)

    def _step(self, turn: Turn) -> None:
        self.clock.in_step_s = 0.0
        self.engine.step(turn)
        self.after_step(self)
        step_s, self.clock.in_step_s = self.clock.in_step_s, 0.0
        self.later(step_s, self._end_step)

    def _wake(self) -> None:
        if not self.is_busy:
            self._turn()

    def _end_step(self) -> None:
        if self.is_dying:
            self.crash()
        else:
            self._send_answers()
            self._turn()

    def _send_answers(self) -> None:
        answers, self.answers = self.answers, []
        for stream, answer in answers:
            if self.is_alive:
                stream.send_answer(answer)

    def close_stream(self, stream: Any) -> None:
        """The process has noticed that a stream is gone."""
        self.streams.remove(stream)
        self.post(lambda: self.handler.close_stream(stream))

    def forget(self, stream: Any, number: int, says_so: bool) -> bool:
        """Drops a session, as a preemption does; False where it is not held. Requests under way are answered."""
        if (stream, number) not in self.held:
            return False
        self.later(0.0, lambda: self.post(lambda: self._preempt(stream, number, says_so)))
        return True

    def _preempt(self, stream: Any, number: int, says_so: bool) -> None:
        held = self.held.get((stream, number))
        if held is None:
            return
        says_so = says_so or getattr(held, "work", None) is not None  # a request that waits for blocks has no feed yet
        name = held.name
        self.handler.handle(stream, [Close(*name)], lambda _: None)
        if says_so:
            self._reply(stream, MissingTokens(*name, 0, unknown=True))

    def check(self) -> None:
        """The cache's own invariants, and those of every tree a draft grows."""
        self.engine.cache.check_integrity()
        for held in self.held.values():
            if self.traits.is_draft:
                held.growth.check()
                held.check()

    def check_idle(self) -> None:
        """Raises Violation unless all sessions, blocks and feeds are free."""
        cache = self.engine.cache
        if self.held or cache.table_count or cache.free_block_count != cache.block_count - 1:
            raise Violation(f"the {self.traits.name} leaks: sessions {list(self.held)}, cache usage {cache.usage:.2f}")
        if self.service.waiting_count:
            raise Violation(f"the {self.traits.name} leaks: {self.service.waiting_count} sessions wait that are gone")
        if self.engine.waiting_count:
            raise Violation(f"the {self.traits.name} leaks: {self.engine.waiting_count} feeds wait for nothing")
