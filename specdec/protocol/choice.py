"""The best plan for given conditions: a search over a small grid, a few predictions at a time.

Conditions are made dimensionless and kept until they have moved, so that a service's sessions share what was found.
Pure.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from specdec.policy.plan import Plan
from specdec.protocol.cost_model import Conditions, Curve, predict

CAPS = (1, 2, 3, 4, 6, 8, 12, 16)
WINDOWS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
LEAVES = (1, 2, 4, 8)
WAIT_LENGTHS = (0, 1, 2, 3, 4)
WAIT_SLACK = 1.25  # a wait may last so much longer than the tokens should take: steps vary, and a vain wait is lost
GAIN_MIN = 1.003  # what is not this much better is not better: the simpler plan stays
PREDICTIONS_AT_ONCE = 1  # 1 to 3 ms: a search goes on at the next call, answers meanwhile are its best so far
CHANGE_GAIN = 1.03  # another plan must be predicted so much better: a change costs the tokens under way
SEARCHES_KEPT = 256  # conditions remembered; a service meets some dozens
ACCEPTANCE_STEP = 0.05  # predictions lie on this grid of acceptances and are interpolated: within 1 % of exact
MOVED_SHARE, MOVED_LEAST = 0.07, 0.02  # what was measured has moved when it differs so much: beyond the noise of means
WAIT_STEP = 0.1  # waits are rounded to steps of 10 %, so that predictions of a plan are found again
STEP_RATIO_MIN = 0.005  # a draft step is not shorter than this share of a target step: times below say nothing
ROWS = (1, 2, 3, 5, 9, 17)  # of one session, where the target's curve is kept
DEFAULT_PLAN = Plan(draft_length_max=6, window=8, leaves=4)  # where nothing is known; not waiting, it costs little


def in_steps(conditions: Conditions) -> Conditions:
    """The same conditions for one session, in units of the target's step for one token of each: dimensionless.

    The acceptance is left as (-tilt / 2, tilt / 2): how far first and later tokens are from their mean.
    """
    count = conditions.session_count
    step_s = conditions.target_step_s(count)
    first, *others = conditions.acceptance
    tilt = sum(others) / len(others) - first if others else 0.0
    draft_step_s = conditions.draft_step_s
    return Conditions(
        target_step_s=Curve(tuple((float(row), conditions.target_step_s(count * row) / step_s) for row in ROWS)),
        draft_step_s=Curve(
            tuple((float(leaf), max(STEP_RATIO_MIN, draft_step_s(count * leaf) / step_s)) for leaf in LEAVES)
        ),
        network_s=conditions.network_s / step_s,
        round_overhead_s=conditions.round_overhead_s / step_s,
        acceptance=(-tilt / 2, tilt / 2),
        branch_probabilities=conditions.branch_probabilities,
        bonus_match=conditions.bonus_match,
    )


def has_moved(kept: Conditions, now: Conditions) -> bool:
    """Whether any number differs by more than noise does."""
    return any(abs(new - old) > MOVED_SHARE * abs(old) + MOVED_LEAST for old, new in zip(_numbers(kept), _numbers(now)))


def _numbers(conditions: Conditions) -> list[float]:
    return [
        *(seconds for _, seconds in conditions.target_step_s.points),
        *(seconds for _, seconds in conditions.draft_step_s.points),
        conditions.network_s,
        conditions.round_overhead_s,
        *conditions.acceptance,
        *conditions.branch_probabilities,
        conditions.bonus_match or 0.0,
    ]


@dataclass(frozen=True, slots=True)
class OnGrid:
    """Dimensionless conditions, and the mean acceptance of one session; predictions are interpolated."""

    steps: Conditions
    level: float

    def at(self, index: int) -> Conditions:
        """The conditions at a point of the grid of acceptances."""
        shifted = (round(index * ACCEPTANCE_STEP + share, 6) for share in self.steps.acceptance)
        return replace(self.steps, acceptance=tuple(min(max(share, 0.0), 1.0) for share in shifted))

    @property
    def nearest(self) -> Conditions:
        """The conditions at the nearest point of that grid."""
        return self.at(round(self.level / ACCEPTANCE_STEP))

    def predict(self, plan: Plan) -> float:
        """Tokens per step under a plan in the same units, interpolated between points of that grid."""
        index = int(self.level / ACCEPTANCE_STEP)
        share = self.level / ACCEPTANCE_STEP - index
        return (1 - share) * predict(self.at(index), plan) + share * predict(self.at(index + 1), plan)


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, and tokens per second predicted of it."""

    plan: Plan
    tokens_per_s: float


