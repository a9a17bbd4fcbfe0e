"""The plans a service chooses among, and what closed formulas say of one that nobody tried yet.

The formulas are those of rounds that wait, E / (T + g d + r), and fits to simulated trees (bench/event_simulation.py):
what a streamed tree brings falls by 0.9 a with every target step that draft tokens are late. They choose a first plan
and give the others a place in the queue; what is measured replaces them. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.policy.plan import PLAIN, Plan
from specdec.policy.step_curve import StepCurve

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
DRAFT_STEP_GUESS_S, WEIGHT = 0.003, 0.1
OUTSIDE_SHARE = 0.43  # of rounds that a tree did not foresee: they wait for the draft
WAIT_SLACK, WAIT_LEAST_S, WAIT_MOST_S = 2.5, 0.005, 1.0  # a wait may last so many times what the tokens should take


class DraftTimes:
    """What is known of the draft and the way to it: steps by nodes of all sessions, and the network's round trip."""

    def __init__(self, link_bytes_per_s: float | None = None) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._steps = StepCurve()
        self._node_bytes = 0.0
        self.network_s = 0.0
        self._has_network = False

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
        old_s = self.network_s if self._has_network else network_s
        self.network_s = old_s + WEIGHT * (min(network_s, 3 * old_s + WAIT_LEAST_S) - old_s)
        self._has_network = True

    def step_s(self, nodes: float) -> float:
        """A step of so many nodes, or the time their messages take on a thin link where that is longer."""
        step_s = self._steps.seconds(nodes) or DRAFT_STEP_GUESS_S
        return max(step_s, nodes * self._node_bytes / self._link_bytes_per_s) if self._link_bytes_per_s else step_s


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the formulas need: a round of one row, the draft, the sessions it serves, the acceptance per token."""

    target_s: float
    draft: DraftTimes
    sessions: float
    acceptance: float

    def trip_s(self, plan: Plan, length: int) -> float:
        """From a commit to so many draft tokens after it."""
        return self.draft.network_s + length * self.draft.step_s(plan.leaves * self.sessions)


@dataclass(frozen=True, slots=True)
class Prior:
    """A round as the formulas see it: tokens offered and accepted, and seconds of waiting for the draft."""

    offered: float
    accepted: float
    wait_s: float


def expected_accepted(acceptance: float, length: float) -> float:
    """a + a^2 + ... + a^length, between whole numbers too."""
    if acceptance >= 0.999:
        return length
    return acceptance * (1.0 - acceptance**length) / (1.0 - acceptance)


def prior_of(plan: Plan, conditions: Conditions) -> Prior:
    """What the formulas say of a plan."""
    if not plan.draft_length_max:
        return Prior(0.0, 0.0, 0.0)
    acceptance, target_s = conditions.acceptance, conditions.target_s
    draft_s = conditions.draft.step_s(plan.leaves * conditions.sessions)
    trip_s = conditions.trip_s(plan, max(1, plan.wait_length))
    if plan.wait_length and plan.leaves == 1:
        return Prior(plan.wait_length, expected_accepted(acceptance, plan.wait_length), trip_s)
    late = WAITED_DELAY_STEPS if plan.wait_length else DELAY_STEPS
    delay = late * draft_s + (0.0 if plan.wait_length else conditions.draft.network_s)
    share = (WAITED_SHARE if plan.wait_length else STREAMED_SHARE) * (LATE_SHARE * acceptance) ** (delay / target_s)
    if plan.leaves == 1:
        share *= acceptance**1.5
    depth = min(DEPTH + DEPTH_MORE * acceptance**10, 1 + DEPTH_A_STEP * target_s / draft_s)
    length = min(float(plan.draft_length_max), depth)
    wait_s = OUTSIDE_SHARE * trip_s if plan.wait_length else 0.0
    return Prior(max(share, OFFERED_SHARE) * length, share * expected_accepted(acceptance, length), wait_s)


def wait_limit_s(plan: Plan, conditions: Conditions) -> float:
    """How long the verifications of a plan that waits may be held back."""
    return min(WAIT_LEAST_S + WAIT_SLACK * conditions.trip_s(plan, plan.wait_length), WAIT_MOST_S)
