"""The peers of a coordinator, and the one choice that each request gets: target, draft, rule, proposers and policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.config import CoordinatorSettings
from specdec.coordinator.peers import Draft, Peer, Target
from specdec.errors import InvalidRequest
from specdec.policy.acceptance import Acceptance
from specdec.policy.draft_time import DraftTimes
from specdec.policy.fixed_policy import OFF_POLICY, FixedPolicy
from specdec.policy.goodput import Goodput
from specdec.policy.goodput_policy import GoodputPolicy
from specdec.policy.plans import catalogue
from specdec.protocol.calibration import Calibration
from specdec.protocol.noise import Lane, hash64
from specdec.protocol.policy import Policy
from specdec.protocol.proposers import LocalProposer, NgramProposer, PredictionProposer
from specdec.protocol.request import GenerationRequest, SpeculationMode
from specdec.protocol.session import Session
from specdec.protocol.suffix_store import SUFFIX_LENGTH_MIN, SUFFIX_TEXT_LENGTH_MAX, SuffixProposer, SuffixStore
from specdec.protocol.types import Proposer, Rule

REJECTION_EVERY = 64  # of the requests that leave the rule to the service, one in 64 measures REJECTION
RULE_GAIN = 1.03  # least ratio of REJECTION to COUPLED for a choice of REJECTION: COUPLED sends less, trusts no draft
RULE_ROUNDS = 100.0  # of both rules, before they are compared


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request gets. `rule_reason`: in one line; `proposers`: those it may use, the draft and heads among them;
    `draft`: none where the request does not use it."""

    target: Target
    draft: Draft | None
    rule: Rule
    rule_reason: str
    policy: Policy
    proposers: frozenset[Proposer]


