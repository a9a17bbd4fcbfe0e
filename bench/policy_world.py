"""A service whose sessions speculate by a policy, simulated on a clock of its own: bench/event_simulation.py with a
policy in each stream, texts of their own, streams that come, a draft that fails, and a machine that is noisy.

A policy sees only the inputs from a session: records of rounds, times of the draft's steps, the network time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bench.event_simulation import Node, Scenario, Simulation, Stream
from specdec.protocol.plan import OFF_PLAN, Plan
from specdec.protocol.policy import Policy, Prediction
from specdec.protocol.records import RoundRecord, RoundTimes, RoundTokens, TargetStep, TreeUse
from specdec.protocol.types import TokenKind

SPARE_TOKENS = 1_000_000
GATHER_S = 0.0015  # that the target holds a step for sessions answered just now
PAUSE_SHARE, PAUSE_FACTOR = 0.005, 5.0  # of the target's steps: how many pause, and how long


def always(now_s: float) -> float:
    """As the scenario says, at any time."""
    return 1.0


@dataclass(frozen=True, slots=True)
class World:
    """A scenario and what happens in it. `texts`: acceptance by place of each stream's text; `begins_s`: when each
    stream begins. `draft_factor`: how many times as long the draft's steps take at a time; None: it is silent.
    `contention`: how many times as long a target's step takes beside a draft at work. `text_tokens`: length of a text;
    then the stream goes on with the next, under a new policy. `changes`: (time, field of the scenario, new value)."""

    scenario: Scenario
    texts: tuple[tuple[float, ...], ...]
    begins_s: tuple[float, ...] = (0.0,)
    draft_factor: Callable[[float], float | None] = always
    acceptance_at: Callable[[float], float] = always
    contention: float = 1.0
    text_tokens: int = 400
    changes: tuple[tuple[float, str, Any], ...] = ()


class Service:
    """A simulated coordinator: makes a policy for a text, and receives the draft's steps and the rounds."""

    def policy(self, index: int) -> Policy:
        """The policy of a new text of a stream."""
        raise NotImplementedError

    def on_draft_step(self, nodes: int, seconds: float) -> None:
        """One step of the draft came."""

    def on_network(self, network_s: float) -> None:
        """One ping came."""

    def on_round(self, policy: Policy, record: RoundRecord) -> None:
        """One round of a session ended."""
        policy.on_round(record)


class FixedService(Service):
    """Every session runs one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def policy(self, index: int) -> Policy:
        return OnePlan(self._plan)


class OnePlan:
    """A policy that runs one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.wants_heads, self.wants_local = plan, False, False
        self.reach_min = self.path_reach_min = 0.0
        self.draft_length_cap, self.is_speculating = plan.draft_length_max, plan.draft_length_max > 0
        self.prediction = Prediction(None, plan.description)

    def plan(self, positions_left: int) -> Plan:
        return self._plan

    def on_round(self, record: RoundRecord) -> None:
        """It learns nothing."""


@dataclass(slots=True)
class Session:
    """One stream's generation: its policy and the round under way."""

    policy: Policy
    text_end: int
    rounds: int = 0
    verdict_s: float = 0.0
    sent_s: float = 0.0
    queued_s: float = 0.0
    waiting_since_s: float | None = None
    waited_s: float = 0.0
    sent_plan: Plan = OFF_PLAN
    is_late: bool = False
    is_cold: bool = True
    is_refused: bool = False  # by the draft
    timeline: list[tuple[float, int]] = field(default_factory=list)


