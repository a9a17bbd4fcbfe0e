"""What a plan is worth: tokens per second of one session, from an explicit model of the pipeline. Pure.

With a target step T(rows), a round's overhead o, a draft step d(leaves), a round trip r and an acceptance a, plain
decoding gives 1 / (T(1) + o), and rounds that wait for their g draft tokens (1 + a + ... + a^g) / (T + o + g d + r).
For a draft that runs ahead and a target that does not wait there is no such formula, and the model is this:

1. A *stretch* begins with a commit that left what the draft was at. Until the first wrong guess shows, everything is
   determined: token k arrives at r + k d, or later where the window holds the draft back; each verification carries
   what is in hand, at most the cap; m of m passing commits m + 1, because a bonus token that is the draft's own guess
   goes on with the same path. So one run of the timeline (stretch.py) gives for every index N of the first wrong
   guess when its round ends: t(N). With the survival s(N) = a_1 ... a_N the means of a stretch are

       tokens = sum N (s(N-1) - s(N))        seconds = sum t(N) (s(N-1) - s(N))

2. After the wrong guess the target's own token stands in the tree as a branch with probability h_b, and the next
   stretch begins with what the draft has below it: tokens in hand, tokens under way. Best-first growth evaluates a
   branch when its cost is reached, minus log of its likelihood (pipeline.py); the level of growth rises with each step
   and falls by the cost of what is committed. Otherwise the next stretch begins with nothing.

3. So stretches form a Markov chain over how they begin. Beginnings are put into groups by what is in hand and under
   way, each group is run once, at its mean, and with pi the share of each group

       rate = sum pi_i tokens_i / sum pi_i seconds_i

Several sessions that share steps: rows and leaves of a step are those of all. It agrees with an event simulation
(bench/event_simulation.py), which shares no code with it, within 5 % (tests/protocol/test_cost_model.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from specdec.policy.plan import Plan
from specdec.protocol.growth import LIKELIHOOD_MIN
from specdec.protocol.pipeline import Landing, NodeCounts, Pipeline
from specdec.protocol.stretch import Stretch

GROUP_SHARE_MIN = 0.02  # rarer beginnings are left out
CYCLE_COUNT = 4  # stretches until the shares of groups have settled: one in three or more begins with nothing
STEP_SPREAD = 0.05  # steps vary; a beginning with nothing is run at both ends of this, so that no cliff is missed
PROBABILITY_MIN, PROBABILITY_MAX = 0.02, 0.98  # beyond, costs of nodes say nothing any more
NODE_COUNTS_KEPT = 256  # tables; one for each acceptance that predictions are made for
PREDICTIONS_KEPT = 8192  # some megabytes; conditions are quantised, so that sessions of a service share them

NOTHING_IDLE, NOTHING_BUSY = ("nothing", 0), ("nothing", 1)


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a function of a count: straight between points of ascending counts, and on with the last slope."""

    points: tuple[tuple[float, float], ...]

    def __call__(self, count: float) -> float:
        points = self.points
        if len(points) == 1 or count <= points[0][0]:
            return points[0][1]
        index = min(bisect_right(points, (count, math.inf)), len(points) - 1)
        (left, left_s), (right, right_s) = points[index - 1], points[index]
        return left_s + (right_s - left_s) * (count - left) / (right - left)


@dataclass(frozen=True, slots=True)
class Conditions:
    """All a prediction depends on, beside the plan. Times in seconds.

    `target_step_s`: of a target step, by its rows; `draft_step_s`: of a draft step, by the nodes it evaluates.
    `network_s`: the round trip between coordinator and draft. `round_overhead_s`: of a round, beside the target's step.
    `acceptance`: of the offered tokens by their place in the round, the last entry for all later ones.
    `branch_probabilities`: that the second, third, ... candidate is right where the first was wrong. `bonus_match`:
    that a guess for the token after the last offered one is right; None: as if it were offered.
    `session_count`: sessions that share each step.
    """

    target_step_s: Curve
    draft_step_s: Curve
    network_s: float
    round_overhead_s: float
    acceptance: tuple[float, ...]
    branch_probabilities: tuple[float, ...]
    bonus_match: float | None = None
    session_count: float = 1.0


