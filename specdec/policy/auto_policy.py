"""The policy that measures: it runs the plan that is worth most, and now and then tries another. Pure.

It sees counts and seconds of rounds that are over, never tokens, so that under REJECTION nothing it decides depends on
what was just drawn (docs/exactness.md). The table is the service's (table.py), the acceptance level the session's.

A round counts for its plan once draft tokens of that plan can have arrived: those before are the change's, not the
plan's. They are part of what a trial costs, as are those in which the old plan's tokens come back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from specdec.policy.policy import Plan, Prediction
from specdec.policy.table import TRIAL_SHARE, Line, Table, probability
from specdec.protocol.report import RoundRecord

REVIEW_ROUNDS, REVIEW_S = 4, 0.02
CHANGE_GAIN = 1.015  # another plan must be worth so much more: a change costs the tokens under way
DOUBT = 0.5  # of a line's uncertainty, that is taken off: few rounds were lucky as often as good
WORTH_GAIN, START_GAIN = 1.02, 1.05  # over plain decoding, of a plan that was measured, and of one that was not
ADOPTED_ROUNDS = 8.0  # a plan is adopted when so many of its rounds were measured
TRIAL_ROUNDS, BASELINE_ROUNDS, HOPELESS_ROUNDS = 12, 6, 4
BASELINE_SHARE, BASELINE_FIRST_S, BASELINE_MOST_S = 0.003, 1.0, 60.0  # what looks at plain decoding may lose, and when
START_S = 0.3  # a draft reads the prompt: rounds before its first token do not count, for so long
OWN_CREDIT_ROUNDS = 3.0
LEVEL_MAX = 4.0
LEVEL_TESTED, LEVEL_TESTED_MAX, LEVEL_VARIANCE_MIN = 40.0, 400.0, 0.03  # tokens that the service's level is worth
TABLE_GAIN = 0.12  # of a session's level in the service's, with each round
SURPRISE_KEPT, SURPRISE_SIGMA = 0.95, 3.0  # of the last 20 tested tokens or so: what is no chance
SURPRISE_SHARE = 0.8  # of what the level was worth, that such a surprise takes away
REST_LEVEL_S, LEVEL_SPREAD = 40.0, 0.5  # how long a session that rests is taken for other than the service's others


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan being tried until `rounds` of it counted, or `ends_s`; `charged_s` is what it was to lose against the
    `best` plan; `otherwise` was in force before."""

    best: float
    began_s: float
    ends_s: float
    rounds: int
    charged_s: float
    otherwise: Line


