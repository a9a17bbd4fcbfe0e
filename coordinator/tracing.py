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

from specdec.coordinator.fleet import Choice
from specdec.coordinator.statistics import CoordinatorMetrics, RequestStatistics
from specdec.coordinator.trace_rounds import (
    ARRIVAL_COUNT_MAX,
    NO_PARTS,
    SLOW_ROUND_COUNT_MAX,
    DraftMessage,
    RoundGroup,
    TraceNames,
    arrival_event,
    begins_group,
    group_spans,
    is_drafting_detailed,
    is_round_detailed,
    milliseconds,
    parts_of,
    round_group_of,
    round_span_id,
    round_spans,
    slow_round_event,
    total,
    unanswered_spans,
)
from specdec.errors import SpecdecError
from specdec.protocol.events import Concluded, Event, FromDraft, Note, Ready, TargetFound
from specdec.protocol.items import NO_TRACE, Commit, DraftItem, Nodes, TargetItem, Trace, Verification
from specdec.protocol.records import RoundRecord
from specdec.protocol.report import TRACED, Finished, Started
from specdec.protocol.request import GenerationRequest
from specdec.rpc.status import code_of
from specdec.telemetry.clock import wall_offset_ns
from specdec.telemetry.metrics import Histogram
from specdec.telemetry.spans import AttributeValue, Span, SpanEvent, SpanKind, drawn_span_id
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
    """A request with a recorded trace: it keeps the records, notes and messages of the group in progress. It belongs to
    one event loop; no method blocks or raises."""

    def __init__(
        self, metrics: CoordinatorMetrics, context: Trace, request_id: str, tracing: Tracing, parent_id: bytes = b""
    ) -> None:
        super().__init__(metrics, context, request_id)
        self._tracing = tracing
        self._parent_id = parent_id
        self._offset_ns = wall_offset_ns()
        self._began_s = time.monotonic()
        self._attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "specdec",
        }
        self._notes: list[SpanEvent] = []  # outside the groups
        self._note_counts: Counter[str] = Counter()
        self._draft_lost_s: float | None = None  # None: it was not lost, or is back
        self._draft_unavailable_s = self._drafting_s = 0.0
        self._times = NO_PARTS  # of the groups that ended
        self._error = ""
        self._group: RoundGroup | None = None
        self._choice: Choice | None = None  # None before it is made
        self._names = TraceNames(context.trace_id, context.span_id, draft=DRAFT_SERVICE)  # a lost draft keeps its own
        self._context = NO_TRACE  # of the group's rounds without spans
        self._round_index = 0
        self._round_began_s = self._began_s
        self._sent_s: float | None = None  # None: nothing is in flight

    def context_of(self, item: TargetItem | DraftItem) -> Trace:
        trace_id, group_id = self.context.trace_id, self._context.span_id
        if isinstance(item, Verification):
            round_id = round_span_id(group_id, item.round_index)
            return Trace(trace_id, round_id, True, True) if round_id else self._context
        if isinstance(item, Commit):
            is_detailed = is_drafting_detailed(self._round_index)
            return Trace(trace_id, group_id, True, True) if is_detailed else NO_TRACE
        return super().context_of(item)

    def admitted(self, request: GenerationRequest, started: Started, choice: Choice) -> None:
        super().admitted(request, started, choice)
        sampling, target = request.sampling, choice.target.usable()
        self._choice, self._names = choice, self._names._replace(target=target.trace_service)
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

    def on_step(self, event: Event, ready: Ready, now_s: float) -> None:
        super().on_step(event, ready, now_s)
        if isinstance(event, TargetFound) and self._group is None:
            self._begin_group(now_s)
        if isinstance(event, FromDraft) and isinstance(event.item, Nodes):
            self._on_nodes(event.item, ready.note, now_s)
        elif ready.note is not None:
            self._note(ready.note, now_s if ready.record is None else ready.record.times.end_s)
        if ready.record is not None:
            self._on_round(ready.record, isinstance(event, Concluded) and event.ends)
        if ready.to_target and isinstance(ready.to_target[-1], Verification):
            if self._sent_s is None:
                self._sent_s = now_s
            else:
                self._note(Note("sent again"), now_s)

    def _begin_group(self, start_s: float) -> None:
        earlier = () if self._group is None else self._group.messages
        group = self._group = RoundGroup(round_group_of(self._round_index), start_s, earlier)
        self._context = Trace(self.context.trace_id, group.span_id, sampled=True)

    def _on_nodes(self, nodes: Nodes, note: Note | None, now_s: float) -> None:
        """The draft sent nodes; `note` says how many were too late."""
        group = self._group
        if group is None:
            return
        group.message_count += 1
        group.drafting_us += nodes.worked_us
        if nodes.is_detailed and nodes.nodes and len(group.messages) < ARRIVAL_COUNT_MAX:
            assert self._choice is not None and self._choice.draft is not None
            late_count = 0 if note is None else int(note.attributes["count"])
            group.messages.append(DraftMessage.of(nodes, self.context.span_id, now_s))
            group.note(arrival_event(nodes, late_count, self._choice.draft.link.stamps, now_s))

    def _on_round(self, record: RoundRecord, is_last: bool) -> None:
        """A verdict is committed, and what follows it is not sent yet."""
        group, choice, end_s = self._group, self._choice, record.times.end_s
        assert group is not None and choice is not None
        if record.step.preemptions:
            self._note(Note("preempted by the target", {"times": record.step.preemptions}), end_s)
        group.records.append(record)
        if is_round_detailed(record.round_index):
            self._record(round_spans(record, group, self.context.trace_id, choice.target.link.stamps))
        self._sent_s, self._round_began_s, self._round_index = None, end_s, record.round_index + 1
        if not is_last and begins_group(self._round_index):
            self._end_group(group, end_s)
            self._begin_group(end_s)

    def _end_group(self, group: RoundGroup, end_s: float) -> None:
        parts = list(map(parts_of, group.records))
        self._times = total((self._times, *parts))
        drafting_s = min(group.drafting_us / 1e6, end_s - self._began_s - self._drafting_s)  # whatever the draft says
        self._drafting_s += drafting_s
        slow = slow_round_event(group.records)
        if slow is not None and self._note_counts[slow.name] < SLOW_ROUND_COUNT_MAX:
            self._note_counts[slow.name] += 1
            group.note(slow)
        self._record(group_spans(group, end_s, parts, drafting_s, self._names, self._error))

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
            self._names = self._names._replace(draft=draft.description.trace_service or DRAFT_SERVICE)

    def _end_draft_loss(self, now_s: float) -> None:
        """The draft is back, or the text is over: records the time without it; nothing if it was not lost."""
        if self._draft_lost_s is None:
            return
        began_s, self._draft_lost_s = self._draft_lost_s, None
        self._draft_unavailable_s += now_s - began_s
        said = {"error.type": DRAFT_LOST}
        own = (self.context.trace_id, drawn_span_id(), self.context.span_id)
        lost = Span(
            "draft unavailable", *own, began_s, now_s, attributes=said, error=DRAFT_LOST, service=self._names.draft
        )
        self._record((lost,))

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
        self.left()

    def failed(self, error: SpecdecError) -> None:
        """Records the error's reason and code on the root; its message may quote the user's text and is left out."""
        super().failed(error)
        code = code_of(error)
        self._attributes |= {"error.type": error.reason, "rpc.grpc.status_code": code.value[0]}
        self._error = error.reason if code.name in FAULTS else ""

    def left(self) -> None:
        """Ends the current group, with the verification in flight if there is one: its answer will not be handled."""
        group, self._group = self._group, None
        now_s = time.monotonic()
        self._end_draft_loss(now_s)
        if group is None:
            return
        if self._sent_s is not None:
            times_s = self._round_began_s, self._sent_s, now_s
            self._record(unanswered_spans(group, self._round_index, times_s, self.context.trace_id, self._error))
        self._end_group(group, max(now_s, self._round_began_s))

    def closed(self) -> None:
        super().closed()
        self.left()
        if not {"error.type", "gen_ai.response.finish_reasons"} & self._attributes.keys():
            self._attributes["specdec.cancelled"] = True
        said = {**self._attributes, **milliseconds(self._times), **self._troubles()}
        own = (self.context.trace_id, self.context.span_id, self._parent_id)
        times = self._began_s, time.monotonic()
        self._record((Span("Generate", *own, *times, SpanKind.SERVER, said, tuple(self._notes), error=self._error),))

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

    def _record(self, spans: Iterable[Span]) -> None:
        self._tracing.record(spans, self._offset_ns)
