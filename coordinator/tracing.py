"""The spans of one generation: told of what happens and of every round's record, it records each span as it ends.

`Generate` is the root; below it the prefill and segments of 32 rounds, below those rounds and draft messages in detail.
A round costs next to nothing unless it is in detail. Whether a request is recorded is decided once, when it comes
(`open_trace`); the contexts that its items are sent in (`context_of`) tell the replicas. Nothing here decides anything
about the text, and nothing of it is known to the session.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from coordinator.trace_attributes import (
    OPERATION,
    DraftMessages,
    failure_attributes,
    finish_attributes,
    hop_attributes,
    is_fault,
    request_attributes,
)
from coordinator.trace_rounds import (
    PARTS,
    SEGMENT_ROUND_COUNT,
    SLOW_ROUND_COUNT_MAX,
    Phase,
    is_drafting_detailed,
    is_round_detailed,
    round_attributes,
    wasted_events,
)
from specdec.errors import SpecdecError
from specdec.protocol.items import NO_TRACE, Commit, DraftAsk, Nodes, Open, TargetAsk, Trace, Verification
from specdec.protocol.report import Finished, Started
from specdec.protocol.request import Ask
from specdec.protocol.round_record import RoundRecord
from specdec.protocol.session import Session
from specdec.protocol.types import Description
from specdec.telemetry.clock import wall_offset_ns
from specdec.telemetry.spans import SPAN_ID_BYTES, AttributeValue, Span, SpanEvent, SpanKind, derived_span_id
from specdec.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from coordinator.replicas import Replica
    from specdec.rpc.link import Link

PHASE_COUNT_MAX = 8  # a draft step may have begun some segments ago, not more
LINGER_S = 1.0  # after the end: the draft's spans of what it had on the way must not lack their parents


class GenerationTrace:
    """A generation that is not recorded: only its ids are known. Every method may be called at any time."""

    def __init__(self, context: Trace, request_id: str) -> None:
        self.context = context
        self.request_id = request_id

    def context_of(self, item: TargetAsk | DraftAsk) -> Trace:
        """The context an item of this generation is sent in."""
        return self.context if isinstance(item, Open) else NO_TRACE

    def admitted(self, ask: Ask, started: Started, target: Description) -> None:
        """The request was found right."""

    def began(self, session: Session) -> None:
        """The session is about to be opened and its prompt to be read."""

    def sent(self, session: Session, now_s: float) -> None:
        """The verification in flight is sent; said again when it is sent again."""

    def nodes(self, session: Session, nodes: Nodes, link: Link) -> None:
        """The draft sent nodes, and the session has filed those it can use."""

    def on_round(self, session: Session, record: RoundRecord, link: Link) -> None:
        """A verdict is committed, and nothing of what follows is carried out yet; `link` is the target's."""

    def note(self, name: str, **attributes: AttributeValue) -> None:
        """Something happened beside the rounds."""

    def finished(self, finished: Finished) -> None:
        """The text ended."""

    def failed(self, error: SpecdecError) -> None:
        """The generation is given up."""

    def left(self, session: Session, draft: Replica | None) -> None:
        """The session is over on all sides; `draft` may still have something on the way for it."""

    def closed(self) -> None:
        """The call is over. Nothing is told after it but what the draft had on the way."""


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
        self._began_s = self._round_began_s = time.monotonic()
        self._attributes: dict[str, AttributeValue] = {**OPERATION}
        self._notes: list[SpanEvent] = []
        self._error = ""
        self._phase: Phase | None = None
        self._recent: deque[Phase] = deque(maxlen=PHASE_COUNT_MAX)
        self._drafting = DraftMessages()
        self._totals = [0.0] * len(PARTS)
        self._slow_count = 0
        self._was_speculating = False
        self._has_left = False
        self._round_id = b""  # of the round under way, where it is in detail
        self._round_context = self._commit_context = NO_TRACE
        self._sent_s: float | None = None  # None: nothing is in flight

    def context_of(self, item: TargetAsk | DraftAsk) -> Trace:
        if isinstance(item, Verification):
            return self._round_context
        if isinstance(item, Commit):
            return self._commit_context
        return super().context_of(item)

    def admitted(self, ask: Ask, started: Started, target: Description) -> None:
        self._attributes.update(request_attributes(ask, started, target))

    def began(self, session: Session) -> None:
        self._was_speculating = session.policy.is_speculating
        self._round_began_s = time.monotonic()
        self._begin_phase("prefill", 0)

    def _begin_phase(self, name: str, round_index: int) -> None:
        self._phase = Phase(name, self._round_began_s)
        self._recent.append(self._phase)
        self._name_round(round_index)

    def _name_round(self, round_index: int) -> None:
        """Says in what context the verification and the commit of a round travel; the prefill is its own round."""
        assert self._phase is not None
        trace_id, phase_id = self.context.trace_id, self._phase.span_id
        is_detailed = is_round_detailed(round_index)
        self._round_id = b"" if not is_detailed else os.urandom(SPAN_ID_BYTES) if round_index else phase_id
        if is_detailed or self._round_context.span_id != phase_id:
            self._round_context = Trace(trace_id, self._round_id or phase_id, True, is_detailed)
        is_drafted = is_drafting_detailed(round_index)
        self._commit_context = Trace(trace_id, phase_id, True, True) if is_drafted else NO_TRACE

    def sent(self, session: Session, now_s: float) -> None:
        if self._sent_s is not None:
            self.note("sent again")
            return
        self._sent_s = now_s
        if self._round_id and session.in_flight is not None:
            self._drafting.offer(session.tree.proposal_path(len(session.in_flight.draft_token_ids)), now_s)

    def nodes(self, session: Session, nodes: Nodes, link: Link) -> None:
        if self._phase is not None:
            self._phase.draft_message_count += 1
            self.late_nodes(session, nodes, link)

    def late_nodes(self, session: Session, nodes: Nodes, link: Link) -> None:
        """Nodes that came, while the text went on or after it: then they are wasted, and recorded as that."""
        if nodes.step_began_us and nodes.nodes:
            self._record(self._drafting.message(session, nodes, link.stamps, self.context, tuple(self._recent)))

    def on_round(self, session: Session, record: RoundRecord, link: Link) -> None:
        phase = self._phase
        assert phase is not None
        if record.evictions:
            self.note("evicted by the target", times=record.evictions)
        phase.records.append(record)
        if self._round_id:
            self._record_round(phase, record, link)
        if session.policy.is_speculating != self._was_speculating:
            self._was_speculating = session.policy.is_speculating
            self.note("policy switched", speculating=self._was_speculating, why=session.policy.prediction.reason)
        self._sent_s, self._round_began_s = None, record.end_s
        if session.finished:
            self._round_id = b""
        elif record.round_index % SEGMENT_ROUND_COUNT == 0:  # the prefill ends with it, or a segment
            self._begin_phase("segment", record.round_index + 1)
            self._end_phase(phase, record.end_s)
        else:
            self._name_round(record.round_index + 1)

    def _record_round(self, phase: Phase, record: RoundRecord, link: Link) -> None:
        """A round in detail, and its verification as this side saw it."""
        assert self._sent_s is not None
        attributes = hop_attributes(record, link.stamps)
        self._record(self._verification(self._round_id, self._sent_s + record.round_trip_s, attributes))
        if self._round_id != phase.span_id:
            links = self._drafting.links(record.accepted_count, self.context.trace_id)
            more = {"attributes": round_attributes(record), "events": wasted_events(record), "links": links}
            names = ("round", self._round_id, phase.span_id)
            self._record(self._span(*names, record.start_s, record.end_s, **more))

    def _verification(self, round_id: bytes, end_s: float, attributes: dict[str, AttributeValue]) -> Span:
        assert self._sent_s is not None
        names = ("verify", derived_span_id(round_id, "verify"), round_id)
        return self._span(*names, self._sent_s, end_s, kind=SpanKind.CLIENT, attributes=attributes)

    def _end_phase(self, phase: Phase, end_s: float, error: str = "") -> None:
        self._totals = [total + part for total, part in zip(self._totals, phase.parts())]
        slow = phase.slow_round() if self._slow_count < SLOW_ROUND_COUNT_MAX else None
        if slow is not None and not is_round_detailed(slow.round_index):
            self._slow_count += 1
            more = {"attributes": {**round_attributes(slow), "specdec.slow": True}, "events": wasted_events(slow)}
            names = ("round", os.urandom(SPAN_ID_BYTES), phase.span_id)
            self._record(self._span(*names, slow.start_s, slow.end_s, **more))
        self._record(phase.span(self.context.trace_id, self.context.span_id, end_s, error))

    def note(self, name: str, **attributes: AttributeValue) -> None:
        said = {f"specdec.{key}": value for key, value in attributes.items()}
        if self._phase is not None:
            self._phase.note(name, time.monotonic(), said)
        else:
            self._notes.append(SpanEvent(name, time.monotonic(), said))

    def finished(self, finished: Finished) -> None:
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
        said = {**self._attributes, **{f"specdec.{name}_ms": round(1e3 * t, 3) for name, t in zip(PARTS, self._totals)}}
        trace_id, span_id = self.context.trace_id, self.context.span_id
        names = ("Generate", trace_id, span_id, self._parent_id, self._began_s, time.monotonic(), SpanKind.SERVER)
        self._record(Span(*names, said, tuple(self._notes), error=self._error))

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
