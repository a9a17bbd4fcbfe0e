"""A target and a draft, as peers of a coordinator: what is measured of each, and what generations are told of it.

A generation whose verification stays unanswered for too long is told that its target is lost (`Deadlines`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from specdec.config import TlsSettings
from specdec.coordinator.deadlines import OVERDUE, TICK_S, Deadlines
from specdec.coordinator.discovery import Member
from specdec.coordinator.ejection import Health
from specdec.coordinator.peers import Listener, ModelKey, Peer, check_node_count
from specdec.policy.acceptance import Acceptance
from specdec.policy.draft_time import DraftTimes, HeadTimes
from specdec.policy.steps import StepTimes
from specdec.protocol.events import DraftLost, DraftStops, Event, FromDraft, FromTarget, TargetLost
from specdec.protocol.items import Nodes, PromptPart, Verification, VerificationResult
from specdec.protocol.types import Description, Rule
from specdec.telemetry.logs import get_logger
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb


class Target(Peer):
    """A target. `steps`: its step times by rows, of each rule; `head_times`, `head_acceptance`: of its feature head."""

    name, service, stream_method = "target", "specdec.v1.TargetService", "Verify"
    request, response = target_pb.VerifyRequest, target_pb.VerifyResponse

    def __init__(
        self, member: Member, tls: TlsSettings, fingerprint: str, changed: Callable[[Peer], None], health: Health
    ) -> None:
        super().__init__(member, tls, fingerprint, changed, health)
        self.suspect: Listener | None = None  # a text that lost several targets, until it is answered here
        self._deadlines = Deadlines()

    def detach(self, session: int) -> None:
        if self.suspect is not None and self.suspect is self._listeners.get(session):
            self.suspect = None
        self._deadlines.forget(session)
        super().detach(session)

    def send(self, item: Any) -> int:
        if isinstance(item, Verification) and self.link.is_up:
            self._deadlines.sent(item)
        return super().send(item)

    def _on_up(self) -> None:
        super()._on_up()
        self._deadlines = Deadlines()
        self._tasks = (*self._tasks, asyncio.create_task(self._watch()))

    def _measure_anew(self) -> None:
        super()._measure_anew()
        self.steps = {rule: StepTimes() for rule in Rule}
        self.head_times = {rule: HeadTimes() for rule in Rule}
        self.head_acceptance = {rule: Acceptance.of_head() for rule in Rule}

    @property
    def has_feature_head(self) -> bool:
        """Whether a feature head on it drafts."""
        return self.description is not None and self.description.head_passes_max > 0

    def _key_of(self, description: Description) -> ModelKey:
        return description.model_digest, *description.numerics

    def measure_with(self, other: Target | None) -> None:
        assert self.description is not None
        step_times, head_times = self.description.step_times, self.description.head_times
        if step_times:
            row_count, step_s = step_times[-1]
            self._deadlines.token_s = step_s / row_count
        if other is not None:
            self.steps, self.goodputs = other.steps, other.goodputs
            self.head_times, self.head_acceptance = other.head_times, other.head_acceptance
            return
        for rule, steps in self.steps.items():
            steps.prime(step_times, head_times)
            self.head_times[rule].prime(self.description.head_pass_times)
            self.head_acceptance[rule].forget()

    async def _watch(self) -> None:
        """Tells the generations whose verifications are overdue that the target is lost to them."""
        while True:
            await asyncio.sleep(TICK_S)
            for session, reason in self._deadlines.tick().items():
                self._deadlines.forget(session)
                if (listener := self._listeners.get(session)) is not None:
                    self._tell(listener, TargetLost(reason, OVERDUE))
                get_logger().error("verification overdue", peer=self.address, session=session, reason=reason)

    def _on_items(self, messages: Sequence[Any], byte_count: int) -> None:
        check_node_count(sum(len(message.result.head_nodes) for message in messages))
        super()._on_items(messages, byte_count)

    def _event_of(self, item: Any) -> Event:
        if isinstance(item, VerificationResult):
            self._deadlines.answered(item)
        elif isinstance(item, PromptPart):
            self._deadlines.heard()
        return FromTarget(item)

    def _on_down(self, reason: str) -> None:
        super()._on_down(reason)
        self._tell_all(TargetLost("the target was lost"))


class Draft(Peer):
    """A draft. `times`: of its steps and its link, by rule; `acceptance`: of its tokens, by rule."""

    name, service, stream_method = "draft", "specdec.v1.DraftService", "Draft"
    request, response = draft_pb.DraftRequest, draft_pb.DraftResponse

    def __init__(
        self,
        member: Member,
        tls: TlsSettings,
        fingerprint: str,
        changed: Callable[[Peer], None],
        health: Health,
        link_mbit: float | None = None,
    ) -> None:
        self._link_bytes_per_s = math.inf if link_mbit is None else link_mbit * 1e6 / 8
        super().__init__(member, tls, fingerprint, changed, health)

    def _measure_anew(self) -> None:
        super()._measure_anew()
        self.times = {rule: DraftTimes(self._link_bytes_per_s) for rule in Rule}
        self.acceptance = {rule: Acceptance() for rule in Rule}

    def _key_of(self, description: Description) -> ModelKey:
        return (description.model_digest,)

    def measure_with(self, other: Draft | None) -> None:
        assert self.description is not None
        if other is not None:
            self.times, self.acceptance, self.goodputs = other.times, other.acceptance, other.goodputs
            return
        for times in self.times.values():
            times.prime(self.description.step_times)
        for acceptance in self.acceptance.values():
            acceptance.forget()

    def _on_stopping(self) -> None:
        super()._on_stopping()
        self._tell_all(DraftStops())

    def _on_items(self, messages: Sequence[Any], byte_count: int) -> None:
        check_node_count(sum(len(message.nodes.nodes) for message in messages))
        super()._on_items(messages, byte_count)

    def _event_of(self, item: Any) -> Event:
        return FromDraft(item)

    def _on_down(self, reason: str) -> None:
        super()._on_down(reason)
        self._tell_all(DraftLost())

    def measure_step(self, nodes: Nodes, rule: Rule, byte_count: int) -> None:
        """Records a step's nodes for one session, if the draft timed it, and the bytes that brought them."""
        if nodes.step_us:
            evaluated_count = sum(node.proposal for node in nodes.nodes)
            if evaluated_count:
                self.times[rule].on_bytes(byte_count / evaluated_count)
            self.times[rule].on_step(nodes.step_rows, nodes.step_us / 1e6, nodes.active_sessions)
            self.measure_network()

    def wait_s(self, rule: Rule) -> float:
        """Returns the seconds to a draft token of one more session: the network round trip and a step."""
        session_count = 0 if self.link.load is None else self.link.load[0]
        return (self.network_s or 0.0) + self.times[rule].nodes_s(1 + session_count)

    def measure_network(self) -> None:
        """Records the network round trip of the last exchange; pings measure it while nothing is drafted."""
        network_s = self.network_s
        if network_s is not None and math.isfinite(network_s):
            for times in self.times.values():
                times.on_network(network_s)
