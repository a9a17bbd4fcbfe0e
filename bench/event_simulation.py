"""A simulation of every step of coordinator, draft and target: the rate of a plan in a scenario given by numbers.

An event simulation with explicit trees: the draft grows best-first, coordinator and draft learn of each other half a
round trip late, the target takes whatever is in hand. It shares no code with the policy, whose formulas are fitted to
it, and knows no models: tokens are ranks among the draft's candidates, drawn when they are decided.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from specdec.protocol.plan import Plan

LIKELIHOOD_MIN = 0.003  # a tree with branches leaves rarer paths alone, as the draft service does
STRATUM = 1000  # draws between which frequencies are exact: random order, without the noise of independent draws
OUTSIDE = -1  # the committed token was none of the draft's candidates


@dataclass(frozen=True, slots=True)
class Scenario:
    """The world a plan runs in. Times in seconds.

    `acceptance`: by position in the round, the last entry for all later ones. `branch_probabilities`: that the second,
    third, ... candidate is right where the first is wrong. `bonus_match`: that the first is right where it was not
    offered; None: as the acceptance (GREEDY and COUPLED; an independent draw under REJECTION agrees less).
    `step_jitter`: every step varies evenly by up to this share, so that no result hangs on steps that happen to fit
    into each other without remainder.
    """

    target_step_s: Callable[[int], float]
    draft_step_s: Callable[[int], float]
    network_s: float
    acceptance: tuple[float, ...]
    branch_probabilities: tuple[float, ...] = (0.45, 0.15)
    bonus_match: float | None = None
    round_overhead_s: float = 0.0
    session_count: int = 1
    step_jitter: float = 0.1


@dataclass(slots=True, eq=False)
class Node:
    """One token at one place. `cost`: minus log of its likelihood since the tree began. `children`, once the draft
    evaluated it, the likeliest first, which is the proposal child; at the coordinator from `arrival_s` on."""

    length: int
    cost: float
    children: tuple[Node, ...] = ()
    arrival_s: float = 0.0
    alive: bool = True

    def kill(self) -> None:
        """Drops this node and all below it."""
        self.alive = False
        for child in self.children:
            child.kill()


class Draws:
    """Uniform numbers in random order whose frequencies are exact over every stratum."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._left: list[float] = []

    def uniform(self) -> float:
        if not self._left:
            self._left = [(i + self._random.random()) / STRATUM for i in range(STRATUM)]
            self._random.shuffle(self._left)
        return self._left.pop()

    def around(self, seconds: float, jitter: float) -> float:
        return seconds * (1 + jitter * (2 * self._random.random() - 1))


