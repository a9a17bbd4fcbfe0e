"""Which rule and which policy a request speculates by, and what all of them learn from: one object per coordinator."""

from __future__ import annotations

import math

from specdec.config import CoordinatorSettings
from specdec.errors import InvalidRequest
from specdec.policy.auto_policy import AutoPolicy
from specdec.policy.catalogue import DraftTimes
from specdec.policy.policy import OFF_POLICY, FixedPolicy, Policy
from specdec.policy.steps import Steps
from specdec.policy.table import Table
from specdec.protocol.items import Nodes
from specdec.protocol.request import Ask, SpeculationMode
from specdec.protocol.types import Description, Rule

REJECTION_EVERY = 64  # of the requests whose rule is the service's choice, one runs REJECTION, so that it is measured
RULE_GAIN = 1.03  # REJECTION must be worth so much more: COUPLED sends less and trusts no draft
RULE_ROUNDS = 100.0  # of both rules, before they are compared


class Speculation:
    """The service's own policy and limits, and what it measured."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        mbit = settings.draft_link_mbit
        self._drafts = {rule: DraftTimes(math.inf if mbit is None else mbit * 1e6 / 8) for rule in Rule}
        self._steps = {rule: Steps() for rule in Rule}
        self._tables: dict[tuple[Rule, int], Table] = {}
        self._choice_count = 0

    def rule(self, ask: Ask) -> tuple[Rule, str]:
        """The rule of one request, and why in one line; a request that leaves it open counts as one more such."""
        named = ask.rule()
        if named is not None:
            return named
        self._choice_count += 1
        coupled, rejection = (self._worth(rule) for rule in (Rule.COUPLED, Rule.REJECTION))
        is_hopeless = False  # so bad when it was last measured that trying it would cost more than it may
        if coupled is not None and rejection is not None:
            is_hopeless = rejection < 0.5 * coupled
            compared = f"COUPLED {coupled:.0f}, REJECTION {rejection:.0f} tokens/s measured"
            if rejection > RULE_GAIN * coupled:
                return Rule.REJECTION, f"the server's choice: {compared}"
        else:
            compared = "REJECTION not measured yet" if coupled is not None else "nothing measured yet"
        speculates = ask.speculative.enabled and self._settings.speculation_policy != "off"
        if speculates and self._choice_count % REJECTION_EVERY == 0 and not is_hopeless:
            return Rule.REJECTION, f"the server's choice, to measure it: {compared}"
        return Rule.COUPLED, f"the server's choice: {compared}"

    def _worth(self, rule: Rule) -> float | None:
        """Tokens per second of the best plan of the server's own limit; None before enough was measured."""
        table = self._tables.get((rule, self._settings.num_speculative_tokens_max))
        return None if table is None or table.round_count < RULE_ROUNDS else table.best_worth()

    def policy(self, ask: Ask, rule: Rule) -> Policy:
        """The policy of one request under a rule. Raises InvalidRequest above the server's maximum."""
        settings, own = self._settings, ask.speculative
        asked, limit = own.num_speculative_tokens, settings.num_speculative_tokens_max
        if asked is not None and asked > limit:
            raise InvalidRequest("speculative.num_speculative_tokens", asked, f"at most this server's maximum, {limit}")
        mode = own.mode or SpeculationMode[settings.speculation_policy.upper()]
        if not own.enabled or mode is SpeculationMode.OFF or 0 in (asked, limit):
            return OFF_POLICY
        if mode is SpeculationMode.AUTO:
            cap = limit if asked is None else asked
            table = self._tables.get((rule, cap))
            if table is None:
                table = self._tables[rule, cap] = Table(self._steps[rule], self._drafts[rule], cap)
            return AutoPolicy(table, cap)
        length = settings.num_speculative_tokens if asked is None else asked
        if own.draft_window is not None and own.draft_window < length:
            least = f"at least the draft tokens of a verification, {length}"
            raise InvalidRequest("speculative.draft_window", own.draft_window, least)
        wait_ms = settings.draft_wait_ms if own.draft_wait_ms is None else own.draft_wait_ms
        return FixedPolicy(length, own.draft_window, own.draft_leaves or 1, wait_ms / 1000)

    def on_target(self, description: Description) -> None:
        """A target is connected: the steps it measured hold until rounds are measured."""
        for steps in self._steps.values():
            steps.prime(description.step_times)

    def on_draft(self, description: Description) -> None:
        """A draft is connected: its steps hold as it measured them; plans measured with another do not."""
        for draft in self._drafts.values():
            draft.prime(description.step_times)
        for table in self._tables.values():
            table.forget_draft()

    def on_draft_step(
        self, nodes: Nodes, evaluated_count: int, rule: Rule, byte_count: int, network_s: float | None
    ) -> None:
        """What one step of the draft sent for one session, and the network time to it, both ways, if it is known."""
        draft = self._drafts[rule]
        if evaluated_count:
            draft.on_bytes(byte_count / evaluated_count)
        if nodes.step_us:
            draft.on_step(nodes.step_rows, nodes.step_us / 1e6)
        self.on_network(network_s)

    def on_network(self, network_s: float | None) -> None:
        """The network time to the draft, both ways, if it is known: while nothing is drafted, pings tell it."""
        if network_s is not None and math.isfinite(network_s):
            for draft in self._drafts.values():
                draft.on_network(network_s)
