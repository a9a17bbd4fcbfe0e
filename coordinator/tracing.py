"""The spans of one generation: made from its events and every round's record, each recorded when it ends.

`Generate` is the root; below it the prefill and groups of rounds, below those detailed rounds, draft steps, and the
summed parts of the other rounds, which cost next to nothing. Sums of a replica's work are recorded here in its name:
its answers have the times, and only here it is known which rounds lie beside them. Whether a request is recorded is
decided once, at its arrival (`open_request`); the trace contexts of its items (`context_of`) pass the decision to the
replicas. Nothing here affects the text, and the session knows nothing of it.

Attribute names: `gen_ai.*` as in OpenTelemetry, all others under `specdec.*`. Never prompts, texts, token ids, stop
strings, labels.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from specdec.coordinator.fleet import Choice
from specdec.coordinator.statistics import CoordinatorMetrics, RequestStatistics
from specdec.coordinator.trace_rounds import (
    ARRIVAL_COUNT_MAX,
    PARTS,
    ROUND_GROUP,
    SLOW_ROUND_COUNT_MAX,
    TARGET_PARTS,
    DraftMessages,
    RoundGroup,
    begins_group,
    hop_attributes,
    is_drafting_detailed,
    is_round_detailed,
    milliseconds,
    parts_of,
    round_attributes,
    wasted_events,
)
from specdec.errors import SpecdecError
from specdec.protocol.events import Event, FromDraft, Note, Ready, TargetFound
from specdec.protocol.items import NO_TRACE, Commit, DraftItem, Nodes, TargetItem, Trace, Verification
from specdec.protocol.records import RoundRecord
from specdec.protocol.report import TRACED, Finished, Started
from specdec.protocol.request import GenerationRequest
from specdec.protocol.session import Session
from specdec.rpc.stamps import Stamps
from specdec.rpc.status import code_of
from specdec.telemetry.clock import wall_offset_ns
from specdec.telemetry.metrics import Histogram
from specdec.telemetry.spans import (
    AttributeValue,
    Span,
    SpanEvent,
    SpanKind,
    SpanLink,
    derived_span_id,
    drawn_span_id,
)
from specdec.telemetry.tracing import Tracing

DRAFT_SERVICE = "specdec-draft"  # the name of a draft whose own is unknown
DRAFT_LOST, DRAFT_CONNECTED, POLICY_SWITCHED = "draft lost", "draft connected", "policy switched"  # events
# Codes that are this side's failure, not a refusal, as OpenTelemetry defines for servers.
FAULTS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")


def open_request(
    metrics: CoordinatorMetrics, tracing: Tracing, caller: Trace | None, follows_caller: bool = False
) -> RequestStatistics:
    """Returns the statistics of a new request, with a trace if it is sampled; `caller`: the trace context it came with.

    The request id is the trace id, so that either finds the trace, unless the caller's trace may hold other requests.
    Unless `follows_caller`, neither the flag nor the id that a caller chose decides whether the trace is recorded.
    """
    drawn_id = secrets.token_bytes(16)
    trace_id = drawn_id if caller is None else caller.trace_id
    request_id = trace_id.hex() if caller is None else secrets.token_hex(16)
    parent_id = b"" if caller is None else caller.span_id
    if tracing.samples(trace_id, caller) if follows_caller else tracing.samples(drawn_id, None):
        context = Trace(trace_id, drawn_span_id(), sampled=True)
        return RequestTrace(metrics, context, request_id, tracing, parent_id)
    return RequestStatistics(metrics, Trace(trace_id, parent_id or drawn_span_id()), request_id)


class RequestTrace(RequestStatistics):
    """A request with a recorded trace. It belongs to one event loop; no method blocks or raises."""

    def __init__(
        self, metrics: CoordinatorMetrics, context: Trace, request_id: str, tracing: Tracing, parent_id: bytes = b""
    ) -> None:
        super().__init__(metrics, context, request_id)
        self._tracing = tracing
        self._parent_id = parent_id
        self._offset_ns = wall_offset_ns()
        self._began_s = self._round_began_s = time.monotonic()
        self._attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "specdec",
        }
        self._notes: list[SpanEvent] = []
        self._note_counts: Counter[str] = Counter()
        self._draft_lost_s: float | None = None  # None: it was not lost, or is back
        self._draft_unavailable_s = 0.0
        self._error = ""
        self._group: RoundGroup | None = None
        self._drafting = DraftMessages()
        self._drafting_s = 0.0
        self._choice: Choice | None = None  # None before it is made
        self._target_service = ""  # the target's name in traces
        self._draft_service = DRAFT_SERVICE  # the draft's name in traces, also once it is lost
        self._totals = (0.0,) * len(PARTS)
        self._slow_count = 0
        self._was_speculating = False
        self._round_id = b""  # of the round under way, where it is in detail
        self._round_context = self._commit_context = NO_TRACE
        self._sent_s: float | None = None  # None: nothing is in flight

    def context_of(self, item: TargetItem | DraftItem) -> Trace:
        if isinstance(item, Verification):
            return self._round_context
        return self._commit_context if isinstance(item, Commit) else super().context_of(item)

    def admitted(self, request: GenerationRequest, started: Started, choice: Choice) -> None:
        super().admitted(request, started, choice)
        sampling, target = request.sampling, choice.target.usable()
        self._choice, self._target_service = choice, target.trace_service
        self._was_speculating = choice.policy.is_speculating
        self._name_draft()
        self._attributes |= {
            "gen_ai.request.model": target.model_name,
            "gen_ai.request.max_tokens": started.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "specdec.request_id": started.request_id,
            "specdec.rule": started.rule.name,
            "specdec.speculative": request.speculative.enabled,
            "specdec.resumed_tokens": len(request.resumed_token_ids),
        }
        if sampling.seed is not None:  # an unsigned 64-bit number: OTLP's integers are signed
            self._attributes["gen_ai.request.seed"] = str(sampling.seed)

    def on_step(self, session: Session, event: Event, ready: Ready, now_s: float) -> None:
        super().on_step(session, event, ready, now_s)
        if isinstance(event, TargetFound) and self._group is None:
            self._round_began_s = now_s
            self._begin_group("prefill", 0)
        elif isinstance(event, FromDraft) and isinstance(event.item, Nodes):
            self._on_nodes(session, event.item, now_s)
        if ready.note is not None:
            self._note(ready.note, now_s)
        if ready.record is not None:
            self._on_round(session, ready.record)
        if ready.to_target and ready.to_target[-1] is session.in_flight:
            self._on_sent(session, now_s)

    def _begin_group(self, name: str, round_index: int) -> None:
        self._group = RoundGroup(name, self._round_began_s)
        self._name_round(self._group.span_id, round_index)

    def _name_round(self, group_id: bytes, round_index: int) -> None:
        """Sets the trace contexts of a round's verification and commit; the prefill is its own round."""
        trace_id, is_detailed = self.context.trace_id, is_round_detailed(round_index)
        self._round_id = b"" if not is_detailed else drawn_span_id() if round_index else group_id
        if is_detailed or self._round_context.span_id != group_id:
            self._round_context = Trace(trace_id, self._round_id or group_id, True, is_detailed)
        is_drafted = is_drafting_detailed(round_index)
        self._commit_context = Trace(trace_id, group_id, True, True) if is_drafted else NO_TRACE

    def _on_sent(self, session: Session, now_s: float) -> None:
        if self._sent_s is not None:
            self._note(Note("sent again"), now_s)
            return
        self._sent_s = now_s
        if self._round_id:
            self._drafting.offer(session, now_s)

    def _on_nodes(self, session: Session, nodes: Nodes, now_s: float) -> None:
        """The draft sent nodes, and the session has added the usable ones to its tree."""
        group = self._group
        if group is None:
            return
        group.draft_message_count += 1
        group.drafting_us += nodes.worked_us
        if nodes.is_detailed and nodes.nodes and group.arrival_count < ARRIVAL_COUNT_MAX:
            group.arrival_count += 1
            group.detailed_drafting_us += nodes.step_us
            stamps = self._stamps(is_draft=True)
            group.note(self._drafting.arrived(session, nodes, stamps, self.context.span_id, now_s))

    def _stamps(self, is_draft: bool = False) -> Stamps:
        """What the link to the target or the draft has measured."""
        assert self._choice is not None
        peer = self._choice.draft if is_draft else self._choice.target
        assert peer is not None
        return peer.link.stamps

    def _on_round(self, session: Session, record: RoundRecord) -> None:
        """A verdict is committed, and what follows it is not sent yet."""
        group = self._group
        assert group is not None
        if record.step.preemptions:
            self._note(Note("preempted by the target", {"times": record.step.preemptions}), record.times.end_s)
        group.add(record)
        if self._round_id:
            assert self._sent_s is not None
            if record.times.wait_s:
                self._record("wait", b"", self._round_id, self._sent_s - record.times.wait_s, self._sent_s)
            answered_s = self._sent_s + record.times.round_trip_s
            self._record_verification(answered_s, hop_attributes(record, self._stamps()))
            if self._round_id != group.span_id:
                links = self._drafting.links(session, record.tokens.accepted_count, self.context.trace_id)
                self._record_round(self._round_id, group, record, links)
        if session.policy.is_speculating != self._was_speculating:
            self._was_speculating = session.policy.is_speculating
            why, from_round = session.policy.prediction.reason, record.round_index + 1
            said: dict[str, str | int] = {"speculating": self._was_speculating, "why": why, "round": from_round}
            self._note(Note(POLICY_SWITCHED, said), record.times.end_s)
        self._sent_s, self._round_began_s = None, record.times.end_s
        if session.finished:
            self._round_id = b""
        elif begins_group(record.round_index + 1):
            self._begin_group(ROUND_GROUP, record.round_index + 1)
            self._end_group(group, record.times.end_s)
        else:
            self._name_round(group.span_id, record.round_index + 1)

    def _record_round(self, span_id: bytes, group: RoundGroup, record: RoundRecord, links: Iterable[SpanLink]) -> None:
        attributes = {**round_attributes(record), **milliseconds(parts_of(record))}
        more = {"attributes": attributes, "events": wasted_events(record), "links": tuple(links)}
        self._record("round", span_id, group.span_id, record.times.start_s, record.times.end_s, **more)

    def _record_verification(self, end_s: float, attributes: dict[str, AttributeValue], error: str = "") -> None:
        """Records this side's span of the verification of the current round: a detailed one, or one without answer."""
        assert self._sent_s is not None
        span_id = derived_span_id(self._round_id, "verify") if self._round_id else b""
        more = {"kind": SpanKind.CLIENT, "attributes": attributes, "error": error}
        parent_id = self._round_id or self._round_context.span_id
        self._record("verify", span_id, parent_id, self._sent_s, end_s, **more)

    def _end_group(self, group: RoundGroup, end_s: float) -> None:
        self._totals = tuple(map(sum, zip(self._totals, group.parts())))
        self._drafting_s += group.end_drafting(end_s - self._began_s - self._drafting_s)
        if self._slow_count < SLOW_ROUND_COUNT_MAX:
            self._slow_count += group.note_slow_round()
        for part, part_start_s, part_end_s, round_count in group.sums():
            service = self._target_service if part in TARGET_PARTS else self._draft_service if part == "draft" else ""
            said = {"attributes": {"specdec.rounds": round_count}, "service": service}
            self._record(f"{part}, summed", b"", group.span_id, part_start_s, part_end_s, **said)
        more = {"attributes": group.attributes(), "events": group, "error": self._error}
        self._record(group.full_name(), group.span_id, self.context.span_id, group.start_s, end_s, **more)

    def _note(self, note: Note, now_s: float) -> None:
        """Records an event outside the rounds."""
        said = {f"specdec.{key}": value for key, value in note.attributes.items()}
        add = self._notes.append if self._group is None else self._group.note
        add(SpanEvent(note.name, now_s, said))
        self._note_counts[note.name] += 1
        if note.name == DRAFT_LOST:
            self._draft_lost_s = now_s
        elif note.name == DRAFT_CONNECTED:
            self._name_draft()
            self._end_draft_loss(now_s)

    def _name_draft(self) -> None:
        draft = None if self._choice is None else self._choice.draft
        if draft is not None and draft.description is not None:
            self._draft_service = draft.description.trace_service or DRAFT_SERVICE

    def _end_draft_loss(self, now_s: float) -> None:
        """The draft is back, or the text is over: records the time without it; nothing if it was not lost."""
        if self._draft_lost_s is None:
            return
        began_s, self._draft_lost_s = self._draft_lost_s, None
        self._draft_unavailable_s += now_s - began_s
        more = {"attributes": {"error.type": DRAFT_LOST}, "error": DRAFT_LOST}
        more |= {"service": self._draft_service}
        self._record("draft unavailable", b"", self.context.span_id, began_s, now_s, **more)

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
        self._leave_group()

    def failed(self, error: SpecdecError) -> None:
        """Records the error's reason and code on the root; its message may quote the user's text and is left out."""
        super().failed(error)
        code = code_of(error)
        self._attributes |= {"error.type": error.reason, "rpc.grpc.status_code": code.value[0]}
        self._error = error.reason if code.name in FAULTS else ""

    def _error_type(self) -> dict[str, AttributeValue]:
        """Returns the attribute of spans that the failure of this side ended."""
        return {"error.type": self._error} if self._error else {}

    def left(self) -> None:
        self._leave_group()

    def _leave_group(self) -> None:
        """Ends the current group, with the verification in flight if there is one: its answer will not be handled."""
        group, self._group = self._group, None
        now_s = time.monotonic()
        self._end_draft_loss(now_s)
        if group is None:
            return
        if self._sent_s is not None:
            self._record_verification(now_s, {"specdec.unanswered": True, **self._error_type()}, self._error)
            if self._round_id and self._round_id != group.span_id:
                self._record("round", self._round_id, group.span_id, self._round_began_s, now_s)
        self._end_group(group, max(now_s, self._round_began_s))

    def closed(self) -> None:
        super().closed()
        self._leave_group()
        if not {"error.type", "gen_ai.response.finish_reasons"} & self._attributes.keys():
            self._attributes["specdec.cancelled"] = True
        said = {**self._attributes, **milliseconds(self._totals), **self._troubles()}
        more = {"kind": SpanKind.SERVER, "attributes": said, "events": tuple(self._notes), "error": self._error}
        self._record("Generate", self.context.span_id, self._parent_id, self._began_s, time.monotonic(), **more)

    def _troubles(self) -> dict[str, AttributeValue]:
        """Returns attributes to search for: what happened to this request, where it did."""
        troubles: dict[str, AttributeValue] = {
            "specdec.draft_ms": round(1000 * self._drafting_s, 3),
            "specdec.draft_lost": self._note_counts[DRAFT_LOST],
            "specdec.draft_unavailable_ms": round(1000 * self._draft_unavailable_s, 3),
            "specdec.policy_switches": self._note_counts[POLICY_SWITCHED],
            "specdec.resumed": bool(self._attributes.get("specdec.resumed_tokens")),
        }
        return {name: value for name, value in troubles.items() if value}

    def _observe(self, histogram: Histogram, value_s: float) -> None:
        histogram.add_traced(value_s, self.context.trace_id.hex(), time.time())

    def _record(self, name: str, span_id: bytes, parent_id: bytes, start_s: float, end_s: float, **more: Any) -> None:
        """Records a span; an empty `span_id` is drawn."""
        span_id = span_id or drawn_span_id()
        span = Span(name, self.context.trace_id, span_id, parent_id, start_s, end_s, **more)
        self._tracing.record((span,), self._offset_ns)