class Fleet:
    """The target and the draft of a coordinator, under its settings. `store`: texts that were generated before;
    `calibration`: the worth of guesses in all texts."""

    def __init__(self, settings: CoordinatorSettings, fingerprint: str, changed: Callable[[], None]) -> None:
        self._settings = settings
        arguments = settings.link_tls, fingerprint, changed
        self.target = Target(settings.target[0], *arguments)
        self.draft = Draft(settings.draft[0], *arguments, settings.draft_link_mbit) if settings.draft else None
        self.peers: list[Peer] = [self.target] if self.draft is None else [self.target, self.draft]
        self.store = SuffixStore(settings.suffix_store_mb << 20)
        self.calibration = Calibration()
        self._own = frozenset(Proposer[name.upper()] for name in settings.proposers.split(",") if name)
        self._without_draft = DraftTimes(), Acceptance()

    def choose(self, request: GenerationRequest, turn: int) -> Choice:
        """Returns the choice for a request, the `turn`-th. Raises InvalidRequest for what the server does not have or
        allow."""
        proposers = self._proposers(request)
        self._check_limits(request)
        rule, reason = self._rule(request, turn)
        policy = self._policy(request, rule, proposers)
        return Choice(self.target, self._draft_of(proposers), rule, reason, policy, proposers)

    def _proposers(self, request: GenerationRequest) -> frozenset[Proposer]:
        asked = frozenset(request.speculative.proposers)
        for index, proposer in enumerate(request.speculative.proposers):
            if proposer not in self._own:
                limit = "one of " + ", ".join(own.name for own in sorted(self._own))
                raise InvalidRequest(f"speculative.proposers[{index}]", proposer.name, limit)
        mode = self._mode(request)
        if mode is SpeculationMode.OFF:
            return frozenset()
        if not asked:
            asked = frozenset({Proposer.DRAFT}) if mode is SpeculationMode.FIXED else self._own
        return asked & self._own - request.withheld_proposers

    def _mode(self, request: GenerationRequest) -> SpeculationMode:
        if not request.speculative.enabled:
            return SpeculationMode.OFF
        return request.speculative.mode or SpeculationMode[self._settings.speculation_policy.upper()]

    def _check_limits(self, request: GenerationRequest) -> None:
        for name in ("num_speculative_tokens", "draft_window", "draft_nodes_per_step", "draft_siblings"):
            asked, limit = getattr(request.speculative, name), getattr(self._settings, f"{name}_max")
            if asked is not None and asked > limit:
                raise InvalidRequest(f"speculative.{name}", asked, f"at most this server's maximum, {limit}")

    def _draft_of(self, proposers: frozenset[Proposer]) -> Draft | None:
        return self.draft if Proposer.DRAFT in proposers else None

    def _rule(self, request: GenerationRequest, turn: int) -> tuple[Rule, str]:
        """The rule, and its reason in one line. REJECTION is measured by requests under the service's own policy and
        limits that leave the rule to it."""
        named = request.rule()
        if named is not None:
            return named
        own, most = request.speculative, self._settings.num_speculative_tokens_max
        coupled, rejection = (self._measured(rule) for rule in (Rule.COUPLED, Rule.REJECTION))
        is_hopeless = False  # so slow when last measured that exploration would cost too much
        if coupled is not None and rejection is not None:
            is_hopeless = rejection < 0.5 * coupled
            compared = f"COUPLED {coupled:.0f}, REJECTION {rejection:.0f} tokens/s measured"
            if rejection > RULE_GAIN * coupled:
                return Rule.REJECTION, f"the server's choice: {compared}"
        else:
            compared = "REJECTION not measured yet" if coupled is not None else "nothing measured yet"
        measures = not own.proposers and own.num_speculative_tokens in (None, most)
        measures &= self._mode(request) is SpeculationMode.AUTO
        is_turn = hash64(0, Lane.NEXT, turn, 0) % REJECTION_EVERY == 0  # whatever order kinds of requests come in
        if measures and is_turn and not is_hopeless:
            return Rule.REJECTION, f"the server's choice, to measure it: {compared}"
        return Rule.COUPLED, f"the server's choice: {compared}"

    def _measured(self, rule: Rule) -> float | None:
        """Tokens per second of the best plan under the server's own limit; None before RULE_ROUNDS rounds."""
        draft = self._draft_of(self._own)
        key = rule, self._settings.num_speculative_tokens_max, draft is not None, bool(self._own - {Proposer.DRAFT})
        goodput = (draft or self.target).goodputs.get(key)
        return None if goodput is None or goodput.round_count < RULE_ROUNDS else goodput.best_rate()

    def _policy(self, request: GenerationRequest, rule: Rule, proposers: frozenset[Proposer]) -> Policy:
        settings, own, draft = self._settings, request.speculative, self._draft_of(proposers)
        asked, limit = own.num_speculative_tokens, settings.num_speculative_tokens_max
        has_local = bool(proposers - {Proposer.DRAFT})
        if not (draft or has_local) or 0 in (asked, limit):
            return OFF_POLICY
        if self._mode(request) is SpeculationMode.AUTO:
            cap = limit if asked is None else asked
            return GoodputPolicy(self._goodput(rule, draft, cap, has_local), cap)
        length = settings.num_speculative_tokens if asked is None else asked
        if own.draft_window is not None and own.draft_window < length and not own.draft_siblings:
            least = f"at least the draft tokens of a verification, {length}"
            raise InvalidRequest("speculative.draft_window", own.draft_window, least)
        wait_ms = settings.draft_wait_ms if own.draft_wait_ms is None else own.draft_wait_ms
        window = min(length + 1, settings.draft_window_max) if own.draft_window is None else own.draft_window
        window, acceptance = (0, None) if draft is None else (window, draft.acceptance[rule])
        tree = own.draft_nodes_per_step or 1, wait_ms / 1000, own.draft_siblings or 0
        return FixedPolicy(length, window, *tree, self.target.steps[rule], acceptance)

    def _goodput(self, rule: Rule, draft: Draft | None, cap: int, has_local: bool) -> Goodput:
        """Returns the measurements of plans that requests of one kind share."""
        goodputs, key = (draft or self.target).goodputs, (rule, cap, draft is not None, has_local)
        if key not in goodputs:
            plans = catalogue(draft is not None, has_local, self._settings.draft_siblings_max, rule)
            measured = self._without_draft if draft is None else (draft.times[rule], draft.acceptance[rule])
            goodputs[key] = Goodput(self.target.steps[rule], *measured, cap, plans)
        return goodputs[key]

    def local_proposers(
        self, choice: Choice, request: GenerationRequest, committed: list[int], prediction: Sequence[int]
    ) -> list[LocalProposer]:
        """Returns the coordinator's own proposers of one request. `committed` grows with the generation."""
        made: list[LocalProposer] = []
        if Proposer.PREDICTION in choice.proposers and prediction:
            made.append(PredictionProposer(list(prediction), len(committed) - len(request.resumed_token_ids)))
        if Proposer.SUFFIX in choice.proposers and self._settings.suffix_store_mb:
            made.append(SuffixProposer(self.store, request.cache_salt))
        if Proposer.NGRAM in choice.proposers:
            own = self._settings
            made.append(NgramProposer(committed, own.ngram_length_min, own.ngram_length_max, own.ngram_window))
        return made

    def remember(self, session: Session, own_start: int, call_soon: Callable[..., object]) -> None:
        """Stores the tokens from `own_start` on of a text that ends, which the target chose, for later requests with
        its salt; the few before them only find the first. `call_soon` calls a function in the event loop's next turn:
        each stores a piece."""
        committed = session.committed
        if Proposer.SUFFIX in self._own and self._settings.suffix_store_mb and len(committed) > own_start:
            start = max(0, own_start - SUFFIX_LENGTH_MIN, len(committed) - SUFFIX_TEXT_LENGTH_MAX)
            if self.store.add(session.cache_salt, committed[start:]):
                call_soon(self._store_piece, call_soon)

    def _store_piece(self, call_soon: Callable[..., object]) -> None:
        if self.store.work():
            call_soon(self._store_piece, call_soon)
