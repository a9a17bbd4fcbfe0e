"""A simulated service on a clock of its own: every step of draft and target, and a coordinator's sessions between them,
each with its policy.

Tokens are ranks among the draft's candidates, drawn when the target decides them; a path in a draft's tree is a string
of ranks. The draft grows its trees best-first, coordinator and draft learn of each other half a round trip late, the
target takes whatever is queued. A policy sees what a coordinator sees: records of rounds, steps of the draft, the
network time. Siblings of draft tokens are not verified, and there are no proposers but the draft.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from specdec.protocol.plan import OFF_PLAN, Plan
from specdec.protocol.policy import Policy
from specdec.protocol.records import RoundRecord, RoundTimes, RoundTokens, TargetStep, TreeUse
from specdec.protocol.types import TokenKind

LIKELIHOOD_MIN = 0.003  # a tree with branches leaves rarer paths alone, as the draft service does
STRATUM = 1000  # draws between which frequencies are exact: random order, without the noise of independent draws
OUTSIDE = "x"  # the committed token was none of the draft's candidates
SPARE_TOKENS = 1_000_000
PAUSE_FACTOR = 5.0  # length of a step that pauses
PING_S = 1.0
WAIT_S = 0.5  # of fixed plans that wait


@dataclass(frozen=True, slots=True)
class Text:
    """What a request generates. `acceptance`: by place in the round, the last for all later ones. `prompt_rows`,
    `prompt_s`: what its prompt adds to its first step; `row_s`: what each of its rows adds. `is_refused`: by the draft.
    `is_repeated`: the stream goes on with another such text. `life_s`: after which it is cancelled."""

    acceptance: tuple[float, ...]
    token_count: float = 400
    prompt_rows: int = 0
    prompt_s: float = 0.0
    row_s: float = 0.0
    is_refused: bool = False
    is_repeated: bool = True
    life_s: float = math.inf


@dataclass(frozen=True, slots=True)
class World:
    """What a service runs on, and what happens there; times in seconds.

    Each stream generates its text from its `begins_s` on. `first_probability`: what the draft thinks of its first
    candidate; `branches`: that the second, third, ... is right where the first is wrong. `bonus_match`: that the first
    is right where it was not offered; None: as the acceptance. `acceptance_factor`: of all texts. `draft_factor`: of
    its steps; None: it is silent. `contention`: of the target's steps beside a draft at work. `gather_s`: for which the
    target holds a step for sessions answered just now. `head_pass_s`: of a pass of the target's feature head by rows,
    which drafts in the draft's place, chains only. `jitter`: every step varies evenly by up to this share;
    `pause_share`: of the target's steps pause. `changes`: (time, new values by field).
    """

    target_step_s: Callable[[int], float]
    draft_step_s: Callable[[int], float]
    network_s: float
    texts: tuple[Text, ...]
    begins_s: tuple[float, ...] = (0.0,)
    first_probability: float = 0.7
    branches: tuple[float, ...] = (0.4, 0.13)
    bonus_match: float | None = None
    overhead_s: float = 0.0
    acceptance_factor: float = 1.0
    draft_factor: float | None = 1.0
    contention: float = 1.0
    gather_s: float = 0.0
    head_pass_s: Callable[[int], float] | None = None
    jitter: float = 0.1
    pause_share: float = 0.0
    changes: tuple[tuple[float, dict[str, Any]], ...] = ()


class FixedService:
    """A coordinator without sessions whose streams all run one plan; it is their policy, too, and learns nothing."""

    def __init__(self, plan: Plan = OFF_PLAN) -> None:
        self._plan = plan

    def policy(self, stream_index: int) -> Policy | FixedService:
        """The policy of a new text."""
        return self

    def on_draft(self, network_s: float, node_count: int = 0, session_count: int = 0, step_s: float = 0.0) -> None:
        """A message of the draft came: of a step, or without nodes a ping."""

    def plan(self, positions_left: int) -> Plan:
        """As a policy's."""
        return self._plan

    def on_round(self, record: RoundRecord) -> None:
        """As a policy's."""


def uniforms(rng: random.Random) -> Iterator[float]:
    """Uniform numbers in random order whose frequencies are exact over every stratum."""
    while True:
        stratum = [(index + rng.random()) / STRATUM for index in range(STRATUM)]
        rng.shuffle(stratum)
        yield from stratum


