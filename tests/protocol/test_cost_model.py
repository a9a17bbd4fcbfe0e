"""The cost model against the event simulation, which shares no code with it, and both against what is known exactly."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest

from bench.event_simulation import LIKELIHOOD_MIN, Scenario, simulate
from specdec.policy.plan import PLAIN, Plan
from specdec.protocol import growth
from specdec.protocol.choice import CAPS, DEFAULT_PLAN, LEAVES, WAIT_LENGTHS, WINDOWS, Chooser
from specdec.protocol.cost_model import Conditions, Curve, plain_rate, predict
from specdec.protocol.pipeline import NodeCounts

pytestmark = pytest.mark.lengthy

TARGET_S = 0.02
BRANCHES = (0.45, 0.15)  # second and third choice right where the first is wrong: measured on real pairs


@dataclass(frozen=True, slots=True)
class Point:
    """One world and plan of the grid: draft step, round trip, wait and overhead in target steps."""

    plan: Plan
    acceptance: tuple[float, ...] = (0.7,)
    draft: float = 0.1
    leaf_cost: float = 0.1  # what each further leaf adds to a draft step
    row_cost: float = 0.0  # what each further row adds to a target step
    trip: float = 0.0
    overhead: float = 0.0
    bonus_match: float | None = None
    session_count: int = 1

    def target_s(self, rows: float) -> float:
        return TARGET_S * (1 + self.row_cost * (rows - 1))

    def draft_s(self, leaves: float) -> float:
        return self.draft * TARGET_S * (1 + self.leaf_cost * (leaves - 1))

    @property
    def conditions(self) -> Conditions:
        return Conditions(
            Curve(((1, self.target_s(1)), (2, self.target_s(2)))),
            Curve(((1, self.draft_s(1)), (2, self.draft_s(2)))),
            self.trip * TARGET_S,
            self.overhead * TARGET_S,
            self.acceptance,
            BRANCHES,
            self.bonus_match,
            self.session_count,
        )

    def simulated(self, token_count: int) -> float:
        scenario = Scenario(
            self.target_s,
            self.draft_s,
            self.trip * TARGET_S,
            self.acceptance,
            BRANCHES,
            self.bonus_match,
            self.overhead * TARGET_S,
            self.session_count,
        )
        return simulate(scenario, self.plan, token_count)

    def error(self, token_count: int) -> float:
        """Predicted over simulated, less one."""
        return predict(self.conditions, self.plan) / self.simulated(token_count) - 1


def waiting(length: int, steps: float, plan: Plan) -> Plan:
    return Plan(plan.draft_length_max, plan.window, plan.leaves, length, steps * TARGET_S)


CHAIN, TREE = Plan(16, 16), Plan(16, 16, 8)
FAST_GRID = (
    *(Point(CHAIN, (a,), d, trip=r) for a, d, r in ((0.5, 0.05, 0.25), (0.6, 0.2, 1), (0.8, 0.1, 0.5), (0.8, 0.2, 5))),
    *(Point(Plan(16, 8), (a,), d, trip=r) for a, d, r in ((0.7, 0.1, 0), (0.8, 0.05, 0.1), (0.6, 0.1, 2))),
    *(Point(TREE, (a,), d, trip=r) for a, d, r in ((0.5, 0.2, 0.25), (0.6, 0.1, 0), (0.8, 0.2, 0.5), (0.7, 0.1, 1))),
    *(Point(Plan(16, 8, 4), (a,), d, trip=r) for a, d, r in ((0.7, 0.1, 0.1), (0.6, 0.05, 0.5), (0.5, 0.1, 5))),
    *(Point(Plan(16, 8, 2), (a,), d, trip=r) for a, d, r in ((0.8, 0.1, 0.25), (0.7, 0.2, 1), (0.6, 0.05, 2))),
    *(Point(Plan(cap, 8, 8), draft=0.2, trip=0.5, row_cost=0.05, overhead=0.1) for cap in (1, 2, 4)),
    Point(waiting(2, 0.5, CHAIN), (0.6,), trip=0.25),
    Point(waiting(4, 2, CHAIN), (0.8,), trip=0.5),
    Point(waiting(1, 1, Plan(8, 8, 2)), trip=0.1),
    Point(waiting(2, 1, Plan(4, 16, 8)), (0.5,), trip=0.5),
    Point(Plan(8, 16, 1), trip=0.5, bonus_match=0.4),
    Point(Plan(8, 16, 8), trip=0.25, bonus_match=0.4),
    Point(Plan(8, 16, 4), (0.9, 0.8, 0.7, 0.6), trip=0.5),
    *(Point(Plan(4, 8, leaves), row_cost=0.03, trip=0.5, session_count=4) for leaves in (1, 4)),
)


@pytest.mark.parametrize("point", FAST_GRID, ids=lambda point: f"{point.plan.leaves} leaves, trip {point.trip}")
def test_the_model_agrees_with_the_event_simulation(point: Point) -> None:
    """Claim (issue 4): within 5 %. Conclusive: the simulation moves every token through explicit trees and shares no
    code with the model; its own noise on these lengths is below 1 %, because its draws are stratified."""
    token_count = 12_000 if point.plan.leaves == 1 else 5_000
    assert abs(point.error(token_count // point.session_count)) <= 0.05


def large_grid() -> list[Point]:
    """Every combination of the issue's grid, thinned evenly: 1 in 29 meets all pairs of values."""
    plans = [
        plan if wait is None else waiting(*wait, plan)
        for cap, window, leaves in itertools.product((2, 4, 8, 16), (8, 16), (1, 2, 4, 8))
        for plan in [Plan(cap, window, leaves)]
        for wait in (None, (1, 0.3), (2, 1.0))
    ]
    worlds = itertools.product(plans, (0.05, 0.1, 0.2), (0.5, 0.6, 0.7, 0.8), (0, 0.1, 0.25, 0.5, 1, 2, 5))
    points = [Point(plan, (a,), d, trip=r, overhead=0.05) for plan, d, a, r in worlds]
    return points[::29]