class AutoPolicy:
    """One session's policy; the table is its service's. Implements `Policy`."""

    def __init__(self, table: Table, draft_length_cap: int) -> None:
        self._table, self.draft_length_cap = table, draft_length_cap
        self._level, self._tested = table.level, 0.0
        self._surprise = self._variance = 0.0
        self._trial: Trial | None = None
        self._trial_rounds, self._trial_loss_s = 0, 0.0
        self._credit_s = OWN_CREDIT_ROUNDS * table.off.round_s
        self._counts_from_s: float | None = None
        self._is_first = True
        self._review_round, self._review_s = 0, 0.0
        table.refresh()
        self._put_in_force(self._first())

    @property
    def prediction(self) -> Prediction:
        line, (worth, plain) = self._line, map(self._worth, (self._line, self._table.off))
        rounds = f"{line.rounds:.0f} rounds measured" if line.rounds >= 1 else "not measured yet"
        name = line.plan.description if self.is_speculating else "off"
        tried = "" if self._trial is None else ", tried"
        reason = f"{name}{tried}: {worth:.0f} tokens/s predicted, {rounds}; off {plain:.0f}"
        if not self.is_speculating:
            best = self._best(self._table.others)
            reason += f"; {best.plan.description}: {self._worth(best):.0f}"
        return Prediction(worth, reason, self._trial_rounds, self._trial_loss_s)

    def plan(self, room: int) -> Plan:
        return self._plan.within(room)

    def on_round(self, record: RoundRecord) -> None:
        if record.step_count > 1 or not record.round_index:  # it read a prompt, or what was evicted
            return
        self._table.on_round(record)
        self._credit_s += TRIAL_SHARE * record.round_s
        self._trial_rounds += self._trial is not None
        if record.plan == self._plan and self._counts(record):
            self._counted_rounds += 1
            self._learn_level(record)
            self._table.measure(self._line, record, self._level)
        if record.round_index >= self._review_round and record.end_s >= self._review_s:
            self._review(record)

    def _counts(self, record: RoundRecord) -> bool:
        """Whether draft tokens of the plan in force can have arrived in this round."""
        if self._counts_from_s is None:
            self._counts_from_s = record.end_s + START_S
        if self._is_first and record.offered_count:
            self._counts_from_s, self._is_first = record.start_s, False
        return record.start_s >= self._counts_from_s

    def _learn_level(self, record: RoundRecord) -> None:
        """Moves the session's level. Only tokens up to the first rejection are looked at."""
        tested = min(record.offered_count, record.accepted_count + 1)
        if not tested:
            return
        expected = probability(self._level)
        surprise, variance = record.accepted_count - tested * expected, expected * (1 - expected)
        step = surprise / max(variance, LEVEL_VARIANCE_MIN)
        self._level = min(max(self._level + step / (self._tested + LEVEL_TESTED), -LEVEL_MAX), LEVEL_MAX)
        self._tested = min(self._tested + tested, LEVEL_TESTED_MAX)
        keep = SURPRISE_KEPT**tested
        self._surprise = keep * self._surprise + surprise
        self._variance = keep * self._variance + tested * variance
        if self._surprise**2 > SURPRISE_SIGMA**2 * max(self._variance, 1.0):
            self._tested, self._surprise, self._variance = -SURPRISE_SHARE * LEVEL_TESTED, 0.0, 0.0
        self._table.level += TABLE_GAIN * (self._level - self._table.level)

    def _first(self) -> Line:
        """The plan a session begins with: the best that was measured, or that promises most while none was."""
        off, others = self._table.off, self._table.others
        measured = [line for line in others if line.rounds >= ADOPTED_ROUNDS]
        best = self._best(measured or others)
        gain = WORTH_GAIN if measured else START_GAIN
        return best if self._worth(best) > gain * self._worth(off) else off

    def _worth(self, line: Line) -> float:
        return line.worth(self._level)

    def _sure(self, line: Line) -> float:
        return line.worth(self._level) * (1 - DOUBT * line.spread)

    def _best(self, lines: Iterable[Line]) -> Line:
        return max(lines, key=self._sure)

    def _put_in_force(self, line: Line, now_s: float | None = None) -> None:
        self._line, self._plan = line, replace(line.plan, wait_s=self._table.wait_s(line.plan))
        self.is_speculating = line is not self._table.off
        self._counted_rounds, self._is_first = 0, now_s is None
        if now_s is not None:
            self._counts_from_s = now_s + self._warm_s(line)

    def _warm_s(self, line: Line) -> float:
        """From a change to the first round that counts."""
        if line is self._table.off or line.plan.wait_length:
            return 0.5 * line.round_s
        return line.round_s + self._table.trip_s(line.plan)

    def _review(self, record: RoundRecord) -> None:
        """Keeps or changes the plan by the table."""
        now_s, table, current = record.end_s, self._table, self._line
        rest_s = now_s - self._review_s if self._review_s else 0.0
        self._review_s, self._review_round = now_s + REVIEW_S, record.round_index + REVIEW_ROUNDS
        table.refresh(now_s)
        if not self.is_speculating and self._trial is None:
            back = 1 - math.exp(-rest_s / REST_LEVEL_S)
            self._level += back * (table.level - self._level)
            self._tested *= 1 - back
        if self._trial is not None and not self._is_over(self._trial, now_s):
            return
        best = self._best(line for line in table.lines if line.rounds >= ADOPTED_ROUNDS or line in (table.off, current))
        if self._worth(best) < WORTH_GAIN * self._worth(table.off):
            best = table.off
        if self._trial is not None:
            trial, self._trial = self._trial, None
            table.on_trial_end(now_s, in_vain=best is trial.otherwise is table.off)
            lost_s = self._loss_s(current, trial.otherwise, self._worth(best), now_s - trial.began_s)
            self._charge(lost_s - trial.charged_s)
        elif self._sure(best) < CHANGE_GAIN * self._sure(current):
            best = current
        if best is not current:
            self._put_in_force(best, now_s)
        if self._counted_rounds > REVIEW_ROUNDS and now_s >= table.trial_ends_s:
            self._consider_trial(best, now_s)

    def _is_over(self, trial: Trial, now_s: float) -> bool:
        if self._counted_rounds >= trial.rounds or now_s >= trial.ends_s:
            return True
        return self._counted_rounds >= HOPELESS_ROUNDS and self._line.promise(self._level) < trial.best

    def _loss_s(self, line: Line, otherwise: Line, best: float, seconds: float) -> float:
        """What so long a trial loses against the best plan, in seconds. Between two plans that draft the tokens under
        way go on; where one does not, tokens are those of plain decoding until the draft's come."""
        lost_s = seconds * (1 - self._worth(line) / best)
        off = self._table.off
        if off in (line, otherwise):
            lost_s += self._warm_s(line if otherwise is off else otherwise) * (1 - self._worth(off) / best)
        return max(0.0, lost_s)

    def _charge(self, lost_s: float) -> None:
        self._trial_loss_s += lost_s
        self._credit_s -= lost_s
        self._table.credit_s -= lost_s

    def _consider_trial(self, best: Line, now_s: float) -> None:
        """Begins a trial where one promises to be worth it and may be paid for; of plain decoding from time to time."""
        table, off, worth, spread = self._table, self._table.off, self._worth(best), 0.0
        if best is off:
            spread = LEVEL_SPREAD / math.sqrt(1 + max(0.0, self._tested) / LEVEL_TESTED)
        elif now_s >= table.next_baseline_s:
            lost_s = self._loss_s(off, best, worth, BASELINE_ROUNDS * off.round_s)
            is_first, table.next_baseline_s = not table.next_baseline_s, now_s + BASELINE_FIRST_S
            if not is_first and lost_s <= table.credit_s:
                table.next_baseline_s = now_s + min(lost_s / BASELINE_SHARE, BASELINE_MOST_S)
                self._try(off, best, worth, BASELINE_ROUNDS, lost_s, now_s)
                return
        level = self._level + spread
        line = max((line for line in table.lines if line is not best), key=lambda line: line.promise(level))
        lost_s = self._loss_s(line, best, worth, self._warm_s(line) + TRIAL_ROUNDS * line.round_s)
        if line.promise(level) > worth and lost_s <= min(table.credit_s, self._credit_s):
            self._try(line, best, worth, TRIAL_ROUNDS, lost_s, now_s)

    def _try(self, line: Line, best: Line, worth: float, rounds: int, lost_s: float, now_s: float) -> None:
        ends_s = now_s + 2 * (self._warm_s(line) + rounds * line.round_s)
        self._trial = Trial(worth, now_s, ends_s, rounds, lost_s, best)
        self._table.trial_ends_s = ends_s
        self._charge(lost_s)
        self._put_in_force(line, now_s)
