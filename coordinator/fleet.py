"""The pools of a coordinator, and the one choice that each request gets: target, draft, rule, proposers and policy."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, cast

from specdec.config import CoordinatorSettings
from specdec.coordinator.discovery import Discovery
from specdec.coordinator.drafters import drafting
from specdec.coordinator.ejection import RetryBudget
from specdec.coordinator.peers import Listener, ModelKey, Peer
from specdec.coordinator.pool import Pool
from specdec.coordinator.replicas import Draft, Target
from specdec.errors import InvalidRequest, ReplicaUnavailable
from specdec.policy.acceptance import Acceptance
from specdec.policy.draft_time import DraftTimes
from specdec.policy.fixed_policy import OFF_POLICY, FixedPolicy
from specdec.policy.goodput_policy import GoodputPolicy
from specdec.protocol import routing
from specdec.protocol.calibration import Calibration
from specdec.protocol.noise import Lane, hash64
from specdec.protocol.policy import Policy
from specdec.protocol.proposers import LocalProposer, NgramProposer, PredictionProposer
from specdec.protocol.request import GenerationRequest, SpeculationMode
from specdec.protocol.session import Session
from specdec.protocol.suffix_store import SUFFIX_LENGTH_MIN, SUFFIX_TEXT_LENGTH_MAX, SuffixProposer, SuffixStore
from specdec.protocol.types import Description, Proposer, Rule

REJECTION_EVERY = 64  # of the requests that leave the rule to the service, one in 64 measures REJECTION
MODEL_EVERY = 2  # while a draft model is not measured yet: a poor one costs little, its policy soon leaves it
HOPELESS = 0.5  # of the best rate: pairs so slow when last measured that exploration would cost too much
RULE_GAIN = 1.03  # least ratio of REJECTION to COUPLED for a choice of REJECTION: COUPLED sends less, trusts no draft
WAITING_RETRY_S = 0.25  # a target may have space again
RULE_ROUNDS = 100.0  # of both rules, before they are compared


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request gets. `model`: as the target describes it; `rule_reason`: in one line; `proposers`: those it may
    use, the draft and heads among them; `draft`: none where the request does not use it; `head_drafts`: whether the
    target's feature head is its draft; `key`: of its prompt, for its further targets."""

    target: Target
    model: Description
    draft: Draft | None
    rule: Rule
    rule_reason: str
    policy: Policy
    proposers: frozenset[Proposer]
    key: bytes = b""
    head_drafts: bool = False


Pair: TypeAlias = tuple[Rule, Draft | None]


def _named(pair: Pair) -> tuple[Rule, ModelKey]:
    return pair[0], () if pair[1] is None else pair[1].model_key


class Mover(Listener, Protocol):
    """A text that goes on at another target, or draft, when its own is lost: a generation. `began_s`: by its age."""

    began_s: float

    def on_target_up(self) -> None:
        """It waits for a target, and one may be there."""

    def on_draft_up(self, found: Draft | None = None) -> None:
        """It may want a draft; `found` was connected just now."""