@functools.cache
def likeliest(shares: tuple[float, ...], window: int) -> list[tuple[str, str]]:
    """Returns the paths of a tree whose candidates have these shares, each with that before it, the likeliest first."""
    cost_max = -math.log(LIKELIHOOD_MIN) if len(shares) > 1 else math.inf
    found, costs, paths = [], [-math.log(share) for share in shares], [(0.0, "")]
    while paths:
        cost, path = heapq.heappop(paths)
        found.append((path, path[:-1]))
        if len(path) + 1 < window:
            for rank, own in enumerate(costs):
                if cost + own <= cost_max:
                    heapq.heappush(paths, (cost + own, f"{path}{rank}"))
    return found


class Stream:
    """One session after another. `ranks`: of all committed tokens. `tree`: when each evaluated path of the draft is at
    the coordinator; it begins after `root` tokens, where the draft knows them; `is_grown`: nothing is left to evaluate.
    `is_cold`: nothing came from the draft yet. `asked`: the plan of the verification under way, `head_count`: tokens
    that the head drafted in the one before. `pause_count`: of `session`, the coordinator's side."""

    def __init__(self, index: int, text: Text) -> None:
        self.index, self.text, self.ranks, self.timeline = index, text, "", [(0.0, 0)]
        self.root, self.drafted_plan, self.is_grown = 0, OFF_PLAN, False
        self.tree: dict[str, float] = {}
        self.commits: list[tuple[int, Plan]] = []
        self.asked, self.head_count = OFF_PLAN, 0
        self.session: Generator[float, TargetStep | None, None]
        self.is_over, self.is_cold, self.is_waiting, self.pause_count = False, True, False, 0

    def in_hand(self, now_s: float, most: int) -> int:
        """The number of draft tokens in hand, at most `most`."""
        path, count = self.ranks[self.root :], 0
        while count < most and self.tree.get(path, math.inf) <= now_s:
            path, count = path + "0", count + 1
        return count

    def shares(self, world: World) -> tuple[float, ...]:
        """The shares of the draft's candidates; a chain has no branches."""
        first, is_chain = world.first_probability, self.drafted_plan.nodes_per_step == 1
        return (first, *((1 - first) * share for share in world.branches if share and not is_chain))

    def paths_to_run(self, world: World) -> list[str]:
        """The draft takes what was committed, and finds the likeliest paths that are not evaluated yet."""
        for count, plan in self.commits:
            self.drafted_plan, self.is_grown = plan, False
            if moved := self.ranks[self.root : count]:
                self.root = count
                self.tree = {path[len(moved) :]: at_s for path, at_s in self.tree.items() if path.startswith(moved)}
        self.commits.clear()
        plan, tree = self.drafted_plan, self.tree
        if world.draft_factor is None or not plan.window or self.is_grown:
            return []
        paths = likeliest(self.shares(world), plan.window)
        ready = (path for path, before in paths if path not in tree and (before in tree or not path))
        found = [*itertools.islice(ready, plan.nodes_per_step)]
        self.is_grown = not found
        return found


