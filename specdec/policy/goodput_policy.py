"""One session's measuring policy: it runs the plan with the highest goodput, and explores others within a budget. Pure.

It sees counts and seconds of finished rounds, never tokens, so that under REJECTION no decision depends on the last
draws (docs/exactness.md). A round counts for its plan once draft tokens of that plan can have arrived.
"""

from __future__ import annotations

import math
from dataclasses import replace

from specdec.policy.acceptance import Acceptance
from specdec.policy.goodput import (
    BUDGET_MAX_S,
    DEBT_MAX_S,
    IDLE_S,
    PRIOR_ROUNDS,
    REACH_LEAST,
    REACH_SLACK,
    Candidate,
    Goodput,
)
from specdec.policy.mean import Mean
from specdec.protocol.plan import Plan
from specdec.protocol.policy import Prediction
from specdec.protocol.records import RoundRecord
from specdec.protocol.types import Proposer

REVIEW_ROUNDS, REVIEW_S = 4, 0.04  # between two choices
GAIN = 1.02  # least ratio of rates for a change of plan
MEASURED_ROUNDS = PRIOR_ROUNDS / 2  # of a plan that may be chosen
EXPLORATION_ROUNDS, EXPLORATION_MAX_S = 12, 4.0  # of a measurement
BASELINE_SHARE, BASELINE_MAX_S = 0.003, 60.0  # of the time that plain decoding may lose; its longest interval
PROBE_S, PROBE_ROUNDS = 3.0, 64  # without the draft, and without its helpers: they may have become better
HELPER_GUESS = 0.3  # accepted tokens of heads or local proposers in a round


