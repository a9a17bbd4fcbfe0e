"""One service's measurements of its plans under one rule: a table with a line for each, plain decoding first. Pure.

A line's worth is tokens over seconds of the same rounds, as if all sessions ran its plan. Seconds: T(rows) of all
sessions plus the plan's own remainder. Tokens: those it yielded, scaled by the acceptance of the session in question
over the lengths that arrived. Old measurements decay: by rounds while a plan runs, by time while it does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.policy.catalogue import DraftTimes, catalogue, expected_accepted, prior_of
from specdec.policy.steps import Steps
from specdec.protocol.plan import Plan
from specdec.protocol.records import RoundRecord

ROUNDS_KEPT, IDLE_KEPT_S = 400.0, 20.0  # decay: rounds of a running plan, seconds of another
PROMISE_KEPT_S = 60.0  # the same of what the formulas promised: it is of the draft, whichever plan runs
NETWORK_NOISE, NETWORK_SHARE = 0.25, 0.1  # shares of the network time and of a round below which it has not changed
PRIOR_ROUNDS, ROUND_SPREAD = 16.0, 0.6  # weight of a closed formula, in rounds; relative spread of a round's tokens
FORMULA_TOKENS = 16.0  # accepted tokens as which the formulas of all plans count, beside the measured ones
FORMULA_SLACK = 10.0  # factor by which they may promise too much
ACCEPTANCE_GUESS = 0.65
BACK_S = 60.0  # time in which the level returns to the guess: without drafting nothing else would raise it
OVERHEAD_GUESS_S, OVERHEAD_WEIGHT = 0.0015, 0.05
REMAINDER_FACTOR, REMAINDER_SLACK_S = 3.0, 0.005  # limits of a round's time beside its step
REFRESH_S = 0.05
EXPLORATION_SHARE = 0.01  # of all time, that exploration may lose
CREDIT_ROUNDS, CREDIT_MAX_S = 4.0, 1.0  # its credit at first, and at most
# The most that it may owe: what one session earns in a quarter of a minute. An exploration that others' requests make
# long may lose more, which says nothing of the next.
DEBT_MAX_S = 0.15
# After a jump of the target's steps all sessions decode plainly, whatever the credit.
JUMP_PROBE_ROUNDS, JUMP_PROBE_MOST_S = 6.0, 10.0
CONTENTION_SLACK = 1.1  # up to this slowdown of the others' steps is noise
SLOPE_ROWS = 8.0  # of a session, over which the slope of T(rows) is taken
REACH_SLACK, REACH_LEAST, REACH_MOST = 1.2, 0.02, 0.9  # a guess costs bytes and the coordinator's time too
WAIT_SLACK, WAIT_LEAST_S, WAIT_MOST_S = 2.5, 0.005, 1.0  # limit of a wait: a multiple of the tokens' expected time


LEVEL_GUESS = math.log(ACCEPTANCE_GUESS / (1 - ACCEPTANCE_GUESS))


def probability(level: float) -> float:
    """Returns the probability of a level on the logistic scale."""
    return 1.0 / (1.0 + math.exp(-level))


@dataclass(slots=True, eq=False)
class Line:
    """One plan: decaying sums over its rounds, and its estimates as of the table's last refresh.

    Sums: `rounds`, their `remainder_s` beside the step and `waited_s` of it, the tokens `promised` by the formula and
    the draft's `model_accepted`; of the rounds with draft tokens `arrivals`, `offered`, `accepted`; `level`, the mean
    acceptance level of their sessions. Estimates: `round_s` if all
    sessions ran the plan, its parts `beside_s` beside the step and `wait_s`, at most `wait_max_s`; `usual_offered` a
    round; `length` of arrivals; `gain`: accepted over a + ... + a^length, a being the acceptance of the measured
    sessions; `formula_gain`: by the closed formula; `spread`: relative uncertainty. `paths`: the sum of further paths,
    beyond one a round. `network_s`: to the draft, in the rounds that were added.
    """

    plan: Plan
    rounds: float = 0.0
    remainder_s: float = 0.0
    waited_s: float = 0.0
    paths: float = 0.0
    promised: float = 0.0
    model_accepted: float = 0.0
    arrivals: float = 0.0
    offered: float = 0.0
    accepted: float = 0.0
    level: float = 0.0
    updated_s: float = 0.0
    network_s: float = 0.0
    round_s: float = 1.0
    beside_s: float = 0.0
    wait_s: float = 0.0
    wait_max_s: float = 0.0
    usual_offered: float = 0.0
    length: float = 0.0
    gain: float = 0.0
    formula_gain: float = 0.0
    spread: float = 0.0

    def keep(self, share: float, promise_share: float | None = None) -> None:
        """Scales all sums by `share`; what was promised and what came of it by `promise_share`, if given."""
        promise_share = share if promise_share is None else promise_share
        self.rounds *= share
        self.remainder_s *= share
        self.waited_s *= share
        self.paths *= share
        self.promised *= promise_share
        self.model_accepted *= promise_share
        self.arrivals *= share
        self.offered *= share
        self.accepted *= share

    def age(self, now_s: float) -> None:
        """Decays the sums by the time since its last round."""
        if now_s > self.updated_s:
            idle_s = now_s - self.updated_s
            self.keep(math.exp(-idle_s / IDLE_KEPT_S), math.exp(-idle_s / PROMISE_KEPT_S))
            self.updated_s = now_s

    def alike(self, network_s: float) -> float:
        """Returns the share of the measurements that a network time leaves: they are of other conditions where it has
        changed, and the formulas know the change at once."""
        scale_s = NETWORK_SHARE * self.round_s
        change_s = abs(network_s - self.network_s) - NETWORK_NOISE * self.network_s - scale_s
        return math.exp(-change_s / scale_s) if change_s > 0 else 1.0

    def add(self, record: RoundRecord, level: float, network_s: float) -> None:
        """Adds one round of a session at an acceptance level."""
        self.age(record.times.start_s)
        self.keep((1 - 1 / ROUNDS_KEPT) * self.alike(network_s))
        self.updated_s = max(self.updated_s, record.times.end_s)
        self.rounds += 1
        self.network_s += (network_s - self.network_s) / self.rounds
        remainder_s = min(beside_step_s(record), REMAINDER_FACTOR * self.beside_s + REMAINDER_SLACK_S)
        self.remainder_s += remainder_s
        self.waited_s += min(record.times.wait_s, remainder_s)
        self.paths += max(0, record.tokens.path_count - 1)
        self.promised += self.formula_gain * expected_accepted(probability(level), self.length)
        self.model_accepted += record.tokens.model_accepted_count
        if record.tokens.offered_count:
            self.arrivals += 1
            self.offered += record.tokens.offered_count
            self.accepted += record.tokens.accepted_count
            self.level += (level - self.level) / self.arrivals

    def worth(self, level: float, wait_factor: float = 1.0) -> float:
        """Tokens per second of a session at an acceptance level whose rounds wait `wait_factor` times the mean."""
        if not self.gain:
            return 1.0 / self.round_s
        round_s = self.round_s + min(wait_factor * self.wait_s, self.wait_max_s) - self.wait_s
        return (1.0 + min(self.gain * expected_accepted(probability(level), self.length), self.length)) / round_s

    def promise(self, level: float, wait_factor: float) -> float:
        """The upper bound of the worth, by the line's uncertainty."""
        return self.worth(level, wait_factor) * (1 + self.spread)