class Simulation:
    """One run: all events in order of time."""

    def __init__(self, world: World, service: FixedService, seed: int = 0) -> None:
        self.world, self.service, self.now_s = world, service, 0.0
        self.streams = [Stream(index, text) for index, text in enumerate(world.texts)]
        self._rng, self._names = random.Random(seed), itertools.count()
        self._uniforms = uniforms(self._rng)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._running: list[Stream] = []
        self._queued: list[tuple[Stream, int, float]] = []
        self._is_target_busy = self._is_draft_busy = False
        for stream, begin_s in zip(self.streams, world.begins_s, strict=True):
            self._after(begin_s, self._begin, stream)
        for at_s, values in world.changes:
            self._after(at_s, self._change, values)
        self._ping()

    def run_until(self, end_s: float) -> None:
        """Runs to a time; it may go on to a later one."""
        while self._events[0][0] <= end_s:
            self.now_s, _, happen, arguments = heapq.heappop(self._events)
            happen(*arguments)

    def rate(self, index: int, from_s: float, to_s: float) -> float:
        """Tokens per second of one stream between two times."""
        counts = [count for time_s, count in self.streams[index].timeline if from_s <= time_s <= to_s]
        return (counts[-1] - counts[0]) / (to_s - from_s) if counts else 0.0

    def _after(self, seconds: float, happen: Callable[..., None], *arguments: Any) -> None:
        if seconds < math.inf:
            heapq.heappush(self._events, (self.now_s + seconds, next(self._names), happen, arguments))

    def _change(self, values: dict[str, Any]) -> None:
        self.world = replace(self.world, **values)

    def _begin(self, stream: Stream) -> None:
        self._running.append(stream)
        self._after(stream.text.life_s, self._end, stream)
        stream.session = self._session(stream)
        self._resume(stream, None, 0)

    def _end(self, stream: Stream) -> None:
        stream.is_over = True
        self._running = [own for own in self._running if own is not stream]
        self._queued = [entry for entry in self._queued if entry[0] is not stream]

    def _resume(self, stream: Stream, step: TargetStep | None, pause_count: int) -> None:
        """Runs a session to its next pause, unless it has ended or gone on before."""
        if not stream.is_over and stream.pause_count == pause_count:
            stream.pause_count += 1
            pause_s = stream.session.send(step)
            self._after(pause_s, self._resume, stream, None, stream.pause_count)

    def _varied(self, step_s: float) -> float:
        return step_s * (1 + self.world.jitter * (2 * self._rng.random() - 1))

    def _ping(self) -> None:
        self.service.on_draft(self.world.network_s)
        self._after(PING_S, self._ping)

    def _session(self, stream: Stream) -> Generator[float, TargetStep | None, None]:
        """The coordinator's side of a stream, which pauses for some seconds or until it is resumed with a step. After a
        verdict it commits, sends the next verification by the plan in force, then asks the policy, as a coordinator
        does."""
        text, record, round_index, text_end = stream.text, None, 0, stream.text.token_count
        policy = self.service.policy(stream.index)
        plan, is_late, verdict_s = policy.plan(SPARE_TOKENS), False, self.now_s
        while True:
            if self.world.head_pass_s is None:
                self._after(self.world.network_s / 2, self._commit, stream, (len(stream.ranks), plan))
            in_hand, wait_end_s = stream.in_hand(self.now_s, SPARE_TOKENS), self.now_s + plan.wait_s
            in_hand += stream.head_count
            is_late &= not 0 < plan.wait_length <= in_hand
            is_ready = in_hand >= plan.wait_length or stream.is_cold or is_late
            sent_plan, offered_count = plan, min(in_hand, plan.draft_length_max)
            if record is not None:
                policy.on_round(record)
            plan = policy.plan(SPARE_TOKENS)
            if not is_ready:
                stream.is_waiting = True
                while (
                    is_late := stream.in_hand(self.now_s, plan.wait_length) < plan.wait_length
                ) and self.now_s < wait_end_s:
                    yield wait_end_s - self.now_s
                stream.is_waiting = False
                sent_plan, offered_count = plan, stream.in_hand(self.now_s, plan.draft_length_max)
            sent_s, is_first = self.now_s, round_index == 0
            yield self.world.overhead_s
            queued_s, rows, stream.asked = self.now_s, offered_count + 1, sent_plan
            self._queue(stream, rows + is_first * text.prompt_rows, rows * text.row_s + is_first * text.prompt_s)
            step = yield math.inf
            assert step is not None, "nothing else resumes it"
            ranks = self._outcomes(text.acceptance, offered_count)
            stream.ranks += ranks
            stream.timeline.append((self.now_s, len(stream.ranks)))
            was_looked_up = stream.tree.get(stream.ranks[stream.root : -1], math.inf) <= self.now_s
            was_found = was_looked_up and ranks[-1] in "012"[: len(stream.shares(self.world))]
            kind = TokenKind.BONUS if len(ranks) == rows else TokenKind.RECOVERED
            record = RoundRecord(
                round_index,
                sent_plan,
                RoundTokens(offered_count, len(ranks) - 1, len(ranks), kind),
                TreeUse(was_looked_up, was_found),
                RoundTimes(verdict_s, self.now_s, sent_s - verdict_s, self.now_s - sent_s),
                step._replace(queue_s=self.now_s - step.forward_s - step.head_s - queued_s),
                is_refused=text.is_refused,
            )
            verdict_s, round_index = self.now_s, round_index + 1
            if len(stream.ranks) >= text_end:
                if not text.is_repeated:
                    self._end(stream)
                    yield math.inf
                policy, record, round_index = self.service.policy(stream.index), None, 0
                text_end = len(stream.ranks) + text.token_count

    def _queue(self, stream: Stream, rows: int, more_s: float) -> None:
        self._queued.append((stream, rows, more_s))
        if not self._is_target_busy:
            self._is_target_busy = True
            self._after(0.0, self._target_step)

    def _target_step(self) -> None:
        """One step for all that is queued."""
        batch, self._queued, world = self._queued, [], self.world
        self._is_target_busy = bool(batch)
        if batch:
            rows = sum(rows for _, rows, _ in batch)
            step_s = self._varied(world.target_step_s(rows) * (world.contention if self._is_draft_busy else 1.0))
            step_s += sum(more_s for _, _, more_s in batch)
            step_s *= PAUSE_FACTOR if world.pause_share > next(self._uniforms) else 1.0
            streams = [stream for stream, _, _ in batch]
            head_s = self._head_s([own.asked for own in streams if own.asked.window])
            self._after(step_s + head_s, self._conclude, streams, rows, step_s, head_s)

    def _head_s(self, plans: list[Plan]) -> float:
        """Seconds of the head behind a step, whose sessions share its passes."""
        if self.world.head_pass_s is None or not plans:
            return 0.0
        pass_s = self.world.head_pass_s(sum(plan.nodes_per_step for plan in plans))
        return self._varied(pass_s * max(plan.of_head(SPARE_TOKENS).window for plan in plans))

    def _conclude(self, streams: list[Stream], rows: int, step_s: float, head_s: float) -> None:
        active = len(streams) + len(self._queued)
        for stream in streams:
            step = TargetStep(0.0, step_s, rows=rows, sessions=len(streams), active_sessions=active, head_s=head_s)
            stream.head_count = stream.asked.of_head(SPARE_TOKENS).window if self.world.head_pass_s else 0
            self._resume(stream, step, stream.pause_count)
        self._after(self.world.gather_s if active > 1 else 0.0, self._target_step)

    def _outcomes(self, acceptance: tuple[float, ...], offered_count: int) -> str:
        """Returns the rank of each token of the round among its candidates: accepted ones, then the next token."""
        world = self.world
        for place in range(offered_count + 1):
            share = world.acceptance_factor * acceptance[min(place, len(acceptance) - 1)]
            if place == offered_count and world.bonus_match is not None:
                share = world.bonus_match
            if next(self._uniforms) >= share:
                choice = next(self._uniforms)
                ranks = (str(rank) for rank, end in enumerate(itertools.accumulate(world.branches), 1) if choice < end)
                return "0" * place + next(ranks, OUTSIDE)
        return "0" * (offered_count + 1)

    def _commit(self, stream: Stream, commit: tuple[int, Plan]) -> None:
        stream.commits.append(commit)
        if not self._is_draft_busy:
            self._draft_step()

    def _draft_step(self) -> None:
        """One step for the likeliest paths of all streams."""
        runs = [(stream, stream.paths_to_run(self.world)) for stream in self._running if not stream.text.is_refused]
        node_count = sum(len(paths) for _, paths in runs)
        self._is_draft_busy = node_count > 0
        if node_count:
            step_s = self._varied(self.world.draft_step_s(node_count) * (self.world.draft_factor or 1.0))
            self._after(step_s, self._end_draft_step, runs, node_count, step_s)

    def _end_draft_step(self, runs: list[tuple[Stream, list[str]]], node_count: int, step_s: float) -> None:
        """The candidates below the evaluated paths exist; half a round trip later the coordinator has them."""
        for stream, paths in runs:
            stream.tree |= dict.fromkeys(paths, self.now_s + self.world.network_s / 2)
        self._after(self.world.network_s / 2, self._receive, runs, node_count, step_s)
        self._draft_step()

    def _receive(self, runs: list[tuple[Stream, list[str]]], node_count: int, step_s: float) -> None:
        """Nodes arrive at the coordinator: streams that waited for them go on."""
        self.service.on_draft(self.world.network_s, node_count, len(runs), step_s)
        for stream, paths in runs:
            stream.is_cold &= not paths
            if stream.is_waiting:
                self._resume(stream, None, stream.pause_count)