@pytest.mark.slow
def test_the_model_agrees_over_the_large_grid() -> None:
    """Claim (issue 4): within 5 % at every point, chains and trees, from no round trip to five target steps."""
    errors = [(abs(point.error(12_000 if point.plan.leaves == 1 else 5_000)), point) for point in large_grid()]
    assert max(errors, key=lambda line: line[0])[0] <= 0.05, max(errors, key=lambda line: line[0])


def test_nodes_are_counted_as_they_are() -> None:
    """Claim: the table of node counts holds what a tree has, and its inverse gives the cost back.

    Conclusive: every node of the unlimited trees is counted one by one, over one chain cost around each cost, for
    acceptances whose trees are bushes and chains; a chain alone has one node a chain cost.
    """
    for acceptance in (0.3, 0.5, 0.8, 0.95):
        shares = (acceptance, *((1 - acceptance) * branch for branch in BRANCHES))
        costs = tuple(-math.log(share) for share in shares)
        table = NodeCounts(costs, 5.8)

        def exact(cost: float) -> int:
            return 0 if cost < 0 else 1 + sum(exact(cost - own) for own in costs)  # noqa: B023

        for tenths in range(5, 50, 5):
            around = [exact(tenths / 10 + costs[0] * (part / 40 - 0.4875)) for part in range(40)]
            assert table(tenths / 10) == pytest.approx(sum(around) / len(around), rel=0.03)
            depth = 3
            left = table(tenths / 10) - table(tenths / 10 - depth * costs[0])
            if tenths / 10 > depth * costs[0] and left > table(depth * costs[0]):
                assert table.cost(left, depth) == pytest.approx(tenths / 10, abs=0.05)
    assert NodeCounts((0.25,), 5.0)(2.0) == pytest.approx(8.5)
    assert NodeCounts((0.01,), 5.0)(2.0) == pytest.approx(200.5, rel=0.01)


@pytest.mark.parametrize("length", (1, 2, 4, 8))
@pytest.mark.parametrize("trip", (0, 0.5, 2))
def test_both_give_the_synchronous_formula(length: int, trip: float) -> None:
    """Claim: a chain whose verifications wait for all g tokens commits E(g) = 1 + a + ... + a^g tokens in every
    T + r + g d. Conclusive: that is exact, since a window of g holds the draft back until it hears of the commit."""
    point = Point(Plan(length, length, 1, length, 1e3), trip=trip)
    exact = sum(0.7**n for n in range(length + 1)) / (TARGET_S * (1 + trip + 0.1 * length))
    assert predict(point.conditions, point.plan) == pytest.approx(exact, rel=1e-3)
    assert point.simulated(12_000) == pytest.approx(exact, rel=0.01)


