"""The plans a service chooses among, and closed formulas for plans without measurements.

The formulas are those of rounds that wait, E / (T + g d + r), and fits to simulated trees (bench/event_simulation.py):
the tokens of a streamed tree fall by the factor 0.9 a with every target step of draft delay. They choose a first plan
and order the explorations; measurements replace them. Pure.
"""

from __future__ import annotations

import math

from specdec.policy.steps import FADE_SHARE, Fading, StepCurve
from specdec.protocol.plan import LOCAL_PLAN, OFF_PLAN, Plan
from specdec.protocol.types import SIBLINGS_MAX, Rule

DRAFT_PLANS = (
    Plan(1, 2, 1, 1),
    Plan(2, 3, 1, 2),
    Plan(4, 5, 1, 4),
    Plan(8, 8, 1),
    Plan(2, 6, 4),
    Plan(4, 12, 4),
    Plan(16, 32, 8),
    Plan(6, 3, 1, 2, siblings=2),
    Plan(10, 5, 1, 4, siblings=2),
    Plan(16, 12, 4, siblings=2),
)
WAITING_TREES = (
    Plan(3, 8, 4, 1),
    Plan(6, 16, 8, 2),
    Plan(16, 32, 4, 2),
    Plan(16, 32, 8, 3),
)
# Instead of these under COUPLED: where the draft's best perturbed score is wrong, its next ones are often right.
WAITING_TREES_COUPLED = (
    Plan(6, 8, 4, 1, siblings=2),
    Plan(12, 16, 8, 2, siblings=2),
    Plan(16, 32, 4, 2, siblings=2),
    Plan(16, 32, 8, 3, siblings=2),
)
DEPTH, DEPTH_MORE = 8.0, 8.0  # path depth in the fits; more where nearly all tokens are accepted
DEPTH_A_STEP = 1.3  # path depth per draft step in a target step
STREAMED_SHARE, WAITED_SHARE = 0.72, 0.84  # a tree's accepted tokens, as a share of those of a path of that depth
OFFERED_SHARE = 0.4  # of that depth, offered even where few tokens are accepted
DELAY_STEPS, WAITED_DELAY_STEPS = 5.0, 2.5  # draft steps by which a tree's tokens are late
LATE_SHARE = 0.9  # times the acceptance: the share of a tree's tokens left after a target step of delay
SIBLING_GAIN = 0.08  # of one sibling of each token of a plan that waits, in accepted tokens
LOCAL_OFFERED = 0.5  # draft tokens of a round by the coordinator's own proposers, in a text without repetitions
DRAFT_STEP_GUESS_S, LATE_GUESS_S, WEIGHT, NETWORK_SLACK_S, WAIT_TRIPS_MAX = 0.003, 0.002, 0.1, 0.005, 4.0
OUTSIDE_SHARE = 0.5  # of rounds whose next token was not in the tree: they wait for the draft


