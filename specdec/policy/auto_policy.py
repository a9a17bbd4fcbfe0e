"""The policy that measures: it runs the plan that is worth most, and now and then tries another. Pure.

It sees counts and seconds of rounds that are over, never tokens, so that under REJECTION nothing it decides depends on
what was just drawn (docs/exactness.md). The table is the service's (table.py); the acceptance level is the session's.

A round counts for its plan once draft tokens of that plan can have arrived: rounds before that are the change's, not
the plan's, and are part of what a trial costs, as are those in which the old plan's tokens come back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specdec.policy.plan import Plan, Prediction
from specdec.policy.table import LEVEL_MAX, TRIAL_SHARE, Arm, Estimate, Table, probability
from specdec.protocol.round_record import RoundRecord

REVIEW_ROUNDS, REVIEW_S = 4, 0.02
CHANGE_GAIN = 1.015  # another plan must be worth so much more: a change costs the tokens under way
DOUBT = 0.5
WORTH_GAIN = 1.02  # over plain decoding: less is noise, and a draft's work for nothing
START_GAIN = 1.05  # a plan nobody measured must promise so much over plain decoding to be the first
ADOPTED_ROUNDS = 8.0  # a plan is adopted when so many of its rounds were measured
TRIAL_ROUNDS, BASELINE_ROUNDS = 12, 6
HOPELESS_ROUNDS = 4
BASELINE_SHARE = 0.003  # of all time, that looks at plain decoding may lose
BASELINE_MOST_S, BASELINE_FIRST_S = 60.0, 0.4
START_S = 0.3  # a draft reads the prompt: rounds before its first token do not count, for so long
OWN_CREDIT_ROUNDS = 3.0
LEVEL_TESTED, LEVEL_TESTED_MAX, LEVEL_VARIANCE_MIN = 40.0, 400.0, 0.03  # tokens that the service's level is worth
TABLE_GAIN = 0.06  # of a session's level in the service's, with each round
SURPRISE_KEPT, SURPRISE_SIGMA = 0.95, 3.0  # of the last 20 tested tokens or so: what is no chance
SURPRISE_SHARE = 0.8  # of what the level was worth, that such a surprise takes away
REST_LEVEL_S = 15.0  # a session that rests is taken for one like the others again after about this time
LEVEL_SPREAD = 0.5


@dataclass(slots=True)
class Trial:
    """A plan being tried. `ends_s`: no longer than that; `back_s`: when the plan after it has its tokens again."""

    estimate: Estimate
    best: float
    began_s: float
    rounds_wanted: int
    ends_s: float
    otherwise: Estimate


class AutoPolicy:
    """One session's policy; the table is its service's. Implements `Policy`."""

    def __init__(self, table: Table, draft_length_cap: int, now_s: float = 0.0) -> None:
        self._table = table
        self._cap = draft_length_cap
        self._level = table.level
        self._tested = self._surprise = self._variance = 0.0
        self._trial: Trial | None = None
        self._trial_rounds, self._trial_loss_s = 0, 0.0
        self._credit_s: float | None = None
        self._counts_from_s: float | None = None
        self._counted_rounds = self._review_round = self._rounds = 0
        self._review_s = 0.0
        self._own_s = 0.0
        self._estimate = self._first()
        self._put_in_force(self._estimate)

    @property
    def draft_length_cap(self) -> int:
        return self._cap

    @property
    def is_speculating(self) -> bool:
        return self._plan.draft_length_max > 0

    @property
    def prediction(self) -> Prediction:
        estimate, off = self._estimate, self._table.estimates(-math.inf)[0]
        worth = estimate.worth(self._level)
        rounds = f"{estimate.rounds:.0f} rounds measured" if estimate.rounds >= 1 else "not measured yet"
        name = self._plan.description if self.is_speculating else "off"
        what = ", tried" if self._trial is not None else ""
        reason = f"{name}{what}: {worth:.0f} tokens/s predicted, {rounds}; off {off.worth(self._level):.0f}"
        if not self.is_speculating:
            best = self._best(self._table.estimates(-math.inf)[1:])
            reason += f"; {best.arm.plan.description}: {best.worth(self._level):.0f}"
        return Prediction(worth, reason, self._trial_rounds, self._trial_loss_s)

    def plan(self, room: int) -> Plan:
        return self._plan.within(room)

    def on_round(self, record: RoundRecord) -> None:
        table = self._table
        self._rounds += 1
        if record.step_count > 1 or not record.round_index:
            return
        table.steps.on_step(record)
        table.earn(record.round_s)
        if self._credit_s is not None:
            self._credit_s += TRIAL_SHARE * record.round_s
        self._trial_rounds += self._trial is not None
        arm = table.arm_of(record.plan)
        if arm is self._estimate.arm and self._counts(record):
            self._counted_rounds += 1
            self._learn_level(arm, record)
            expected_s = self._estimate.remainder_s
            table.measure(arm, record, self._level, expected_s, self._expected_offered)
        if self._rounds >= self._review_round and record.end_s >= self._review_s:
            self._review(record.end_s)

    def _counts(self, record: RoundRecord) -> bool:
        """Whether draft tokens of the plan in force can have arrived in this round."""
        if self._counts_from_s is None:
            self._counts_from_s = record.end_s + START_S
        if self._is_new and record.offered_count:
            self._counts_from_s, self._is_new = record.start_s, False
        return record.start_s >= self._counts_from_s

    def _learn_level(self, arm: Arm, record: RoundRecord) -> None:
        """Moves the session's level, and the plan's bias while the plan is new to it: a change that comes with the plan
        is the plan's. Only tokens up to the first rejection are looked at."""
        tested = min(record.offered_count, record.accepted_count + 1)
        if not tested:
            return
        expected = probability(self._level + arm.bias)
        surprise = record.accepted_count - tested * expected
        variance = expected * (1 - expected)
        step = surprise / max(variance, LEVEL_VARIANCE_MIN)
        arm.tested += tested
        if self._counted_rounds <= TRIAL_ROUNDS and self._tested > LEVEL_TESTED:
            arm.bias += step / (arm.tested + 4 * LEVEL_TESTED)
        self._level = min(max(self._level + step / (self._tested + LEVEL_TESTED), -LEVEL_MAX), LEVEL_MAX)
        self._tested = min(self._tested + tested, LEVEL_TESTED_MAX)
        keep = SURPRISE_KEPT**tested
        self._surprise = keep * self._surprise + surprise
        self._variance = keep * self._variance + tested * variance
        if self._surprise**2 > SURPRISE_SIGMA**2 * max(self._variance, 1.0):
            self._tested, self._surprise, self._variance = -SURPRISE_SHARE * LEVEL_TESTED, 0.0, 0.0
        self._table.level += TABLE_GAIN * (self._level - self._table.level)

    def _first(self) -> Estimate:
        """The plan a session begins with: the best that was measured, or that promises most while none was."""
        estimates = self._table.estimates(-math.inf)
        measured = [line for line in estimates[1:] if line.rounds >= ADOPTED_ROUNDS]
        best = self._best(measured or estimates[1:])
        off = estimates[0]
        gain = WORTH_GAIN if measured else START_GAIN
        return best if best.worth(self._level) > gain * off.worth(self._level) else off

    def _sure(self, line: Estimate) -> float:
        """Worth less half its uncertainty: what was measured in few rounds was lucky as often as good."""
        return line.worth(self._level) * (1 - DOUBT * line.spread)

    def _best(self, lines) -> Estimate:
        return max(lines, key=self._sure)

    def _put_in_force(self, estimate: Estimate, now_s: float | None = None) -> None:
        arm, table = estimate.arm, self._table
        self._estimate = estimate
        self._plan = replace(arm.plan, wait_s=table.wait_s(arm)) if arm.plan.wait_length else arm.plan
        self._expected_offered = estimate.length * min(1.0, self._arrived_share(estimate))
        self._counted_rounds = 0
        self._is_new = now_s is None
        if now_s is not None:
            self._counts_from_s = now_s + self._warm_s(estimate)

    @staticmethod
    def _arrived_share(estimate: Estimate) -> float:
        arm = estimate.arm
        return (arm.arrivals + 3.0) / (arm.rounds + 3.0)

    def _warm_s(self, estimate: Estimate) -> float:
        """From a change to the first round that counts."""
        if not estimate.arm.plan.draft_length_max or estimate.arm.plan.wait_length:
            return 0.5 * estimate.seconds
        conditions = self._table.conditions()
        return estimate.seconds + conditions.network_s + conditions.draft_s(estimate.arm.plan.leaves)

    def _review(self, now_s: float) -> None:
        """Keeps or changes the plan by the table."""
        rest_s = now_s - self._review_s if self._review_s else 0.0
        self._review_s, self._review_round = now_s + REVIEW_S, self._rounds + REVIEW_ROUNDS
        table, level = self._table, self._level
        estimates = table.estimates(now_s)
        current = next(line for line in estimates if line.arm is self._estimate.arm)
        self._estimate = current
        if not self.is_speculating and self._trial is None:
            back = 1 - math.exp(-rest_s / REST_LEVEL_S)
            self._level += back * (table.level - self._level)
            self._tested *= 1 - back
        if self._trial is not None and not self._trial_is_over(current, now_s):
            return
        adoptable = [line for line in estimates if line.rounds >= ADOPTED_ROUNDS or line is current]
        best = self._best([estimates[0], *adoptable])
        if best.worth(level) < WORTH_GAIN * estimates[0].worth(level):
            best = estimates[0]
        if self._trial is not None:
            self._account(current, best.worth(level), now_s)
        elif best is not current and self._sure(best) < CHANGE_GAIN * self._sure(current):
            best = current
        if best is not current:
            self._put_in_force(best, now_s)
        self._expected_offered = best.length * self._arrived_share(best)
        if self._counted_rounds > REVIEW_ROUNDS and now_s >= table.trial_ends_s:
            self._consider_trial(estimates, best, now_s)

    def _trial_is_over(self, current: Estimate, now_s: float) -> bool:
        trial = self._trial
        assert trial is not None
        if self._counted_rounds >= trial.rounds_wanted or now_s >= trial.ends_s:
            return True
        optimistic = current.worth(self._level) * (1 + current.spread)
        return self._counted_rounds >= HOPELESS_ROUNDS and optimistic < trial.best

    def _account(self, current: Estimate, best: float, now_s: float) -> None:
        """Ends a trial: what it lost against the best plan, the way there and back included."""
        trial = self._trial
        assert trial is not None
        lost_s = self._loss_s(current, best, now_s - trial.began_s)
        self._trial_loss_s += lost_s
        self._table.credit_s = (self._table.credit_s or 0.0) - lost_s
        self._credit_s = (self._credit_s or 0.0) - lost_s
        self._table.trial_ends_s = now_s
        self._trial = None

    def _loss_s(self, line: Estimate, best: float, seconds: float) -> float:
        """What so long a trial loses against the best plan, in seconds. Between two plans that draft the tokens under
        way go on; where one does not, tokens are those of plain decoding until the draft's come."""
        lost_s = seconds * (1 - line.worth(self._level) / best)
        otherwise = self._estimate if self._trial is None else self._trial.otherwise
        drafts = otherwise.arm.plan.draft_length_max > 0
        if not (line.arm.plan.draft_length_max and drafts):
            drafting = otherwise if drafts else line
            off = self._table.estimates(-math.inf)[0].worth(self._level)
            lost_s += self._warm_s(drafting) * (1 - off / best)
        return max(0.0, lost_s)

    def _consider_trial(self, estimates: tuple[Estimate, ...], best: Estimate, now_s: float) -> None:
        table, level = self._table, self._level
        worth = best.worth(level)
        if self._credit_s is None:
            self._credit_s = OWN_CREDIT_ROUNDS * best.seconds
        off = estimates[0]
        if self.is_speculating and now_s >= table.next_baseline_s:
            lost_s = self._loss_s(off, worth, BASELINE_ROUNDS * off.seconds)
            if not table.next_baseline_s:
                table.next_baseline_s = now_s + BASELINE_FIRST_S
            elif lost_s <= (table.credit_s or 0.0):
                table.next_baseline_s = now_s + min(lost_s / BASELINE_SHARE, BASELINE_MOST_S)
                self._try(off, worth, BASELINE_ROUNDS, now_s)
                return
        spread = LEVEL_SPREAD / math.sqrt(1 + max(0.0, self._tested) / LEVEL_TESTED) if not self.is_speculating else 0.0
        rated = [(line.worth(level + spread) * (1 + line.spread), line) for line in estimates if line is not best]
        hopeful, line = max(rated, key=lambda entry: entry[0])
        if hopeful <= worth:
            return
        lost_s = self._loss_s(line, worth, self._warm_s(line) + TRIAL_ROUNDS * line.seconds)
        if lost_s <= min(table.credit_s or 0.0, self._credit_s):
            self._try(line, worth, TRIAL_ROUNDS, now_s)

    def _try(self, line: Estimate, best: float, rounds: int, now_s: float) -> None:
        most_s = 2 * (self._warm_s(line) + rounds * line.seconds)
        self._trial = Trial(line, best, now_s, rounds, now_s + most_s, self._estimate)
        self._table.trial_ends_s = self._trial.ends_s
        self._put_in_force(line, now_s)
