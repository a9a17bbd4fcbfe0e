"""What one service measured of its plans under one rule: a table with a line for each, plain decoding among them. Pure.

A line's worth is tokens over seconds of the same rounds, as if all sessions ran its plan: seconds are T(rows) of that
many sessions plus the plan's own remainder; tokens are what it brought, corrected by the acceptance of the session that
asks, over the lengths that arrived. It forgets: by rounds while a plan runs, by time while it does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.policy.catalogue import CATALOGUE, Conditions, DraftTimes, expected_accepted, prior_of, wait_limit_s
from specdec.policy.plan import Plan
from specdec.policy.steps import Steps
from specdec.protocol.round_record import RoundRecord

ROUNDS_KEPT, IDLE_KEPT_S = 400.0, 60.0  # rounds that count of a plan that runs; how long those of one that does not
PRIOR_ROUNDS, ROUND_SPREAD = 16.0, 0.6  # what a closed formula is worth; relative spread of a round's tokens
ACCEPTANCE_GUESS, LEVEL_MAX = 0.65, 4.0
OVERHEAD_GUESS_S, OVERHEAD_WEIGHT = 0.0015, 0.05
REMAINDER_FACTOR, REMAINDER_SLACK_S = 3.0, 0.005  # what a round takes beside its step counts for at most so much
FAST_S, ARRIVALS_SIGMA, ARRIVALS_SPREAD = 0.6, 3.0, 0.25  # the window that is held against the usual arrivals
LOST_SHARE, LOST_KEPT = 0.4, 0.1  # of the usual arrivals: below, the draft is taken for lost; what then still counts
KNOWN_ROUNDS, SILENT_ROUNDS = 40.0, 20.0  # of a plan, before its arrivals say that; where none came at all
BACK_S = 20.0  # how long a lost draft counts against plans that were not tried since
ESTIMATES_S = 0.05
REST_LEAST_S, REST_MOST_S = 0.25, 8.0  # between trials while plain decoding is the best
TRIAL_SHARE = 0.01  # of all time, that trying may lose
CREDIT_ROUNDS, CREDIT_MAX_S = 4.0, 1.0  # what it may lose at first, and save up


def probability(level: float) -> float:
    """Of a level on the logistic scale."""
    return 1.0 / (1.0 + math.exp(-level))


@dataclass(slots=True, eq=False)
class Arm:
    """One plan and its rounds, as forgotten sums. `level`: mean acceptance level of the sessions in rounds where draft
    tokens arrived."""

    plan: Plan
    rounds: float = 0.0
    arrivals: float = 0.0
    offered: float = 0.0
    accepted: float = 0.0
    level: float = 0.0
    wait_s: float = 0.0
    overhead_s: float = 0.0
    told_s: float = 0.0

    def keep(self, share: float) -> None:
        """Forgets all but a share."""
        self.rounds *= share
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


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """One line of the table as of now. `seconds`: of a round if all sessions ran the plan, `remainder_s` of it beside
    the step; `offered`: tokens a round; `length`: of what arrived; `gain`: accepted over a + ... + a^length, a being
    the acceptance of the sessions that were measured; `spread`: relative uncertainty."""

    arm: Arm
    seconds: float
    remainder_s: float
    offered: float
    gain: float
    length: float
    rounds: float
    spread: float

    def worth(self, level: float) -> float:
        """Tokens per second of a session at an acceptance level."""
        if not self.gain:
            return 1.0 / self.seconds
        return (1.0 + min(self.gain * expected_accepted(probability(level), self.length), self.length)) / self.seconds


class Table:
    """The plans of all requests of one rule with the same most draft tokens."""

    def __init__(self, steps: Steps, draft: DraftTimes, draft_length_cap: int) -> None:
        self._steps, self._draft = steps, draft
        self._arms = {self._shape(plan): Arm(plan) for plan in (plan.capped(draft_length_cap) for plan in CATALOGUE)}
        self.off = next(iter(self._arms.values()))
        self.level = math.log(ACCEPTANCE_GUESS / (1 - ACCEPTANCE_GUESS))
        self.round_count = 0
        self.trial_ends_s, self.next_baseline_s = -math.inf, 0.0
        self._rest_s = REST_LEAST_S
        self._overhead_s = OVERHEAD_GUESS_S
        self._arrival_share = 1.0
        self._fast_expected = self._fast_offered = self._fast_squares = self._noticed_s = 0.0
        self._estimates: tuple[Estimate, ...] = ()
        self._estimated_s = -math.inf
        self.credit_s = CREDIT_ROUNDS * self.estimates(-math.inf)[0].seconds

    @staticmethod
    def _shape(plan: Plan) -> tuple[int, int, int, int]:
        return plan.draft_length_max, plan.window, plan.leaves, plan.wait_length

    def arm_of(self, plan: Plan) -> Arm | None:
        """The line of a plan; None for one that was cut to the end of a text."""
        return self._arms.get(self._shape(plan))

    def forget_draft(self, share: float = 0.0, but: Arm | None = None) -> None:
        """Another draft is connected, or the same is back: what was measured of all plans but one counts for less."""
        for arm in self._arms.values():
            if arm not in (self.off, but):
                arm.keep(share)
        self._arrival_share, self._estimated_s = 1.0, -math.inf

    def on_round(self, record: RoundRecord) -> None:
        """A round of any session: its step is measured, and trying may lose a share of its time."""
        self._steps.on_step(record)
        self.round_count += 1
        self.credit_s = min(self.credit_s + TRIAL_SHARE * record.round_s, CREDIT_MAX_S)

    def on_trial_end(self, now_s: float, in_vain: bool) -> None:
        """Another may be tried, after a rest twice as long as the last where plain decoding stays the best."""
        self._rest_s = min(2 * self._rest_s, REST_MOST_S) if in_vain else REST_LEAST_S
        self.trial_ends_s = now_s + (self._rest_s if in_vain else 0.0)

    def measure(self, line: Estimate, record: RoundRecord, level: float) -> None:
        """A round that counts for its plan."""
        line.arm.add(record, level, line.remainder_s)
        if line.arm is self.off:
            overhead_s = max(0.0, record.round_s - record.queue_s - record.step_s)
            overhead_s = min(overhead_s, REMAINDER_FACTOR * self._overhead_s)
            self._overhead_s += OVERHEAD_WEIGHT * (overhead_s - self._overhead_s)
        else:
            self._watch_arrivals(line.arm, record, line.offered)

    def _watch_arrivals(self, arm: Arm, record: RoundRecord, expected: float) -> None:
        """Notices at once that draft tokens ceased to come or come again: that is true of all plans."""
        keep = math.exp(min(0.0, self._noticed_s - record.end_s) / FAST_S)
        self._noticed_s = max(self._noticed_s, record.end_s)
        self._fast_expected = self._fast_expected * keep + expected
        self._fast_offered = self._fast_offered * keep + record.offered_count
        self._fast_squares = self._fast_squares * keep + expected * expected + ARRIVALS_SPREAD
        surplus = self._fast_offered - self._fast_expected
        is_known = arm.rounds >= KNOWN_ROUNDS if arm.arrivals else arm.rounds >= SILENT_ROUNDS
        is_lost = is_known and self._fast_offered < LOST_SHARE * self._fast_expected
        if surplus**2 < ARRIVALS_SIGMA**2 * self._fast_squares or not (is_lost or self._arrival_share < LOST_SHARE):
            return
        if surplus < 0:
            share = self._fast_offered / self._fast_expected
            self._arrival_share *= share
            self._estimated_s = -math.inf
            for other in self._arms.values():
                other.scale_arrivals(share)
            arm.keep(LOST_KEPT)
        else:
            self.forget_draft(LOST_KEPT, arm)
        self._fast_expected = self._fast_offered = self._fast_squares = 0.0

    def estimates(self, now_s: float) -> tuple[Estimate, ...]:
        """All lines as of now, plain decoding first; made anew when some time has passed."""
        if self._estimates and now_s < self._estimated_s + ESTIMATES_S:
            return self._estimates
        if math.isfinite(self._estimated_s):
            self._arrival_share = 1 - (1 - self._arrival_share) * math.exp((self._estimated_s - now_s) / BACK_S)
        self._estimated_s = now_s
        conditions = self._conditions()
        self._estimates = tuple(self._estimate(arm, conditions, now_s) for arm in self._arms.values())
        return self._estimates

    def best_worth(self) -> float:
        """Tokens per second of the best plan that was measured, for a session like the others."""
        return max(line.worth(self.level) for line in self._estimates if line.rounds >= 1 or line.arm is self.off)

    def _conditions(self) -> Conditions:
        target_s = self._steps.round_s(1.0, True, False) + self._overhead_s
        return Conditions(target_s, self._draft, self._steps.active, probability(self.level))

    def wait_s(self, plan: Plan) -> float:
        """How long a plan may hold a verification back, as things stand."""
        return wait_limit_s(plan, self._conditions())

    def trip_s(self, plan: Plan) -> float:
        """From a commit to the first draft token after it, as things stand."""
        return self._conditions().trip_s(plan, 1)

    def _estimate(self, arm: Arm, conditions: Conditions, now_s: float) -> Estimate:
        arm.age(now_s)
        prior = prior_of(arm.plan, conditions)
        count, arrivals = PRIOR_ROUNDS + arm.rounds, PRIOR_ROUNDS + arm.arrivals
        arrived = PRIOR_ROUNDS * self._arrival_share
        offered = (arrived * prior.offered + arm.offered) / count
        wait_s = (PRIOR_ROUNDS * prior.wait_s + arm.wait_s) / count
        remainder_s = wait_s + (PRIOR_ROUNDS * self._overhead_s + arm.overhead_s) / count
        accepted = (arrived * prior.accepted + arm.accepted) / count
        length = max(0.5, (PRIOR_ROUNDS * prior.offered + arm.offered) / arrivals)
        level = (PRIOR_ROUNDS * self.level + arm.arrivals * arm.level) / arrivals
        is_off = arm is self.off
        return Estimate(
            arm,
            self._steps.round_s(1 + offered, not is_off, arm.plan.wait_length > 0) + remainder_s,
            remainder_s,
            offered,
            accepted / expected_accepted(probability(level), length),
            length,
            arm.rounds,
            0.0 if is_off else ROUND_SPREAD / math.sqrt(count),
        )