def test_without_draft_tokens_it_is_plain_decoding() -> None:
    """Claim: 1 / (T + o), also through the timeline, where nothing ever arrives in time."""
    conditions = Point(PLAIN, overhead=0.1, trip=1e6).conditions
    assert predict(conditions, PLAIN) == plain_rate(conditions) == pytest.approx(1 / (1.1 * TARGET_S))
    assert predict(conditions, Plan(4, 8)) == pytest.approx(plain_rate(conditions), rel=1e-6)


def test_a_chain_stays_below_its_ceiling() -> None:
    """Claim (performance.md): no chain commits more than 1 / ((1 - a) T), and one that is drafted and arrives in no
    time comes within a few percent of it, if verifications wait that moment. Conclusive: both sides are asserted."""
    plan = waiting(16, 1, Plan(64, 64))
    rate = predict(Point(plan, draft=1e-4).conditions, plan)
    assert 0.97 / (0.3 * TARGET_S) <= rate <= 1 / (0.3 * TARGET_S)


def test_more_is_never_predicted_to_be_worse_by_more_than_a_rounding() -> None:
    """Claim: a higher acceptance or a shorter round trip never costs speed; so the policy can trust a comparison."""
    for plan in (CHAIN, TREE, waiting(2, 0.5, TREE)):
        by_acceptance = [predict(Point(plan, (a / 20,), trip=0.5).conditions, plan) for a in range(4, 19)]
        by_trip = [predict(Point(plan, trip=r / 10).conditions, plan) for r in range(20, -1, -1)]
        for rates in (by_acceptance, by_trip):
            assert all(later >= 0.97 * earlier for earlier, later in zip(rates, rates[1:])), (plan, rates)
            assert rates[-1] > 1.2 * rates[0]


def test_under_load_speculation_shrinks_to_none() -> None:
    """Claim: the more sessions share a step whose time grows with its rows, the fewer draft tokens are worth their
    rows; at last none. Conclusive: the same search, only the number of sessions differs."""
    lengths = []
    for count in (1, 4, 16, 64):
        point = Point(PLAIN, (0.6,), 0.1, row_cost=0.05, trip=0.5, session_count=count)
        chooser, is_over = Chooser(), False
        while not is_over:
            choice, is_over = chooser.choose(point.conditions, 16, DEFAULT_PLAN)
        lengths.append(choice.plan.draft_length_max if choice.tokens_per_s > plain_rate(point.conditions) else 0)
    assert lengths == sorted(lengths, reverse=True) and lengths[0] >= 3 and lengths[-1] == 0, lengths


@pytest.mark.parametrize("draft, acceptance, trip", [(0.05, 0.8, 0.0), (0.2, 0.5, 0.5), (0.1, 0.8, 2.0)])
def test_the_search_finds_the_best_plan(draft: float, acceptance: float, trip: float) -> None:
    """Claim: climbing from the default ends within 2 % of the best plan of the grid. Conclusive: 100 other plans,
    spread evenly over all combinations, are predicted too and none is better by more."""
    conditions = Point(PLAIN, (acceptance,), draft, row_cost=0.01, trip=trip).conditions
    chooser, is_over, calls = Chooser(), False, 0
    while not is_over:
        choice, is_over = chooser.choose(conditions, 16, DEFAULT_PLAN)
        calls += 1
    sides = itertools.product(CAPS, WINDOWS, LEAVES, WAIT_LENGTHS)
    plans = [
        Plan(cap, window, leaves, wait, wait and (trip + (wait + 2) * draft) * TARGET_S)
        for cap, window, leaves, wait in sides
        if window >= cap >= wait
    ]
    best = max(predict(conditions, plan) for plan in plans[:: len(plans) // 100])
    assert choice.tokens_per_s >= 0.98 * best and calls <= 60


def test_simulation_and_draft_stop_at_the_same_likelihood() -> None:
    """Claim: the simulated draft leaves alone what the real one does; a copy, because the two share no code."""
    assert LIKELIHOOD_MIN == growth.LIKELIHOOD_MIN
