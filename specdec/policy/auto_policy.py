"""The measuring policy: it runs the plan with the highest worth and explores others from time to time. Pure.

It sees counts and seconds of finished rounds, never tokens, so that under REJECTION no decision depends on the last
draws (docs/exactness.md). The table is the service's (table.py), the acceptance level the session's.

A round counts for its plan once draft tokens of that plan can have arrived: earlier rounds belong to the change of
plan. They are part of an exploration's cost, as are those until the old plan's tokens arrive again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from specdec.policy.table import Line, Table, probability
from specdec.protocol.plan import Plan
from specdec.protocol.policy import Prediction
from specdec.protocol.records import RoundRecord
from specdec.protocol.types import Proposer

REVIEW_ROUNDS, REVIEW_S = 4, 0.02
CHANGE_GAIN = 1.015  # least ratio of worths for a change of plan: it loses the draft tokens under way
DOUBT = 0.5  # share of a line's uncertainty subtracted from its worth: few rounds may have been lucky
WORTH_GAIN, START_GAIN = 1.02, 1.05  # least ratio to plain decoding, of a measured plan, and of an unmeasured one
STARTING_ROUNDS = 8.0  # measured rounds that make a plan eligible
EXPLORATION_ROUNDS, BASELINE_ROUNDS = 12, 6
EXPLORATION_MOST_S = 10.0  # others wait for it, also for that of a session that has ended
WARM_MOST_S = 3.0  # a change of plan in rounds of seconds must not keep those of milliseconds after them from counting
BASELINE_SHARE, BASELINE_FIRST_S, BASELINE_MOST_S = 0.003, 1.0, 60.0  # baseline probes: share of time lost, intervals
REST_PROBE_S = 3.0  # without the draft, before an exploration that promises nothing: it may have become faster
LEVEL_MAX = 4.0
LEVEL_TESTED, LEVEL_TESTED_MAX, LEVEL_VARIANCE_MIN = 40.0, 400.0, 0.03  # weight of the service's level, in tokens
HEADS_GUESS, HEADS_GAIN, HEADS_EVERY = 0.3, 0.08, 64  # accepted tokens of heads in a round, weight of one, probes
LOCAL_GAIN, LOCAL_TABLE_GAIN = 0.1, 0.01  # weight of a round in the mean of accepted tokens of local proposers
WAITS_KEPT, WAITS_ROUNDS = 0.95, 4.0  # window of about 20 rounds of a session's waits, weight of the mean, in rounds
TABLE_GAIN = 0.12  # weight of a session's level in the service's, per round
SURPRISE_KEPT, SURPRISE_SIGMA = 0.95, 3.0  # window of about 20 tested tokens, and deviation beyond chance
SURPRISE_SHARE = 0.8  # of the level's weight, removed by such a deviation
BACK_S, LEVEL_SPREAD = 40.0, 0.5  # time in which the level of a session without drafting returns to the service's


@dataclass(frozen=True, slots=True)
class Exploration:
    """A plan being explored until `rounds` of its rounds counted, or `ends_s`. `charged_s`: the expected loss against
    the best plan; `otherwise`: the line in force before."""

    ends_s: float
    rounds: int
    charged_s: float
    otherwise: Line


class AutoPolicy:
    """One session's policy; the table is its service's. Implements `Policy`."""

    def __init__(self, table: Table, draft_length_cap: int) -> None:
        self._table, self.draft_length_cap = table, draft_length_cap
        self._level, self._tested = table.level, 0.0
        self._local_accepted = table.local_accepted
        self._heads_accepted = HEADS_GUESS
        self.wants_heads = True
        self._surprise = self._variance = 0.0
        self._waited_s = self._usual_wait_s = 0.0
        self._wait_factor = 1.0
        self._exploration: Exploration | None = None
        self._exploration_rounds, self._exploration_loss_s = 0, 0.0
        self._explored_tokens, self._explored_s = 0, 0.0
        self._counts_from_s = -math.inf
        self._review_round, self._review_s = 0, 0.0
        table.refresh()
        self._put_in_force(self._first())

    @property
    def prediction(self) -> Prediction:
        line, (worth, plain) = self._line, map(self._worth, (self._line, self._table.off))
        rounds = f"{line.rounds:.0f} rounds measured" if line.rounds >= 1 else "not measured yet"
        name = line.plan.description if self.is_speculating else "off"
        tried = "" if self._exploration is None else ", tried"
        reason = f"{name}{tried}: {worth:.0f} tokens/s predicted, {rounds}; off {plain:.0f}"
        if line is self._table.rest and self._table.drafting:
            best = self._best(self._table.drafting)
            reason += f"; {best.plan.description}: {self._worth(best):.0f}"
        return Prediction(worth, reason, self._exploration_rounds, self._exploration_loss_s)

    def plan(self, positions_left: int) -> Plan:
        return self._plan.within(positions_left)

    def on_round(self, record: RoundRecord) -> None:
        if record.step.step_count > 1 or not record.round_index:  # it read a prompt or a preempted session
            return
        self._table.on_round(record)
        self._exploration_rounds += self._exploration is not None
        self._explored_tokens += record.tokens.kept_count
        self._explored_s += record.times.round_s
        if record.plan.draft_length_max:
            self._learn_heads(record)
            self._local_accepted += LOCAL_GAIN * (record.tokens.local_accepted_count - self._local_accepted)
            self._table.local_accepted += LOCAL_TABLE_GAIN * (self._local_accepted - self._table.local_accepted)
        if record.is_refused:  # what its plan brings says nothing of the plan in a session with a draft
            if self._line is not self._table.rest:
                self._exploration = None
                self._put_in_force(self._table.rest)
            return
        if record.plan == self._plan and record.times.start_s >= self._counts_from_s:
            self._counted_rounds += 1
            self._learn_level(record)
            self._learn_waits(record)
            self._table.measure(self._line, record, self._level)
        if (
            record.times.end_s < self._table.baseline_ends_s
            and self._line is not self._table.off
            and not self._exploration
        ):
            self._try_plain(self._line, record.times.end_s)
        elif record.round_index >= self._review_round and record.times.end_s >= self._review_s:
            self._review(record)

    def _learn_heads(self, record: RoundRecord) -> None:
        """Heads take their time in every step that asks for them: they are asked while their accepted tokens are worth
        it, and now and then to find out."""
        if record.tokens.had_heads:
            count = record.tokens.accepted_proposers.count(Proposer.HEADS)
            self._heads_accepted += HEADS_GAIN * (count - self._heads_accepted)
        is_due = record.round_index % HEADS_EVERY == 0
        self.wants_heads = self.is_speculating and (self._heads_accepted >= self._heads_min or is_due)

    def _learn_level(self, record: RoundRecord) -> None:
        """Updates the session's level, by the draft model's tokens up to the first rejection. Where none was tested: by
        whether it had the committed one, else a draft that is always wrong would keep the level of its first rounds."""
        tested, accepted = record.tokens.model_tested_count, record.tokens.model_accepted_count
        if not tested and record.plan.window and record.tree.was_looked_up:
            tested, accepted = 1, int(record.tree.was_found)
        if not tested:
            return
        expected = probability(self._level)
        surprise, variance = accepted - tested * expected, expected * (1 - expected)
        step = surprise / max(variance, LEVEL_VARIANCE_MIN)
        self._level = min(max(self._level + step / (self._tested + LEVEL_TESTED), -LEVEL_MAX), LEVEL_MAX)
        self._tested = min(self._tested + tested, LEVEL_TESTED_MAX)
        keep = SURPRISE_KEPT**tested
        self._surprise = keep * self._surprise + surprise
        self._variance = keep * self._variance + tested * variance
        if self._surprise**2 > SURPRISE_SIGMA**2 * max(self._variance, 1.0):
            self._tested, self._surprise, self._variance = -SURPRISE_SHARE * LEVEL_TESTED, 0.0, 0.0
        self._table.level += TABLE_GAIN * (self._level - self._table.level)

    def _learn_waits(self, record: RoundRecord) -> None:
        """Updates how long the session's rounds wait for the draft, over the mean of all sessions: a text whose next
        token is seldom in the tree waits often."""
        usual_s = self._line.wait_s
        if not self._plan.wait_length or not usual_s:
            return
        self._waited_s = WAITS_KEPT * self._waited_s + record.times.wait_s
        self._usual_wait_s = WAITS_KEPT * self._usual_wait_s + usual_s
        mean_s = WAITS_ROUNDS * usual_s
        self._wait_factor = (mean_s + self._waited_s) / (mean_s + self._usual_wait_s)

    def _first(self) -> Line:
        """Returns the plan a session begins with: the best measured one, or the best by the formulas if none was."""
        rest, drafting = self._table.rest, self._table.drafting
        measured = [line for line in drafting if line.rounds >= STARTING_ROUNDS]
        if not drafting:
            return rest
        best = self._best(measured or drafting)
        gain = WORTH_GAIN if measured else START_GAIN
        return best if self._worth(best) > gain * self._worth(rest) else rest

    def _worth(self, line: Line) -> float:
        return self._table.worth(line, self._level, self._local_accepted, self._wait_factor)

    def _sure(self, line: Line) -> float:
        return self._worth(line) * (1 - DOUBT * line.spread)

    def _best(self, lines: Iterable[Line]) -> Line:
        return max(lines, key=self._sure)

    def _put_in_force(self, line: Line, now_s: float | None = None) -> None:
        self._line, self._plan = line, replace(line.plan, wait_s=self._table.wait_s(line.plan))
        self.is_speculating = line is not self._table.off
        self._weigh_guesses()
        self._counted_rounds = 0
        if now_s is not None:
            self._counts_from_s = now_s + self._warm_s(line)

    def _weigh_guesses(self) -> None:
        """Sets what a draft token, and the heads of a round, must bring to be worth their time."""
        worth = self._worth(self._line)
        self.reach_min, self.path_reach_min = self._table.reach_min(worth)
        self._heads_min = self._table.heads_min(self._line, worth)

    def _warm_s(self, line: Line) -> float:
        """Seconds from a change of plan to the first round that counts."""
        if not line.plan.window or line.plan.wait_length:
            return min(0.5 * line.round_s, WARM_MOST_S)
        return min(line.round_s + self._table.trip_s(line.plan), WARM_MOST_S)

    def _review(self, record: RoundRecord) -> None:
        """Keeps or changes the plan by the table's estimates."""
        now_s, table, current = record.times.end_s, self._table, self._line
        elapsed_s = now_s - self._review_s if self._review_s else 0.0
        self._review_s, self._review_round = now_s + REVIEW_S, record.round_index + REVIEW_ROUNDS
        table.refresh(now_s)
        self._weigh_guesses()
        exploration = self._exploration
        if current is table.rest and not exploration:  # nothing is tested: a poor text may have ended since
            back = 1 - math.exp(-elapsed_s / BACK_S)
            self._level += back * (table.level - self._level)
            self._tested *= 1 - back
            self._wait_factor += back * (1 - self._wait_factor)
        if exploration and self._counted_rounds < exploration.rounds and now_s < exploration.ends_s:
            return
        best = self._best(
            line for line in table.lines if line.rounds >= STARTING_ROUNDS or line in (table.rest, current)
        )
        if self._worth(best) < WORTH_GAIN * self._worth(table.rest):
            best = table.rest
        if exploration:
            self._exploration, table.exploration_ends_s = None, now_s
            rate = self._worth(current) if table.use == 1 else self._explored_tokens / self._explored_s
            lost_s = self._loss_s(current, rate, exploration.otherwise, self._worth(best), self._explored_s)
            table.charge(lost_s - exploration.charged_s)
            self._exploration_loss_s += lost_s - exploration.charged_s
        elif self._sure(best) < CHANGE_GAIN * self._sure(current):
            best = current
        if best is not current:
            self._put_in_force(best, now_s)
        if self._counted_rounds > REVIEW_ROUNDS and now_s >= table.exploration_ends_s:
            self._consider_exploration(best, now_s)

    def _loss_s(self, line: Line, rate: float, otherwise: Line, best: float, seconds: float) -> float:
        """Returns the seconds that an exploration of `seconds` at `rate` tokens per second loses against the best plan.
        Between two plans that draft, the tokens under way stay usable; otherwise the warm-up runs at the rate of plain
        decoding."""
        lost_s = seconds * (1 - rate / best)
        rest = self._table.rest
        if line.plan.window and not otherwise.plan.window:
            lost_s += seconds * self._table.others_loss()
        if not (line.plan.window and otherwise.plan.window):
            lost_s += self._warm_s(otherwise if otherwise.plan.window else line) * (1 - self._worth(rest) / best)
        return max(0.0, lost_s)

    def _consider_exploration(self, best: Line, now_s: float) -> None:
        """Begins an exploration if one is promising and the credit covers it; from time to time a baseline probe."""
        table, off, worth, spread = self._table, self._table.off, self._worth(best), 0.0
        if best is table.rest:
            spread = LEVEL_SPREAD / math.sqrt(1 + max(0.0, self._tested) / LEVEL_TESTED)
        elif now_s >= table.next_baseline_s:
            lost_s = self._loss_s(off, self._worth(off), best, worth, BASELINE_ROUNDS * off.round_s)
            is_first, table.next_baseline_s = not table.next_baseline_s, now_s + BASELINE_FIRST_S
            if not is_first and lost_s <= table.credit_s:
                table.next_baseline_s = now_s + min(lost_s / BASELINE_SHARE, BASELINE_MOST_S)
                self._try_plain(best, now_s)
                table.baseline_ends_s = table.exploration_ends_s
                return
        level = self._level + spread
        others = [line for line in table.drafting if line is not best]
        if not others:
            return
        line = max(others, key=lambda line: line.promise(level, self._wait_factor))
        seconds = self._warm_s(line) + EXPLORATION_ROUNDS * line.round_s
        lost_s = self._loss_s(line, self._worth(line), best, worth, seconds)
        is_probe_due = best is table.rest and now_s >= table.drafted_s + REST_PROBE_S
        if (is_probe_due or line.promise(level, self._wait_factor) > worth) and lost_s <= table.credit_s:
            self._try(line, best, EXPLORATION_ROUNDS, lost_s, now_s)

    def _try_plain(self, best: Line, now_s: float) -> None:
        """Begins a baseline probe, in which all sessions take part: while one of them drafts, none sees the target
        without a draft beside it."""
        off = self._table.off
        lost_s = self._loss_s(off, self._worth(off), best, self._worth(best), BASELINE_ROUNDS * off.round_s)
        self._try(off, best, BASELINE_ROUNDS, lost_s, now_s)

    def _try(self, line: Line, best: Line, rounds: int, lost_s: float, now_s: float) -> None:
        ends_s = now_s + min(2 * (self._warm_s(line) + rounds * line.round_s), EXPLORATION_MOST_S)
        charged_s = self._table.charge(lost_s)
        self._exploration_loss_s += charged_s
        self._exploration = Exploration(ends_s, rounds, charged_s, best)
        self._explored_tokens, self._explored_s = 0, 0.0
        self._table.exploration_ends_s = ends_s
        self._put_in_force(line, now_s)
