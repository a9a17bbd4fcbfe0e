"""The policy that chooses by the cost model, and stops speculating where plain decoding is faster.

It sees counts and seconds of rounds that are over, never tokens, so that under REJECTION nothing it decides depends on
what was just drawn (docs/exactness.md). It states what it expects and why. Pure.
"""

from __future__ import annotations

import enum
import math

from specdec.policy.plan import PLAIN, Plan, Prediction
from specdec.protocol.choice import DEFAULT_PLAN, LEAVES, ROWS
from specdec.protocol.cost_model import Conditions, Curve, plain_rate
from specdec.protocol.measure import CHOOSE_ROUNDS, SEARCH_ROUNDS, Acceptance, Mean, Measurements
from specdec.protocol.outlook import Outlook
from specdec.protocol.round_record import RoundRecord
from specdec.protocol.types import DRAFT_LENGTH_LIMIT, Rule, check_integer

WORTH_GAIN = 1.02  # the model must see so much over plain decoding: less is noise, and a draft's work for nothing
RESUME_GAIN = 1.02  # a trial must come out so much better than plain decoding to end the rest
PROBE_ROUNDS = 6  # plain rounds in a row when plain decoding is looked at
SETTLE_ROUNDS = 2  # of them, in which the draft still works off what it had
PROBE_TOKENS = 2048  # of the service between two looks: with five tokens lost by one, a quarter of a percent
WARM_ROUNDS_MAX = 8  # rounds after a (re)start of the draft that say nothing yet, at most
TRIAL_ROUNDS = 8  # that a rested session tries, beyond the warm ones
LASTING_ROUNDS = 64  # of speculation in a row that show that a trial was right
HOPELESS = 0.7  # half a trial this far below plain decoding is enough
EARLY_GAIN = 1.1  # a rest ends early when load or times changed so that so much is predicted
BACKOFF_TOKENS, BACKOFF_TOKENS_MAX = 64, 1024  # rest after a trial without gain: doubled each time
WINDOW_ROUNDS_MIN = 8  # fewer rounds say nothing about the model
BIAS_PRIOR = 4.0  # observations of one session that the service's bias is worth
BIAS_MIN, BIAS_MAX = 0.4, 1.5  # of observed over predicted; beyond, something else is wrong
BRANCH_SPLIT = (0.7, 0.3)  # of corrections found in the tree, those of the second and of the third choice
PLACES = 8  # of the acceptance by place, that the model is told


class Mode(enum.Enum):
    """What the policy is at."""

    SPECULATING = "the chosen plan"
    PROBING = "a few plain rounds, to see what they take"
    RESTING = "plain decoding is faster"
    TRYING = "whether that is still so"


