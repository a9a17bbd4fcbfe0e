"""The goodput of plans: accepted and own tokens of a round over its seconds, if all sessions ran the plan. Pure.

goodput = (1 + expected accepted tokens) / (T(load x rows, paths) + seconds beside the step) (SmartSpec, Liu et al.
2024). T is the target's, the times of drafting the draft's, acceptance that of the draft and of the session. What a
plan measured corrects its forecast: accepted over forecast tokens, offered ones, paths, and seconds beside the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.policy.acceptance import Acceptance
from specdec.policy.draft_time import DraftTimes, HeadTimes
from specdec.policy.mean import Mean
from specdec.policy.plans import Forecast, catalogue, forecast
from specdec.policy.steps import StepTimes
from specdec.protocol.plan import Plan
from specdec.protocol.records import RoundRecord

PRIOR_ROUNDS, IDLE_S = 16.0, 20.0  # as which a forecast counts; until a measurement is old
REFRESH_S = 0.15  # of all estimates
TRIP_S = 1.0  # in which the time to a draft token is smoothed: single ones scatter by a multiple
OVERHEAD_GUESS_S, LOCAL_GUESS = 0.0015, 0.1  # of a round beside the step; tokens of the coordinator's own proposers
BUDGET_SHARE, BUDGET_MAX_S, DEBT_MAX_S = 0.01, 1.0, 0.15  # of all time, for explorations; debt of a session
START_ROUNDS = 4.0  # that they may lose at a start
REACH_SLACK, REACH_LEAST, REACH_MOST = 1.2, 0.02, 0.9  # a draft token costs bytes and the coordinator's time too


@dataclass(slots=True, eq=False)
class Candidate:
    """A plan, what it measured, and its estimates as of the last refresh: `rows` of a session and `round_s`, if
    all ran it; `accepted_share` of the forecast's tokens."""

    plan: Plan
    accepted: Mean = field(default_factory=lambda: Mean(1.0))
    offered: Mean = field(default_factory=lambda: Mean(0.0))
    paths: Mean = field(default_factory=lambda: Mean(0.0))
    beside_s: Mean = field(default_factory=lambda: Mean(0.0))
    forecast: Forecast = Forecast(0.0)
    updated_s: float = -math.inf
    accepted_share: float = 1.0
    rows: float = 1.0
    round_s: float = 1.0

    @property
    def rounds(self) -> float:
        """Measured rounds that count."""
        return (self.accepted if self.plan.window else self.beside_s).weight

    def forget(self, kept_share: float = 0.0) -> None:
        """Scales the weight of all that was measured."""
        for mean in (self.accepted, self.offered, self.paths, self.beside_s):
            mean.forget(kept_share)


