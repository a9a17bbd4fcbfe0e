"""One session's measuring policy: it runs the plan with the highest goodput, and explores others within a budget. Pure.

It sees counts and seconds of finished rounds, never tokens, so that under REJECTION no decision depends on the last
draws (docs/exactness.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specdec.policy.acceptance import Acceptance
from specdec.policy.goodput import LOCAL_GUESS, REACH_LEAST, Candidate, Goodput
from specdec.protocol.plan import Plan
from specdec.protocol.policy import Prediction
from specdec.protocol.records import RoundRecord
from specdec.protocol.types import Proposer

REVIEW_ROUNDS, REVIEW_S = 4, 0.02
CHANGE_GAIN, LOCAL_GAIN = 1.02, 1.01  # least ratio of rates for a change of plan, and for local proposers over none
MEASURED_ROUNDS = 8.0  # of a plan that may be chosen
EXPLORATION_ROUNDS, BASELINE_ROUNDS, EXPLORATION_MAX_S = 12, 6, 10.0
BASELINE_SHARE, BASELINE_FIRST_S, BASELINE_MAX_S = 0.003, 1.0, 60.0  # of the time; intervals of plain decoding
PROBE_S = 3.0  # without the draft, before an exploration that promises nothing: it may have become faster
HELPER_GUESS, HELPER_WEIGHT, HELPER_EVERY = 0.3, 0.08, 64  # tokens of heads and local proposers a round, probes
BACK_S = 40.0  # in which what a session learned of plans that rest is forgotten


@dataclass(frozen=True, slots=True)
class Exploration:
    """A plan that is explored until `rounds` of its rounds counted, or `ends_s`; `instead`: the best plan."""

    rounds: int
    ends_s: float
    instead: Candidate


class Helper:
    """Whether proposers beside the draft's are worth their time: by their accepted tokens, asked now and then."""

    def __init__(self) -> None:
        self.accepted = HELPER_GUESS

    def add(self, count: int) -> None:
        """Takes a round in which they were asked."""
        self.accepted += HELPER_WEIGHT * (count - self.accepted)

    def is_wanted(self, round_index: int, accepted_min: float) -> bool:
        """Whether they shall be asked in the round after the next."""
        return self.accepted >= accepted_min or round_index % HELPER_EVERY == 0


