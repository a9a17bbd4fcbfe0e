"""The spans of one generation that is sampled: told of what happens, it records each as it ends.

`Generate` is the root; below it the prefill and segments of 32 rounds, below those rounds and draft messages in detail.
A round costs microseconds unless it is in detail: numbers are kept, and become events where the spans are sent. Nothing
here decides anything about the text.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coordinator.trace_detail import (
    SEGMENT_ROUND_COUNT,
    SLOW_ROUND_COUNT_MAX,
    is_drafting_detailed,
    is_round_detailed,
)
from coordinator.trace_drafting import DraftMessages, link_attributes
from coordinator.trace_root import OPERATION, failure_attributes, finish_attributes, is_fault, request_attributes
from coordinator.trace_segments import TIMES, Phase, RoundRow
from coordinator.tracing import GenerationTrace
from specdec.errors import SpecdecError
from specdec.protocol.items import NO_TRACE, EvidenceAnswer, Nodes, Trace
from specdec.protocol.report import Finished, Started
from specdec.protocol.request import Ask
from specdec.protocol.session import Session
from specdec.protocol.tree import Place
from specdec.protocol.types import DRAFT_LENGTH_LIMIT, Description, TokenKind
from specdec.rpc.stamps import Stamps
from specdec.telemetry.clock import wall_offset_ns
from specdec.telemetry.spans import SPAN_ID_BYTES, AttributeValue, Span, SpanEvent, SpanKind, derived_span_id
from specdec.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from coordinator.replicas import Replica
    from specdec.rpc.link import Link

PHASE_COUNT_MAX = 8  # a draft step may have begun some segments ago, not more
LINGER_S = 1.0  # after the end: the draft's spans of what it had on the way must not lack their parents


def open_trace(tracing: Tracing, caller: Trace | None) -> GenerationTrace:
    """The trace of a request that has just come, sampled or not; `caller`: the context it came with.

    The request id is the trace id, so that either finds the trace, unless the caller's trace may hold other requests.
    """
    trace_id = secrets.token_bytes(16) if caller is None else caller.trace_id
    request_id = trace_id.hex() if caller is None else secrets.token_hex(16)
    parent_id = b"" if caller is None else caller.span_id
    if tracing.samples(trace_id, caller):
        context = Trace(trace_id, os.urandom(SPAN_ID_BYTES), sampled=True)
        return RequestTrace(tracing, context, request_id, parent_id)
    return GenerationTrace(Trace(trace_id, parent_id or secrets.token_bytes(SPAN_ID_BYTES)), request_id)


class RequestTrace(GenerationTrace):
    """A generation that is recorded. It belongs to one event loop; nothing it is told blocks or raises."""

    def __init__(self, tracing: Tracing, context: Trace, request_id: str, parent_id: bytes) -> None:
        super().__init__(context, request_id)
        self._tracing = tracing
        self._parent_id = parent_id
        self._offset_ns = wall_offset_ns()
        self._began_s = time.monotonic()
        self._attributes: dict[str, AttributeValue] = {**OPERATION}
        self._notes: list[SpanEvent] = []
        self._error = ""
        self._phase: Phase | None = None
        self._recent: deque[Phase] = deque(maxlen=PHASE_COUNT_MAX)
        self._drafting = DraftMessages()
        self._totals = dict.fromkeys(TIMES, 0.0)
        self._slow_count = 0
        self._was_speculating = False
        self._has_left = False
        self._round_began_s = self._began_s
        self._round_id = b""  # of the round under way, where it is in detail
        self._sent_s: float | None = None  # None: nothing is in flight
        self._answered_s = self._began_s
        self._ending: tuple[Phase, bytes, tuple[float, ...], Sequence[Place]] | None = None

    def admitted(self, ask: Ask, started: Started, target: Description) -> None:
        self._attributes.update(request_attributes(ask, started, target))

    def began(self, session: Session) -> None:
        self._round_began_s = time.monotonic()
        self._was_speculating = session.policy.is_speculating
        self._begin_phase(session, "prefill", self._round_began_s, 0)

    def _begin_phase(self, session: Session, name: str, start_s: float, round_index: int) -> None:
        self._phase = Phase(name, start_s)
        self._recent.append(self._phase)
        self._name_round(session, round_index)

    def _name_round(self, session: Session, round_index: int) -> None:
        """Says in what context the verification and the commit of a round travel; the prefill is its own round."""
        assert self._phase is not None
        trace_id, phase_id = self.context.trace_id, self._phase.span_id
        is_detailed = is_round_detailed(round_index)
        self._round_id = b"" if not is_detailed else os.urandom(SPAN_ID_BYTES) if round_index else phase_id
        if is_detailed or session.round_trace.span_id != phase_id:
            session.round_trace = Trace(trace_id, self._round_id or phase_id, True, is_detailed)
        is_drafted = is_drafting_detailed(round_index)
        session.commit_trace = Trace(trace_id, phase_id, True, True) if is_drafted else NO_TRACE

    def sent(self, session: Session, now_s: float) -> None:
        if self._sent_s is not None:
            self.note("sent again")
            return
        self._sent_s = now_s
        if self._round_id and session.in_flight is not None:
            self._drafting.offer(session.tree.proposal_path(len(session.in_flight.draft_token_ids)), now_s)

    def nodes(self, session: Session, nodes: Nodes, link: Link) -> None:
        if self._phase is None:
            return
        self._phase.draft_message_count += 1
        if nodes.step_began_us and nodes.nodes:
            self._record(self._drafting.message(session, nodes, link.stamps, self.context, tuple(self._recent)))

    def answered(self) -> None:
        self._answered_s = time.monotonic()

    def verdict(self, session: Session, answer: EvidenceAnswer, now_s: float, waited_s: float, ends: bool) -> None:
        assert self._phase is not None
        if answer.evictions:
            self.note("evicted by the target", times=answer.evictions)
        path = session.tree.proposal_path(DRAFT_LENGTH_LIMIT)
        sent_s = self._answered_s if self._sent_s is None else self._sent_s
        times = round_times(answer, self._answered_s - sent_s, waited_s, now_s - self._round_began_s)
        self._ending = (self._phase, self._round_id, (self._round_began_s, now_s, *times), path)
        if ends:
            return
        if session.round_index % SEGMENT_ROUND_COUNT == 0:  # the prefill ends with it, or a segment
            self._begin_phase(session, "segment", now_s, session.round_index + 1)
        else:
            self._name_round(session, session.round_index + 1)

    def committed(self, session: Session, link: Link) -> None:
        assert self._ending is not None and session.outcome is not None
        (phase, round_id, (start_s, end_s, *times), path), outcome = self._ending, session.outcome
        is_bonus = outcome.next_kind is TokenKind.BONUS
        branch = 0 if is_bonus or not outcome.was_looked_up else 1 if outcome.was_found else 2
        numbers = (
            session.round_index - 1,
            start_s,
            end_s,
            outcome.offered_count,
            outcome.accepted_count,
            is_bonus,
            branch,
            sum(not place.alive for place in path),
            *times,
        )
        phase.add(*numbers)
        for name, value in zip(TIMES, times):
            self._totals[name] += value
        if round_id:
            self._record_round(phase, round_id, RoundRow(*numbers), link)
        if session.policy.is_speculating != self._was_speculating:
            self._was_speculating = session.policy.is_speculating
            self.note("policy switched", speculating=self._was_speculating, why=session.policy.prediction.reason)
        self._sent_s, self._round_began_s, self._ending = None, end_s, None
        if phase is not self._phase:
            self._end_phase(phase, end_s)

    def _record_round(self, phase: Phase, round_id: bytes, row: RoundRow, link: Link) -> None:
        """A round in detail, and its verification as this side saw it."""
        assert self._sent_s is not None
        attributes = hop_attributes(row, self._answered_s - self._sent_s, link.stamps)
        self._record(self._verification(round_id, self._answered_s, attributes))
        if round_id != phase.span_id:
            links = self._drafting.links(int(row.accepted_count), self.context.trace_id)
            more = {"attributes": row.attributes(), "events": row.wasted(), "links": links}
            self._record(self._span("round", round_id, phase.span_id, row.start_s, row.end_s, **more))

    def _verification(self, round_id: bytes, end_s: float, attributes: dict[str, AttributeValue]) -> Span:
        assert self._sent_s is not None
        names = ("verify", derived_span_id(round_id, "verify"), round_id)
        return self._span(*names, self._sent_s, end_s, kind=SpanKind.CLIENT, attributes=attributes)

    def _end_phase(self, phase: Phase, end_s: float, error: str = "") -> None:
        slow = phase.slow_round() if self._slow_count < SLOW_ROUND_COUNT_MAX else None
        if slow is not None and not is_round_detailed(int(slow.round_index)):
            self._slow_count += 1
            attributes = {**slow.attributes(), "specdec.slow": True}
            names = ("round", os.urandom(SPAN_ID_BYTES), phase.span_id)
            self._record(self._span(*names, slow.start_s, slow.end_s, attributes=attributes, events=slow.wasted()))
        self._record(phase.span(self.context.trace_id, self.context.span_id, end_s, error))

    def note(self, name: str, **attributes: AttributeValue) -> None:
        said = {f"specdec.{key}": value for key, value in attributes.items()}
        if self._phase is not None:
            self._phase.note(name, time.monotonic(), said)
        else:
            self._notes.append(SpanEvent(name, time.monotonic(), said))

    def finished(self, session: Session, finished: Finished) -> None:
        self._attributes.update(finish_attributes(finished))
        self._leave_phase()

    def failed(self, error: SpecdecError) -> None:
        self._attributes.update(failure_attributes(error))
        self._error = error.reason if is_fault(error) else ""

    def left(self, session: Session, draft: Replica | None) -> None:
        self._leave_phase()
        if draft is not None and self._recent and not self._has_left:
            self._has_left = True
            draft.attach(session.number, LateNodes(self, session))
            asyncio.get_running_loop().call_later(LINGER_S, draft.detach, session.number)

    def _leave_phase(self) -> None:
        """Ends the phase under way, with the verification in flight if there is one: its answer will not be heard."""
        phase, self._phase = self._phase, None
        now_s = time.monotonic()
        if phase is None:
            return
        if self._sent_s is not None and self._round_id:
            self._record(self._verification(self._round_id, now_s, {"specdec.unanswered": True}))
            if self._round_id != phase.span_id:
                self._record(self._span("round", self._round_id, phase.span_id, self._round_began_s, now_s))
        self._end_phase(phase, max(now_s, self._round_began_s), self._error)

    def closed(self) -> None:
        self._leave_phase()
        if not {"error.type", "gen_ai.response.finish_reasons"} & self._attributes.keys():
            self._attributes["specdec.cancelled"] = True
        said = {**self._attributes, **{f"specdec.{name[:-2]}_ms": round(1e3 * self._totals[name], 3) for name in TIMES}}
        trace_id, span_id = self.context.trace_id, self.context.span_id
        names = ("Generate", trace_id, span_id, self._parent_id, self._began_s, time.monotonic(), SpanKind.SERVER)
        self._record(Span(*names, said, tuple(self._notes), error=self._error))

    def late_nodes(self, session: Session, nodes: Nodes, link: Link) -> None:
        """What the draft had on the way when the text ended: wasted, and recorded as that."""
        if nodes.step_began_us and nodes.nodes:
            self._record(self._drafting.message(session, nodes, link.stamps, self.context, tuple(self._recent)))

    def _span(self, name: str, span_id: bytes, parent_id: bytes, start_s: float, end_s: float, **more: Any) -> Span:
        return Span(name, self.context.trace_id, span_id, parent_id, start_s, end_s, **more)

    def _record(self, span: Span) -> None:
        self._tracing.record((span,), self._offset_ns)


class LateNodes:
    """Listens for a generation that is over, for a moment."""

    def __init__(self, trace: RequestTrace, session: Session) -> None:
        self.names = {"trace_id": trace.context.trace_id.hex(), "session": session.number}
        self._trace = trace
        self._session = session

    def on_item(self, replica: Replica, item: Any, byte_count: int) -> None:
        if isinstance(item, Nodes):
            self._trace.late_nodes(self._session, item, replica.link)

    def on_up(self, replica: Replica) -> None: ...

    def on_down(self, replica: Replica, reason: str) -> None: ...

    def on_sent(self, replica: Replica, byte_count: int) -> None: ...

    def on_defect(self) -> None: ...


def round_times(
    answer: EvidenceAnswer, round_trip_s: float, waited_s: float, round_s: float
) -> tuple[float, float, float, float, float, float]:
    """Where a round's time went, as RoundRow has it; the six add up to the round.

    Network time is (t3 - t0) - (t2 - t1), the round trip by this clock less the stay at the target by its own, and so
    with what both processes take to hand the messages on.
    """
    forward_s, evidence_s = answer.forward_us / 1e6, answer.evidence_us / 1e6
    server_s = min(round_trip_s, (answer.server_us or answer.queue_us + answer.forward_us + answer.evidence_us) / 1e6)
    queue_s = max(0.0, server_s - forward_s - evidence_s)
    rule_s = max(0.0, round_s - waited_s - round_trip_s)
    return waited_s, round_trip_s - server_s, queue_s, forward_s, evidence_s, rule_s


def hop_attributes(row: RoundRow, round_trip_s: float, stamps: Stamps) -> dict[str, AttributeValue]:
    """The hop of one verification, in milliseconds: the round trip is the stay at the target, the network by the stamps
    of the messages, and the rest, which both processes took to hand the messages on."""
    away_s = row.network_s
    network_s = away_s if stamps.network_s is None else min(away_s, stamps.network_s)
    return {
        **link_attributes(stamps),
        "specdec.round": int(row.round_index),
        "specdec.offered": int(row.offered_count),
        "specdec.round_trip_ms": round(1000 * round_trip_s, 4),
        "specdec.server_ms": round(1000 * (round_trip_s - away_s), 4),
        "specdec.network_ms": round(1000 * network_s, 4),
        "specdec.handling_ms": round(1000 * (away_s - network_s), 4),
    }
