"""The measuring policy: it runs the plan with the highest goodput, and explores others within a budget. Pure.

goodput = (1 + expected accepted tokens) / (T(load x rows, paths) + seconds beside the step), if all sessions ran the
plan (SmartSpec, Liu et al. 2024). T is the target's, the times of drafting the draft's, acceptance that of the draft
and of the session. What a plan measured corrects the forecast: accepted over expected tokens, seconds beside the step.

It sees counts and seconds of finished rounds, never tokens, so that under REJECTION no decision depends on the last
draws (docs/exactness.md). A round counts for its plan once draft tokens of that plan can have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.policy.acceptance import UNTESTED_S, Acceptance
from specdec.policy.draft_time import DraftTimes
from specdec.policy.mean import Mean
from specdec.policy.plans import Forecast, catalogue, forecast
from specdec.policy.steps import StepTimes
from specdec.protocol.plan import Plan
from specdec.protocol.records import RoundRecord

ROUNDS_KEPT, PRIOR_ROUNDS, IDLE_S = 400.0, 16.0, 20.0  # rounds of a plan that count; of a forecast; until it is old
OVERHEAD_GUESS_S = 0.0015  # of a round beside the step, without waiting
LOCAL_GUESS, LOCAL_OFFERED = 0.1, 0.5  # tokens of a round by the coordinator's own proposers
REFRESH_S = 0.05
BUDGET_SHARE, BUDGET_S, DEBT_S = 0.01, 1.0, 0.15  # of all time, that exploration may lose; most that it saves, owes
SPREAD = 1.0  # of a round's tokens, relative to their mean
REACH_LEAST, REACH_MOST = 0.02, 0.9  # a draft token costs bytes and the coordinator's time too


@dataclass(slots=True, eq=False)
class Candidate:
    """A plan: what it measured, and its estimates as of the last refresh, for the mean session: `round_s` if all ran
    it, `yield_`, accepted over forecast tokens."""

    plan: Plan
    accepted: Mean = field(default_factory=lambda: Mean(1.0, ROUNDS_KEPT))  # over what was expected
    offered: Mean = field(default_factory=lambda: Mean(0.0, ROUNDS_KEPT))
    paths: Mean = field(default_factory=lambda: Mean(0.0, ROUNDS_KEPT))
    beside_s: Mean = field(default_factory=lambda: Mean(0.0, ROUNDS_KEPT))
    forecast: Forecast = Forecast(0.0)
    updated_s: float = -math.inf
    yield_: float = 1.0
    round_s: float = 1.0

    @property
    def rounds(self) -> float:
        """Measured rounds that count."""
        return self.accepted.weight

    def forget(self, kept_share: float = 0.0) -> None:
        """Scales the weight of all that was measured."""
        for mean in (self.accepted, self.offered, self.paths, self.beside_s):
            mean.forget(kept_share)

    def add(self, record: RoundRecord, share: float, beside_s: float) -> None:
        """Adds a round that accepted a share of the forecast."""
        tokens = record.tokens
        self.accepted.add(share)
        self.offered.add(tokens.offered_count)
        if self.plan.draft_length_max:
            self.paths.add(max(0, tokens.path_count - 1))
        self.beside_s.add(beside_s)
        self.updated_s = max(self.updated_s, record.times.end_s)


class Goodput:
    """The candidates of all requests of one rule with the same limit of draft tokens and kinds of proposers, plain
    decoding first, then that of the coordinator's own proposers if it has any. `rest`: the best without the draft.
    """

    def __init__(
        self,
        steps: StepTimes,
        draft: DraftTimes,
        acceptance: Acceptance,
        draft_length_cap: int,
        plans: Sequence[Plan] | None = None,
    ) -> None:
        self.steps, self._draft, self.acceptance = steps, draft, acceptance
        capped = dict.fromkeys(plan.capped(draft_length_cap) for plan in plans or catalogue())
        self.off, *others = self.candidates = [Candidate(plan) for plan in capped]
        self.drafting = [own for own in others if own.plan.window]
        self.local = next((own for own in others if not own.plan.window), None)
        self.local_accepted = Mean(LOCAL_GUESS, ROUNDS_KEPT)
        self._overhead_s = Mean(OVERHEAD_GUESS_S, ROUNDS_KEPT)  # beside the step, without the draft
        self._usual = Mean(1.0, ROUNDS_KEPT)  # accepted over forecast tokens, of all plans of the draft
        self.round_count = 0
        self.exploring_until_s = self.baseline_until_s = self.drafted_s = -math.inf
        self.baseline_s = 0.0  # when plain decoding is due; 0: never measured
        self._refreshed_s, self._draft_jumps, self._trip_s = -math.inf, draft.jumps, 0.0
        self.refresh(-math.inf)
        self.credit_s = 4 * self.off.round_s

    def on_round(self, record: RoundRecord) -> None:
        """Takes a round of any session: its step, and a share of its time for exploration."""
        jumps = self.steps.jumps
        self.steps.on_step(record)
        if self.steps.jumps != jumps:
            self._forget()
            self.refresh(record.times.end_s, is_due=True)
        self.round_count += 1
        if record.plan.window or self.round_count == 1:
            self.drafted_s = record.times.end_s
        self.credit_s = min(self.credit_s + BUDGET_SHARE * record.times.round_s, BUDGET_S)

    def charge(self, lost_s: float) -> float:
        """Takes the loss of an exploration from the credit, as far as it may fall or rise, and returns what it took."""
        taken_s = max(min(lost_s, self.credit_s + DEBT_S), self.credit_s - BUDGET_S)
        self.credit_s -= taken_s
        return taken_s

    def others_loss(self) -> float:
        """Share of the time of one session that all others together lose while one session drafts and they do not."""
        return (self.steps.load - 1) * self.steps.slowdown_s() / self.steps.step_s(self.steps.load, True)

    def measure(self, own: Candidate, record: RoundRecord, acceptance: float) -> None:
        """Adds a round that counts for its plan, of a session at an acceptance."""
        step, times = record.step, record.times
        beside_s = times.round_s - step.step_s - max(0.0, step.queue_s - step.step_s)
        active = step.active_sessions
        if active > step.sessions > 0:  # some sessions are in another step: the queue for it is a part of T(load)
            whole, part = (self.steps.step_s(rows, True) for rows in (step.rows * active / step.sessions, step.rows))
            beside_s -= step.step_s * (whole / part - 1)
        beside_s = max(0.0, beside_s)
        if own.plan.window:
            share = record.tokens.model_accepted_count / own.forecast.accepted(acceptance)
            own.add(record, share, beside_s)
            self._usual.add(share)
        else:
            own.add(record, 1.0, beside_s)
            self._overhead_s.add(beside_s)
        if times.wait_s < record.plan.wait_s and (times.wait_s or record.tokens.model_offered_count):
            self._draft.on_wait(own.plan, self.steps.load, times.wait_s)

    def refresh(self, now_s: float, is_due: bool = False) -> None:
        """Updates the estimates, every REFRESH_S."""
        if now_s < self._refreshed_s + REFRESH_S and not is_due:
            return
        elapsed_s = now_s - self._refreshed_s if math.isfinite(self._refreshed_s) else 0.0
        self._refreshed_s = now_s
        self.steps.fade(now_s)
        self._draft.fade(now_s)
        if now_s > self.drafted_s + elapsed_s:
            self.acceptance.fade(elapsed_s)
            self._usual.forget(math.exp(-elapsed_s / UNTESTED_S))
        load = self.steps.load
        overhead_s = self._overhead_s.shrunk(OVERHEAD_GUESS_S, PRIOR_ROUNDS)
        target_s = self.steps.step_s(load, True) + overhead_s
        if self.drafting:
            self._check_draft(target_s)
        usual = min(1.0, self._usual.shrunk(1.0, PRIOR_ROUNDS))
        for own in self.candidates:
            if now_s > own.updated_s + elapsed_s:
                own.forget(math.exp(-elapsed_s / IDLE_S))
            offered = LOCAL_OFFERED if own is self.local else 0.0
            if own.plan.window:
                own.forecast = forecast(own.plan, self._draft, load, target_s)
                offered = own.forecast.offered
            own.yield_ = own.accepted.shrunk(usual, PRIOR_ROUNDS)
            rows = load * (1 + own.offered.shrunk(offered, PRIOR_ROUNDS))
            paths = load * own.paths.shrunk(0.0, PRIOR_ROUNDS)
            beside_s = own.beside_s.shrunk(own.forecast.wait_s + overhead_s, PRIOR_ROUNDS)
            own.round_s = self.steps.step_s(rows, own.plan.window > 0, paths) + beside_s

    def _check_draft(self, target_s: float) -> None:
        """Begins anew where the draft's times jumped: the forecasts know of it at once."""
        trip_s = self._draft.trip_s(self.drafting[0].plan, self.steps.load)
        if abs(trip_s - self._trip_s) > 0.25 * self._trip_s + 0.1 * target_s or self._draft.jumps != self._draft_jumps:
            self._forget()
            self._trip_s, self._draft_jumps = trip_s, self._draft.jumps

    def _forget(self) -> None:
        """Drops what the plans with the draft measured."""
        for own in self.drafting:
            own.forget()

    def rate(self, own: Candidate, acceptance: float, local_accepted: float) -> float:
        """Tokens per second of a session at an acceptance, of whose rounds each accepts `local_accepted` tokens of the
        coordinator's own proposers, or those in the share of rounds in which the draft has none."""
        accepted = 0.0
        if own.plan.window:
            accepted = own.yield_ * own.forecast.accepted(acceptance)
        if own is not self.off:
            accepted += local_accepted / (1 + accepted)
        return (1 + accepted) / own.round_s

    def best_rate(self) -> float:
        """Tokens per second of the best measured plan, for the mean session."""
        acceptance, local = self.acceptance.value, self.local_accepted.value
        measured = [own for own in self.candidates if own.rounds >= 1 or own is self.off]
        return max(self.rate(own, acceptance, local) for own in measured)

    def reach_min(self, rate: float) -> tuple[float, float]:
        """The least probability at which a draft token is worth its row, and one that begins a further path its row and
        that path, for sessions of `rate` tokens per second: they delay all sessions of the step."""
        load, steps = self.steps.load, self.steps
        flat_s = steps.step_s(load, True)
        row_s = (steps.step_s(9 * load, True) - flat_s) / 8
        path_s = row_s + steps.step_s(load, True, load) - flat_s
        row, path = (min(max(1.2 * rate * seconds, REACH_LEAST), REACH_MOST) for seconds in (row_s, path_s))
        return row, path

    def wait_max_s(self, plan: Plan) -> float:
        """Seconds for which a plan may hold a verification back at present."""
        return self._draft.wait_max_s(plan, self.steps.load)

    def warm_s(self, own: Candidate) -> float:
        """Seconds from a change of plan to the first round that counts."""
        if not own.plan.window or own.plan.wait_length:
            return 0.5 * own.round_s
        return own.round_s + self._draft.trip_s(own.plan, self.steps.load)

    def spread(self, own: Candidate) -> float:
        """The relative error of a rate: few rounds may have been lucky."""
        return SPREAD / math.sqrt(PRIOR_ROUNDS + own.rounds) if own.plan.window else 0.0