CHAINS = [(length, length + 1, 1, length) for length in (1, 2, 4, 8)]
STREAMED = [(8, 8), (2, 6, 4), (4, 12, 4), (16, 16, 8), (16, 32, 8)]
OF_HEAD = [(length, length) for length in (1, 2, 3, 4, 5, 7)]
WAITING = [(3, 8, 4, 1), (6, 16, 8, 2), (16, 32, 4, 2), (16, 32, 8, 3)]


def best_plan(rate: Callable[[Plan], float], is_head: bool = False) -> tuple[float, Plan]:
    """Returns the plan with the highest rate, of plain decoding, chains and trees that wait, and streamed ones; or of
    plain decoding and chains of a feature head."""
    plans = [Plan(*shape) for shape in STREAMED] + [Plan(*shape, WAIT_S) for shape in CHAINS + WAITING]
    plans = [OFF_PLAN, *([Plan(*shape) for shape in OF_HEAD] if is_head else plans)]
    return max(((rate(plan), plan) for plan in plans), key=lambda found: found[0])


def rate_of(world: World, plan: Plan, token_count: int, seed: int = 0) -> float:
    """Tokens per second of a world's first stream under one plan, over its first tokens."""
    run = Simulation(world, FixedService(plan), seed)
    while len(run.streams[0].ranks) < token_count:
        run.run_until(run.now_s + 1.0)
    return len(run.streams[0].ranks) / run.now_s
