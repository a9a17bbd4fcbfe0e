"""What one service measured of its plans under one rule: a table with a line for each, plain decoding among them. Pure.

A line's worth is tokens over seconds of the same rounds, as if all sessions ran its plan: seconds are T(rows) of that
many sessions plus the plan's own remainder; tokens are what it brought, corrected by the acceptance of the session that
asks, over the lengths that arrived. It forgets: by rounds while a plan runs, by time while it does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specdec.policy.catalogue import CATALOGUE, Conditions, expected_accepted, prior_of, wait_limit_s
from specdec.policy.plan import Plan
from specdec.policy.step_curve import StepCurve
from specdec.policy.steps import Steps
from specdec.protocol.round_record import RoundRecord
from specdec.protocol.types import Rule

ROUNDS_KEPT, IDLE_KEPT_S = 400.0, 60.0  # rounds that count of a plan that runs; how long those of one that does not
PRIOR_ROUNDS = 16.0  # measured rounds that a closed formula is worth
ROUND_SPREAD = 0.6  # relative spread of a round's tokens
ACCEPTANCE_GUESS, LEVEL_MAX = 0.65, 4.0
OVERHEAD_GUESS_S = 0.0015
REMAINDER_FACTOR, REMAINDER_SLACK_S = 3.0, 0.005  # what a round takes beside its step counts for at most so much
FAST_S = 0.6  # the window in which arrivals are held against what is usual
ARRIVALS_SIGMA, ARRIVALS_SPREAD = 3.0, 0.25
LOST_SHARE = 0.4  # of the usual arrivals: below, the draft is taken for lost, whatever the plan
ARRIVALS_BACK_S = 20.0  # how long a lost draft counts against plans that were not tried since
ESTIMATES_S = 0.05
TRIAL_SHARE = 0.01  # of all time, that trying may lose
CREDIT_ROUNDS, CREDIT_MAX_S = 8.0, 1.0  # what it may lose at first, and save up
DRAFT_STEP_GUESS_S, NETWORK_WEIGHT = 0.003, 0.1


def probability(level: float) -> float:
    """Of a level on the logistic scale."""
    return 1.0 / (1.0 + math.exp(-level))


@dataclass(slots=True)
class DraftTimes:
    """What is known of the draft and the way to it: steps by nodes of all sessions, and the network's round trip."""

    steps: StepCurve = field(default_factory=StepCurve)
    network_s: float | None = None
    node_bytes: dict[Rule, float] = field(default_factory=dict)
    link_bytes_per_s: float | None = None

    def prime(self, step_times: tuple[tuple[int, float], ...]) -> None:
        """Another draft is connected, and tells what it measured when it had loaded."""
        self.steps = StepCurve()
        for nodes, seconds in step_times:
            self.steps.add(nodes, seconds)

    def on_bytes(self, rule: Rule, node_bytes: float) -> None:
        """What one evaluated node took on the link."""
        old = self.node_bytes.get(rule, node_bytes)
        self.node_bytes[rule] = old + NETWORK_WEIGHT * (node_bytes - old)

    def step_s(self, nodes: float, rule: Rule) -> float:
        """A step of so many nodes, or the time their messages take on a thin link where that is longer."""
        step_s = self.steps.seconds(nodes) or DRAFT_STEP_GUESS_S
        if self.link_bytes_per_s is None:
            return step_s
        return max(step_s, nodes * self.node_bytes.get(rule, 0.0) / self.link_bytes_per_s)

    def on_network(self, network_s: float) -> None:
        """One exchange with the draft."""
        old_s = network_s if self.network_s is None else self.network_s
        self.network_s = old_s + NETWORK_WEIGHT * (min(network_s, 3 * old_s + 0.005) - old_s)