class GoodputPolicy:
    """One session's policy; `goodput` is its service's. Implements `Policy`."""

    def __init__(self, goodput: Goodput, draft_length_cap: int) -> None:
        self._goodput, self.draft_length_cap = goodput, draft_length_cap
        self._acceptance = Acceptance(goodput.acceptance)
        local_guess = goodput.local_guess if goodput.local is None else max(goodput.local_guess, HELPER_GUESS)
        guesses = local_guess, HELPER_GUESS, HELPER_GUESS  # a text may repeat: its first rounds find out
        self._local, self._heads_help, self._local_help = (
            Mean(each, *[float(EXPLORATION_ROUNDS)] * 2) for each in guesses
        )
        self.wants_heads = self.wants_local = self._asks_local = goodput.local is not None
        self._exploring_until: tuple[int, float] | None = None  # rounds that counted, and a time
        self._instead = goodput.off  # the plan that an exploration stands for
        self._exploring_rounds = self._explored_tokens = 0
        self._lost_s = self._explored_s = self._reserved_s = 0.0
        self._review_round, self._review_s, self._jumps = 0, 0.0, goodput.steps.jumps
        self._own = goodput.off
        self._rates = self._compute_rates()
        measured = [own for own in goodput.drafting if own.rounds >= MEASURED_ROUNDS]
        self._run(self._best(measured or goodput.opening, self._rest()), -math.inf)

    @property
    def prediction(self) -> Prediction:
        own, goodput, rates = self._own, self._goodput, self._rates
        other = max(goodput.drafting, key=rates.__getitem__, default=own) if own is goodput.off else goodput.off
        names = ["off" if each is goodput.off else each.plan.description for each in (own, other)]
        tried = ", explored" if self._exploring_until else ""
        reason = f"{names[0]}{tried}: {rates[own]:.0f} tokens/s predicted; {names[1]}: {rates[other]:.0f}"
        return Prediction(rates[own], reason, self._exploring_rounds, max(0.0, self._lost_s))

    def plan(self, positions_left: int) -> Plan:
        return self._plan.within(positions_left)

    def on_round(self, record: RoundRecord) -> None:
        if record.step.step_count > 1 or not record.round_index:  # it read a prompt or a preempted session
            return
        goodput, now_s = self._goodput, record.times.end_s
        goodput.on_round(record)
        if self._exploring_until:
            self._exploring_rounds += 1
            self._explored_tokens += record.tokens.kept_count
            self._explored_s += record.times.round_s
        if goodput.local is not None and record.plan.draft_length_max:
            self._learn_helpers(record)
        if record.is_refused:  # what its plan brings says nothing of the plan in a session with a draft
            if self._own.plan.window:
                self._exploring_until = None
                self._run(self._rest(), now_s)
            return
        if record.plan == self._plan and record.times.start_s >= self._counts_from_s:
            self._counted_rounds += 1
            if record.plan.window:
                self._acceptance.add(record)
            goodput.measure(self._own, record, self._acceptance)
        if now_s < goodput.baseline_until_s and self._own is not goodput.off and not self._exploring_until:
            self._explore(goodput.off, now_s)
        elif self._jumps != goodput.steps.jumps or (
            record.round_index >= self._review_round and now_s >= self._review_s
        ):
            self._review(record.round_index, now_s)

    def _learn_helpers(self, record: RoundRecord) -> None:
        """Heads and local proposers take their time in every round that asks for them: they are asked while their
        accepted tokens are worth it, and now and then to find out."""
        tokens, proposers = record.tokens, record.tokens.accepted_proposers
        if tokens.had_heads:
            self._heads_help.add(proposers.count(Proposer.HEADS))
        if self._asks_local:
            self._local_help.add(sum(own not in (Proposer.DRAFT, Proposer.HEADS) for own in proposers))
            for mean in (self._local, self._goodput.local_accepted):
                mean.add(tokens.local_accepted_count)
        is_due, self._asks_local = record.round_index % PROBE_ROUNDS == 0, self.wants_local
        self.wants_heads = self.is_speculating and (is_due or self._heads_help.value >= self._heads_min)
        self.wants_local = not record.plan.window or is_due or self._local_help.value >= REACH_LEAST

    def _compute_rates(self) -> dict[Candidate, float]:
        session = self._acceptance.value, self._local.value
        return {own: self._goodput.rate(own, *session) for own in self._goodput.candidates}

    def _rest(self) -> Candidate:
        """The best plan without the draft."""
        off, local = self._goodput.off, self._goodput.local
        return off if local is None or self._rates[local] <= GAIN * self._rates[off] else local

    def _best(self, candidates: list[Candidate], otherwise: Candidate) -> Candidate:
        """The best candidate, few rounds weighing less, or `otherwise` if that is no gain."""
        sure = {own: self._rates[own] * (1 - self._spread(own) / 2) for own in (*candidates, otherwise)}
        best = max(candidates, key=sure.__getitem__, default=otherwise)
        return best if sure[best] > GAIN * sure[otherwise] else otherwise

    def _spread(self, own: Candidate) -> float:
        """The relative error of a rate: a round's tokens scatter by their mean."""
        return 1 / math.sqrt(PRIOR_ROUNDS + own.rounds) if own.plan.window else 0.0

    def _run(self, own: Candidate, now_s: float) -> None:
        """Puts a plan in force."""
        goodput = self._goodput
        wait_s = goodput.draft.wait_max_s(own.plan, goodput.steps.load)
        self._own, self._plan = own, replace(own.plan, wait_s=wait_s)
        self.is_speculating = own is not goodput.off
        self.wants_local = self.wants_local or own is goodput.local
        self._counted_rounds, self._counts_from_s = 0, now_s + goodput.warm_s(own)
        self._weigh()

    def _weigh(self) -> None:
        """Sets what a draft token, and the heads of a round, must bring to be worth their time."""
        rate = self._rates[self._own]
        self.reach_min, self.path_reach_min = self._goodput.reach_min(rate)
        self._heads_min = max(REACH_SLACK * rate * self._goodput.steps.heads_s(), REACH_LEAST)

    def _review(self, round_index: int, now_s: float) -> None:
        """Keeps or changes the plan."""
        goodput, current, exploring = self._goodput, self._own, self._exploring_until
        elapsed_s = now_s - self._review_s + REVIEW_S if self._review_s else 0.0
        self._review_round, self._review_s = round_index + REVIEW_ROUNDS, now_s + REVIEW_S
        goodput.refresh(now_s)
        has_jumped, self._jumps = goodput.steps.jumps != self._jumps, goodput.steps.jumps
        if not current.plan.window and not exploring:  # a poor text may have ended since
            self._acceptance.forget(math.exp(-elapsed_s / IDLE_S))
            if current is goodput.off:
                self._local.value += min(1.0, elapsed_s / IDLE_S / 2) * (goodput.local_guess - self._local.value)
        self._rates = self._compute_rates()
        if self.is_speculating:
            self._weigh()
        if exploring and not has_jumped:
            if self._counted_rounds < exploring[0] and now_s < exploring[1]:
                return
            self._charge()
            goodput.exploring_until_s = now_s
        self._exploring_until = None
        measured = [own for own in goodput.drafting if own.rounds >= MEASURED_ROUNDS or own is current]
        best = self._best(measured, self._rest())
        if not exploring and current.plan.window and best.plan.window:
            best = self._best([best], current)
        if best is not current:
            self._run(best, now_s)
        elif self._counted_rounds > REVIEW_ROUNDS and now_s >= goodput.exploring_until_s:
            self._consider(best, now_s)

    def _consider(self, best: Candidate, now_s: float) -> None:
        """Begins an exploration if one is promising, or due, and the budget covers it; while the draft works, from time
        to time plain decoding of all sessions: else none sees the target without a draft beside it."""
        goodput, rates = self._goodput, self._rates
        if best.plan.window and now_s >= goodput.baseline_s:
            lost_s = self._loss_s(goodput.off, best)
            is_first, goodput.baseline_s = not goodput.baseline_s, now_s + 1.0
            if not is_first and lost_s <= goodput.credit_s:
                goodput.baseline_s = now_s + min(max(lost_s / BASELINE_SHARE, 1.0), BASELINE_MAX_S)
                self._explore(goodput.off, now_s)
                goodput.baseline_until_s = goodput.exploring_until_s
                return
        open_plans = goodput.drafting if best.plan.window else goodput.opening
        promises = {own: self._promise(own, best) for own in open_plans if own is not best}
        own = max(promises, key=promises.__getitem__, default=best)
        is_due = not best.plan.window and now_s >= goodput.drafted_s + PROBE_S
        if own is not best and (is_due or promises[own] > rates[best]) and self._loss_s(own, best) <= goodput.credit_s:
            self._explore(own, now_s)

    def _promise(self, own: Candidate, best: Candidate) -> float:
        """The rate of a plan of the draft if it is better than estimated. Beside plain decoding that can only be by
        more accepted tokens: if they come too late to be offered, it promises nothing."""
        if best.plan.window:
            return self._rates[own] * (1 + self._spread(own))
        acceptance = min(1.0, self._acceptance.value + self._acceptance.spread)
        return self._goodput.rate(own, acceptance, self._local.value, 1 + self._spread(own))

    def _rounds(self, own: Candidate) -> int:
        """Rounds of an exploration: half as many of plain decoding, of which each is like the next, and of the one
        plan that says whether a head is of use at all."""
        is_short = not own.plan.window or [own] == self._goodput.opening
        return EXPLORATION_ROUNDS // 2 if is_short else EXPLORATION_ROUNDS

    def _loss_s(self, own: Candidate, best: Candidate) -> float:
        """The seconds that an exploration is expected to lose; never more than the budget can save."""
        seconds = self._goodput.warm_s(own) + self._rounds(own) * own.round_s
        lost_s = max(0.0, 1 - self._rates[own] / self._rates[best]) * seconds + self._others_loss_s(own, best, seconds)
        return min(lost_s, BUDGET_MAX_S - DEBT_MAX_S)

    def _others_loss_s(self, own: Candidate, best: Candidate, seconds: float) -> float:
        """The seconds that the other sessions lose together while one explores: by its rows, and by a draft on the
        target's cores."""
        steps, load = self._goodput.steps, self._goodput.steps.load
        usual_s = steps.step_s(load * best.rows, best.plan.window > 0)
        explored_s = steps.step_s(load * best.rows + own.rows - best.rows, best.plan.window + own.plan.window > 0)
        return seconds * (load - 1) * max(0.0, 1 - usual_s / explored_s)

    def _explore(self, own: Candidate, now_s: float) -> None:
        """Begins one. It is paid in advance, as a text may end in its midst."""
        goodput, rounds = self._goodput, self._rounds(own)
        self._reserved_s = goodput.charge(self._loss_s(own, self._own))
        self._lost_s += self._reserved_s
        ends_s = now_s + min(2 * (goodput.warm_s(own) + rounds * own.round_s), EXPLORATION_MAX_S)
        self._exploring_until, self._instead = (rounds, ends_s), self._own
        self._explored_tokens, self._explored_s = 0, 0.0
        goodput.exploring_until_s = ends_s
        self._run(own, now_s)

    def _charge(self) -> None:
        """Takes from the budget what an exploration lost against the best plan: the mean of what its tokens and what
        its estimated rate say, as its rounds are few."""
        seconds, best_rate = self._explored_s, self._rates[self._instead]
        lost_s = seconds - (self._explored_tokens + seconds * self._rates[self._own]) / 2 / best_rate
        lost_s += self._others_loss_s(self._own, self._instead, seconds)
        self._lost_s += self._goodput.charge(lost_s - self._reserved_s)