def plain_rate(conditions: Conditions) -> float:
    """Tokens per second of one session without a draft."""
    return 1 / (conditions.target_step_s(conditions.session_count) + conditions.round_overhead_s)


@lru_cache(maxsize=PREDICTIONS_KEPT)
def predict(conditions: Conditions, plan: Plan) -> float:
    """Tokens per second of one session under a plan. Deterministic; well below a millisecond for a chain, a few for
    the largest trees over the longest round trips."""
    if plan.draft_length_max == 0 or plan.window == 0:
        return plain_rate(conditions)
    return _Beginnings(_pipeline(conditions, plan)).rate()


def _pipeline(conditions: Conditions, plan: Plan) -> Pipeline:
    count, leaves = conditions.session_count, plan.leaves
    acceptance = conditions.acceptance
    first = min(max(sum(acceptance) / len(acceptance), PROBABILITY_MIN), PROBABILITY_MAX)
    shares = [share for share in conditions.branch_probabilities if share > 0] if leaves > 1 else []
    branches = tuple((-math.log((1 - first) * share), share) for share in shares)
    chain_cost = -math.log(first)
    lengths = range(plan.draft_length_max + 1)
    return Pipeline(
        round_s=tuple(conditions.target_step_s(count * (m + 1)) + conditions.round_overhead_s for m in lengths),
        first_step_s=conditions.draft_step_s(count),
        second_step_s=conditions.draft_step_s(count * min(leaves, 1 + len(shares))),
        draft_step_s=conditions.draft_step_s(count * leaves),
        leaves=leaves,
        half_network_s=conditions.network_s / 2,
        acceptance=tuple(acceptance[min(m, len(acceptance) - 1)] for m in lengths),
        bonus_match=conditions.bonus_match,
        chain_cost=chain_cost,
        branches=branches,
        node_counts=_node_counts((chain_cost, *(cost for cost, _ in branches))),
        window=plan.window,
        wait_length=min(plan.wait_length, plan.draft_length_max),
        wait_s=plan.wait_s,
    )


@lru_cache(maxsize=NODE_COUNTS_KEPT)
def _node_counts(costs: tuple[float, ...]) -> NodeCounts:
    return NodeCounts(costs, -math.log(LIKELIHOOD_MIN))


def _size(count: float) -> int:
    """The group of a count: 0, 1, 2 to 3, 4 to 7, 8 and more; each is run at its mean."""
    return int(count + 0.5).bit_length() if count < 7.5 else 4


class _Group:
    """Beginnings that are alike: the sums of what they have in hand and under way, by their probability."""

    __slots__ = ("sums", "is_sparse")

    def __init__(self, is_sparse: bool) -> None:
        self.sums = [0.0] * 6
        self.is_sparse = is_sparse

    def add(self, probability: float, landing: Landing) -> None:
        """Adds one beginning."""
        sums = self.sums
        in_hand, evaluated, steps, level, ahead, _ = landing
        sums[0] += probability
        sums[1] += probability * in_hand
        sums[2] += probability * evaluated
        sums[3] += probability * steps
        sums[4] += probability * level
        sums[5] += probability * ahead

    def merge(self, share: float, other: _Group) -> None:
        """Adds another group's beginnings, which are found with probability `share`."""
        for index, value in enumerate(other.sums):
            self.sums[index] += share * value

    def mean(self) -> Landing:
        """The beginning that stands for all of them."""
        probability, in_hand, evaluated, steps, level, ahead = self.sums
        values = in_hand / probability, evaluated / probability, steps / probability
        return Landing(*values, level / probability, ahead / probability, self.is_sparse)


