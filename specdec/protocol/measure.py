"""What a process has learnt about its steps, links and drafts: running estimates, told of samples, asked for values.

Pure: no clock, no messages, no tokens. Everything forgets slowly, so that it follows a machine or a text that changes.
A coordinator keeps one `Measurements` for all its sessions; each session has its own `Acceptance` beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.policy.step_curve import OUTLIER_FACTOR, SAMPLE_WEIGHT, StepCurve
from specdec.protocol.choice import Chooser
from specdec.protocol.outlook import Outlook
from specdec.protocol.types import Rule

ACCEPTANCE_PLACES = 16  # places in a round that are told apart; later ones count as the last
PRIOR_COUNT = 16.0  # tokens the service's record is worth beside a session's own
FORGET_TOKENS = 256.0  # offered tokens after which a session's record counts for a third: a paragraph or two
SERVICE_FORGET_TOKENS = 4096.0  # the same for the service's
ACCEPTANCE_GUESS, HIT_GUESS, MATCH_GUESS = 0.6, 0.5, 0.5  # of a draft nobody has seen yet; a few rounds correct them
CHOOSE_ROUNDS = 16  # between two choices: some 30 tokens, a third of a second
SEARCH_ROUNDS = 4  # the same while the search for these conditions is not over
MANY_SESSIONS = 1.5  # at work at once, above which sessions adopt each other's plans
RESCALE_WEIGHT = 1e9  # counts are scaled down before their growing weight loses precision


class Mean:
    """A running mean that forgets; `value` is None before the first sample."""

    def __init__(self, weight: float = SAMPLE_WEIGHT) -> None:
        self.value: float | None = None
        self.count = 0
        self._weight = weight

    def add(self, sample: float) -> None:
        """Tells one sample; one far above the mean counts for OUTLIER_FACTOR times the mean."""
        self.count += 1
        if self.value is None:
            self.value = sample
        elif self.value <= 0:
            self.value += self._weight * sample
        else:
            self.value += max(self._weight, 1 / self.count) * (min(sample, OUTLIER_FACTOR * self.value) - self.value)


class Share:
    """How often something came true, shrunk towards a prior and forgetting: counts decay by 1/e in `forget` trials."""

    __slots__ = ("true", "trials", "_keep")

    def __init__(self, forget: float) -> None:
        self.true = 0.0
        self.trials = 0.0
        self._keep = 1 - 1 / forget

    def add(self, came_true: bool) -> None:
        """Tells one trial."""
        self.true = self._keep * self.true + came_true
        self.trials = self._keep * self.trials + 1

    def value(self, prior: float, prior_count: float = PRIOR_COUNT) -> float:
        """(true + prior_count * prior) / (trials + prior_count)."""
        return (self.true + prior_count * prior) / (self.trials + prior_count)


class Acceptance:
    """How offered tokens fared, by their place in the round, and whether the tree held the next token.

    Of a round, places up to and including the first rejection count and nothing after it: what came later was not
    tested, and under REJECTION may not be looked at (docs/exactness.md). `prior` is the record of the whole service;
    without one, guesses take its place.
    """

    def __init__(self, prior: Acceptance | None = None) -> None:
        self._prior = prior
        self._forget = SERVICE_FORGET_TOKENS if prior is None else FORGET_TOKENS
        self._weight = 1.0  # of the next token: it grows, instead of all counts shrinking
        self._accepted = [0.0] * ACCEPTANCE_PLACES
        self._offered = [0.0] * ACCEPTANCE_PLACES
        self._hits = Share(self._forget)  # of corrections: the tree held the token
        self._found = Share(self._forget)  # of bonus tokens: the same, the proposal child included

    def add(self, offered_count: int, accepted_count: int) -> None:
        """Tells one round's draft tokens."""
        tested_count = min(offered_count, accepted_count + 1)
        for place in range(tested_count):
            self._weight *= 1 + 1 / self._forget
            index = min(place, ACCEPTANCE_PLACES - 1)
            self._offered[index] += self._weight
            if place < accepted_count:
                self._accepted[index] += self._weight
        if self._weight > RESCALE_WEIGHT:
            self._accepted = [count / self._weight for count in self._accepted]
            self._offered = [count / self._weight for count in self._offered]
            self._weight = 1.0

    def add_next(self, is_bonus: bool, was_found: bool) -> None:
        """Tells whether the tree held a round's next token, where it had branch children for its place."""
        (self._found if is_bonus else self._hits).add(was_found)

    @property
    def overall(self) -> float:
        """Acceptance over all places."""
        prior = ACCEPTANCE_GUESS if self._prior is None else self._prior.overall
        accepted, offered = sum(self._accepted) / self._weight, sum(self._offered) / self._weight
        return (accepted + PRIOR_COUNT * prior) / (offered + PRIOR_COUNT)

    def hazard(self, place: int) -> float:
        """P(the token at a place, from 0, passes | those before it did).

        The service's record tells places apart; a session's few hundred tokens tell its level, so its places are the
        service's, moved by the difference of the two over all places.
        """
        if self._prior is not None:
            return min(max(self._prior.hazard(place) + self.overall - self._prior.overall, 0.0), 1.0)
        index = min(place, ACCEPTANCE_PLACES - 1)
        accepted, offered = self._accepted[index] / self._weight, self._offered[index] / self._weight
        return (accepted + PRIOR_COUNT * self.overall) / (offered + PRIOR_COUNT)

    @property
    def hit(self) -> float:
        """P(a correction stands in the tree as a branch), where branches were drafted."""
        return self._hits.value(HIT_GUESS)

    @property
    def bonus_match(self) -> float:
        """P(a bonus token is the draft's own guess m) out of how often it is found: found = m + (1 - m) hit."""
        found, hit = self._found.value(MATCH_GUESS), self.hit
        return min(max((found - hit) / (1 - hit), 0.0), 1.0) if hit < 1 else found