class Simulated(Simulation):
    """One run. `committed(stream, from, to)` tells tokens by time."""

    def __init__(self, world: World, service: Service, seed: int) -> None:
        super().__init__(world.scenario, OFF_PLAN, seed)
        self.world, self.service = world, service
        self.texts = [*world.texts]
        self.streams = [Stream(OFF_PLAN, text) for text in self.texts]
        self.sessions = [Session(OnePlan(OFF_PLAN), 0) for _ in self.streams]
        self.plans: dict[Plan, int] = {}
        self._step_began_s = 0.0
        self._index = {id(stream): index for index, stream in enumerate(self.streams)}
        self._running: list[Stream] = []
        self._step: tuple[int, int, float] = (1, 1, 0.0)
        for stream, begin_s in zip(self.streams, world.begins_s):
            self._after(begin_s, partial(self._begin, stream))
        for at_s, name, value in world.changes:
            self._after(at_s, partial(self._change, {name: value}))
        self._ping()

    def run_until(self, end_s: float) -> None:
        """Runs to a time; it may go on to a later one."""
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()

    def rate(self, index: int, from_s: float, to_s: float) -> float:
        """Tokens per second of one stream between two times."""
        timeline = self.sessions[index].timeline
        first = next((count for time_s, count in timeline if time_s >= from_s), 0)
        last = next((count for time_s, count in reversed(timeline) if time_s <= to_s), 0)
        return (last - first) / (to_s - from_s)

    def _session(self, stream: Stream) -> Session:
        return self.sessions[self._index[id(stream)]]

    def _change(self, fields: dict[str, Any]) -> None:
        self.scenario = replace(self.scenario, **fields)

    def _ping(self) -> None:
        self.service.on_network(self.scenario.network_s)
        self._after(1.0, self._ping)

    def _begin(self, stream: Stream) -> None:
        session = self._session(stream)
        if stream not in self._running and not session.is_refused:
            self._running.append(stream)
        session.policy = self.service.policy(self._index[id(stream)])
        session.text_end = stream.committed_count + self.world.text_tokens
        session.rounds, session.verdict_s, session.is_cold, session.is_late = 0, self.now_s, True, False
        stream.plan = session.policy.plan(SPARE_TOKENS)
        self._verify(stream)
        self._hear(stream, stream.committed_count, stream.plan)

    def _verify(self, stream: Stream) -> None:
        plan, session = stream.plan, self._session(stream)
        in_hand = stream.path_length(self.now_s, max(1, plan.wait_length))
        if session.is_late and 0 < plan.wait_length <= in_hand:
            session.is_late = False
        if in_hand < plan.wait_length and not session.is_cold and not session.is_late:
            stream.waiting = True
            session.waiting_since_s = self.now_s
            index = stream.wait_index
            self._after(plan.wait_s, lambda: self._end_wait(stream, index))
        else:
            self._send(stream)

    def _end_wait(self, stream: Stream, index: int) -> None:
        if stream.waiting and stream.wait_index == index:
            self._session(stream).is_late = True
            self._send(stream)

    def _send(self, stream: Stream) -> None:
        session = self._session(stream)
        session.sent_s, session.sent_plan = self.now_s, stream.plan
        if session.waiting_since_s is not None:
            session.waited_s += self.now_s - session.waiting_since_s
            session.waiting_since_s = None
        super()._send(stream)

    def _queue(self, stream: Stream, offered_count: int) -> None:
        self._session(stream).queued_s = self.now_s
        super()._queue(stream, offered_count)

    def _target_step(self) -> None:
        batch, self.verified = self.verified, []
        self.target_is_busy = bool(batch)
        if batch:
            more_rows, more_s = self._load(batch)
            rows = sum(offered_count + 1 for _, offered_count in batch) + more_rows
            step_s = self.scenario.target_step_s(rows) * (self.world.contention if self.draft_is_busy else 1.0)
            step_s = self.draws.around(step_s, self.scenario.step_jitter) + more_s
            if self.draws.uniform() < PAUSE_SHARE:
                step_s *= PAUSE_FACTOR
            self._step, self._step_began_s = (rows, len(batch), step_s), self.now_s
            self._after(step_s, lambda: self._conclude(batch))

    def _load(self, batch: list[tuple[Stream, int]]) -> tuple[int, float]:
        """Further rows of a step and seconds beyond the usual time of its rows."""
        return 0, 0.0

    def _conclude(self, batch: list[tuple[Stream, int]]) -> None:
        rows, count, step_s = self._step
        active = count + len(self.verified)
        for stream, offered_count in batch:
            scale = self.world.acceptance_at(self.now_s)
            text = self.texts[self._index[id(stream)]]
            stream.acceptance = tuple(scale * share for share in text)
            ranks = self._outcomes(stream, offered_count)
            self._close_round(stream, offered_count, ranks, (rows, count, active, step_s))
        self._after(GATHER_S if active > 1 else 0.0, self._target_step)

    def _close_round(self, stream: Stream, offered: int, ranks: list[int], step: tuple[int, int, int, float]) -> None:
        """The verdict: commit, next verification by the plan in force, then the policy, as the coordinator does."""
        session = self._session(stream)
        rows, count, active, step_s = step
        times_s = session.verdict_s, self.now_s, session.waited_s, self.now_s - session.sent_s
        plan, round_index, queue_s = session.sent_plan, session.rounds, self._step_began_s - session.queued_s
        self.plans[plan] = self.plans.get(plan, 0) + 1
        session.rounds += 1
        session.verdict_s, session.waited_s = self.now_s, 0.0
        self._commit(stream, ranks)
        stream.path_length(self.now_s, SPARE_TOKENS)  # goes as far along the committed tokens as has arrived
        was_found = not stream.ahead
        was_looked_up = was_found or (len(stream.ahead) == 1 and stream.root.arrival_s <= self.now_s)
        kind = TokenKind.BONUS if len(ranks) > offered else TokenKind.RECOVERED
        tokens = RoundTokens(offered, len(ranks) - 1, len(ranks), kind)
        tree, times = TreeUse(was_looked_up, was_found), RoundTimes(*times_s)
        reported = TargetStep(queue_s, step_s, rows=rows, sessions=count, active_sessions=active)
        record = RoundRecord(round_index, plan, tokens, tree, times, reported, is_refused=session.is_refused)
        session.timeline.append((self.now_s, stream.committed_count))
        if stream.committed_count >= session.text_end:
            session.policy = self.service.policy(self._index[id(stream)])
            session.rounds, session.text_end = 0, stream.committed_count + self.world.text_tokens
        else:
            self.service.on_round(session.policy, record)
        stream.plan = session.policy.plan(SPARE_TOKENS)
        if stream.waiting and stream.path_length(self.now_s, SPARE_TOKENS) >= stream.plan.wait_length:
            self._send(stream)

    def _draft(self) -> None:
        """As the simulation's, for streams that have begun; a silent draft begins nothing."""
        factor = self.world.draft_factor(self.now_s)
        for stream in self._running:
            for committed_count, plan in stream.commits:
                stream.drafted_plan = plan
                stream.learn(committed_count, self._names)
            stream.commits.clear()
        if factor is None:
            self.draft_is_busy = False
            return
        chosen = [(stream, node) for stream in self._running for node in stream.nodes_to_run()]
        self.draft_is_busy = bool(chosen)
        if chosen:
            step_s = self.draws.around(self.scenario.draft_step_s(len(chosen)) * factor, self.scenario.step_jitter)
            self._after(step_s, lambda: self._step_ended(chosen, step_s))

    def _step_ended(self, chosen: list[tuple[Stream, Node]], step_s: float) -> None:
        self._after(self.scenario.network_s / 2, lambda: self._told_of_step([stream for stream, _ in chosen], step_s))
        self._drafted(chosen)

    def _told_of_step(self, streams: list[Stream], step_s: float) -> None:
        self.service.on_draft_step(len(streams), step_s)
        for stream in streams:
            self._session(stream).is_cold = False
        self.service.on_network(self.scenario.network_s)
