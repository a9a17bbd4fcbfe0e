"""The policy in a simulated service: with a draft without gain, a draft that loses its gain, and a useful draft.

The cells are those of `python -m bench.policy_cells`, a few seeds of each; the command runs more and prints a table.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.policy.acceptance import Acceptance
from specdec.policy.goodput import BUDGET_SHARE, Goodput
from specdec.protocol.policy import Policy
from tests.support.policy_cells import BOUNDS, CELLS, Cell, FleetService, later, mean, one, share
from tests.support.simulation import FixedService, Simulation

pytestmark = pytest.mark.lengthy

NOISE = 0.02  # of a mean over four runs: steps jitter, and now and then one pauses
NOISE_BESIDE = 0.06  # where the others' rows set the step time, and their plans differ from run to run
STREAMS_MANY = 8  # more are left to the command: they take a minute
FIRST = [name for name, cell in CELLS.items() if cell.is_first]
FAILING = {
    name: cell
    for name, cell in CELLS.items()
    if not cell.pays and len(cell.world.texts) <= STREAMS_MANY and name not in FIRST
}
# Between others, or of the longest: run with the longer tests.
SELDOM = (
    "poor draft, RTT 10 ms",
    "poor draft, RTT 30 ms",
    "acceptance 0.4, RTT 0.5, then 20 ms",
    "4 streams, poor draft on the target's cores",
    "useless text beside three perfect ones",
    "100 times slower from the second minute on",
)
PAYING = ("acceptance 0.7, RTT 0 ms", "acceptance 0.7, RTT 7 ms", "acceptance 0.85, RTT 30 ms", "head, acceptance 0.7")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.more] * (name in SELDOM)) for name in FAILING])
def test_a_draft_of_no_use_costs_next_to_nothing(name: str) -> None:
    """Claim: 0.98 of off, reached within 2 s of the change. Conclusive: the whole time counts, exploration included;
    off runs in the same world with the same seeds."""
    cell = FAILING[name]
    assert share(cell, 4) >= BOUNDS[cell.kind] - (NOISE_BESIDE if cell.is_beside else NOISE)


@pytest.mark.more
@pytest.mark.parametrize("name", PAYING)
def test_where_it_pays_it_comes_near_the_best_fixed_plan(name: str) -> None:
    """Claim: from the third second of a service on its rate is that of the best fixed plan, less exploration.

    Conclusive: the plans are run, not predicted, and the best is chosen on other seeds."""
    assert share(CELLS[name], 2) >= 0.92


def test_the_first_seconds_speculate() -> None:
    """Claim: the first request of a service speculates at once, by what replicas measured when they had loaded: in its
    first two seconds it is 1.4 times as fast as off where the best plan is more than twice as fast."""
    first = replace(CELLS["acceptance 0.7, RTT 3 ms"], from_s=0.0, to_s=2.0)
    auto = mean(first, lambda: FleetService(first.world), range(3))
    assert auto >= 1.4 * mean(first, FixedService, range(3))


@pytest.mark.parametrize("name", FIRST)
def test_a_head_costs_a_first_text_next_to_nothing_and_brings_it_its_gain(name: str) -> None:
    """Claim: the first 64 tokens of a service whose target has a useless head take a few percent more time than plain
    decoding, and those with a good head have most of the best plan's speed. Conclusive: nothing is measured before, and
    all passes count; with the prior of a draft, and a first plan of several passes, useless heads reach 0.89 and 0.94
    (`test_a_head_that_is_trusted_like_a_draft_costs_a_first_text`)."""
    cell = CELLS[name]
    assert share(cell, 2) >= BOUNDS[cell.kind]


def test_a_head_that_is_trusted_like_a_draft_costs_a_first_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the cells above find a policy that begins with the plan that a draft's prior promises most of."""
    monkeypatch.setattr(Acceptance, "of_head", Acceptance)
    monkeypatch.setattr(Goodput, "opening", property(lambda self: self.drafting, lambda self, plans: None), False)
    cell = CELLS[FIRST[0]]
    assert share(cell, 2) < BOUNDS[cell.kind] - NOISE


@pytest.mark.parametrize("network_s", [0.03, *(pytest.param(own, marks=pytest.mark.more) for own in (0.0005, 0.01))])
def test_a_draft_that_ceases_to_be_slow_is_found(network_s: float) -> None:
    """Claim: a draft that is 100 times slower for 20 s is in use from 10 s after that, with every seed. Its step, as
    last measured, promises nothing: a policy that tries only plans of promise stays off for ever with some seeds."""
    world = one(0.7, network_s=network_s, draft_factor=100.0, **later(20, draft_factor=1.0))
    cell = Cell("slow for 20 s", world, 30, 40)
    for seed in range(6):
        assert cell.rate(FleetService(world), seed) >= 1.2 * cell.rate(FixedService(), seed), seed


def test_exploration_is_counted_and_bounded() -> None:
    """Claim: the time lost to exploration, as the policies count it, stays within its share of all time and the
    initial credit; exploration rounds are counted with it."""
    world, policies = CELLS["acceptance 0.7, RTT 3 ms"].world, []

    class Counting(FleetService):
        def policy(self, stream_index: int) -> Policy:
            policies.append(super().policy(stream_index))
            return policies[-1]

    Simulation(world, Counting(world)).run_until(20.0)
    predictions = [policy.prediction for policy in policies]
    assert sum(each.num_rounds_exploring for each in predictions) > 20
    assert 0 < sum(each.exploration_loss_s for each in predictions) <= 20 * BUDGET_SHARE + 0.4
