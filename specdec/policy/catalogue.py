"""The plans a service chooses among, and what closed formulas say of one that nobody tried yet.

The formulas are those of rounds that wait, E / (T + g d + r), and fits to simulated trees (bench/event_simulation.py):
what a streamed tree brings falls by 0.9 a with every target step that draft tokens are late. They choose a first plan
and give the others a place in the queue; what is measured replaces them. Pure.
"""

from __future__ import annotations

import math

from specdec.policy.policy import PLAIN, Plan
from specdec.policy.steps import StepCurve

CATALOGUE = (
    PLAIN,
    Plan(1, 2, 1, 1),
    Plan(2, 3, 1, 2),
    Plan(4, 5, 1, 4),
    Plan(8, 8, 1),
    Plan(2, 6, 4),
    Plan(4, 12, 4),
    Plan(16, 32, 8),
    Plan(3, 8, 4, 1),
    Plan(6, 16, 8, 2),
    Plan(16, 32, 4, 2),
    Plan(16, 32, 8, 3),
)
DEPTH, DEPTH_MORE = 8.0, 8.0  # of a path that the fits count; more where nearly all tokens pass
DEPTH_A_STEP = 1.3  # of a path, for each draft step in a target step
STREAMED_SHARE, WAITED_SHARE = 0.72, 0.84  # of the tokens a path of that depth would bring, what trees bring
OFFERED_SHARE = 0.4  # of that depth is offered even where little of it passes
DELAY_STEPS, WAITED_DELAY_STEPS = 5.0, 2.5  # draft steps by which a tree's tokens are late
LATE_SHARE = 0.9  # of the acceptance: what a target step of delay leaves of a tree's tokens
DRAFT_STEP_GUESS_S, WEIGHT, NETWORK_SLACK_S = 0.003, 0.1, 0.005
OUTSIDE_SHARE = 0.43  # of rounds that a tree did not foresee: they wait for the draft


class DraftTimes:
    """What is known of the draft and the way to it: steps by nodes of all sessions, and the network's round trip."""

    def __init__(self, link_bytes_per_s: float = math.inf) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._steps = StepCurve()
        self._node_bytes = 0.0
        self.network_s = 0.0

    def prime(self, step_times: tuple[tuple[int, float], ...]) -> None:
        """Another draft is connected, and tells what it measured when it had loaded."""
        self._steps = StepCurve()
        for nodes, seconds in step_times:
            self._steps.add(nodes, seconds)

    def on_step(self, nodes: int, seconds: float) -> None:
        """One step, of so many nodes of all sessions."""
        self._steps.add(max(1, nodes), seconds)

    def on_bytes(self, node_bytes: float) -> None:
        """What one evaluated node took on the link."""
        self._node_bytes += WEIGHT * (node_bytes - self._node_bytes)

    def on_network(self, network_s: float) -> None:
        """One exchange with the draft: the network time of it, both ways."""
        old_s = self.network_s or network_s
        self.network_s = old_s + WEIGHT * (min(network_s, 3 * old_s + NETWORK_SLACK_S) - old_s)

    def step_s(self, nodes: float) -> float:
        """A step of so many nodes, or the time their messages take on a thin link where that is longer."""
        return max(self._steps.seconds(nodes) or DRAFT_STEP_GUESS_S, nodes * self._node_bytes / self._link_bytes_per_s)

    def trip_s(self, plan: Plan, sessions: float) -> float:
        """From a commit to the draft tokens that a plan waits for, or to the first."""
        return self.network_s + max(1, plan.wait_length) * self.step_s(plan.leaves * sessions)


def expected_accepted(acceptance: float, length: float) -> float:
    """a + a^2 + ... + a^length, between whole numbers too."""
    if acceptance >= 0.999:
        return length
    beyond: float = acceptance**length
    return acceptance * (1.0 - beyond) / (1.0 - acceptance)


def prior_of(
    plan: Plan, draft: DraftTimes, sessions: float, target_s: float, acceptance: float
) -> tuple[float, float, float]:
    """What the formulas say of a round: tokens offered and accepted, and seconds of waiting for the draft. `target_s`:
    a round of one row without waiting; `acceptance`: per token."""
    if not plan.draft_length_max:
        return 0.0, 0.0, 0.0
    trip_s = draft.trip_s(plan, sessions)
    if plan.wait_length and plan.leaves == 1:
        return plan.wait_length, expected_accepted(acceptance, plan.wait_length), trip_s
    draft_s = draft.step_s(plan.leaves * sessions)
    if plan.wait_length:
        share, delay_s, wait_s = WAITED_SHARE, WAITED_DELAY_STEPS * draft_s, OUTSIDE_SHARE * trip_s
    else:
        share, delay_s, wait_s = STREAMED_SHARE, DELAY_STEPS * draft_s + draft.network_s, 0.0
    share *= (LATE_SHARE * acceptance) ** (delay_s / target_s)
    if plan.leaves == 1:
        share *= acceptance**1.5
    depth = min(DEPTH + DEPTH_MORE * acceptance**10, 1 + DEPTH_A_STEP * target_s / draft_s)
    length = min(float(plan.draft_length_max), depth)
    return max(share, OFFERED_SHARE) * length, share * expected_accepted(acceptance, length), wait_s
