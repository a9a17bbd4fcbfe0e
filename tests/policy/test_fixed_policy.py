"""FIXED plans under load, in a simulated service: alone as asked, beside others as long as pays for all."""

from __future__ import annotations

from collections import Counter

import pytest

from specdec.policy.acceptance import Acceptance
from specdec.policy.fixed_policy import FixedPolicy
from specdec.policy.steps import StepTimes
from specdec.protocol.plan import OFF_PLAN, Plan
from specdec.protocol.records import RoundRecord
from tests.support.policy_cells import TARGET_S, many, one, steps_of
from tests.support.records import changed
from tests.support.simulation import FixedService, Simulation, World

FROM_S, TO_S = 1.0, 6.0
WIDE = Plan(16, 32, 8)
STREAMS = 24
STEEP, FLAT = 0.1, 0.0001  # what a row adds to a step, as a share of the first: a saturated machine, and a free one


def primed(slope: float) -> StepTimes:
    """Of a target that measured steps of few rows at its start."""
    steps = StepTimes()
    steps.prime(tuple((rows, steps_of(slope)(rows)) for rows in (1, 2, 4, 8, 16)))
    return steps


class Fixed(FixedService):
    """Every text asks for 16 tokens and 8 nodes per step; with or without the limit of a coordinator, which knows the
    target's steps of few rows from its start."""

    def __init__(self, slope: float, is_limited: bool = True) -> None:
        super().__init__(WIDE)
        self.policies: list[FixedPolicy] = []
        self.records: list[RoundRecord] = []
        steps, self._acceptance = primed(slope), Acceptance()
        self._steps = steps if is_limited else None

    def policy(self, stream_index: int) -> FixedPolicy:
        records = self.records

        class Recorded(FixedPolicy):
            def on_round(self, record: RoundRecord) -> None:
                records.append(record)
                super().on_round(record)

        self.policies.append(Recorded(16, 32, 8, 0.0, 0, self._steps, self._acceptance))
        return self.policies[-1]


def run(world: World, service: Fixed) -> tuple[float, Counter[Plan]]:
    """Runs a world; returns the rate of all streams and the rounds of each plan."""
    simulation = Simulation(world, service, 1)
    simulation.run_until(TO_S)
    rate = sum(simulation.rate(index, FROM_S, TO_S) for index in range(len(world.texts)))
    return rate, Counter(record.plan for record in service.records)


@pytest.mark.parametrize("acceptance", [0.05, 0.7])
def test_alone_a_fixed_plan_is_as_asked(acceptance: float) -> None:
    """Claim: a lone request keeps its plan in every round, however few of its tokens are accepted and whatever its rows
    cost: a benchmark measures the plan that it names."""
    _, plans = run(one(acceptance, slope=STEEP), Fixed(STEEP))
    assert set(plans) == {WIDE}


def test_under_load_it_shrinks_as_far_as_pays() -> None:
    """Claim: with 24 sessions on a saturated target, plans of 16 tokens and 8 nodes shrink, for a poor draft to plain
    decoding, and the text of all comes quicker by half at least than by the plans that were asked for.

    Source: a client's FIXED overrode the load control. Conclusive: the same world runs without the limit.
    """
    for acceptance, length_max in ((0.7, 4), (0.2, 1)):
        world = many(STREAMS, acceptance, slope=STEEP)
        unlimited, _ = run(world, Fixed(STEEP, is_limited=False))
        service = Fixed(STEEP)
        limited, plans = run(world, service)
        assert limited > 1.5 * unlimited
        short = sum(count for plan, count in plans.items() if plan.draft_length_max <= length_max)
        assert short > 0.8 * sum(plans.values()), plans
        assert all(plan.nodes_per_step <= plan.draft_length_max for plan in plans if plan not in (WIDE, OFF_PLAN))
        assert "under the load of 24 sessions" in service.policies[0].prediction.reason


def test_rows_without_cost_are_no_load() -> None:
    """Claim: 24 sessions keep what they asked for on a target whose step does not grow with its rows."""
    _, plans = run(many(STREAMS, 0.7, slope=FLAT), Fixed(FLAT))
    assert plans[WIDE] > 0.95 * sum(plans.values())


def test_when_the_others_are_gone_it_is_as_asked_again() -> None:
    """Claim: once its neighbours are gone, a session has its own plan again within some rounds.
    Conclusive: one policy receives rounds of 24 sessions, then of one; nothing else differs."""
    run(many(STREAMS, 0.2, slope=STEEP), service := Fixed(STEEP))
    policy = next(own for own in service.policies if own.plan(100) != WIDE)
    record = service.records[-1]
    for index in range(1, 25):
        policy.on_round(changed(record, round_index=index, sessions=1, active_sessions=1, rows=1))
    assert policy.plan(100) == WIDE and policy.is_speculating
    assert policy.prediction.reason == "fixed: 16 tokens"


def test_slow_steps_of_others_are_forgotten_within_a_minute() -> None:
    """Claim: of two sessions each has its plan again a minute after requests whose steps of 8 rows and more took two
    seconds, though no step of theirs had as many rows since; a second after them it has one draft token at most.

    Conclusive: all the rounds between are equal, so that only the time since the slow steps differs.
    """
    steps = primed(FLAT)
    policy = FixedPolicy(16, 32, 8, 0.0, 0, steps, Acceptance())
    run(many(2, 0.9, slope=FLAT), service := Fixed(FLAT))
    record = changed(
        service.records[-1], offered_count=16, accepted_count=3, path_count=1, sessions=2, active_sessions=2
    )
    for rows in (8, 16, 32) * 400:
        steps._curve.add(rows, 2.0)
    lengths = []
    for index in range(1, 60 * 50):
        now_s, plan = index / 50, policy.plan(100)
        own = changed(record, round_index=index, plan=plan, rows=2, forward_s=TARGET_S)
        policy.on_round(changed(own, start_s=now_s - 0.02, end_s=now_s))
        lengths.append(policy.plan(100).draft_length_max)
    assert lengths[50] <= 1 and lengths[-1] == 16