class Fleet:
    """The targets and the drafts of a coordinator, under its settings. `store`: texts that were generated before;
    `calibration`: the worth of guesses in all texts; `waiting`: texts without a target, the oldest first; `movers`: all
    texts."""

    def __init__(self, settings: CoordinatorSettings, fingerprint: str, changed: Callable[[], None]) -> None:
        self._settings = settings
        self._told = changed
        arguments = settings.link_tls, fingerprint, self._on_changed
        self.targets = Pool("target", lambda member, health: Target(member, *arguments, health))
        self.drafts = Pool("draft", lambda member, health: Draft(member, *arguments, health, settings.draft_link_mbit))
        self.store = SuffixStore(settings.suffix_store_mb << 20)
        self.calibration = Calibration()
        self.movers: dict[Mover, None] = {}
        self.waiting: dict[Mover, None] = {}
        self.routes = dict.fromkeys(("home", "spill", "random"), 0)
        self._keys, self._retries = routing.Keys(), RetryBudget()
        self._tried: dict[tuple[Rule, ModelKey], int] = {}  # turns of pairs
        self._discoveries: dict[str, Discovery] = {}  # by the kind of replica
        self._searches: list[asyncio.Task[None]] = []
        self._retry: asyncio.TimerHandle | None = None
        self._own = frozenset(Proposer[name.upper()] for name in settings.proposers.split(",") if name)
        self._without_draft = DraftTimes(), Acceptance()

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All targets and drafts."""
        return *self.targets.peers, *self.drafts.peers

    @property
    def model_name(self) -> str:
        """The name of the model that is served, or was last; empty before any target was connected."""
        up = self.targets.up()
        return next((peer.model_name for peer in up or self.targets.peers if peer.model_name), "")

    def served(self) -> Description | None:
        """Returns the model that a new text gets: of two models, each as often as it has targets; the description with
        most positions. None without a usable target."""
        up = [peer.usable() for peer in self.targets.up()]
        if not up:
            return None
        digest = secrets.choice(up).model_digest
        return max((own for own in up if own.model_digest == digest), key=lambda own: own.positions_max)

    def start(self) -> None:
        """Finds the replicas and connects them."""
        settings = self._settings
        for name, values, pool in (("target", settings.target, self.targets), ("draft", settings.draft, self.drafts)):
            pool.start()
            discovery = self._discoveries[name] = Discovery(values, pool.update)
            self._searches.append(asyncio.create_task(discovery.run()))

    async def stop(self) -> None:
        """Closes all links."""
        for search in self._searches:
            search.cancel()
        await asyncio.gather(*self._searches, self.targets.stop(), self.drafts.stop(), return_exceptions=True)

    def _on_changed(self, peer: Peer) -> None:
        """A replica became usable, or no longer is: tells the texts that wait for one."""
        self._judge_drafts()
        is_up = self.targets.on_changed(peer) if isinstance(peer, Target) else self.drafts.on_changed(cast(Draft, peer))
        self._told()
        if not peer.link.is_up and peer.name in self._discoveries:
            self._discoveries[peer.name].look_now()  # whatever replaced it
        if is_up and isinstance(peer, Target):
            self.place_waiting()
        elif is_up:
            for mover in list(self.movers):
                mover.on_draft_up(cast(Draft, peer))

    def _judge_drafts(self) -> None:
        """A draft works for targets of its own kind only. While none is usable the last judgement stands."""
        kinds = sorted({peer.usable().kind for peer in self.targets.up()})
        for draft in self.drafts.peers if kinds else ():
            if draft.description is not None:
                own = draft.description.kind
                draft.set_misfit("" if own in kinds else f"the draft is {own}, the target {' or '.join(kinds)}")

    def may_retry(self, refusal_count: int) -> bool:
        """Whether a text that `refusal_count` targets refused may ask another one."""
        return self._retries.retry(refusal_count, time.monotonic())

    def wait(self, mover: Mover) -> None:
        """A text waits for a target from now on: it tries again when one is connected, and every WAITING_RETRY_S."""
        self.waiting[mover] = None
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(WAITING_RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self.place_waiting()
        if self.waiting:
            self._retry = asyncio.get_running_loop().call_later(WAITING_RETRY_S, self._try_again)

    def place_waiting(self) -> None:
        """Lets the texts that wait for a target try again, the oldest first."""
        for mover in sorted(self.waiting, key=lambda one: one.began_s):
            mover.on_target_up()

    def choose(
        self,
        request: GenerationRequest,
        turn: int,
        model: Description,
        tokens: Sequence[int] = (),
        length_max: int = 0,
        encoder_length: int = 0,
    ) -> Choice:
        """Returns the choice for a request, the `turn`-th, with these `tokens`, the first `encoder_length` an encoder's
        input, among the targets of `model` that hold `length_max` tokens. Raises InvalidRequest for what the server
        does not have or allow, ReplicaUnavailable without a target."""
        proposers = self._proposers(request)
        self._check_limits(request)
        key = self._keys.key(tokens, request.cache_salt, request.prompt_cache_key, encoder_length)
        target = self.next_target(model, length_max, key, is_new=True)
        target = target or self.next_target(model, 0, key, is_new=True)  # which says what does not fit
        if target is None:
            raise ReplicaUnavailable(f"no target: {self.targets.absent_reason or 'the model changed'}")
        self._retries.opened(time.monotonic())
        proposers = self._with_head(request, proposers, target)
        rule, draft, reason = self._pair(request, turn, target, proposers)
        policy = self._policy(request, rule, proposers, target, draft)
        head_drafts = policy.draft_length_cap > 0 and drafting(rule, target, draft, proposers).kind is Proposer.HEADS
        draft = draft if policy.draft_length_cap else None
        return Choice(target, target.usable(), draft, rule, reason, policy, proposers, key, head_drafts)

    def again(self, choice: Choice, request: GenerationRequest) -> Choice:
        """Returns the same choice for a further text of the request; it has a policy of its own."""
        policy = self._policy(request, choice.rule, choice.proposers, choice.target, choice.draft)
        return replace(choice, policy=policy)

    def next_target(
        self,
        model: Description,
        length_max: int,
        key: bytes = b"",
        avoided: Collection[Target] = (),
        is_new: bool = False,
    ) -> Target | None:
        """Returns the target for a text of a model with this key. Unless the text is new: one of equal numerics if
        there is any, else of others. None without one that is usable, holds the text and is not avoided."""
        fitting = [one for one in self.targets.up() if one not in avoided and _holds(one.usable(), model, length_max)]
        equal = [one for one in fitting if is_new or one.usable().numerics == model.numerics]
        candidates = self.targets.fit(equal or fitting)
        if not candidates:
            return None
        reports = [one.link.load for one in candidates if one.link.load is not None]
        chosen = routing.choose(key, candidates, secrets.randbelow, routing.session_load(reports))
        is_home = bool(key) and routing.order(key, (one.address for one in candidates))[0] == chosen.address
        self.routes["home" if is_home else "spill" if key else "random"] += 1
        return chosen

    def next_draft(self, draft: Draft, rule: Rule, avoided: Collection[Draft] = ()) -> Draft | None:
        """Returns a draft of the model of `draft`, near and idle; None without one that is usable and not avoided."""
        same = [one for one in self.drafts.up() if one.model_key == draft.model_key and one not in avoided]
        same = self.drafts.fit(same)
        return routing.choose_draft(same, lambda one: one.wait_s(rule), secrets.randbelow) if same else None

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
        found = asked & self._own - request.withheld_proposers
        return found - {Proposer.GRAMMAR} if request.sampling.grammar is None else found

    def _with_head(
        self, request: GenerationRequest, proposers: frozenset[Proposer], target: Target
    ) -> frozenset[Proposer]:
        """Returns the proposers of a request: a fixed plan that names none is the feature head's where no draft is."""
        is_drafts = self._mode(request) is SpeculationMode.FIXED and not request.speculative.proposers
        if is_drafts and target.has_feature_head and not self.drafts.up():
            return self._own & {Proposer.HEADS} or proposers
        return proposers

    def _mode(self, request: GenerationRequest) -> SpeculationMode:
        if not request.speculative.enabled:
            return SpeculationMode.OFF
        return request.speculative.mode or SpeculationMode[self._settings.speculation_policy.upper()]

    def _check_limits(self, request: GenerationRequest) -> None:
        for name in ("num_speculative_tokens", "draft_window", "draft_nodes_per_step", "draft_siblings"):
            asked, limit = getattr(request.speculative, name), getattr(self._settings, f"{name}_max")
            if asked is not None and asked > limit:
                raise InvalidRequest(f"speculative.{name}", asked, f"at most this server's maximum, {limit}")

    def _models(self, proposers: frozenset[Proposer], target: Target) -> list[Draft | None]:
        """Returns a draft of each model that is usable, in the order of the pool; None, the last, for the target's
        feature head, and where there is no draft."""
        if Proposer.DRAFT not in proposers:
            return [None]
        models = {one.model_key: one for one in reversed(self.drafts.up() or self.drafts.peers[:1])}
        has_head = target.has_feature_head and Proposer.HEADS in proposers
        return [*reversed(models.values()), *[None] * (has_head or not models)]

    def _pair(
        self, request: GenerationRequest, turn: int, target: Target, proposers: frozenset[Proposer]
    ) -> tuple[Rule, Draft | None, str]:
        """Returns rule and draft, and the reason in one line: those with the most tokens per second measured, the first
        unless others gain RULE_GAIN. Of the requests under the service's own policy and limits one in REJECTION_EVERY
        measures the pair that was chosen least lately; until each draft model is measured, one in MODEL_EVERY one that
        is not."""
        named = request.rule()
        rules = (Rule.COUPLED, Rule.REJECTION) if named is None else (named[0],)
        models = self._models(proposers, target)
        pairs = [(rule, draft) for rule in rules for draft in models]
        chosen, why = pairs[0], "" if named is None else named[1]
        if len(pairs) > 1:
            chosen, why = self._best_pair(request, turn, target, pairs)
        rule, draft = chosen
        if draft is not None:
            draft = self.next_draft(draft, rule) or draft
        return rule, draft, why if named is None or len(pairs) == 1 else f"{named[1]}; draft: {why}"

    def _best_pair(self, request: GenerationRequest, turn: int, target: Target, pairs: list[Pair]) -> tuple[Pair, str]:
        first, own, most = pairs[0], request.speculative, self._settings.num_speculative_tokens_max
        rates = {pair: rate for pair in pairs if (rate := self._measured(pair[0], target, pair[1])) is not None}
        best = max(rates, key=rates.__getitem__) if first in rates else first
        has_models = len({draft for _, draft in pairs}) > 1

        def said(pair: Pair) -> str:
            model_name = "the target's head" if pair[1] is None else pair[1].model_name
            return f"{pair[0].name} with {model_name}" if has_models else pair[0].name

        compared = ", ".join(f"{said(pair)} {rate:.0f}" for pair, rate in rates.items()) + " tokens/s measured"
        missing = [said(pair) for pair in pairs if pair not in rates]
        if missing:
            compared = "nothing measured yet" if not rates else f"{', '.join(missing)} not measured yet"
        measures = not own.proposers and own.num_speculative_tokens in (None, most)
        measures &= self._mode(request) is SpeculationMode.AUTO
        new = [pair for pair in pairs if has_models and pair[0] is first[0] and pair not in rates]
        every = MODEL_EVERY if new else REJECTION_EVERY
        if measures and hash64(0, Lane.NEXT, turn, 0) % every == 0:  # whatever order kinds of requests come in
            least = HOPELESS * rates.get(best, 0.0)
            hopeful = [pair for pair in pairs if rates.get(pair, least) >= least]
            latest = min(new or hopeful, key=lambda pair: self._tried.get(_named(pair), 0))
            if latest != best:
                self._tried[_named(latest)] = turn
                return latest, f"the server's choice, to measure it: {compared}"
        chosen = best if best in rates and rates[best] > RULE_GAIN * rates[first] else first
        self._tried[_named(chosen)] = turn
        return chosen, f"the server's choice: {compared}"

    def _measured(self, rule: Rule, target: Target, draft: Draft | None) -> float | None:
        """Tokens per second of the best plan under the server's own limit; None before RULE_ROUNDS rounds."""
        own = drafting(rule, target, draft, self._own - {Proposer.GRAMMAR})
        goodput = own.measured(self._settings.num_speculative_tokens_max)
        return None if goodput is None or goodput.round_count < RULE_ROUNDS else goodput.best_rate()

    def _policy(
        self,
        request: GenerationRequest,
        rule: Rule,
        proposers: frozenset[Proposer],
        target: Target,
        draft: Draft | None,
    ) -> Policy:
        settings, own = self._settings, request.speculative
        asked, limit = own.num_speculative_tokens, settings.num_speculative_tokens_max
        way = drafting(rule, target, draft, proposers)
        if way.kind is Proposer.NONE and not way.has_local or 0 in (asked, limit):
            return OFF_POLICY
        if self._mode(request) is SpeculationMode.AUTO:
            cap = limit if asked is None else asked
            return GoodputPolicy(way.goodput(cap, settings.draft_siblings_max, self._without_draft), cap)
        length = settings.num_speculative_tokens if asked is None else asked
        if own.draft_window is not None and own.draft_window < length and not own.draft_siblings:
            least = f"at least the draft tokens of a verification, {length}"
            raise InvalidRequest("speculative.draft_window", own.draft_window, least)
        wait_ms = settings.draft_wait_ms if own.draft_wait_ms is None else own.draft_wait_ms
        is_head = way.kind is Proposer.HEADS  # it drafts once the bonus token is known, and no round waits for it
        wait_s, length_ahead = (0.0, length) if is_head else (wait_ms / 1000, length + 1)
        window = min(length_ahead, settings.draft_window_max) if own.draft_window is None else own.draft_window
        window, acceptance = (window, way.measurements(self._without_draft)[1]) if way.kind else (0, None)
        tree = own.draft_nodes_per_step or 1, wait_s, own.draft_siblings or 0
        return FixedPolicy(length, window, *tree, target.steps[rule], acceptance)

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


def _holds(target: Description, model: Description, length_max: int) -> bool:
    """Whether a target has the weights of `model`, and positions and cache for a text."""
    cell_count = length_max if target.cache is None else target.cache.position_count
    return target.model_digest == model.model_digest and length_max <= min(target.positions_max, cell_count)
