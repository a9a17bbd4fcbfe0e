"""The choice of rule and policy for each request, and the measurements they share: one object per coordinator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from specdec.config import CoordinatorSettings
from specdec.errors import InvalidRequest
from specdec.policy.auto_policy import AutoPolicy
from specdec.policy.catalogue import DraftTimes, catalogue
from specdec.policy.draft_limit import DraftLimit, Load
from specdec.policy.fixed_policy import OFF_POLICY, FixedPolicy
from specdec.policy.steps import Steps
from specdec.policy.table import Table
from specdec.protocol.calibration import Calibration
from specdec.protocol.items import Nodes
from specdec.protocol.policy import Policy
from specdec.protocol.proposers import LocalProposer, NgramProposer, PredictionProposer
from specdec.protocol.request import GenerationRequest, SpeculationMode
from specdec.protocol.session import Session
from specdec.protocol.suffix_store import SUFFIX_LENGTH_MIN, SUFFIX_TEXT_LENGTH_MAX, SuffixProposer, SuffixStore
from specdec.protocol.types import Description, Proposer, Rule

REJECTION_EVERY = 64  # of the requests whose rule is the service's choice, one in 64 measures REJECTION
RULE_GAIN = 1.03  # least ratio of REJECTION to COUPLED for a choice of REJECTION: COUPLED sends less, trusts no draft
RULE_ROUNDS = 100.0  # of both rules, before they are compared


class Speculation:
    """The service's own policy and limits, and its measurements."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        mbit = settings.draft_link_mbit
        self._drafts = {rule: DraftTimes(math.inf if mbit is None else mbit * 1e6 / 8) for rule in Rule}
        self._steps = {rule: Steps() for rule in Rule}
        self._load = Load()
        self._tables: dict[tuple[Rule, int, bool, bool], Table] = {}
        self._choice_count = 0
        self._own = frozenset(Proposer[name.upper()] for name in settings.proposers.split(",") if name)
        self._store = SuffixStore(settings.suffix_store_mb << 20)
        self.calibration = Calibration()

    def rule(self, request: GenerationRequest) -> tuple[Rule, str]:
        """Returns the rule of one request and its reason in one line; counts the requests that name no rule and would
        measure one: those under the service's own policy and limits."""
        named = request.rule()
        if named is not None:
            return named
        own, most = request.speculative, self._settings.num_speculative_tokens_max
        is_auto = own.enabled and self._mode(request) is SpeculationMode.AUTO
        measures = is_auto and not own.proposers and own.num_speculative_tokens in (None, most)
        self._choice_count += measures
        coupled, rejection = (self._worth(rule) for rule in (Rule.COUPLED, Rule.REJECTION))
        is_hopeless = False  # so slow when last measured that exploration would cost too much
        if coupled is not None and rejection is not None:
            is_hopeless = rejection < 0.5 * coupled
            compared = f"COUPLED {coupled:.0f}, REJECTION {rejection:.0f} tokens/s measured"
            if rejection > RULE_GAIN * coupled:
                return Rule.REJECTION, f"the server's choice: {compared}"
        else:
            compared = "REJECTION not measured yet" if coupled is not None else "nothing measured yet"
        if measures and self._choice_count % REJECTION_EVERY == 0 and not is_hopeless:
            return Rule.REJECTION, f"the server's choice, to measure it: {compared}"
        return Rule.COUPLED, f"the server's choice: {compared}"

    def _worth(self, rule: Rule) -> float | None:
        """Tokens per second of the best plan under the server's own limit; None before RULE_ROUNDS rounds."""
        table = self._tables.get((rule, self._settings.num_speculative_tokens_max, *self._kinds(self._own)))
        return None if table is None or table.round_count < RULE_ROUNDS else table.best_worth()

    def _kinds(self, proposers: frozenset[Proposer]) -> tuple[bool, bool]:
        """Whether the draft is among these proposers, and whether one of the coordinator is."""
        with_draft = Proposer.DRAFT in proposers and self._settings.draft is not None
        return with_draft, bool(proposers - {Proposer.DRAFT})

    def allowed(self, request: GenerationRequest) -> frozenset[Proposer]:
        """Returns the proposers of one request. Raises InvalidRequest for one that the server does not have."""
        asked = frozenset(request.speculative.proposers)
        for index, proposer in enumerate(request.speculative.proposers):
            if proposer not in self._own:
                limit = "one of " + ", ".join(own.name for own in sorted(self._own))
                raise InvalidRequest(f"speculative.proposers[{index}]", proposer.name, limit)
        if not request.speculative.enabled or self._mode(request) is SpeculationMode.OFF:
            return frozenset()
        if not asked:
            asked = frozenset({Proposer.DRAFT}) if self._mode(request) is SpeculationMode.FIXED else self._own
        return asked & self._own

    def proposers(
        self, request: GenerationRequest, committed: list[int], prediction: Sequence[int]
    ) -> list[LocalProposer]:
        """Returns the coordinator's own proposers of one request; it may run in a thread. `committed` grows with the
        generation. Raises InvalidRequest."""
        allowed = self.allowed(request)
        made: list[LocalProposer] = []
        if Proposer.PREDICTION in allowed and prediction:
            made.append(PredictionProposer(list(prediction), len(committed) - len(request.resumed_token_ids)))
        if Proposer.SUFFIX in allowed and self._settings.suffix_store_mb:
            made.append(SuffixProposer(self._store, request.cache_salt))
        if Proposer.NGRAM in allowed:
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
            if self._store.add(session.cache_salt, committed[start:]):
                call_soon(self._store_piece, call_soon)

    def _store_piece(self, call_soon: Callable[..., object]) -> None:
        if self._store.work():
            call_soon(self._store_piece, call_soon)

    def _mode(self, request: GenerationRequest) -> SpeculationMode:
        return request.speculative.mode or SpeculationMode[self._settings.speculation_policy.upper()]

    def policy(self, request: GenerationRequest, rule: Rule, session_count: int = 1) -> Policy:
        """Returns the policy of one request under a rule; `session_count`: of the generations that run, this one
        included. Raises InvalidRequest above a maximum of the server."""
        settings, own = self._settings, request.speculative
        allowed = self.allowed(request)
        for name in ("num_speculative_tokens", "draft_window", "draft_nodes_per_step", "draft_siblings"):
            asked, limit = getattr(own, name), getattr(settings, f"{name}_max")
            if asked is not None and asked > limit:
                raise InvalidRequest(f"speculative.{name}", asked, f"at most this server's maximum, {limit}")
        asked, limit = own.num_speculative_tokens, settings.num_speculative_tokens_max
        with_draft, with_local = self._kinds(allowed)
        if not (with_draft or with_local) or 0 in (asked, limit):
            return OFF_POLICY
        if self._mode(request) is SpeculationMode.AUTO:
            cap = limit if asked is None else asked
            key = rule, cap, with_draft, with_local
            if key not in self._tables:
                plans = catalogue(with_draft, with_local, settings.draft_siblings_max, rule)
                self._tables[key] = Table(self._steps[rule], self._drafts[rule], cap, plans)
            return AutoPolicy(self._tables[key], cap)
        length = settings.num_speculative_tokens if asked is None else asked
        if own.draft_window is not None and own.draft_window < length and not own.draft_siblings:
            least = f"at least the draft tokens of a verification, {length}"
            raise InvalidRequest("speculative.draft_window", own.draft_window, least)
        wait_ms = settings.draft_wait_ms if own.draft_wait_ms is None else own.draft_wait_ms
        window = min(length + 1, settings.draft_window_max) if own.draft_window is None else own.draft_window
        limit, window = DraftLimit(self._load, length, session_count), window if with_draft else 0
        tree = own.draft_nodes_per_step or 1, wait_ms / 1000, limit, own.draft_siblings or 0
        return FixedPolicy(length, window, *tree)

    def on_target(self, description: Description) -> None:
        """A target is connected: its own step times count until rounds are measured."""
        for steps in self._steps.values():
            steps.prime(description.step_times, description.head_times)
        self._load.steps.prime(description.step_times)

    def on_draft(self, description: Description) -> None:
        """A draft is connected: its own step times count; measurements of plans with another draft are dropped."""
        for draft in self._drafts.values():
            draft.prime(description.step_times)
        for table in self._tables.values():
            table.forget_draft()

    def on_draft_step(
        self, nodes: Nodes, evaluated_count: int, rule: Rule, byte_count: int, network_s: float | None
    ) -> None:
        """Records the nodes of one timed draft step for one session, and the network round trip to the draft, if
        known."""
        draft = self._drafts[rule]
        if evaluated_count:
            draft.on_bytes(byte_count / evaluated_count)
        draft.on_step(nodes.step_rows, nodes.step_us / 1e6)
        self.on_network(network_s)

    def on_network(self, network_s: float | None) -> None:
        """Records the network round trip to the draft, if known; pings measure it while nothing is drafted."""
        if network_s is not None and math.isfinite(network_s):
            for draft in self._drafts.values():
                draft.on_network(network_s)