@dataclass(slots=True, eq=False)
class Stream:
    """One session as all three see it. `root` is the coordinator's; `ahead` are committed candidates below it whose
    nodes are not there yet. `draft_root`, `frontier` and `beyond_window` are the draft's; `drafted_plan` is the plan
    it last received."""

    plan: Plan
    acceptance: tuple[float, ...]
    committed_count: int = 0
    root: Node = field(default_factory=lambda: Node(0, 0.0))
    ahead: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    draft_root: Node = field(init=False)
    frontier: list[tuple[float, int, Node]] = field(default_factory=list)
    beyond_window: list[tuple[float, int, Node]] = field(default_factory=list)
    commits: list[tuple[int, Plan]] = field(default_factory=list)
    drafted_plan: Plan = field(init=False)
    wait_index: int = 0
    waiting: bool = False

    def __post_init__(self) -> None:
        self.draft_root, self.drafted_plan = self.root, self.plan
        self.frontier.append((0.0, 0, self.root))

    def hazard(self, place: int) -> float:
        """The acceptance of the `place`-th offered token of this stream's text, from 0."""
        return self.acceptance[min(place, len(self.acceptance) - 1)]

    def path_length(self, now_s: float, length_max: int) -> int:
        """The number of draft tokens in hand, at most `length_max`."""
        while self.ahead and self.root.arrival_s <= now_s and 0 <= self.ahead[0] < len(self.root.children):
            self.root = self.root.children[self.ahead.pop(0)]
        if self.ahead:
            return 0
        count, node = 0, self.root
        while count < length_max and node.children and node.arrival_s <= now_s:
            count, node = count + 1, node.children[0]
        return count

    def learn(self, committed_count: int, names: Iterator[int]) -> None:
        """The draft receives a commit: it re-roots inside its tree, or restarts if the tokens left the tree."""
        while self.draft_root.length < committed_count:
            rank, children = self.ranks[self.draft_root.length], self.draft_root.children
            if not 0 <= rank < len(children):
                self._restart(committed_count, names)
                return
            for index, child in enumerate(children):
                if index != rank:
                    child.kill()
            self.draft_root.alive = False
            self.draft_root = children[rank]
        for entry in self.beyond_window:
            heapq.heappush(self.frontier, entry)
        self.beyond_window.clear()

    def _restart(self, committed_count: int, names: Iterator[int]) -> None:
        self.draft_root.kill()
        self.draft_root = self.root = Node(committed_count, 0.0)
        self.ahead = self.ranks[committed_count:]
        self.frontier = [(0.0, next(names), self.root)]
        self.beyond_window.clear()

    def nodes_to_run(self) -> list[Node]:
        """The likeliest nodes that are not evaluated yet, within the window."""
        plan = self.drafted_plan
        chosen: list[Node] = []
        root = self.draft_root
        cost_max = -math.log(LIKELIHOOD_MIN) if plan.nodes_per_step > 1 else math.inf
        while self.frontier and len(chosen) < plan.nodes_per_step:
            entry = heapq.heappop(self.frontier)
            node = entry[2]
            if not node.alive:
                continue
            if node.length - root.length >= plan.window or node.cost - root.cost > cost_max:
                self.beyond_window.append(entry)
            else:
                chosen.append(node)
        return chosen