@dataclass(slots=True, eq=False)
class Arm:
    """One plan and its rounds, as forgotten sums. `level`: mean acceptance level of the sessions in rounds where draft
    tokens arrived; `bias`: how far the plan's own tokens pass more or less often than that says."""

    plan: Plan
    rounds: float = 0.0
    arrivals: float = 0.0
    offered: float = 0.0
    accepted: float = 0.0
    level: float = 0.0
    bias: float = 0.0
    tested: float = 0.0
    wait_s: float = 0.0
    overhead_s: float = 0.0
    told_s: float = 0.0

    def keep(self, share: float) -> None:
        """Forgets all but a share."""
        self.rounds *= share
        self.tested *= share
        self.wait_s *= share
        self.overhead_s *= share
        self.scale_arrivals(share)

    def scale_arrivals(self, share: float) -> None:
        """As if draft tokens had arrived so much less often."""
        self.arrivals *= share
        self.offered *= share
        self.accepted *= share

    def age(self, now_s: float) -> None:
        """Forgets by the time since its last round."""
        if now_s > self.told_s:
            self.keep(math.exp((self.told_s - now_s) / IDLE_KEPT_S))
            self.told_s = now_s

    def add(self, record: RoundRecord, level: float, expected_s: float) -> None:
        """One round of a session at an acceptance level; `expected_s`: what it should take beside its step."""
        self.age(record.start_s)
        self.keep(1 - 1 / ROUNDS_KEPT)
        self.told_s = max(self.told_s, record.end_s)
        self.rounds += 1
        remainder_s = max(0.0, record.round_s - record.queue_s - record.step_s)
        remainder_s = min(remainder_s, REMAINDER_FACTOR * expected_s + REMAINDER_SLACK_S)
        wait_s = min(record.wait_s, remainder_s)
        self.wait_s += wait_s
        self.overhead_s += remainder_s - wait_s
        if record.offered_count:
            self.arrivals += 1
            self.offered += record.offered_count
            self.accepted += record.accepted_count
            self.level += (level - self.level) / self.arrivals


@dataclass(frozen=True, slots=True)
class Estimate:
    """One line of the table as of now. `accepted`: tokens a round at `level`; `length`: of what arrived; `seconds`: of
    a round if all sessions ran the plan; `spread`: relative uncertainty."""

    arm: Arm
    seconds: float
    accepted: float
    length: float
    level: float
    bias: float
    rounds: float
    remainder_s: float
    spread: float

    def worth(self, level: float) -> float:
        """Tokens per second of a session at an acceptance level."""
        if not self.accepted:
            return 1.0 / self.seconds
        now = expected_accepted(probability(level + self.bias), self.length)
        then = expected_accepted(probability(self.level + self.bias), self.length)
        return (1.0 + min(self.accepted * now / then, self.length)) / self.seconds


