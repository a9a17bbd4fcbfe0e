"""A draft, a target, a coordinator and clients on one clock, and the faults they can have."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec.protocol.types import CacheSize
from tests.simulation.client import Client, Coordinator
from tests.simulation.clock import Clock, Violation
from tests.simulation.faults import Faults, Plan
from tests.simulation.ledger import Ledger
from tests.simulation.model import describe
from tests.simulation.network import SILENT_S, SimulatedReplica, Stream
from tests.simulation.replica import BLOCK_SIZE, Process, ProcessTraits
from tests.simulation.scenario import Scenario
from tests.simulation.transcript import Transcript

LIVENESS_S = 30.0  # virtual seconds after the last fault has healed, for texts that take less than ten
EVENT_COUNT_MAX = 50_000
CHECK_EVERY = 5  # points between two checks of a whole cache and all trees of a draft
DOWN_S = (0.01, 0.05, 0.3, 1.5)


@dataclass(slots=True, eq=False)
class World:
    """One run; its transcript is optional."""

    scenario: Scenario
    rng: random.Random
    plan: Plan
    transcript: Transcript | None = None
    clock: Clock = field(default_factory=Clock)
    ledger: Ledger = field(init=False)
    faults: Faults = field(init=False)
    target: Process = field(init=False)
    draft: Process = field(init=False)
    coordinator: Coordinator = field(init=False)
    clients: list[Client] = field(init=False)
    event_count: int = 0
    cache_counts: Counter = field(default_factory=Counter)  # of all lives of the target

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.ledger = Ledger(scenario.table)
        self.faults = Faults(self, self.plan, self.rng)
        self.target = self._process(False, self.ledger.sampler, scenario.target_step_s, scenario.target_blocks)
        self.draft = self._process(True, self.ledger.propose, scenario.draft_step_s, scenario.draft_blocks)
        self.target.start()
        self.draft.start()
        self._start_coordinator()
        self.clients = [
            Client(self.clock, order, lambda: self.coordinator, self.ledger.on_tokens) for order in scenario.orders
        ]
        for client in self.clients:
            client.request()

    def _process(self, is_draft: bool, sampler: Callable, step_s: float, block_count: int) -> Process:
        scenario = self.scenario
        traits = ProcessTraits(
            "draft" if is_draft else "target",
            is_draft,
            block_count,
            describe(scenario.draft_positions if is_draft else scenario.target_positions),
            lambda rows: step_s * (1 + 0.02 * rows),
            sampler,
            self.ledger.read_heads if scenario.has_heads and not is_draft else None,
            scenario.chunk_size,
        )
        return Process(self.clock, traits, self.faults.on_step, self._after_step, self._on_crash)

    def _start_coordinator(self) -> None:
        links = []
        for process, latency_s in (
            (self.target, self.scenario.target_latency_s),
            (self.draft, self.scenario.draft_latency_s),
        ):
            links.append(SimulatedReplica(self.clock, process, latency_s, self._on_carry, self._on_arrive))
        cache = CacheSize(self.scenario.target_blocks - 1, BLOCK_SIZE, 0)
        self.coordinator = Coordinator(self.clock, *links, self.ledger, target_cache=cache)
        for link in links:
            link.coordinator = self.coordinator
            link.connect()

    def note(self, what: str, thing: Any = "") -> None:
        """A line of the transcript."""
        if self.transcript is not None:
            shown = thing.traits.name if isinstance(thing, Process) else thing
            self.transcript.note(self.clock.now_s, what, shown)

    def _on_carry(self, stream: Stream, item: Any, is_request: bool):
        if is_request:
            self.ledger.on_ask(stream, item)
        if self.transcript is not None:
            self.note(f"{'coordinator' if is_request else stream.process.traits.name} sends", item)
        return self.faults.on_carry(stream, item, is_request)

    def _on_arrive(self, stream: Stream, item: Any, is_request: bool) -> None:
        if self.transcript is not None:
            self.note(f"{stream.process.traits.name if is_request else 'coordinator'} takes", item)

    def _after_step(self, process: Process) -> None:
        if self.faults.point % CHECK_EVERY == 0:
            process.check()
        if process.traits.is_draft:
            self.ledger.after_draft_step(process.held.values(), process.answers)
        self.note("step of", process)

    def crash(self, process: Process, in_s: float = 0.0) -> None:
        """A process dies."""
        if in_s:
            self.clock.call_later(in_s, process.crash)
        else:
            process.crash()

    def _on_crash(self, process: Process) -> None:
        """A dead process comes back later."""
        if process.traits.is_draft:
            self.ledger.unsent.clear()
        self.count_cache(process)
        down_s = self.rng.choice(DOWN_S)
        self.note(f"dead for {down_s} s:", process)
        self.faults.healed_s = max(self.faults.healed_s, self.clock.now_s + down_s)
        self.clock.call_later(down_s, process.start)

    def count_cache(self, process: Process) -> None:
        """Adds the counters of a process's life, at its end."""
        self.cache_counts.update(process.service.counters())

    def freeze(self, process: Process, for_s: float) -> None:
        """A process stops for a while; when that is long its connections are given up."""
        process.freeze()
        self.clock.call_later(for_s, process.thaw)
        if for_s >= SILENT_S:
            for stream in process.streams:
                stream.lose(SILENT_S, for_s)

    def slow(self, process: Process, slowness: float, for_s: float) -> None:
        """A process computes slower for a while."""
        process.slowness = slowness
        self.clock.call_later(for_s, setattr, process, "slowness", 1.0)

    def lose(self, stream: Stream, here_s: float, there_s: float) -> None:
        """A connection is lost; nothing gets through any more, and each end notices at its time."""
        stream.lose(here_s, there_s)

    def partition(self, stream: Stream, for_s: float) -> None:
        """Nothing gets through a link for a while."""
        stream.replica.blocked_until_s = self.clock.now_s + for_s
        stream.block(for_s)

    def forget(self, process: Process, stream: Stream, number: int, says_so: bool) -> bool:
        """A process drops a session; False where it does not hold it."""
        return process.forget(stream, number, says_so)

    def cancel(self) -> bool:
        """A client cancels at once and requests again; False when none runs."""
        running = [client for client in self.clients if client.generation is not None]
        if running:
            self.clock.call_later(0.0, self.rng.choice(running).cancel)
        return bool(running)

    def crash_coordinator(self) -> bool:
        """The coordinator dies and comes back."""
        if not self.coordinator.is_alive:
            return False
        self.coordinator.is_alive = False
        down_s = self.rng.choice(DOWN_S)
        self.faults.healed_s = max(self.faults.healed_s, self.clock.now_s + down_s)
        self.clock.call_later(0.0, self.coordinator.crash)
        self.clock.call_later(down_s, self._start_coordinator)
        return True

    def run(self) -> None:
        """Runs to the end of every text, and until no event is left. Raises Violation."""
        while not all(client.is_done for client in self.clients):
            self._advance()
            if self.clock.now_s > self.faults.healed_s + LIVENESS_S:
                raise Violation(f"no end {LIVENESS_S} s after the last fault has healed")
        while self._advance(must=False):
            pass
        self.count_cache(self.target)
        self.check_idle()

    def _advance(self, must: bool = True) -> bool:
        self.event_count += 1
        if self.event_count > EVENT_COUNT_MAX:
            raise Violation(f"still going on after {EVENT_COUNT_MAX} events")
        went_on = self.clock.advance()
        if must and not went_on:
            raise Violation("nothing more can happen, and a text is not finished")
        if not self.clock.is_remote:
            self.ledger.check_sessions(self.clock.now_s)
            for client in self.clients:
                client.look()
        return went_on

    def check_idle(self) -> None:
        """Raises Violation where a session, block or generation outlives its text."""
        for process in (self.target, self.draft):
            process.check()
            process.check_idle()
        for link in (self.coordinator.target, self.coordinator.draft):
            link.check_idle()
        if self.coordinator.generations:
            raise Violation(f"generations {list(self.coordinator.generations)} go on")
