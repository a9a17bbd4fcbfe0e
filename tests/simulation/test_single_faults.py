"""Every single fault at every single point of a run."""

from __future__ import annotations

import random

import pytest

from specdec.policy.fixed_policy import FixedPolicy
from specdec.protocol.types import Rule
from tests.simulation.client import Order
from tests.simulation.faults import FAULTS, Fault, NoFaults, OneFault
from tests.simulation.scenario import Scenario
from tests.simulation.schedule import run

ITEMS = ("ask", "answer")
# Where a fault has an effect, by how the name of a point begins; a fault that is not here has one everywhere.
PLACES = {
    Fault.DUPLICATE: ITEMS,
    Fault.DELAY: ITEMS,
    Fault.PARTITION: ITEMS,
    Fault.DROP: ("ask",),
    Fault.REPLY_LOST: ("answer",),
    Fault.STALE: ("answer",),
    Fault.REORDER: ("ask Open", "ask Verification", "ask Commit", "answer"),
    Fault.FORGET: (),  # where the process that is chosen holds a session
    Fault.MUTE: ("answer VerificationResult",),
    Fault.MALFORMED: ("answer VerificationResult",),
    Fault.STOP: (),  # where the process does not stop already
    Fault.LEAVE: (),
    Fault.CANCEL: (),  # where a generation has begun and not ended
}


TABLES = {Rule.GREEDY: 3, Rule.REJECTION: 0, Rule.COUPLED: 1}  # each speculates well, so the run is short
RULES = [pytest.param(Rule.REJECTION, marks=pytest.mark.more)]
RULES += [pytest.param(rule, marks=pytest.mark.slow) for rule in (Rule.GREEDY, Rule.COUPLED)]


IN_ORDER = (Fault.DUPLICATE, Fault.REORDER, Fault.STALE)  # of which parts of prompts know nothing (`faults`)


def scenario_of(rule: Rule) -> Scenario:
    """One text of 20 tokens with a small tree, held for its tokens."""
    order = Order(TABLES[rule], rule, TABLES[rule], (3, 1, 4), 20, 20, FixedPolicy(4, 4, nodes_per_step=2, wait_s=0.02))
    return Scenario(order.table, (order,), 0.005, 0.004, 0.0005, 0.0003, 64, 64, 128, 128, 64, 2048)


@pytest.mark.parametrize("rule", RULES)
def test_every_fault_at_every_point_keeps_every_property(rule: Rule) -> None:
    """Claim: every property holds with a fault of any kind at any message or step of a run.

    Conclusive: the points of the undisturbed run are counted, each fault strikes once at each point, and is checked to
    have an effect wherever it can have one.
    """
    scenario = scenario_of(rule)
    points = run(scenario, NoFaults(), 1, random.Random(1)).points
    assert len(points) > 40
    for fault in FAULTS:
        for number, point in enumerate(points, 1):
            report = run(scenario, OneFault(fault, number), 1, random.Random(number))
            assert not report.problem, f"{fault.name} at point {number}, {point}: {report.problem}"
            assert report.token_count == 20
            if point.startswith(PLACES.get(fault, "")) and not (fault in IN_ORDER and "PromptPart" in point):
                assert report.faults[fault] == 1, f"{fault.name} at point {number}, {point}, had no effect"