class DraftTimes:
    """Times of the draft and its link: steps by nodes of all sessions, and the network round trip."""

    def __init__(self, link_bytes_per_s: float = math.inf) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._steps = StepCurve()
        self._node_bytes = 0.0
        self._sessions = 0.0  # that the draft drafts for, by what it says; 0: unknown
        self._late_s = LATE_GUESS_S  # waits of chains beyond `trip_s`
        self._fading, self._is_late_measured = Fading(), False  # the latter since the last fading
        self.network_s = 0.0

    def prime(self, step_times: tuple[tuple[int, float], ...]) -> None:
        """Another draft is connected: takes the (nodes, seconds) that it measured at start."""
        self._steps.prime(step_times)
        self._late_s = LATE_GUESS_S

    def on_step(self, nodes: int, seconds: float, sessions: int = 0) -> None:
        """Records one step; `nodes`: of all `sessions` of the draft, 0 if unknown."""
        self._steps.add(max(1, nodes), seconds)
        self._sessions += (WEIGHT if self._sessions else 1.0) * (sessions - self._sessions)

    def nodes(self, plan: Plan, sessions: float) -> float:
        """Returns the nodes of a step if all sessions of the draft had the plan; without its word, these `sessions`."""
        return plan.nodes_per_step * max(1.0, self._sessions or sessions)

    def on_bytes(self, node_bytes: float) -> None:
        """Records the bytes of one evaluated node on the link."""
        self._node_bytes += WEIGHT * (node_bytes - self._node_bytes)

    def on_network(self, network_s: float) -> None:
        """Records the network round trip of one exchange with the draft."""
        old_s = self.network_s or network_s
        self.network_s = old_s + WEIGHT * (min(network_s, 3 * old_s + NETWORK_SLACK_S) - old_s)

    def on_wait(self, plan: Plan, sessions: float, wait_s: float) -> None:
        """Records the wait of a round in which the tokens came: longer than `trip_s` by messages and by processes that
        share a core, shorter where tokens were in hand."""
        if plan.wait_length and plan.nodes_per_step == 1 and not plan.siblings:
            trip_s = self.trip_s(plan, sessions)
            self._late_s += WEIGHT * (min(wait_s, WAIT_TRIPS_MAX * trip_s) - trip_s - self._late_s)
            self._is_late_measured = True

    def fade(self, now_s: float) -> None:
        """Lets times that were not measured lately return to those at start: see steps.py."""
        if self._fading.is_due(now_s):
            self._steps.fade()
            self._late_s += 0.0 if self._is_late_measured else FADE_SHARE * (LATE_GUESS_S - self._late_s)
            self._is_late_measured = False

    def usual_wait_s(self, plan: Plan, sessions: float) -> float:
        """Seconds for which the rounds of a chain wait on the mean."""
        return max(0.0, self.trip_s(plan, sessions) + self._late_s)

    def step_s(self, nodes: float) -> float:
        """Seconds of a step of `nodes` nodes, or of their messages on a slow link if that is longer."""
        return max(self._steps.seconds(nodes) or DRAFT_STEP_GUESS_S, nodes * self._node_bytes / self._link_bytes_per_s)

    def trip_s(self, plan: Plan, sessions: float) -> float:
        """Seconds from a commit to the draft tokens that a plan waits for, or to the first."""
        return self.network_s + max(1, plan.wait_length) * self.step_s(self.nodes(plan, sessions))


def catalogue(
    with_draft: bool = True, with_local: bool = False, siblings_max: int = SIBLINGS_MAX, rule: Rule = Rule.GREEDY
) -> tuple[Plan, ...]:
    """Returns the plans of a service for a rule: plain decoding first, then that of its own proposers, if it has any,
    then those of its draft with at most `siblings_max` siblings."""
    branched = [plan for plan in WAITING_TREES_COUPLED if plan.siblings <= siblings_max and rule is Rule.COUPLED]
    of_draft = [plan for plan in DRAFT_PLANS if plan.siblings <= siblings_max]
    return (OFF_PLAN, *(LOCAL_PLAN,) * with_local, *[*of_draft, *(branched or WAITING_TREES)] * with_draft)


def expected_accepted(acceptance: float, length: float) -> float:
    """Returns a + a^2 + ... + a^length, also for a `length` that is not an integer."""
    if acceptance >= 0.999:
        return length
    beyond: float = acceptance**length
    return acceptance * (1.0 - beyond) / (1.0 - acceptance)


def prior_of(
    plan: Plan, draft: DraftTimes, sessions: float, target_s: float, acceptance: float
) -> tuple[float, float, float]:
    """Returns the formulas' estimate of a round: tokens offered, tokens accepted, seconds of waiting for the draft.
    `target_s`: a round of one row without waiting; `acceptance`: per token."""
    if not plan.draft_length_max:
        return 0.0, 0.0, 0.0
    if not plan.window:
        return LOCAL_OFFERED, 0.0, 0.0
    usual_wait_s = draft.usual_wait_s(plan, sessions)
    gain = 1 + SIBLING_GAIN * plan.siblings
    if plan.wait_length and plan.nodes_per_step == 1:
        offered = (
            min(plan.wait_length * (1 + plan.siblings), plan.draft_length_max) if plan.siblings else plan.wait_length
        )
        return offered, gain * expected_accepted(acceptance, plan.wait_length), usual_wait_s
    draft_s = draft.step_s(draft.nodes(plan, sessions))
    if plan.wait_length:
        share, delay_s, wait_s = gain * WAITED_SHARE, WAITED_DELAY_STEPS * draft_s, OUTSIDE_SHARE * usual_wait_s
    else:
        share, delay_s, wait_s = STREAMED_SHARE, DELAY_STEPS * draft_s + draft.network_s, 0.0
    share *= (LATE_SHARE * acceptance) ** (delay_s / target_s)
    if plan.nodes_per_step == 1:
        share *= acceptance**1.5
    depth = min(DEPTH + DEPTH_MORE * acceptance**10, 1 + DEPTH_A_STEP * target_s / draft_s)
    length = min(float(plan.draft_length_max), depth)
    return max(share, OFFERED_SHARE) * length, share * expected_accepted(acceptance, length), wait_s