@dataclass(slots=True)
class Measurements:
    """What one coordinator has measured; shared by its sessions, each of which reads and adds. Times in seconds.

    `target_step`: of steps by rows, of all sessions in them, while a draft works; `plain_step`: while it rests. They
    differ where draft and target share cores, and a session that rests gets the second. `draft_step`: by evaluated
    nodes. `network`: the round trip to the draft. `round_overhead`: of a round beside the target's queue and step.
    `step_sessions`, `active_sessions`: those in a step, and those with work. `bias`, by rule: observed tokens per
    second over predicted ones; `plain_bias`: observed seconds of rounds without a draft over those of their parts.
    `leaf_bytes`, by rule: what one evaluated node takes on the draft link; `link_bytes_per_s`: what that link carries,
    if anybody said so. `token_count`: committed by all sessions. `rest_until`, by rule: the count at which one of the
    sessions that rest may try again, `backoff_tokens`: how long the next rest is.
    `tokens_since_probe`: committed since plain rounds were last looked at. `round_count`: of all sessions. `outlooks`,
    by rule and cap: what a session chose last, whose plan others adopt while it is fresh. `offered`, by rule: draft
    tokens of a round. `latest_rows`: of the last step of the target that was told.
    """

    target_step: StepCurve = field(default_factory=StepCurve)
    plain_step: StepCurve = field(default_factory=StepCurve)
    draft_step: StepCurve = field(default_factory=StepCurve)
    network: Mean = field(default_factory=Mean)
    round_overhead: Mean = field(default_factory=Mean)
    step_sessions: Mean = field(default_factory=Mean)
    active_sessions: Mean = field(default_factory=Mean)
    bias: dict[Rule, Mean] = field(default_factory=lambda: {rule: Mean() for rule in Rule})
    plain_bias: Mean = field(default_factory=Mean)
    leaf_bytes: dict[Rule, Mean] = field(default_factory=lambda: {rule: Mean() for rule in Rule})
    link_bytes_per_s: float | None = None
    acceptance: dict[Rule, Acceptance] = field(default_factory=lambda: {rule: Acceptance() for rule in Rule})
    backoff_tokens: dict[Rule, int] = field(default_factory=dict)
    token_count: int = 0
    rest_until: dict[Rule, int] = field(default_factory=dict)
    tokens_since_probe: int = 0
    round_count: int = 0
    outlooks: dict[tuple[Rule, int], Outlook] = field(default_factory=dict)
    offered: dict[Rule, Mean] = field(default_factory=lambda: {rule: Mean() for rule in Rule})
    latest_rows: int = 0
    choosers: dict[Rule, Chooser] = field(default_factory=lambda: {rule: Chooser() for rule in Rule})

    def on_target_step(
        self, rows: int, seconds: float, drafting: bool, step_sessions: int = 1, active_sessions: int = 1
    ) -> None:
        """One step of the target without prefill, forward and evidence, as one of its sessions saw it; `drafting`:
        whether that session had its draft at work."""
        self.latest_rows = max(1, rows)
        (self.target_step if drafting else self.plain_step).add(self.latest_rows, seconds)
        self.step_sessions.add(max(1, step_sessions))
        self.active_sessions.add(max(1, step_sessions, active_sessions))

    def on_draft_step(self, leaves: int, seconds: float) -> None:
        """One step of the draft over all its sessions."""
        self.draft_step.add(max(1, leaves), seconds)

    def draft_step_s(self, leaves: float, rule: Rule) -> float:
        """A step of the draft that evaluates so many nodes for all its sessions, or the time their messages take on a
        thin link, where that is longer: steps and messages overlap, and the slower of the two sets the pace."""
        step_s = self.draft_step.seconds(leaves) or 0.0
        if self.link_bytes_per_s is None:
            return step_s
        return max(step_s, leaves * (self.leaf_bytes[rule].value or 0.0) / self.link_bytes_per_s)

    def fresh_outlook(self, rule: Rule, draft_length_cap: int) -> Outlook | None:
        """The latest outlook of a session with this rule and cap while it is fresh: many must not search all the time.

        Fresh: made so few rounds ago, counted over all sessions at work, that one alone would not choose again yet. A
        lone session always searches for itself.
        """
        latest = self.outlooks.get((rule, draft_length_cap))
        session_count = self.active_sessions.value or 1.0
        if latest is None or session_count <= MANY_SESSIONS:
            return None
        age_max = session_count * (CHOOSE_ROUNDS if latest.is_final else SEARCH_ROUNDS)
        return latest if self.round_count - latest.made_round < age_max else None

    @property
    def session_count(self) -> float:
        """Sessions that share a step of the target, on average."""
        return self.step_sessions.value or 1.0

    @property
    def turn_count(self) -> float:
        """Target steps that pass in a round: more than one where sessions take turns."""
        return max(1.0, (self.active_sessions.value or 1.0) / self.session_count)

    @property
    def plain_round_s(self) -> float | None:
        """A round without a draft, from its parts; None before a step was seen."""
        return self._round_s(self.session_count)

    @property
    def latest_round_s(self) -> float | None:
        """What the parts say of a round without a draft whose step had the rows of the last one told: others may have
        offered draft tokens in it."""
        return self._round_s(self.latest_rows)

    def _round_s(self, rows: float) -> float | None:
        step_s = self.plain_step.seconds(rows)
        step_s = self.target_step.seconds(rows) if step_s is None else step_s
        return None if step_s is None else self.turn_count * step_s + (self.round_overhead.value or 0.0)

    @property
    def plain_rate(self) -> float | None:
        """Tokens per second of one session without a draft: from the parts, corrected by what was observed."""
        round_s = self.plain_round_s
        return None if not round_s else 1 / (round_s * (self.plain_bias.value or 1.0))
