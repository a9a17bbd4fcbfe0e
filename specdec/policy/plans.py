"""The plans that a policy compares, and what they promise before they are measured. Pure.

The forecasts are fits to simulated trees (tests/support/simulation.py): a tree's tokens fall with every target step by
which they are late.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.policy.acceptance import expected_accepted
from specdec.policy.draft_time import DraftTimes, HeadTimes
from specdec.protocol.limits import SIBLINGS_MAX
from specdec.protocol.plan import LOCAL_PLAN, OFF_PLAN, Plan
from specdec.protocol.types import Rule

CHAINS = Plan(2, 3, 1, 2), Plan(4, 5, 1, 4)
STREAMING_TREES = Plan(4, 12, 4), Plan(16, 32, 8)
WAITING_TREES = Plan(6, 16, 8, 2), Plan(16, 32, 8, 3)
# Under COUPLED: where the draft's best perturbed score is wrong, its next ones are often right.
WAITING_TREES_COUPLED = Plan(12, 16, 8, 2, siblings=2), Plan(16, 32, 8, 3, siblings=2)
# Of a feature head: it draws or guesses siblings at every place, as its tree lasts for one round.
HEAD_CHAINS = Plan(1, 1), Plan(2, 2), Plan(4, 4), Plan(7, 7)
HEAD_TREES = Plan(6, 3, 2, siblings=2), Plan(14, 5, 4, siblings=2)
HEAD_TREES_DRAWN = Plan(6, 3, siblings=2), Plan(10, 5, siblings=2)  # along the first draws (docs/exactness.md)
HEAD_TREE_GAIN, HEAD_TREE_ROWS = 1.15, 2.0  # tokens of such a tree over those of a chain, and its rows
TREE_DEPTH, TREE_SHARE, TREE_DELAY_STEPS = 8.0, 0.78, 3.0  # path of a streaming tree; its tokens; late by draft steps
WAITING_GROWTH = 0.2  # tokens by which a waiting tree grows with each draft step in a target step
HALF = 0.5  # of a streaming tree's path is in hand, and of a waiting tree's rounds wait for the draft


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan promises: `offered` draft tokens of a round; a path of `length`, `share` of whose tokens are not
    late; `delay_steps`, target steps by which they are late; `wait_s` a round."""

    offered: float
    length: float = 0.0
    share: float = 1.0
    delay_steps: float = 0.0
    wait_s: float = 0.0

    def accepted(self, acceptance: float) -> float:
        """Accepted tokens of a round; never next to none, as a plan that promises nothing is never measured."""
        share: float = self.share * acceptance**self.delay_steps
        return max(0.05, share * expected_accepted(acceptance, self.length))


def catalogue(
    with_draft: bool = True,
    with_local: bool = False,
    siblings_max: int = SIBLINGS_MAX,
    rule: Rule = Rule.GREEDY,
    with_head: bool = False,
) -> tuple[Plan, ...]:
    """Returns the plans of a service for a rule: plain decoding first, then that of its own proposers, if it has any,
    then those of its draft, or of the target's feature head, at most eight together; with siblings where the service
    allows as many."""
    if with_head:
        trees = () if siblings_max < 2 else HEAD_TREES_DRAWN if rule is Rule.REJECTION else HEAD_TREES
        return (OFF_PLAN, *(LOCAL_PLAN,) * with_local, *HEAD_CHAINS, *trees)
    waiting = WAITING_TREES_COUPLED if rule is Rule.COUPLED and siblings_max >= 2 else WAITING_TREES
    return (OFF_PLAN, *(LOCAL_PLAN,) * with_local, *(CHAINS + STREAMING_TREES + waiting) * with_draft)


def forecast(plan: Plan, draft: DraftTimes, load: float, target_s: float) -> Forecast:
    """Returns the forecast of a plan with a draft; `target_s`: of a round that waits for nothing."""
    if isinstance(draft, HeadTimes):
        rows, gain = (HEAD_TREE_ROWS, HEAD_TREE_GAIN) if plan.siblings else (1.0, 1.0)
        depth, most = float(min(plan.draft_length_max, plan.window)), min(plan.draft_length_max, rows * plan.window)
        return Forecast(most, depth, gain, wait_s=draft.trip_s(plan, load))
    trip_s, draft_steps = draft.trip_s(plan, load), target_s / draft.step_s(plan, load)
    if plan.wait_length and plan.nodes_per_step == 1:
        return Forecast(float(plan.wait_length), float(plan.wait_length), wait_s=trip_s)
    if plan.wait_length:
        length = min(plan.draft_length_max, plan.wait_length + WAITING_GROWTH * draft_steps)
        return Forecast(length, length, wait_s=HALF * trip_s)
    length = min(plan.draft_length_max, TREE_DEPTH, draft_steps)
    return Forecast(HALF * length, length, TREE_SHARE, TREE_DELAY_STEPS / draft_steps + draft.network_s / target_s)
