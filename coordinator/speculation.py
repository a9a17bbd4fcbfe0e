"""Which policy a request speculates by, and what all of them learn from: one object per coordinator process."""

from __future__ import annotations

from specdec.config import CoordinatorSettings
from specdec.errors import InvalidRequest
from specdec.protocol.items import EvidenceAnswer
from specdec.protocol.policy import OFF_POLICY, FixedPolicy, Policy
from specdec.protocol.request import Ask, SpeculationMode


class Speculation:
    """The service's own policy and limits, and its measurements."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings

    def policy(self, ask: Ask) -> Policy:
        """The policy of one request. Raises InvalidRequest above the server's maximum."""
        asked, limit = ask.speculative.num_speculative_tokens, self._settings.num_speculative_tokens_max
        if asked is not None and asked > limit:
            raise InvalidRequest("speculative.num_speculative_tokens", asked, f"at most this server's maximum, {limit}")
        mode = ask.speculative.mode or SpeculationMode[self._settings.speculation_policy.upper()]
        if not ask.speculative.enabled or mode is SpeculationMode.OFF or asked == 0:
            return OFF_POLICY
        return self._fixed(ask)

    def _fixed(self, ask: Ask) -> Policy:
        own = ask.speculative
        length = own.num_speculative_tokens
        length = self._settings.num_speculative_tokens if length is None else length
        if own.draft_window is not None and own.draft_window < length:
            limit = f"at least the draft tokens of a verification, {length}"
            raise InvalidRequest("speculative.draft_window", own.draft_window, limit)
        wait_ms = self._settings.draft_wait_ms if own.draft_wait_ms is None else own.draft_wait_ms
        return FixedPolicy(length, own.draft_window, own.draft_leaves or 1, wait_ms / 1000)

    def on_target_step(self, answer: EvidenceAnswer, step_s: float) -> None:
        """One step of the target, forward and evidence, as one of its sessions saw it."""

    def on_draft_step(self, row_count: int, step_s: float) -> None:
        """One step of the draft, over all its sessions."""

    def on_round_overhead(self, overhead_s: float) -> None:
        """What a round took beside the target's step: link, messages, the rule; without waits for the draft."""

    def on_network(self, network_s: float) -> None:
        """The network time to the draft, both ways."""