class Simulation:
    """All events of one run, in order of time; every stream begins with the same plan."""

    def __init__(self, scenario: Scenario, plan: Plan, seed: int) -> None:
        self.scenario = scenario
        self.draws = Draws(seed)
        self.now_s = 0.0
        self.verified: list[tuple[Stream, int]] = []
        self.target_is_busy = self.draft_is_busy = False
        self.streams = [Stream(plan, scenario.acceptance) for _ in range(scenario.session_count)]
        self._names = itertools.count(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        first = scenario.acceptance[0]
        rest = [(1 - first) * probability for probability in scenario.branch_probabilities if probability]
        self._all_costs = [-math.log(share) for share in (first, *rest)]
        self.evaluated_count = self.round_count = 0

    def _costs(self, stream: Stream) -> list[float]:  # of a node's children: a chain has no branches
        return self._all_costs[: 1 if stream.drafted_plan.nodes_per_step == 1 else None]

    def run(self, token_count: int) -> float:
        """Tokens per second of one stream, over about `token_count` tokens of each."""
        for stream in self.streams:
            self._verify(stream)
        self._draft()
        needed = token_count * len(self.streams)
        while sum(stream.committed_count for stream in self.streams) < needed:
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()
        return sum(stream.committed_count for stream in self.streams) / len(self.streams) / self.now_s

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._names), happen))

    def _verify(self, stream: Stream) -> None:
        """Requests the next verification, or holds it until enough tokens are in hand."""
        plan = stream.plan
        if plan.wait_length and stream.path_length(self.now_s, plan.wait_length) < plan.wait_length:
            stream.waiting = True
            index = stream.wait_index
            self._after(plan.wait_s, lambda: self._end_wait(stream, index))
        else:
            self._send(stream)

    def _end_wait(self, stream: Stream, index: int) -> None:
        if stream.waiting and stream.wait_index == index:
            self._send(stream)

    def _send(self, stream: Stream) -> None:
        stream.waiting = False
        stream.wait_index += 1
        offered_count = stream.path_length(self.now_s, stream.plan.draft_length_max)
        self._after(self.scenario.round_overhead_s, lambda: self._queue(stream, offered_count))

    def _queue(self, stream: Stream, offered_count: int) -> None:
        self.verified.append((stream, offered_count))
        if not self.target_is_busy:
            self.target_is_busy = True
            self._after(0.0, self._target_step)

    def _target_step(self) -> None:
        """One step for all that is queued."""
        batch, self.verified = self.verified, []
        self.target_is_busy = bool(batch)
        if batch:
            step_s = self.scenario.target_step_s(sum(offered_count + 1 for _, offered_count in batch))
            self._after(self.draws.around(step_s, self.scenario.step_jitter), lambda: self._conclude(batch))

    def _conclude(self, batch: list[tuple[Stream, int]]) -> None:
        for stream, offered_count in batch:
            self._commit(stream, self._outcomes(stream, offered_count))
        self._after(0.0, self._target_step)

    def _outcomes(self, stream: Stream, offered_count: int) -> list[int]:
        """Returns the rank of each token of the round among its candidates: accepted ones, then the next token."""
        ranks: list[int] = []
        scenario = self.scenario
        while len(ranks) < offered_count and self.draws.uniform() < stream.hazard(len(ranks)):
            ranks.append(0)
        if len(ranks) == offered_count:
            match = stream.hazard(offered_count) if scenario.bonus_match is None else scenario.bonus_match
            if self.draws.uniform() < match:
                return [*ranks, 0]
        choice = self.draws.uniform()
        for rank, probability in enumerate(scenario.branch_probabilities[: len(self._costs(stream)) - 1], 1):
            choice -= probability
            if choice < 0:
                return [*ranks, rank]
        return [*ranks, OUTSIDE]

    def _commit(self, stream: Stream, ranks: list[int]) -> None:
        self.round_count += 1
        stream.ranks += ranks
        stream.ahead += ranks
        stream.committed_count += len(ranks)
        self._verify(stream)
        commit = stream.committed_count, stream.plan
        self._after(self.scenario.network_s / 2, lambda: self._hear(stream, *commit))

    def _hear(self, stream: Stream, committed_count: int, plan: Plan) -> None:
        stream.commits.append((committed_count, plan))
        if not self.draft_is_busy:
            self._draft()

    def _draft(self) -> None:
        """Runs one draft step for all streams: first the commits received meanwhile, then their likeliest nodes."""
        for stream in self.streams:
            for committed_count, plan in stream.commits:
                stream.drafted_plan = plan
                stream.learn(committed_count, self._names)
            stream.commits.clear()
        chosen = [(stream, node) for stream in self.streams for node in stream.nodes_to_run()]
        self.draft_is_busy = bool(chosen)
        if chosen:
            self.evaluated_count += len(chosen)
            step_s = self.scenario.draft_step_s(len(chosen))
            self._after(self.draws.around(step_s, self.scenario.step_jitter), lambda: self._drafted(chosen))

    def _drafted(self, chosen: list[tuple[Stream, Node]]) -> None:
        """The candidates below the evaluated nodes exist; half a round trip later the coordinator has them."""
        arrival_s = self.now_s + self.scenario.network_s / 2
        for stream, node in chosen:
            node.arrival_s = arrival_s
            node.children = tuple(Node(node.length + 1, node.cost + cost) for cost in self._costs(stream))
            for child in node.children:
                heapq.heappush(stream.frontier, (child.cost, next(self._names), child))
        if any(stream.waiting or stream.plan.wait_length for stream, _ in chosen):
            self._after(self.scenario.network_s / 2, self._arrive)
        self._draft()

    def _arrive(self) -> None:
        """Nodes arrived: streams that waited for them may continue."""
        for stream in self.streams:
            wait_length = stream.plan.wait_length
            if stream.waiting and stream.path_length(self.now_s, wait_length) >= wait_length:
                self._send(stream)


def simulate(scenario: Scenario, plan: Plan, token_count: int, seed: int = 0) -> float:
    """Tokens per second of one stream under a plan, the same for the same seed."""
    return Simulation(scenario, plan, seed).run(token_count)
