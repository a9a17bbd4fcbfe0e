"""Drafts, targets, a coordinator and clients on one clock, and the faults they can have."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specdec.coordinator.discovery import Member
from specdec.protocol.types import CacheSize
from tests.simulation.client import Client, Coordinator
from tests.simulation.clock import Clock, Violation
from tests.simulation.faults import Faults, Plan
from tests.simulation.ledger import Ledger
from tests.simulation.model import describe, table_of
from tests.simulation.network import SILENT_S, Carriage, SimulatedLink, Stream
from tests.simulation.replica import BLOCK_SIZE, Process, ProcessTraits
from tests.simulation.scenario import Scenario
from tests.simulation.transcript import Transcript

LIVENESS_S = 30.0  # virtual seconds after the last fault has healed, for texts that take less than ten
SETTLE_S = 3.0  # after the last fault has healed and the last text ended, nothing is under way
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
    targets: list[Process] = field(default_factory=list)
    drafts: list[Process] = field(default_factory=list)
    addresses: dict[str, Process] = field(default_factory=dict)
    unlisted: Counter = field(default_factory=Counter)  # processes that are no members, by how many reasons
    coordinator: Coordinator = field(init=False)
    clients: list[Client] = field(default_factory=list)
    event_count: int = 0
    cache_counts: Counter = field(default_factory=Counter)  # of all lives of the target

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.ledger = Ledger(scenario.table)
        self.faults = Faults(self, self.plan, self.rng)
        for number, profile in enumerate(scenario.profiles):
            self.targets.append(self._target(number, profile))
        for number, model in enumerate(scenario.drafts):
            self.drafts.append(self._draft(number, model))
        self.addresses = {process.traits.name: process for process in self.processes}
        if scenario.has_alias:
            self.addresses["alias"] = self.targets[0]

    @property
    def processes(self) -> list[Process]:
        """All targets and drafts."""
        return [*self.targets, *self.drafts]

    def _target(self, number: int, profile: int) -> Process:
        own = self.scenario
        cache = CacheSize(own.target_blocks - 1, BLOCK_SIZE, 0)
        description = describe(own.target_positions, "target", profile, cache, own.has_encoder)
        table = table_of(own.table, description)
        has_heads = own.has_heads and not number
        sampler, read_heads = partial(self.ledger.sampler, table), self.ledger.read_heads if has_heads else None
        return self._process(
            ProcessTraits(
                *(f"target{number or ''}", False, table, own.target_blocks, description),
                *(partial(step_s, own.target_step_s), sampler, read_heads, own.chunk_size),
                places=own.places,
            )
        )

    def _draft(self, number: int, model: int) -> Process:
        own = self.scenario
        description = describe(own.draft_positions, f"draft{model}", has_encoder=own.has_encoder)
        sampler = partial(self.ledger.propose, model)
        return self._process(
            ProcessTraits(
                *(f"draft{number or ''}", True, 0, own.draft_blocks, description),
                *(partial(step_s, own.draft_step_s), sampler, None, own.chunk_size),
                places=own.places,
            )
        )

    def _process(self, traits: ProcessTraits) -> Process:
        return Process(self.clock, traits, self.faults.on_step, self._after_step, self._on_crash)

    def start(self) -> None:
        """Starts processes, coordinator and clients."""
        for process in self.processes:
            process.start()
        for pool in (self.targets, self.drafts):
            if self.scenario.join_s and len(pool) > 1:
                self.unlist(pool[-1], self.scenario.join_s)
        self._start_coordinator()
        for order in self.scenario.orders:
            client = Client(self.clock, order, lambda: self.coordinator, self.ledger)
            self.clients.append(client)
            client.request()

    def make_link(self, peer: str, *parts: Any) -> SimulatedLink:
        """Returns the link of a peer, which its address ends; it stands for the class Link."""
        process = self.addresses[peer.rpartition(" ")[2]]
        latency_s = self.scenario.draft_latency_s if process.traits.is_draft else self.scenario.target_latency_s
        link = SimulatedLink(self, process, latency_s, *parts[-3:])
        self.coordinator.links.append(link)
        return link

    def _start_coordinator(self) -> None:
        self.coordinator = Coordinator(self.clock, self.ledger, self.scenario.wait_s)
        self.coordinator.start()
        self._update()

    def _update(self) -> None:
        """The coordinator discovers the members of its pools."""
        if not self.coordinator.is_alive:
            return
        for pool, is_draft in ((self.coordinator.fleet.targets, False), (self.coordinator.fleet.drafts, True)):
            pool.update(
                Member(address)
                for address, process in self.addresses.items()
                if process.traits.is_draft == is_draft and not self.unlisted[process]
            )

    def unlist(self, process: Process, for_s: float) -> bool:
        """A process is no member of its pool for a while; False where it is none already."""
        if self.unlisted[process]:
            return False
        self.unlisted[process] += 1
        self.clock.call_later(0.0, self._update)
        self.clock.call_later(for_s, self._list, process)
        return True

    def _list(self, process: Process) -> None:
        self.unlisted[process] -= 1
        self._update()

    def note(self, what: str, thing: Any = "") -> None:
        """A line of the transcript."""
        if self.transcript is not None:
            shown = thing.traits.name if isinstance(thing, Process) else thing
            self.transcript.note(self.clock.now_s, what, shown)

    def on_carry(self, stream: Stream, item: Any, is_request: bool) -> Carriage:
        """An item leaves."""
        if is_request:
            self.ledger.on_ask(stream, item)
        if self.transcript is not None:
            self.note(f"{'coordinator' if is_request else stream.process.traits.name} sends", item)
        return self.faults.on_carry(stream, item, is_request)

    def on_close(self, stream: Stream) -> None:
        """A connection is closed; no text may be open there."""
        for own in self.ledger.running:
            if any(stream in streams for streams in own.open_at.values()) and not own.session.finished:
                raise Violation(f"session {own.session.number} is at {stream}, which is closed")

    def deliver(self, stream: Stream, answer: Any, load: tuple[int, float]) -> None:
        """An answer is handed to the coordinator, under the eyes of the ledger."""
        self.ledger.deliver(stream, answer, lambda: stream.link.on_answer(answer, load))

    def on_arrive(self, stream: Stream, item: Any, is_request: bool) -> None:
        """An item arrives."""
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
        stream.link.blocked_until_s = self.clock.now_s + for_s
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
        """Runs to the end of every text, and on until all that was under way has come. Raises Violation."""
        self.start()
        while not all(client.is_done for client in self.clients):
            if not self._advance():
                raise Violation("nothing more can happen, and a text is not finished")
            if self.clock.now_s > self.faults.healed_s + LIVENESS_S:
                raise Violation(f"no end {LIVENESS_S} s after the last fault has healed")
        settled_s = max(self.clock.now_s, self.faults.healed_s) + SETTLE_S
        while self._advance(settled_s):
            pass
        for process in self.processes:
            self.count_cache(process)
        self.check_idle()

    def _advance(self, until_s: float = math.inf) -> bool:
        self.event_count += 1
        if self.event_count > EVENT_COUNT_MAX:
            raise Violation(f"still going on after {EVENT_COUNT_MAX} events")
        went_on = self.clock.advance(until_s)
        if self.coordinator.loop.failure is not None:
            raise self.coordinator.loop.failure
        if not self.clock.is_remote:
            self.ledger.check_sessions(self.clock.now_s)
            for client in self.clients:
                client.look()
        return went_on

    def check_idle(self) -> None:
        """Raises Violation where a session, block or generation outlives its text."""
        for process in self.processes:
            process.check()
            process.check_idle()
        fleet = self.coordinator.fleet
        for peer in fleet.peers:
            if peer._listeners or peer.link.process.traits.is_draft < bool(getattr(peer, "suspect", None)):
                raise Violation(f"sessions {list(peer._listeners)} are still attached to {peer.address}")
        if self.coordinator.generations or fleet.movers or fleet.waiting:
            raise Violation(f"generations {list(self.coordinator.generations)} go on")
        listed = [peer.address for peer in fleet.peers if not peer.is_listed]
        if listed:
            raise Violation(f"{listed} are no members, serve nothing and are kept")
        for watched in self.ledger.sessions.values():
            if watched.coordinator.is_alive:
                watched.moves.check_statistics()


def step_s(row_s: float, rows: int) -> float:
    """The time of a step of some rows."""
    return row_s * (1 + 0.02 * rows)