class GoodputPolicy:
    """One session's policy; `goodput` is its service's. Implements `Policy`."""

    def __init__(self, goodput: Goodput, draft_length_cap: int) -> None:
        self._goodput, self.draft_length_cap = goodput, draft_length_cap
        self._acceptance = Acceptance(goodput.acceptance)
        self._local = max(LOCAL_GUESS, goodput.local_accepted.value)
        self._heads_helper, self._local_helper = Helper(), Helper()
        self.wants_heads = self.wants_local = self._asks_local = True
        self._jumps = goodput.steps.jumps
        self._exploration: Exploration | None = None
        self._exploring_rounds, self._lost_s = 0, 0.0
        self._explored_tokens, self._explored_s = 0, 0.0
        self._review_round, self._review_s = 0, 0.0
        self._counts_from_s = -math.inf
        self._own = goodput.off
        self._rates = self._compute_rates()
        measured = [own for own in goodput.drafting if own.rounds >= MEASURED_ROUNDS]
        self._run(self._best(measured or goodput.drafting, self._rest(), CHANGE_GAIN))

    @property
    def prediction(self) -> Prediction:
        own, goodput = self._own, self._goodput
        drafting = [other for other in goodput.drafting if other is not own]
        other = goodput.off if own is not goodput.off else max(drafting, key=self._rate, default=own)
        names = [self._name(each) for each in (own, other)]
        tried = ", explored" if self._exploration else ""
        reason = f"{names[0]}{tried}: {self._rate(own):.0f} tokens/s predicted; {names[1]}: {self._rate(other):.0f}"
        return Prediction(self._rate(own), reason, self._exploring_rounds, max(0.0, self._lost_s))

    def _name(self, own: Candidate) -> str:
        return "off" if own is self._goodput.off else own.plan.description

    def plan(self, positions_left: int) -> Plan:
        return self._plan.within(positions_left)

    def on_round(self, record: RoundRecord) -> None:
        if record.step.step_count > 1 or not record.round_index:  # it read a prompt or a preempted session
            return
        goodput, now_s, tokens = self._goodput, record.times.end_s, record.tokens
        goodput.on_round(record)
        if self._exploration:
            self._exploring_rounds += 1
            self._explored_tokens += tokens.kept_count
            self._explored_s += record.times.round_s
        if record.plan.draft_length_max:
            self._learn_helpers(record)
        if record.is_refused:  # what its plan brings says nothing of the plan in a session with a draft
            if self._own.plan.window:
                self._exploration = None
                self._run(self._rest(), now_s)
            return
        if record.plan == self._plan and record.times.start_s >= self._counts_from_s:
            self._counted_rounds += 1
            if record.plan.window:
                self._acceptance.add(record)
            goodput.measure(self._own, record, self._acceptance.value)
        if now_s < goodput.baseline_until_s and self._own is not goodput.off and not self._exploration:
            self._explore(goodput.off, BASELINE_ROUNDS, now_s)
        elif goodput.steps.jumps != self._jumps or (
            record.round_index >= self._review_round and now_s >= self._review_s
        ):
            self._review(record.round_index, now_s)

    def _learn_helpers(self, record: RoundRecord) -> None:
        """Heads and local proposers take their time in every round that asks for them."""
        tokens, index = record.tokens, record.round_index
        heads_count = tokens.accepted_proposers.count(Proposer.HEADS)
        if tokens.had_heads:
            self._heads_helper.add(heads_count)
        if self._asks_local:
            own_count = len(tokens.accepted_proposers) - heads_count - tokens.accepted_proposers.count(Proposer.DRAFT)
            self._local_helper.add(own_count)
            self._local += HELPER_WEIGHT * (tokens.local_accepted_count - self._local)
            self._goodput.local_accepted.add(tokens.local_accepted_count)
        self._asks_local = self.wants_local
        self.wants_heads = self.is_speculating and self._heads_helper.is_wanted(index, self._heads_min)
        self.wants_local = not record.plan.window or self._local_helper.is_wanted(index, REACH_LEAST)

    def _compute_rates(self) -> dict[int, float]:
        acceptance, goodput = self._acceptance.value, self._goodput
        return {id(own): goodput.rate(own, acceptance, self._local) for own in goodput.candidates}

    def _rate(self, own: Candidate) -> float:
        return self._rates[id(own)]

    def _rest(self) -> Candidate:
        """The best plan without the draft."""
        off, local = self._goodput.off, self._goodput.local
        return local if local is not None and self._rate(local) > LOCAL_GAIN * self._rate(off) else off

    def _best(self, candidates: list[Candidate], otherwise: Candidate, gain: float) -> Candidate:
        """The best candidate, few rounds weighing less, or `otherwise` if it is not better by `gain`."""

        def sure(own: Candidate) -> float:
            return self._rate(own) * (1 - self._goodput.spread(own) / 2)

        best = max(candidates, key=sure, default=otherwise)
        return best if sure(best) > gain * sure(otherwise) else otherwise

    def _run(self, own: Candidate, now_s: float = -math.inf) -> None:
        """Puts a plan in force."""
        goodput = self._goodput
        self._own, self._plan = own, replace(own.plan, wait_s=goodput.wait_max_s(own.plan))
        self.is_speculating = own is not goodput.off
        self.wants_local = self.wants_local or own is goodput.local
        self._counted_rounds = 0
        self._counts_from_s = now_s + goodput.warm_s(own)
        self._weigh()

    def _weigh(self) -> None:
        """Sets what a draft token, and the heads of a round, must bring to be worth their time."""
        goodput, rate = self._goodput, self._rate(self._own)
        self.reach_min, self.path_reach_min = goodput.reach_min(rate)
        self._heads_min = max(1.2 * rate * goodput.steps.heads_s(), REACH_LEAST)

    def _review(self, round_index: int, now_s: float) -> None:
        """Keeps or changes the plan."""
        goodput, current, exploration = self._goodput, self._own, self._exploration
        elapsed_s = now_s - self._review_s + REVIEW_S if self._review_s else 0.0
        self._review_round, self._review_s = round_index + REVIEW_ROUNDS, now_s + REVIEW_S
        goodput.refresh(now_s)
        has_jumped, self._jumps = goodput.steps.jumps != self._jumps, goodput.steps.jumps
        if not current.plan.window and not exploration:
            self._forget(elapsed_s)
        self._rates = self._compute_rates()
        self._weigh()
        if exploration and not has_jumped:
            if self._counted_rounds < exploration.rounds and now_s < exploration.ends_s:
                return
            self._charge(exploration)
            goodput.exploring_until_s = now_s
        self._exploration = None
        rest = self._rest()
        measured = [own for own in goodput.drafting if own.rounds >= MEASURED_ROUNDS or own is current]
        best = self._best(measured, rest, CHANGE_GAIN)
        if not exploration and current.plan.window and best.plan.window:
            best = self._best([best], current, CHANGE_GAIN)
        if best is not current:
            self._run(best, now_s)
        if self._counted_rounds > REVIEW_ROUNDS and now_s >= goodput.exploring_until_s:
            self._consider(best, now_s)

    def _forget(self, elapsed_s: float) -> None:
        """A plan that rests is not measured: a poor text may have ended since."""
        self._acceptance.fade(elapsed_s)
        if self._own is self._goodput.off:
            usual = max(LOCAL_GUESS, self._goodput.local_accepted.value)
            self._local += min(1.0, elapsed_s / BACK_S) * (usual - self._local)

    def _consider(self, best: Candidate, now_s: float) -> None:
        """Begins an exploration if one is promising and the budget covers it; from time to time plain decoding."""
        goodput, rate = self._goodput, self._rate(best)
        if best.plan.window and now_s >= goodput.baseline_s:
            lost_s = self._loss_s(goodput.off, BASELINE_ROUNDS, rate)
            is_first, goodput.baseline_s = not goodput.baseline_s, now_s + BASELINE_FIRST_S
            if not is_first and lost_s <= goodput.credit_s:
                goodput.baseline_s = now_s + min(max(lost_s / BASELINE_SHARE, BASELINE_FIRST_S), BASELINE_MAX_S)
                self._explore(goodput.off, BASELINE_ROUNDS, now_s)
                goodput.baseline_until_s = goodput.exploring_until_s
                return
        others = [own for own in goodput.drafting if own is not best]
        if others:
            spread = 0.0 if best.plan.window else self._acceptance.spread

            def promise(own: Candidate) -> float:
                return self._rate(own) * (1 + goodput.spread(own) + spread)

            own = max(others, key=promise)
            is_due = not best.plan.window and now_s >= goodput.drafted_s + PROBE_S
            if (is_due or promise(own) > rate) and self._loss_s(own, EXPLORATION_ROUNDS, rate) <= goodput.credit_s:
                self._explore(own, EXPLORATION_ROUNDS, now_s)

    def _loss_s(self, own: Candidate, rounds: int, best_rate: float) -> float:
        """The seconds that an exploration is expected to lose."""
        seconds = self._goodput.warm_s(own) + rounds * own.round_s
        return max(0.0, seconds * (1 - self._rate(own) / best_rate))

    def _explore(self, own: Candidate, rounds: int, now_s: float) -> None:
        goodput = self._goodput
        ends_s = now_s + min(2 * (goodput.warm_s(own) + rounds * own.round_s), EXPLORATION_MAX_S)
        self._exploration = Exploration(rounds, ends_s, self._own)
        self._explored_tokens, self._explored_s = 0, 0.0
        goodput.exploring_until_s = ends_s
        self._run(own, now_s)

    def _charge(self, exploration: Exploration) -> None:
        """Takes from the budget what an exploration lost against the best plan: the mean of what its tokens and what
        its estimated rate say, as its rounds are few."""
        best_rate = self._rate(exploration.instead)
        lost_s = self._explored_s * (1 - self._rate(self._own) / best_rate)
        lost_s = (lost_s + self._explored_s - self._explored_tokens / best_rate) / 2
        if self._own.plan.window:
            lost_s += self._explored_s * self._goodput.others_loss()
        self._lost_s += self._goodput.charge(lost_s)