@dataclass(slots=True)
class _Outcome:
    """Means of the stretches of one group, and how the next ones begin."""

    tokens: float
    seconds: float
    shares: dict[tuple, float]
    groups: dict[tuple, _Group]


class _Beginnings:
    """The Markov chain over beginnings of stretches."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._trip_steps = 2 * pipeline.half_network_s / pipeline.draft_step_s
        self._steps_apart = max(1.0, pipeline.round_s[0] / 2 / pipeline.draft_step_s)
        self._groups: dict[tuple, _Group] = {}
        self._outcomes: dict[tuple, _Outcome] = {}

    def rate(self) -> float:
        """Tokens per second, once shares have settled."""
        shares = {NOTHING_BUSY: 1.0}
        tokens = seconds = 0.0
        for _ in range(CYCLE_COUNT):
            tokens = seconds = 0.0
            following: dict[tuple, float] = {}
            for key, share in shares.items():
                if share < GROUP_SHARE_MIN:
                    continue
                outcome = self._outcome(key)
                tokens += share * outcome.tokens
                seconds += share * outcome.seconds
                for next_key, probability in outcome.shares.items():
                    following[next_key] = following.get(next_key, 0.0) + share * probability
                self._gather(share, outcome)
            total = sum(following.values())
            shares = {key: share / total for key, share in following.items()}
        return tokens / seconds

    def _gather(self, share: float, outcome: _Outcome) -> None:
        """Takes beginnings into their groups, as long as those have not been run."""
        for key, group in outcome.groups.items():
            if key not in self._outcomes:
                self._groups.setdefault(key, _Group(group.is_sparse)).merge(share, group)

    def _outcome(self, key: tuple) -> _Outcome:
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome = self._outcomes[key] = self._run(self._stretches(key))
        return outcome

    def _stretches(self, key: tuple) -> list[Stretch]:
        """Nothing in hand is run twice, over the phase of the draft's running step and the spread of all steps."""
        pipeline = self._pipeline
        step_s = pipeline.draft_step_s
        if key not in (NOTHING_IDLE, NOTHING_BUSY):
            return [Stretch(pipeline, self._groups[key].mean(), step_s / 2)]
        middle_s, spread_s = (step_s / 2, step_s / 4) if key is NOTHING_BUSY else (0.0, 2 * STEP_SPREAD * step_s)
        ends = ((middle_s - spread_s, 1 + STEP_SPREAD), (middle_s + spread_s, 1 - STEP_SPREAD))
        return [Stretch(pipeline, Landing(), late_s, pace) for late_s, pace in ends]

    def _run(self, stretches: list[Stretch]) -> _Outcome:
        outcome = _Outcome(0.0, 0.0, {}, {})
        weight = 1 / len(stretches)
        shares, groups = outcome.shares, outcome.groups
        for stretch in stretches:
            stretch.run()
            outcome.tokens += weight * stretch.tokens
            outcome.seconds += weight * stretch.seconds
            for key, share in ((NOTHING_IDLE, stretch.idle_share), (NOTHING_BUSY, stretch.busy_share)):
                shares[key] = shares.get(key, 0.0) + weight * share
            for probability, landing in stretch.landings:
                key = self._key(landing)
                group = groups.get(key)
                if group is None:
                    group = groups[key] = _Group(landing.is_sparse)
                group.add(weight * probability, landing)
        shares.update((key, group.sums[0]) for key, group in groups.items())
        return outcome

    def _key(self, landing: Landing) -> tuple:
        """The group: when the first token came or comes, and how many there are."""
        in_hand, evaluated, steps, _, _, is_sparse = landing
        lead = steps - self._trip_steps  # in draft steps; below 0 it is still to come
        if lead <= -0.5:
            when = -1 - round(-lead / self._steps_apart)
        else:
            when = 0 if is_sparse else _size(lead)
        if is_sparse:
            return when, _size(in_hand), _size(evaluated - in_hand)
        return when, -1 if evaluated > steps - 0.5 else _size(evaluated)