class AutoPolicy:
    """One session's policy; `measurements` are the service's. Implements `Policy`."""

    def __init__(self, measurements: Measurements, rule: Rule, draft_length_cap: int) -> None:
        check_integer("draft_length_cap", draft_length_cap, 1, DRAFT_LENGTH_LIMIT)
        self._measurements = measurements
        self._rule = rule
        self._cap = draft_length_cap
        self._acceptance = Acceptance(measurements.acceptance[rule])
        self._bias = Mean(weight=0.25)
        latest = measurements.outlooks.get((rule, draft_length_cap))
        self._plan = DEFAULT_PLAN.capped(draft_length_cap) if latest is None else latest.plan
        self._mode = Mode.SPECULATING
        self._mode_rounds = self._next_choice = self._round_count = self._token_count = 0
        self._own_rest_until, self._own_backoff = 0, BACKOFF_TOKENS  # in tokens of this session
        self._forget_window()
        self._predicted: float | None = None
        self._is_worth_it = True
        if measurements.plain_bias.count:
            self._choose()
        else:
            self._enter(Mode.PROBING)

    @property
    def draft_length_cap(self) -> int:
        return self._cap

    @property
    def is_speculating(self) -> bool:
        return self._mode in (Mode.SPECULATING, Mode.TRYING)

    @property
    def prediction(self) -> Prediction:
        off = self._measurements.plain_rate
        rates = f"off {off:.0f}" if off else "off not measured yet"
        if self._mode is Mode.PROBING:
            return Prediction(off, f"a few plain rounds, to see what they take; {rates}")
        if self._mode is Mode.RESTING:
            best = "" if self._predicted is None else f"; {self._plan.description}: {self._predicted:.0f}"
            return Prediction(off, f"off: {off or 0:.0f} tokens/s predicted{best}")
        if self._predicted is None:
            return Prediction(None, f"{self._plan.description}, until enough is measured")
        expected = f"{self._predicted:.0f} tokens/s predicted"
        return Prediction(self._predicted, f"{self._plan.description}: {expected}; {rates}")

    def plan(self, room: int) -> Plan:
        return (self._plan if self.is_speculating else PLAIN).within(room)

    @property
    def trial_round_count(self) -> int:
        return 0

    @property
    def trial_loss_s(self) -> float:
        return 0.0

    def on_round(self, record: RoundRecord) -> None:
        """Learns from a round, and chooses again now and then."""
        offered_count, accepted_count, round_s = record.offered_count, record.accepted_count, record.round_s
        branch_hit = record.was_found if record.was_looked_up else None
        if record.round_index and record.step_count <= 1:  # others read a prompt, or what was evicted
            sessions = record.step_sessions, record.active_sessions
            drafting = record.is_speculating
            self._measurements.on_target_step(record.step_rows, record.step_s, drafting, *sessions)
            overhead_s = round_s - record.wait_s - record.step_s - record.queue_s
            self._measurements.round_overhead.add(max(0.0, overhead_s))
        self._round_count += 1
        self._mode_rounds += 1
        self._token_count += accepted_count + 1
        self._measurements.round_count += 1
        self._measurements.token_count += accepted_count + 1
        self._measurements.tokens_since_probe += accepted_count + 1
        if self.is_speculating:
            self._measurements.offered[self._rule].add(offered_count)
        if offered_count:
            self._acceptance.add(offered_count, accepted_count)
            self._measurements.acceptance[self._rule].add(offered_count, accepted_count)
        if branch_hit is not None and self.is_speculating and self._plan.leaves > 1:
            is_bonus = accepted_count == offered_count
            self._measurements.acceptance[self._rule].add_next(is_bonus, branch_hit)
        if self._round_count > 1:  # the first round reads the prompt
            self._on_time(offered_count, accepted_count + 1, round_s)

    def _on_time(self, offered_count: int, token_count: int, round_s: float) -> None:
        """What the round took, by what the policy is at."""
        if self.is_speculating:
            if self._mode_rounds > WARM_ROUNDS_MAX or self._mode_rounds > self._warm_rounds():
                self._window_offered += offered_count
                self._window_tokens += token_count
                self._window_s += round_s
                self._window_rounds += 1
            if self._mode is Mode.TRYING:
                self._on_trial()
            elif self._mode_rounds >= self._next_choice:
                self._choose()
            return
        expected_s = self._measurements.latest_round_s
        if self._mode_rounds > SETTLE_ROUNDS and expected_s and round_s > 0:
            self._measurements.plain_bias.add(round_s / expected_s)
            self._measurements.tokens_since_probe = 0
        if self._mode is Mode.PROBING and self._mode_rounds >= PROBE_ROUNDS:
            self._enter(Mode.SPECULATING)
            self._choose()
        elif self._mode is Mode.RESTING:
            if self._mode_rounds >= self._next_choice:
                self._choose()
            if self._rest_is_over or self._gain() >= EARLY_GAIN:
                self._try()

    def _enter(self, mode: Mode) -> None:
        self._mode = mode
        self._mode_rounds = self._next_choice = 0
        self._forget_window()

    def _forget_window(self) -> None:
        """Begins to observe the plan in force anew."""
        self._window_tokens = self._window_rounds = self._window_offered = 0
        self._window_s = 0.0

    def _warm_rounds(self) -> int:
        """Rounds until the first tokens of a draft that (re)starts are used."""
        measurements = self._measurements
        trip_s = (measurements.network.value or 0.0) + (measurements.draft_step.seconds(1) or 0.0)
        return min(WARM_ROUNDS_MAX, 2 + math.ceil(trip_s / (measurements.plain_round_s or math.inf)))

    def _choose(self) -> None:
        """Keeps or changes the plan by what is predicted, or rests where plain decoding is faster."""
        self._next_choice = self._mode_rounds + CHOOSE_ROUNDS
        outlook = self._outlook()
        if outlook is None or self._measurements.plain_rate is None:
            return
        if outlook.plan == self._plan:
            self._learn_bias(outlook.tokens_per_s)
        else:
            self._plan = outlook.plan
            self._forget_window()
        if not outlook.is_final:
            self._next_choice = self._mode_rounds + SEARCH_ROUNDS
        self._predicted = outlook.tokens_per_s * self._bias_now()
        self._is_worth_it = outlook.gain >= WORTH_GAIN
        if self._mode is Mode.SPECULATING:
            self._review()

    def _outlook(self) -> Outlook | None:
        """The service's latest choice while it is fresh, corrected for this session's own acceptance; else a new one.

        None before enough was measured.
        """
        measurements, key = self._measurements, (self._rule, self._cap)
        acceptance = self._acceptance.overall
        latest = measurements.fresh_outlook(*key)
        if latest is not None:
            return latest.at(acceptance, measurements.offered[self._rule].value or 0.0)
        conditions = self.conditions()
        if conditions is None:
            return None
        choice, is_final = measurements.choosers[self._rule].choose(conditions, self._cap, self._plan)
        gain = choice.tokens_per_s / plain_rate(conditions)
        outlook = Outlook(choice.plan, choice.tokens_per_s, gain, acceptance, is_final, measurements.round_count)
        measurements.outlooks[key] = outlook
        return outlook

    def _review(self) -> None:
        """Whether to go on speculating, by what is predicted now."""
        if self._gain() < 1:
            self._rest()
            return
        if self._mode_rounds >= LASTING_ROUNDS:
            self._measurements.backoff_tokens[self._rule] = self._own_backoff = BACKOFF_TOKENS
        if self._measurements.tokens_since_probe > PROBE_TOKENS:
            self._measurements.tokens_since_probe = 0  # so that no other session looks as well
            self._enter(Mode.PROBING)

    def _gain(self) -> float:
        """What is predicted over plain decoding, both corrected by what was observed; 1 while that is not known, 0
        where the model sees none worth having."""
        off = self._measurements.plain_rate
        if off is None or self._predicted is None:
            return 1.0
        return self._predicted / off if self._is_worth_it else 0.0

    def _learn_bias(self, predicted: float) -> None:
        """Holds what was observed against what the model says of the same plan.

        A draft that sent nothing at all is away: that says nothing of the plan, and ends by itself.
        """
        if self._window_rounds < WINDOW_ROUNDS_MIN or self._window_s <= 0 or not self._window_offered:
            return
        ratio = min(max(self._window_tokens / self._window_s / predicted, BIAS_MIN), BIAS_MAX)
        self._bias.add(ratio)
        self._measurements.bias[self._rule].add(ratio)
        self._forget_window()

    def _bias_now(self) -> float:
        """Observed over predicted: the session's own, shrunk towards the service's."""
        count, service = min(self._bias.count, 8), self._measurements.bias[self._rule].value or 1.0
        own = self._bias.value if self._bias.value is not None else service
        return (count * own + BIAS_PRIOR * service) / (count + BIAS_PRIOR)

    @property
    def _rest_is_over(self) -> bool:
        """Whether service and session have rested long enough for this session to look again."""
        told = self._measurements
        return told.token_count >= told.rest_until.get(self._rule, 0) and self._token_count >= self._own_rest_until

    def _try(self) -> None:
        """Speculates for a trial, which the others leave alone for a while."""
        self._measurements.rest_until[self._rule] = self._measurements.token_count + BACKOFF_TOKENS
        self._enter(Mode.TRYING)

    def _rest(self) -> None:
        """Decodes plainly until the service's rest is over; a new rest is twice as long after every trial in vain.

        A session that tried in vain also rests as long by its own count: others may lift the service's. One that begins
        when a rest is over tries at once: short texts must not rest for ever.
        """
        told, rule = self._measurements, self._rule
        if rule in told.rest_until and self._rest_is_over and not self._round_count:
            self._try()
            return
        if self._mode is Mode.TRYING or self._rest_is_over:
            backoff = told.backoff_tokens.get(rule, BACKOFF_TOKENS)
            told.rest_until[rule] = told.token_count + backoff
            if self._round_count:
                told.backoff_tokens[rule] = min(BACKOFF_TOKENS_MAX, 2 * backoff)
        if self._mode is Mode.TRYING:
            self._own_rest_until = self._token_count + self._own_backoff
            self._own_backoff = min(BACKOFF_TOKENS_MAX, 2 * self._own_backoff)
        self._enter(Mode.RESTING)

    def _on_trial(self) -> None:
        """Ends a trial when it says enough: back to speculation if it was observed or is predicted to be faster."""
        off = self._measurements.plain_rate or 0.0
        observed, tokens_if_off = self._window_tokens, off * self._window_s
        is_hopeless = self._window_rounds >= TRIAL_ROUNDS // 2 and observed < HOPELESS * tokens_if_off
        if self._window_rounds < TRIAL_ROUNDS and not is_hopeless:
            return
        self._choose()
        is_faster = self._is_worth_it and observed >= RESUME_GAIN * tokens_if_off
        if not is_hopeless and (is_faster or self._gain() >= RESUME_GAIN):
            self._enter(Mode.SPECULATING)
        else:
            self._rest()

    def conditions(self) -> Conditions | None:
        """What is measured, for the cost model; None before a step of target and draft was seen."""
        measurements = self._measurements
        service = measurements.acceptance[self._rule]
        places = range(min(PLACES, self._cap))
        target = measurements.target_step if measurements.target_step.sample_count else measurements.plain_step
        if not target.sample_count or not measurements.draft_step.sample_count:
            return None
        count, turns = measurements.session_count, measurements.turn_count
        rows = tuple((float(row), turns * (target.seconds(count * row) or 0.0)) for row in ROWS)
        drafted_count = count * turns  # a draft's step serves all that are at work
        leaves = tuple((float(leaf), measurements.draft_step_s(drafted_count * leaf, self._rule)) for leaf in LEAVES)
        is_independent = self._rule is Rule.REJECTION  # elsewhere a bonus token is what the draft would have guessed
        return Conditions(
            target_step_s=Curve(rows),
            draft_step_s=Curve(leaves),
            network_s=measurements.network.value or 0.0,
            round_overhead_s=measurements.round_overhead.value or 0.0,
            acceptance=tuple(self._acceptance.hazard(place) for place in places),
            branch_probabilities=tuple(service.hit * share for share in BRANCH_SPLIT),
            bonus_match=service.bonus_match if is_independent else None,
        )