class Chooser:
    """The searches of a service's sessions under one rule, the least recently asked for forgotten first.

    All sessions share one set of conditions until those have moved; only the level of acceptance is a session's own.
    """

    def __init__(self) -> None:
        self._searches: OrderedDict[tuple[Conditions, int], _Search] = OrderedDict()
        self._steps: Conditions | None = None
        self._latest = DEFAULT_PLAN  # where the next search begins: neighbouring conditions have neighbouring plans

    def choose(self, conditions: Conditions, draft_length_cap: int, current: Plan) -> tuple[Choice, bool]:
        """The best plan found so far with at most so many draft tokens in a round, unless `current` is as good but for
        CHANGE_GAIN; and whether the search is over. At most PREDICTIONS_AT_ONCE + 2 predictions are made."""
        steps = in_steps(conditions)
        if self._steps is None or has_moved(self._steps, steps):
            self._steps = steps
        first, *others = conditions.acceptance
        grid = OnGrid(self._steps, (first + sum(others) / len(others)) / 2 if others else first)
        search = self._search(grid.nearest, draft_length_cap)
        search.go_on(PREDICTIONS_AT_ONCE)
        self._latest = search.plan
        step_s = conditions.target_step_s(conditions.session_count)
        plan = _in_unit(current, 1 / step_s)
        if search.rate < CHANGE_GAIN * predict(grid.nearest, plan):
            return Choice(current, grid.predict(plan) / step_s), search.is_done
        return Choice(_in_unit(search.plan, step_s), grid.predict(search.plan) / step_s), search.is_done

    def _search(self, conditions: Conditions, draft_length_cap: int) -> _Search:
        key = conditions, draft_length_cap
        if key not in self._searches:
            self._searches[key] = _Search(conditions, draft_length_cap, self._latest)
            if len(self._searches) > SEARCHES_KEPT:
                self._searches.popitem(last=False)
        self._searches.move_to_end(key)
        return self._searches[key]


def _in_unit(plan: Plan, unit: float) -> Plan:
    """The plan with its wait in other units."""
    return replace(plan, wait_s=_rounded_wait(plan.wait_s * unit)) if plan.wait_s else plan


def _rounded_wait(wait_s: float) -> float:
    """To steps of WAIT_STEP on a logarithmic scale."""
    return math.exp(round(math.log(wait_s) / WAIT_STEP) * WAIT_STEP)


class _Search:
    """Hill climbing along one side of the plan after the other, until no neighbour is better."""

    def __init__(self, conditions: Conditions, draft_length_cap: int, start: Plan) -> None:
        self._conditions = conditions
        self._caps = [cap for cap in CAPS if cap < draft_length_cap] + [draft_length_cap]
        length = min(max(start.draft_length_max, 1), draft_length_cap)
        self.plan = self._with_wait(Plan(length, max(start.window, length), max(start.leaves, 1)), start.wait_length)
        self.rate = 0.0
        self._steps = self._climb()
        self.is_done = False

    def go_on(self, prediction_count: int) -> None:
        """At most so many predictions more."""
        while prediction_count and not self.is_done:
            prediction_count -= 1
            self.is_done = next(self._steps, None) is None

    def _climb(self) -> Iterator[bool]:
        """Yields after every prediction."""
        self.rate = predict(self._conditions, self.plan)
        yield True
        improves = True
        while improves:
            improves = False
            for side in (self._leaves, self._cap, self._window, self._wait):
                for direction in (1, -1):
                    while (plan := side(direction)) is not None:
                        rate = predict(self._conditions, plan)
                        is_better = rate > self.rate * GAIN_MIN
                        if is_better:
                            self.plan, self.rate = plan, rate
                            improves = True
                        yield True
                        if not is_better:
                            break

    def _with_wait(self, plan: Plan, wait_length: int) -> Plan:
        """The plan with a wait for so many tokens, bounded by what they should take over the link."""
        length = min(wait_length, plan.draft_length_max)
        draft_s = self._conditions.draft_step_s(plan.leaves)
        bound = WAIT_SLACK * (self._conditions.network_s + (length + 1) * draft_s)
        return replace(plan, wait_length=length, wait_s=_rounded_wait(bound) if length else 0.0)

    def _leaves(self, direction: int) -> Plan | None:
        leaves = _neighbour(LEAVES, self.plan.leaves, direction)
        return None if leaves is None else self._with_wait(replace(self.plan, leaves=leaves), self.plan.wait_length)

    def _cap(self, direction: int) -> Plan | None:
        cap = _neighbour(self._caps, self.plan.draft_length_max, direction)
        if cap is None:
            return None
        plan = replace(self.plan, draft_length_max=cap, window=max(cap, self.plan.window))
        return self._with_wait(plan, plan.wait_length)

    def _window(self, direction: int) -> Plan | None:
        window = _neighbour(WINDOWS, self.plan.window, direction)
        return None if window is None or window < self.plan.draft_length_max else replace(self.plan, window=window)

    def _wait(self, direction: int) -> Plan | None:
        length = _neighbour(WAIT_LENGTHS, self.plan.wait_length, direction)
        return None if length is None or length > self.plan.draft_length_max else self._with_wait(self.plan, length)


def _neighbour(values: tuple[int, ...] | list[int], value: int, direction: int) -> int | None:
    """The next of ascending `values` above or below; None at the end."""
    if direction > 0:
        return next((other for other in values if other > value), None)
    return next((other for other in reversed(values) if other < value), None)
