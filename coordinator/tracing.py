"""The spans of one generation: told of what happens and of every round's record, it records each span as it ends.

`Generate` is the root; below it the prefill and segments of 32 rounds, below those rounds and draft messages in detail.
A round costs next to nothing unless it is in detail. Whether a request is recorded is decided once, when it comes
(`open_request`); the contexts that its items are sent in (`context_of`) tell the replicas. Nothing here decides
anything about the text, and nothing of it is known to the session.

Attributes bear the names people know: `gen_ai.*` as OpenTelemetry spells them, ours under `specdec.*`. Never prompts,
texts, token ids, stop strings, labels.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from coordinator.figures import Figures, RequestFigures
from coordinator.trace_rounds import (
    PARTS,
    SEGMENT_ROUND_COUNT,
    SLOW_ROUND_COUNT_MAX,
    DraftMessages,
    Phase,
    hop_attributes,
    is_drafting_detailed,
    is_round_detailed,
    milliseconds,
    round_attributes,
    wasted_events,
)
from specdec.errors import SpecdecError
from specdec.protocol.items import NO_TRACE, Commit, DraftAsk, Nodes, TargetAsk, Trace, Verification
from specdec.protocol.report import TRACED, Finished, RoundRecord, Started
from specdec.protocol.request import Ask
from specdec.protocol.session import Session
from specdec.protocol.types import Description
from specdec.rpc.link import Link
from specdec.rpc.status import code_of
from specdec.telemetry.clock import wall_offset_ns
from specdec.telemetry.metrics import Histogram
from specdec.telemetry.spans import (
    SPAN_ID_BYTES,
    AttributeValue,
    Span,
    SpanEvent,
    SpanKind,
    SpanLink,
    derived_span_id,
)
from specdec.telemetry.tracing import Tracing

PHASE_COUNT_MAX = 8  # a draft step may have begun some segments ago, not more
LINGER_S = 1.0  # after the end: the draft's spans of what it had on the way must not lack their parents
# Codes that are this side's failure and no refusal, as OpenTelemetry draws the line for servers.
FAULTS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")


def open_request(figures: Figures, tracing: Tracing, caller: Trace | None) -> RequestFigures:
    """A request that has just come, its trace sampled or not; `caller`: the context it came with.

    The request id is the trace id, so that either finds the trace, unless the caller's trace may hold other requests.
    """
    trace_id = secrets.token_bytes(16) if caller is None else caller.trace_id
    request_id = trace_id.hex() if caller is None else secrets.token_hex(16)
    parent_id = b"" if caller is None else caller.span_id
    if tracing.samples(trace_id, caller):
        context = Trace(trace_id, os.urandom(SPAN_ID_BYTES), sampled=True)
        return RequestTrace(figures, context, request_id, tracing, parent_id)
    return RequestFigures(figures, Trace(trace_id, parent_id or secrets.token_bytes(SPAN_ID_BYTES)), request_id)


class RequestTrace(RequestFigures):
    """A request that is recorded. It belongs to one event loop; nothing it is told blocks or raises."""

    def __init__(
        self, figures: Figures, context: Trace, request_id: str, tracing: Tracing, parent_id: bytes = b""
    ) -> None:
        super().__init__(figures, context, request_id)
        self._tracing = tracing
        self._parent_id = parent_id
        self._offset_ns = wall_offset_ns()
        self._began_s = self._round_began_s = time.monotonic()
        self._attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "specdec",
        }
        self._notes: list[SpanEvent] = []
        self._error = ""
        self._phase: Phase | None = None
        self._recent: deque[Phase] = deque(maxlen=PHASE_COUNT_MAX)
        self._drafting = DraftMessages()
        self._totals = (0.0,) * len(PARTS)
        self._slow_count = 0
        self._was_speculating = False
        self._round_id = b""  # of the round under way, where it is in detail
        self._round_context = self._commit_context = NO_TRACE
        self._sent_s: float | None = None  # None: nothing is in flight

    def context_of(self, item: TargetAsk | DraftAsk) -> Trace:
        if isinstance(item, Verification):
            return self._round_context
        return self._commit_context if isinstance(item, Commit) else super().context_of(item)

    def admitted(self, ask: Ask, started: Started, target: Description) -> None:
        super().admitted(ask, started, target)
        sampling = ask.sampling
        self._attributes |= {
            "gen_ai.request.model": target.model_name,
            "gen_ai.request.max_tokens": started.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "specdec.request_id": started.request_id,
            "specdec.rule": started.rule.name,
            "specdec.speculative": ask.speculative.enabled,
            "specdec.resumed_tokens": len(ask.resumed_token_ids),
        }
        if sampling.seed is not None:  # an unsigned 64-bit number: OTLP's integers are signed
            self._attributes["gen_ai.request.seed"] = str(sampling.seed)

    def began(self, session: Session) -> None:
        self._was_speculating = session.policy.is_speculating
        self._round_began_s = time.monotonic()
        self._begin_phase("prefill", 0)

    def _begin_phase(self, name: str, round_index: int) -> None:
        self._phase = Phase(name, self._round_began_s)
        self._recent.append(self._phase)
        self._name_round(self._phase.span_id, round_index)

    def _name_round(self, phase_id: bytes, round_index: int) -> None:
        """Says in what context the verification and the commit of a round travel; the prefill is its own round."""
        trace_id, is_detailed = self.context.trace_id, is_round_detailed(round_index)
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
        if nodes.step_began_us and nodes.nodes and self._recent:
            message = self._drafting.message(session, nodes, link.stamps, self.context.span_id, self._recent)
            span_id, parent_id, start_s, end_s, attributes = message
            self._record("draft", span_id, parent_id, start_s, end_s, kind=SpanKind.CLIENT, attributes=attributes)

    def on_round(self, session: Session, record: RoundRecord, link: Link) -> None:
        super().on_round(session, record, link)
        phase = self._phase
        assert phase is not None
        if record.evictions:
            self.note("evicted by the target", times=record.evictions)
        phase.records.append(record)
        if self._round_id:
            assert self._sent_s is not None
            self._record_verification(self._sent_s + record.round_trip_s, hop_attributes(record, link.stamps))
            if self._round_id != phase.span_id:
                links = self._drafting.links(record.accepted_count, self.context.trace_id)
                self._record_round(self._round_id, phase, record, links)
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
            self._name_round(phase.span_id, record.round_index + 1)

    def _record_round(
        self, span_id: bytes, phase: Phase, record: RoundRecord, links: Iterable[SpanLink] = (), **said: AttributeValue
    ) -> None:
        attributes = {**round_attributes(record), **{f"specdec.{name}": value for name, value in said.items()}}
        more = {"attributes": attributes, "events": wasted_events(record), "links": tuple(links)}
        self._record("round", span_id, phase.span_id, record.start_s, record.end_s, **more)

    def _record_verification(self, end_s: float, attributes: dict[str, AttributeValue]) -> None:
        """The verification of the round under way, which is in detail, as this side saw it."""
        assert self._sent_s is not None
        span_id = derived_span_id(self._round_id, "verify")
        more = {"kind": SpanKind.CLIENT, "attributes": attributes}
        self._record("verify", span_id, self._round_id, self._sent_s, end_s, **more)

    def _end_phase(self, phase: Phase, end_s: float) -> None:
        self._totals = tuple(map(sum, zip(self._totals, phase.parts())))
        slow = phase.slow_round() if self._slow_count < SLOW_ROUND_COUNT_MAX else None
        if slow is not None and not is_round_detailed(slow.round_index):
            self._slow_count += 1
            self._record_round(os.urandom(SPAN_ID_BYTES), phase, slow, slow=True)
        more = {"attributes": phase.attributes(), "events": phase, "error": self._error}
        self._record(phase.name, phase.span_id, self.context.span_id, phase.start_s, end_s, **more)

    def note(self, name: str, **attributes: AttributeValue) -> None:
        said = {f"specdec.{key}": value for key, value in attributes.items()}
        note = self._notes.append if self._phase is None else self._phase.note
        note(SpanEvent(name, time.monotonic(), said))

    def finished(self, finished: Finished) -> None:
        super().finished(finished)
        statistics = finished.statistics
        self._attributes |= {
            "gen_ai.response.finish_reasons": (finished.reason.name.lower(),),
            "gen_ai.usage.input_tokens": finished.prompt_tokens,
            "gen_ai.usage.output_tokens": finished.output_tokens,
            **{f"specdec.{name}": getattr(statistics, name) for name in TRACED},
            "specdec.mean_acceptance_length": round(statistics.mean_acceptance_length, 4),
            "specdec.draft_acceptance_rate": round(statistics.draft_acceptance_rate, 4),
            "specdec.time_to_first_token_ms": round(1000 * statistics.time_to_first_token_s, 3),
            "specdec.predicted_tokens_per_s": round(statistics.predicted_tokens_per_s, 3),
            "specdec.observed_tokens_per_s": round(statistics.observed_tokens_per_s, 3),
            "specdec.policy_reason": statistics.policy_reason,
        }
        self._leave_phase()

    def failed(self, error: SpecdecError) -> None:
        """The root says it in one word and one code; the sentence may quote what the user sent."""
        super().failed(error)
        code = code_of(error)
        self._attributes |= {"error.type": error.reason, "rpc.grpc.status_code": code.value[0]}
        self._error = error.reason if code.name in FAULTS else ""

    def left(self) -> float:
        self._leave_phase()
        return LINGER_S

    def _leave_phase(self) -> None:
        """Ends the phase under way, with the verification in flight if there is one: its answer will not be heard."""
        phase, self._phase = self._phase, None
        now_s = time.monotonic()
        if phase is None:
            return
        if self._sent_s is not None and self._round_id:
            self._record_verification(now_s, {"specdec.unanswered": True})
            if self._round_id != phase.span_id:
                self._record("round", self._round_id, phase.span_id, self._round_began_s, now_s)
        self._end_phase(phase, max(now_s, self._round_began_s))

    def closed(self) -> None:
        super().closed()
        self._leave_phase()
        if not {"error.type", "gen_ai.response.finish_reasons"} & self._attributes.keys():
            self._attributes["specdec.cancelled"] = True
        said = {**self._attributes, **milliseconds(self._totals)}
        more = {"kind": SpanKind.SERVER, "attributes": said, "events": tuple(self._notes), "error": self._error}
        self._record("Generate", self.context.span_id, self._parent_id, self._began_s, time.monotonic(), **more)

    def _observe(self, histogram: Histogram, value_s: float) -> None:
        histogram.add_traced(value_s, self.context.trace_id.hex(), time.time())

    def _record(self, name: str, span_id: bytes, parent_id: bytes, start_s: float, end_s: float, **more: Any) -> None:
        span = Span(name, self.context.trace_id, span_id, parent_id, start_s, end_s, **more)
        self._tracing.record((span,), self._offset_ns)