def beside_step_s(record: RoundRecord) -> float:
    """Seconds of a round beside the target's step and the queue for it."""
    return max(0.0, record.times.round_s - record.step.queue_s - record.step.step_s)


class Table:
    """The plans of all requests of one rule with the same limit of draft tokens and the same proposers; `plans`: as
    `catalogue` returns them.

    The formulas are of the draft alone. The coordinator's own proposers and heads bring their `local_accepted` tokens
    in the share of the rounds in which the draft brings none, 1 / (1 + accepted) for runs of independent guesses.

    `use`: a factor of the tokens that formulas promise of the draft, below 1 where all its plans together bring less
    than 1 / FORMULA_SLACK of these at the measured acceptance, as its tokens come late or are not worth a row: such a
    draft is useless. `drafted_s`: the end of the last round with the draft.
    """

    def __init__(
        self, steps: Steps, draft: DraftTimes, draft_length_cap: int, plans: Sequence[Plan] | None = None
    ) -> None:
        self._steps, self._draft = steps, draft
        capped = [plan.capped(draft_length_cap) for plan in plans or catalogue()]
        self.lines = [Line(plan) for plan in dict.fromkeys(capped)]
        self.off, *self.others = self.lines
        has_local = bool(self.others) and not self.others[0].plan.window
        self.rest = self.others[0] if has_local else self.off
        self.drafting = [line for line in self.others if line is not self.rest]
        self.local_accepted = 0.0
        self.level = LEVEL_GUESS
        self.use, self.drafted_s = 1.0, -math.inf
        self.round_count = 0
        self.exploration_ends_s = self.baseline_ends_s = -math.inf
        self.next_baseline_s = 0.0
        self._jump_s = steps.jump_s
        self._overhead_s = OVERHEAD_GUESS_S
        self._refreshed_s = -math.inf
        self.refresh()
        self.credit_s = CREDIT_ROUNDS * self.off.round_s

    def forget_draft(self) -> None:
        """Another draft is connected, or the same again: drops its acceptance and the measurements of its plans."""
        for line in self.drafting:
            line.keep(0.0)
        self.level, self._refreshed_s = LEVEL_GUESS, -math.inf

    def on_round(self, record: RoundRecord) -> None:
        """Takes a round of any session: measures its step, and adds a share of its time to the exploration credit."""
        self._steps.on_step(record)
        if record.plan.window or not self.round_count:
            self.drafted_s = record.times.end_s
        self.round_count += 1
        self.credit_s = min(self.credit_s + EXPLORATION_SHARE * record.times.round_s, CREDIT_MAX_S)
        if self._steps.jump_s > self._jump_s:
            self._jump_s, self._refreshed_s = self._steps.jump_s, -math.inf
            self.refresh(record.times.end_s)
            probe_s = min(JUMP_PROBE_ROUNDS * record.step.step_s, JUMP_PROBE_MOST_S)
            self.baseline_ends_s = self.exploration_ends_s = record.times.end_s + probe_s

    def charge(self, lost_s: float) -> float:
        """Takes the loss of an exploration from the credit, as far as it may fall, and returns what it took; a loss
        below 0 gives back."""
        taken_s = max(min(lost_s, self.credit_s + DEBT_MAX_S), self.credit_s - CREDIT_MAX_S)
        self.credit_s -= taken_s
        return taken_s

    def measure(self, line: Line, record: RoundRecord, level: float) -> None:
        """Adds a round that counts for its plan."""
        line.add(record, level, self._draft.network_s if line.plan.window else 0.0)
        if line is self.off or (line is self.rest and not record.tokens.offered_count):
            overhead_s = min(beside_step_s(record), REMAINDER_FACTOR * self._overhead_s)
            self._overhead_s += OVERHEAD_WEIGHT * (overhead_s - self._overhead_s)
        if record.times.wait_s < record.plan.wait_s and (record.times.wait_s or record.tokens.model_offered_count):
            self._draft.on_wait(line.plan, self._steps.active, record.times.wait_s)

    def refresh(self, now_s: float = -math.inf) -> None:
        """Updates the estimates of all plans, after REFRESH_S or a change of the draft."""
        if now_s < self._refreshed_s + REFRESH_S:
            return
        if math.isfinite(self._refreshed_s):
            self.level += (1 - math.exp((self._refreshed_s - now_s) / BACK_S)) * (LEVEL_GUESS - self.level)
        self._refreshed_s = now_s
        self._steps.fade(now_s)
        self._draft.fade(now_s)
        sessions, acceptance = self._steps.active, probability(self.level)
        most = self._steps.seconds(sessions * (1 + SLOPE_ROWS), True)
        row_s = (most - self._steps.seconds(sessions, True)) / (sessions * SLOPE_ROWS)
        slack = REACH_SLACK * sessions  # a row, and a row that begins a path, delay all sessions
        self._reach_s = slack * row_s, slack * (row_s + self._steps.path_s(True))
        target_s = self._steps.round_s(1.0, True, False) + self._overhead_s
        measured = FORMULA_TOKENS + sum(line.model_accepted for line in self.drafting)
        self.use = min(1.0, FORMULA_SLACK * measured / (FORMULA_TOKENS + sum(line.promised for line in self.drafting)))
        for line in self.lines:
            line.age(now_s)
            if line.plan.window:
                line.keep(line.alike(self._draft.network_s))
            offered, accepted, wait_s = prior_of(line.plan, self._draft, sessions, target_s, acceptance)
            useful = self.use * accepted
            local = self.local_accepted / (1 + useful) if line.plan.window else 0.0
            self._expect(line, (offered + local, useful + local, wait_s))
            line.formula_gain = accepted / expected_accepted(acceptance, line.length)

    def best_worth(self) -> float:
        """Tokens per second of the best measured plan, for a session of the mean level."""
        return max(
            self.worth(line, self.level, self.local_accepted)
            for line in self.lines
            if line.rounds >= 1 or line in (self.off, self.rest)
        )

    def worth(self, line: Line, level: float, local_accepted: float, wait_factor: float = 1.0) -> float:
        """Tokens per second of a session at an acceptance level, of whose rounds each accepts `local_accepted` tokens
        of the coordinator's own proposers. Their use differs from text to text, so only the session's own counts."""
        if line is self.rest and line is not self.off:
            return (1.0 + local_accepted) / line.round_s
        return line.worth(level, wait_factor)

    def reach_min(self, worth: float) -> tuple[float, float]:
        """The least probability at which a draft token is worth its row, and one that begins a further path its row and
        that path, for sessions of `worth` tokens per second: they delay all sessions of the step."""
        row_s, path_s = self._reach_s
        return min(max(worth * row_s, REACH_LEAST), REACH_MOST), min(max(worth * path_s, REACH_LEAST), REACH_MOST)

    def heads_min(self, line: Line, worth: float) -> float:
        """The least number of accepted tokens of the target's heads in a round at which they are worth their time, for
        sessions that run a plan at `worth` tokens per second."""
        heads_s = self._steps.heads_s(line.plan.window > 0)
        return max(REACH_SLACK * worth * heads_s, REACH_LEAST)

    def others_loss(self) -> float:
        """Share of the time of one session that all others together lose while one session drafts and they do not."""
        steps = self._steps
        slowdown = steps.seconds(1, True) / steps.seconds(1, False)
        return (steps.active - 1) * max(0.0, 1 - CONTENTION_SLACK / slowdown)

    def wait_s(self, plan: Plan) -> float:
        """Seconds for which a plan may hold a verification back at present; 0 if it does not wait."""
        return min(WAIT_LEAST_S + WAIT_SLACK * self.trip_s(plan), WAIT_MOST_S) if plan.wait_length else 0.0

    def trip_s(self, plan: Plan) -> float:
        """Seconds at present from a commit to the draft tokens that a plan waits for, or to the first."""
        return self._draft.trip_s(plan, self._steps.active)

    def _expect(self, line: Line, prior: tuple[float, float, float]) -> None:
        """Sets a line's estimates from the prior and the measurements, each with its weight."""
        offered, accepted, wait_s = prior
        count, arrivals = PRIOR_ROUNDS + line.rounds, PRIOR_ROUNDS + line.arrivals
        offered_sum = PRIOR_ROUNDS * offered + line.offered
        line.usual_offered = offered_sum / count
        line.beside_s = (PRIOR_ROUNDS * (wait_s + self._overhead_s) + line.remainder_s) / count
        line.wait_s = (PRIOR_ROUNDS * wait_s + line.waited_s) / count
        line.wait_max_s = max(line.wait_s, self.trip_s(line.plan)) if line.plan.wait_length else line.wait_s
        line.length = max(0.5, offered_sum / arrivals)
        paths = (PRIOR_ROUNDS * line.plan.siblings / (1 + line.plan.siblings) * offered + line.paths) / count
        level = (PRIOR_ROUNDS * self.level + line.arrivals * line.level) / arrivals
        line.gain = (
            (PRIOR_ROUNDS * accepted + line.accepted) / count / expected_accepted(probability(level), line.length)
        )
        is_drafting, waits = line.plan.window > 0, line.plan.wait_length > 0
        line.round_s = self._steps.round_s(1 + line.usual_offered, is_drafting, waits, paths) + line.beside_s
        line.spread = ROUND_SPREAD / math.sqrt(count) if is_drafting else 0.0
