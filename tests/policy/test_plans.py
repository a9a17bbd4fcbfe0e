"""The plans of a service by rule and by the most siblings that it allows."""

from __future__ import annotations

import pytest

from specdec.policy.plans import WAITING_TREES, WAITING_TREES_COUPLED, catalogue
from specdec.protocol.types import Rule


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("siblings_max", [0, 1, 2, 3])
def test_trees_that_wait_have_siblings_under_coupled(rule: Rule, siblings_max: int) -> None:
    """Claim: under COUPLED the trees that wait are those with siblings, where the service allows as many, in place of
    those without; under other rules none of them is. With the service's own proposers there are eight plans, none
    twice. Conclusive: every plan of the catalogue is compared."""
    plans = catalogue(with_local=True, siblings_max=siblings_max, rule=rule)
    waiting = {plan for plan in plans if plan.wait_length and plan.nodes_per_step > 1}
    is_branched = rule is Rule.COUPLED and siblings_max >= 2
    assert waiting == set(WAITING_TREES_COUPLED if is_branched else WAITING_TREES)
    assert all(plan.siblings <= siblings_max for plan in plans) and len(set(plans)) == len(plans) == 8