class Table:
    """The plans of all requests of one rule with the same most draft tokens."""

    def __init__(self, steps: Steps, draft: DraftTimes, rule: Rule, draft_length_cap: int) -> None:
        self.steps, self.draft, self._rule = steps, draft, rule
        self.round_count = 0
        plans = dict.fromkeys(plan.capped(draft_length_cap) for plan in CATALOGUE)
        self.arms = tuple(Arm(plan) for plan in plans)
        self.off = self.arms[0]
        self._by_shape = {self._shape(arm.plan): arm for arm in self.arms}
        self.level = math.log(ACCEPTANCE_GUESS / (1 - ACCEPTANCE_GUESS))
        self.overhead_s = OVERHEAD_GUESS_S
        self.credit_s: float | None = None
        self.trial_ends_s = -math.inf
        self.next_baseline_s = 0.0
        self._arrival_share = 1.0
        self._fast_expected = self._fast_offered = self._fast_squares = 0.0
        self._noticed_s = 0.0
        self._estimates: tuple[Estimate, ...] = ()
        self._estimated_s = -math.inf

    @staticmethod
    def _shape(plan: Plan) -> tuple[int, int, int, int]:
        return plan.draft_length_max, plan.window, plan.leaves, plan.wait_length

    def arm_of(self, plan: Plan) -> Arm | None:
        """The line of a plan; None for one that was cut to the end of a text."""
        return self._by_shape.get(self._shape(plan))

    def forget_draft(self) -> None:
        """Another draft is connected: what the last one did says nothing of it."""
        for arm in self.arms[1:]:
            arm.keep(0.0)
        self._arrival_share, self._estimated_s = 1.0, -math.inf
        self._fast_expected = self._fast_offered = self._fast_squares = 0.0

    def measure(self, arm: Arm, record: RoundRecord, level: float, expected_s: float, offered: float) -> None:
        """Tells a round that counts for its plan; `offered`: draft tokens that were expected in it."""
        arm.add(record, level, expected_s)
        if arm.plan.draft_length_max:
            self._watch_arrivals(arm, record, offered)
        else:
            overhead_s = max(0.0, record.round_s - record.queue_s - record.step_s)
            self.overhead_s += 0.05 * (min(overhead_s, REMAINDER_FACTOR * self.overhead_s) - self.overhead_s)

    def _watch_arrivals(self, arm: Arm, record: RoundRecord, offered: float) -> None:
        """Notices at once that draft tokens ceased to come or come again: that is true of all plans."""
        keep = math.exp((self._noticed_s - record.end_s) / FAST_S) if record.end_s > self._noticed_s else 1.0
        self._noticed_s = max(self._noticed_s, record.end_s)
        self._fast_expected = self._fast_expected * keep + offered
        self._fast_offered = self._fast_offered * keep + record.offered_count
        self._fast_squares = self._fast_squares * keep + offered * offered + ARRIVALS_SPREAD
        surplus = self._fast_offered - self._fast_expected
        if surplus * surplus < ARRIVALS_SIGMA * ARRIVALS_SIGMA * self._fast_squares:
            return
        share = self._fast_offered / self._fast_expected
        if LOST_SHARE < share and self._arrival_share > LOST_SHARE:
            return
        if surplus < 0:
            self._arrival_share *= share
            for other in self.arms:
                other.scale_arrivals(share)
            arm.keep(0.1)
        else:
            self._arrival_share = 1.0
            for other in self.arms[1:]:
                if other is not arm:
                    other.keep(0.1)
        self._estimated_s = -math.inf
        self._fast_expected = self._fast_offered = self._fast_squares = 0.0

    def earn(self, round_s: float) -> None:
        """A round passed: trying may lose a share of its time."""
        self.round_count += 1
        if self.credit_s is not None:
            self.credit_s = min(self.credit_s + TRIAL_SHARE * round_s, CREDIT_MAX_S)

    def estimates(self, now_s: float) -> tuple[Estimate, ...]:
        """All lines as of now, plain decoding first; made anew when some time has passed."""
        age_s = now_s - self._estimated_s
        if age_s < ESTIMATES_S:
            return self._estimates
        back = math.exp(-age_s / ARRIVALS_BACK_S) if age_s < math.inf else 1.0
        self._arrival_share = 1 - (1 - self._arrival_share) * back
        self._estimated_s = now_s
        conditions = self.conditions()
        self._estimates = tuple(self._estimate(arm, conditions, now_s) for arm in self.arms)
        if self.credit_s is None:
            self.credit_s = CREDIT_ROUNDS * self._estimates[0].seconds
        return self._estimates

    def best_worth(self) -> float:
        """Tokens per second of the best plan that was measured, for a session like the others."""
        return max(line.worth(self.level) for line in self._estimates if line.rounds >= 1 or line.arm is self.off)

    def conditions(self) -> Conditions:
        """What the closed formulas are fed with."""
        draft, sessions = self.draft, self.steps.active

        def draft_s(leaves: float) -> float:
            return draft.step_s(leaves * sessions, self._rule)

        target_s = self.steps.round_s(1.0, True, False) + self.overhead_s
        return Conditions(target_s, draft_s, draft.network_s or 0.0, probability(self.level))

    def _estimate(self, arm: Arm, conditions: Conditions, now_s: float) -> Estimate:
        arm.age(now_s)
        prior = prior_of(arm.plan, conditions)
        weight = PRIOR_ROUNDS / (PRIOR_ROUNDS + arm.rounds)
        count = PRIOR_ROUNDS + arm.rounds
        arrived = PRIOR_ROUNDS * self._arrival_share
        offered = (arrived * prior.offered + arm.offered) / count
        accepted = (arrived * prior.accepted + arm.accepted) / count
        wait_s = (PRIOR_ROUNDS * prior.wait_s + arm.wait_s) / count
        overhead_s = (PRIOR_ROUNDS * self.overhead_s + arm.overhead_s) / count
        share = PRIOR_ROUNDS / (PRIOR_ROUNDS + arm.arrivals)
        is_drafting = arm.plan.draft_length_max > 0
        step_s = self.steps.round_s(1 + offered, is_drafting, arm.plan.wait_length > 0)
        return Estimate(
            arm,
            step_s + wait_s + overhead_s,
            accepted,
            max(0.5, (PRIOR_ROUNDS * prior.offered + arm.offered) / (PRIOR_ROUNDS + arm.arrivals)),
            share * self.level + (1 - share) * arm.level,
            arm.bias * (1 - weight),
            arm.rounds,
            wait_s + overhead_s,
            ROUND_SPREAD / math.sqrt(count) if is_drafting else 0.0,
        )

    def wait_s(self, arm: Arm) -> float:
        """How long a plan may hold a verification back, as things stand."""
        return wait_limit_s(arm.plan, self.conditions()) if arm.plan.wait_length else 0.0
