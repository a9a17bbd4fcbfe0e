"""Which policy a request speculates by, and what all of them learn from: one object per coordinator process."""

from __future__ import annotations

from specdec.config import CoordinatorSettings
from specdec.errors import InvalidRequest
from specdec.policy.policy import OFF_POLICY, FixedPolicy, Policy
from specdec.protocol.auto_policy import AutoPolicy
from specdec.protocol.items import Nodes
from specdec.protocol.measure import Measurements
from specdec.protocol.request import Ask, SpeculationMode
from specdec.protocol.types import Rule


class Speculation:
    """The service's own policy and limits, and its measurements."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        mbit = settings.draft_link_mbit
        self._measurements = Measurements(link_bytes_per_s=None if mbit is None else mbit * 1e6 / 8)

    def policy(self, ask: Ask) -> Policy:
        """The policy of one request. Raises InvalidRequest above the server's maximum."""
        asked, limit = ask.speculative.num_speculative_tokens, self._settings.num_speculative_tokens_max
        if asked is not None and asked > limit:
            raise InvalidRequest("speculative.num_speculative_tokens", asked, f"at most this server's maximum, {limit}")
        mode = ask.speculative.mode or SpeculationMode[self._settings.speculation_policy.upper()]
        if not ask.speculative.enabled or mode is SpeculationMode.OFF or 0 in (asked, limit):
            return OFF_POLICY
        if mode is SpeculationMode.AUTO:
            return AutoPolicy(self._measurements, ask.rule(), limit if asked is None else asked)
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

    def on_draft_step(self, nodes: Nodes, rule: Rule, byte_count: int, network_s: float | None) -> None:
        """What one step of the draft sent for one session, and the network time to it, both ways, if it is known."""
        leaf_count = sum(node.proposal for node in nodes.nodes)
        if leaf_count:
            self._measurements.leaf_bytes[rule].add(byte_count / leaf_count)
        if nodes.step_us:
            self._measurements.on_draft_step(nodes.step_rows, nodes.step_us / 1e6)
        self.on_network(network_s)

    def on_network(self, network_s: float | None) -> None:
        """The network time to the draft, both ways, if it is known: while nothing is drafted, pings tell it."""
        if network_s is not None:
            self._measurements.network.add(network_s)
