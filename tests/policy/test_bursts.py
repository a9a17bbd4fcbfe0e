"""After odd requests: whatever they taught the policy, ordinary requests are held back for less than a minute.

The bursts are those of `python -m bench.policy_cells`; the command runs ten minutes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from specdec.policy.goodput import Goodput
from specdec.policy.goodput_policy import EXPLORATION_MAX_S, GoodputPolicy
from specdec.protocol.plan import OFF_PLAN, Plan
from tests.policy.test_policy import SPARE_TOKENS, record_of
from tests.support.policy_cells import AFTER_ODD, BOUNDS, CELLS, LENGTH_CAP, TARGET_S, FleetService
from tests.support.records import changed
from tests.support.simulation import FixedService, Simulation

ON_ITS_CORES = "after odd requests, on its cores"
BEST = {  # of the world's plans, by `python -m bench.policy_cells`
    ON_ITS_CORES: Plan(16, 32, 8),
    "after odd requests, 2 streams, on its cores": Plan(4, 12, 4),
    "after odd requests, near": Plan(16, 32, 4, 2, wait_s=0.5),
}
BURSTS_S, FROM_S, TO_S = 60.0, 60.0, 75.0


def best_of(name: str) -> float:
    """Tokens per second of the best plan in a world without bursts."""
    return replace(CELLS[name], from_s=2.0, to_s=20.0, bursts_s=0.0).rate(FixedService(BEST[name]), 0)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        (ON_ITS_CORES, 2),
        ("after odd requests, 2 streams, on its cores", 4),
        pytest.param("after odd requests, near", 2, marks=pytest.mark.more),
        pytest.param(ON_ITS_CORES, 3, marks=pytest.mark.more),
        *(pytest.param(ON_ITS_CORES, seed, marks=pytest.mark.slow) for seed in range(4, 8)),
    ],
)
def test_bursts_of_odd_requests_hold_ordinary_ones_back_for_less_than_a_minute(name: str, seed: int) -> None:
    """Claim: after a minute of requests that are cancelled, refused by the draft, slow, wrong, one token long or many,
    with seconds of trouble in target, draft and network, the rate is near that of the best fixed plan a minute later.

    Source: in a real service plans stayed off for over six minutes after hostile bursts. Conclusive: the world without
    bursts is the same, and plain decoding has less than 0.65 of that rate.
    """
    cell = replace(CELLS[name], bursts_s=BURSTS_S)
    assert cell.rate(FleetService(cell.world), seed) >= BOUNDS[AFTER_ODD] * best_of(name)


def goodput_of(service: FleetService) -> Goodput:
    """What the sessions of a service share."""
    service.policy(0)
    return next(iter(service.fleet.drafts.peers[0].goodputs.values()))


def slow_beside_the_draft(table: Goodput) -> None:
    """The target takes four times as long while the draft works."""
    table.steps._slowdown = 4.0


def slow_rows(table: Goodput) -> None:
    """Every step of more than one row takes 0.1 s."""
    for rows in (2, 3, 4, 6, 8, 12, 16, 24):
        for _ in range(400):
            table.steps._curve.add(rows, 0.1)


def slow_draft(table: Goodput) -> None:
    """A step of the draft takes a second."""
    for nodes in (1, 2, 4, 8):
        for _ in range(400):
            table.draft._steps.add(nodes, 1.0)


def useless_plans(table: Goodput) -> None:
    """No plan had a token accepted in 400 rounds, each of which took 0.02 s beside its step."""
    for own in table.drafting:
        for _ in range(400):
            own.accepted.add(0.0)
            own.beside_s.add(0.02)


def wrong_draft(table: Goodput) -> None:
    """No draft token was accepted."""
    for _ in range(400):
        table.acceptance._mean.add(0.0)


MEASURED = (slow_beside_the_draft, slow_rows, slow_draft, useless_plans, wrong_draft)


@pytest.mark.parametrize("taught", MEASURED, ids=lambda taught: taught.__name__)
def test_a_wrong_measurement_is_forgotten_within_a_minute(taught: Callable[[Goodput], None]) -> None:
    """Claim: whichever estimate is far too high when ordinary requests begin, with exploration as deep in debt as it
    can be, a text without end has 0.85 of the rate of the best fixed plan after a minute.

    Conclusive: plain decoding has 0.63 of that rate, and by each estimate every plan of the draft is worse, so
    that a text drafts only by what fades and is explored.
    """
    world = CELLS[ON_ITS_CORES].world
    service = FleetService(world)
    table = goodput_of(service)
    taught(table)
    table.charge(1000.0)
    simulation = Simulation(world, service, 1)
    simulation.run_until(TO_S)
    assert simulation.rate(0, FROM_S, TO_S) >= 0.85 * best_of(ON_ITS_CORES)


def begun() -> tuple[GoodputPolicy, Goodput]:
    """A policy that drafts, and its table."""
    table = goodput_of(FleetService(CELLS["after odd requests, near"].world))
    policy = GoodputPolicy(table, LENGTH_CAP)
    for index in range(1, 60):
        policy.on_round(record_of(index, policy.plan(SPARE_TOKENS), 4, 3))
    return policy, table


def test_one_step_that_hung_stops_the_drafting_of_all_for_seconds_only() -> None:
    """Claim: after one step of a minute a session decodes plainly, and drafts again within ten seconds. Conclusive: in
    proportion to that step one row would take more than ten; plans are compared at each step's end."""
    policy, _ = begun()
    index, plans = 60, []
    record = record_of(index, policy.plan(SPARE_TOKENS), 4, 3, step_s=60.0)
    now_s = record.times.end_s
    policy.on_round(record)
    while now_s < record.times.end_s + 10:
        index += 1
        plan = policy.plan(SPARE_TOKENS)
        plans.append(plan)
        offered = min(4, plan.draft_length_max)
        own = record_of(index, plan, offered, min(3, offered))
        policy.on_round(changed(own, start_s=now_s, end_s=now_s + own.times.round_s))
        now_s += own.times.round_s
    assert OFF_PLAN in plans and plans[-1].window


def test_an_exploration_whose_session_ended_keeps_others_for_seconds_only() -> None:
    """Claim: others may explore EXPLORATION_MAX_S after one began, however long its rounds were expected to be, as its
    session may have ended. Conclusive: by the expected rounds it would be ten minutes."""
    policy, table = begun()
    for own in table.drafting:
        own.round_s = 25.0
    policy._explore(table.drafting[0], 100.0)
    assert table.exploring_until_s == 100.0 + EXPLORATION_MAX_S


def test_a_session_that_the_draft_refused_changes_no_plan_of_others() -> None:
    """Claim: a session without a draft, beside one that is connected, decodes without it from its next round on, and
    the estimates of the draft's plans are those of the sessions that it serves. Conclusive: the rounds of the refused
    session would lower the plan's tokens to a third."""
    served, table = begun()
    refused = GoodputPolicy(table, LENGTH_CAP)
    before = served._own.rounds, served._own.accepted.value
    for index in range(100, 300):
        plan = refused.plan(SPARE_TOKENS)
        assert index == 100 or plan == OFF_PLAN
        refused.on_round(record_of(index, plan, 0, 0, step_s=TARGET_S)._replace(is_refused=True))
    assert (served._own.rounds, served._own.accepted.value) == before
    assert GoodputPolicy(table, LENGTH_CAP).plan(SPARE_TOKENS).window