class Goodput:
    """The plans of all requests of one rule with the same limit of draft tokens and kinds of proposers: `off`, `local`
    if the coordinator has own proposers, and those `drafting`. `credit_s`: what explorations may lose at present."""

    def __init__(
        self,
        steps: StepTimes,
        draft: DraftTimes,
        acceptance: Acceptance,
        draft_length_cap: int,
        plans: Sequence[Plan] | None = None,
    ) -> None:
        self.steps, self.draft, self.acceptance = steps, draft, acceptance
        capped = dict.fromkeys(plan.capped(draft_length_cap) for plan in plans or catalogue())
        self.candidates = [Candidate(plan) for plan in capped]
        self.off, *others = self.candidates
        self.drafting = [own for own in others if own.plan.window]
        # Those that a session may begin with: each pass of a head takes its time and brings less than the one before,
        # so where a chain of one token gains nothing no plan does.
        self.opening = self.drafting[:1] if isinstance(draft, HeadTimes) else self.drafting
        self.local = next((own for own in others if not own.plan.window), None)
        self.local_accepted, self._overhead_s = Mean(0.0), Mean(OVERHEAD_GUESS_S)
        self._usual = Mean(1.0)  # accepted over forecast tokens of all plans of the draft
        self.round_count, self.drafted_s = 0, -math.inf
        self.exploring_until_s = self.baseline_until_s = -math.inf
        self.baseline_s = 0.0  # when plain decoding is due; 0: never measured
        self._refreshed_s, self._trip_s, self._conditions = -math.inf, 0.0, (0, 0, 0.0)
        self.credit_s = 0.0
        self.refresh(-math.inf)

    @property
    def local_guess(self) -> float:
        """Accepted tokens of local proposers in a round of a text that begins; never next to none, as it may repeat."""
        return max(self.local_accepted.value, 0.0 if self.local is None else LOCAL_GUESS)

    def on_round(self, record: RoundRecord) -> None:
        """Takes a round of any session: its step, and a share of its time for exploration."""
        jumps = self.steps.jumps
        self.steps.on_step(record)
        self.draft.on_round(record)
        if self.steps.jumps != jumps:
            self._refreshed_s = -math.inf
            self.refresh(record.times.end_s)
        self.round_count += 1
        if record.plan.window or self.round_count == 1:
            self.drafted_s = record.times.end_s
        owed_s = max(self.credit_s, -DEBT_MAX_S * self.steps.load)  # the sessions that owed more may have ended
        self.credit_s = min(owed_s + BUDGET_SHARE * record.times.round_s, BUDGET_MAX_S)

    def charge(self, lost_s: float) -> float:
        """Takes the loss of an exploration from the credit, as far as it may fall or rise, and returns what it took."""
        debt_max_s = DEBT_MAX_S * self.steps.load
        taken_s = max(min(lost_s, self.credit_s + debt_max_s), self.credit_s - BUDGET_MAX_S)
        self.credit_s -= taken_s
        return taken_s

    def measure(self, own: Candidate, record: RoundRecord, acceptance: Acceptance) -> None:
        """Adds a round that counts for its plan, of a session of this acceptance."""
        step, tokens = record.step, record.tokens
        beside_s = record.times.round_s - step.step_s - max(0.0, step.queue_s - step.step_s)
        if not own.plan.draft_length_max:
            beside_s -= step.head_s  # heads of the step's other sessions: if all ran this plan there were none
        if step.active_sessions > step.sessions > 0:  # the queue for a step without it is a part of T(load)
            rows = step.rows * step.active_sessions / step.sessions
            beside_s -= step.step_s * (self.steps.step_s(rows, True) / self.steps.step_s(step.rows, True) - 1)
        beside_s, own.updated_s = max(0.0, beside_s), record.times.end_s
        own.beside_s.add(beside_s)
        if own.plan.window:
            share = tokens.model_accepted_count / own.forecast.accepted(acceptance.value)
            self._usual.add(share)
            own.accepted.add(share)
        else:
            self._overhead_s.add(beside_s)
        if own is not self.off:
            own.offered.add(tokens.offered_count)
        if own.plan.siblings:
            own.paths.add(max(0, tokens.path_count - 1))

    def refresh(self, now_s: float) -> None:
        """Updates the estimates, every REFRESH_S."""
        if now_s < self._refreshed_s + REFRESH_S:
            return
        elapsed_s = now_s - self._refreshed_s if math.isfinite(self._refreshed_s) else 0.0
        self._refreshed_s, kept_share, steps, load = now_s, math.exp(-elapsed_s / IDLE_S), self.steps, self.steps.load
        steps.fade(now_s)
        self.draft.fade(now_s)
        if now_s > self.drafted_s + elapsed_s:
            self.acceptance.forget(kept_share ** (1 / 3))
            self._usual.forget(kept_share ** (1 / 3))
        overhead_s = self._overhead_s.shrunk(OVERHEAD_GUESS_S, PRIOR_ROUNDS)
        target_s = steps.step_s(load, True) + overhead_s
        self._check_conditions(target_s, elapsed_s)
        usual = min(1.0, self._usual.shrunk(1.0, PRIOR_ROUNDS))
        for own in self.candidates:
            if now_s > own.updated_s + elapsed_s:
                own.forget(kept_share)
            if own.plan.window:
                own.forecast = forecast(own.plan, self.draft, load, target_s)
            own.accepted_share = own.accepted.shrunk(usual, PRIOR_ROUNDS)
            own.rows = 1 + own.offered.shrunk(own.forecast.offered, PRIOR_ROUNDS)
            paths = load * own.paths.shrunk(0.0, PRIOR_ROUNDS)
            beside_s = own.beside_s.shrunk(own.forecast.wait_s + overhead_s, PRIOR_ROUNDS)
            own.round_s = steps.step_s(load * own.rows, own.plan.window > 0, paths) + beside_s

    def _check_conditions(self, target_s: float, elapsed_s: float) -> None:
        """Begins anew where target or draft jumped: drops what the plans of the draft measured, as their forecasts know
        of it at once, and lets them be explored. `elapsed_s`: since the last refresh."""
        trip_s = self.draft.trip_s(self.off.plan, self.steps.load)
        *counts, known_s = self._conditions
        conditions = self.steps.jumps, self.draft.connections
        self._trip_s += (1 - math.exp(-elapsed_s / TRIP_S)) * (trip_s - self._trip_s)
        if [*conditions] != counts or abs(self._trip_s - known_s) > 0.25 * known_s + 0.1 * target_s:
            self._conditions, self._trip_s = (*conditions, trip_s), trip_s
            self.credit_s = max(self.credit_s, START_ROUNDS * target_s)
            for own in self.drafting:
                own.forget()

    def rate(self, own: Candidate, acceptance: float, local_accepted: float, factor: float = 1.0) -> float:
        """Tokens per second of a session at an acceptance, of whose rounds each accepts `local_accepted` tokens of the
        coordinator's own proposers, or those in the share of rounds in which the draft has none. `factor`: of the
        draft's accepted tokens."""
        accepted = factor * own.accepted_share * own.forecast.accepted(acceptance) if own.plan.window else 0.0
        return (1 + accepted + (local_accepted / (1 + accepted) if own is not self.off else 0.0)) / own.round_s

    def best_rate(self) -> float:
        """Tokens per second of the best measured plan, for the mean session."""
        mean = self.acceptance.value, self.local_accepted.value
        return max(self.rate(own, *mean) for own in self.candidates if own.rounds >= 1 or own is self.off)

    def reach_min(self, rate: float) -> tuple[float, float]:
        """The least probability at which a draft token is worth its row, and one that begins a further path its row and
        that path, for sessions of `rate` tokens per second: they delay all sessions of the step."""
        load, steps = self.steps.load, self.steps
        row_s = (steps.step_s(9 * load, True) - steps.step_s(load, True)) / 8
        path_s = row_s + steps.step_s(load, True, load) - steps.step_s(load, True)
        row, path = (min(max(REACH_SLACK * rate * s, REACH_LEAST), REACH_MOST) for s in (row_s, path_s))
        return row, path

    def warm_s(self, own: Candidate) -> float:
        """Seconds from a change of plan to the first round that counts."""
        if not own.plan.window or own.plan.wait_length:
            return own.round_s / 2
        return own.round_s + self.draft.trip_s(own.plan, self.steps.load)
