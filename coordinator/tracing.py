"""The spans of one generation: made from its events and every round's record, each recorded when it ends.

`Generate` is the root; below it the prefill and groups of rounds, below those detailed rounds, draft steps, and the
summed parts of the other rounds, which cost next to nothing. Sums of a replica's work are recorded here in its name:
its answers have the times, and only here it is known which rounds lie beside them. Whether a request is recorded is
decided once, at its arrival (`open_request`); the trace contexts of its items (`in_context`) pass the decision to the
replicas. Nothing here affects the text, and the session knows nothing of it.

Attribute names: `gen_ai.*` as in OpenTelemetry, all others under `specdec.*`. Never prompts, texts, token ids, stop
strings, labels.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from specdec.coordinator.fleet import Choice
from specdec.coordinator.replicas import Draft, Target
from specdec.coordinator.statistics import CoordinatorMetrics, RequestStatistics
from specdec.coordinator.trace_rounds import (
    SLOW_ROUND_COUNT_MAX,
    Parts,
    RoundGroup,
    TraceNames,
    begins_group,
    group_spans,
    is_drafting_detailed,
    is_round_detailed,
    milliseconds,
    not_empty,
    parts_of,
    round_group_of,
    round_spans,
    slow_round_event,
    unanswered_spans,
)
from specdec.errors import SpecdecError
from specdec.protocol.events import Concluded, Event, FromDraft, Note, Ready, TargetFound
from specdec.protocol.items import Commit, DraftItem, Nodes, TargetItem, Trace, Verification, within
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
MOVED, DRAFT_CHANGED = "moved", "draft changed"  # to another target, or draft
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
    """A request with a recorded trace: it keeps the records, notes and messages of the group in progress. Of several
    choices each has a `Generate` below the request's `Choices`. It belongs to one event loop; no method blocks or
    raises."""

    def __init__(
        self, metrics: CoordinatorMetrics, context: Trace, request_id: str, tracing: Tracing, parent_id: bytes = b""
    ) -> None:
        super().__init__(metrics, context, request_id)
        self._tracing = tracing
        self._offset_ns = wall_offset_ns()
        self._began_s = time.monotonic()
        self._attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "specdec",
        }
        self._note_counts: Counter[str] = Counter()
        self._draft_lost_s: float | None = None  # None: it was not lost, or is back
        self._draft_unavailable_s = self._drafting_s = 0.0
        self._times = Parts()  # of the groups that ended
        self._error = ""
        self._group: RoundGroup | None = None
        self._choice: Choice | None = None  # None before it is made
        self._names = TraceNames(context.trace_id, context.span_id, parent_id, draft=DRAFT_SERVICE)
        self._sent_s: float | None = None  # None: nothing is in flight
        self._choices: list[RequestTrace] = []  # of a request with several
        self._kind = SpanKind.SERVER  # a choice is a part of its call

    def _of_choice(self, index: int) -> RequestTrace:
        context = Trace(self.context.trace_id, drawn_span_id(), sampled=True)
        own = RequestTrace(self._metrics, context, self.request_id, self._tracing, self.context.span_id)
        own._kind = SpanKind.INTERNAL
        own._attributes["specdec.choice"] = index
        self._choices.append(own)
        return own

    def in_context(self, item: TargetItem | DraftItem) -> TargetItem | DraftItem:
        group = self._group
        if isinstance(item, Verification) and group is not None:
            return within(item, group.context_of(item.round_index))
        if isinstance(item, Commit) and group is not None and is_drafting_detailed(self.statistics.rounds):
            return within(item, replace(group.context, detailed=True))
        return super().in_context(item)

    def admitted(self, request: GenerationRequest, started: Started, choice: Choice) -> None:
        super().admitted(request, started, choice)
        sampling, target = request.sampling, choice.target.usable()
        self._choice, self._names = choice, self._names._replace(target=target.trace_service)
        self._name_draft()
        self._attributes |= {
            "gen_ai.request.model": target.model_name,
            "gen_ai.request.max_tokens": started.max_tokens,
            **{f"gen_ai.request.{name}": getattr(sampling, name) for name in ("temperature", "top_p", "top_k")},
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
            if self._group is not None and self._choice is not None and self._choice.draft is not None:
                late_count = 0 if ready.note is None else int(ready.note.attributes["count"])
                stamps = self._choice.draft.link.stamps
                self._group.arrived(event.item, late_count, stamps, self.context.span_id, now_s)
        elif ready.note is not None:
            self._note(ready.note, now_s if ready.record is None else ready.record.times.end_s)
        if ready.record is not None:
            self._on_round(ready.record, isinstance(event, Concluded) and event.ends)
        if ready.to_target and isinstance(ready.to_target[-1], Verification):
            if self._sent_s is None:
                self._sent_s = now_s
            else:
                self._note(Note("sent again"), now_s)

    def on_moved(self, target: Target, reason: str, cause: str, now_s: float) -> None:
        """Ends the group at the last round of the old target: spans name the target that answered."""
        super().on_moved(target, reason, cause, now_s)
        group = self._group
        if self._choice is not None:
            self._choice = replace(self._choice, target=target)
        if group is not None and group.records:
            began_s = group.records[-1].times.end_s
            self._end_group(group, began_s)
            self._begin_group(began_s)
        self._names = self._names._replace(target=target.usable().trace_service)
        self._note(Note(MOVED, {"reason": reason, "peer": target.address}), now_s)

    def on_draft_changed(self, draft: Draft, cause: str) -> None:
        super().on_draft_changed(draft, cause)
        if self._choice is not None:
            self._choice = replace(self._choice, draft=draft)
        self._note(Note(DRAFT_CHANGED, {"reason": cause, "peer": draft.address}), time.monotonic())

    def _begin_group(self, start_s: float) -> None:
        earlier = () if self._group is None else self._group.messages
        context = Trace(self.context.trace_id, drawn_span_id(), sampled=True)
        self._group = RoundGroup(context, round_group_of(self.statistics.rounds), start_s, earlier)

    def _on_round(self, record: RoundRecord, is_last: bool) -> None:
        """A verdict is committed, and what follows it is not sent yet."""
        group, choice, end_s = self._group, self._choice, record.times.end_s
        assert group is not None and choice is not None
        if record.step.preemptions:
            self._note(Note("preempted by the target", {"times": record.step.preemptions}), end_s)
        group.records.append(record)
        if is_round_detailed(record.round_index):
            self._record(round_spans(record, group, self._names, choice.target.link.stamps))
        self._sent_s = None
        if not is_last and begins_group(record.round_index + 1):
            self._end_group(group, end_s)
            self._begin_group(end_s)

    def _end_group(self, group: RoundGroup, end_s: float) -> None:
        parts = list(map(parts_of, group.records))
        self._times = self._times.plus(parts)
        drafting_s = min(group.drafting_us / 1e6, end_s - self._began_s - self._drafting_s)  # whatever the draft says
        self._drafting_s += drafting_s
        slow = slow_round_event(group.records)
        if slow is not None and self._note_counts[slow.name] < SLOW_ROUND_COUNT_MAX:
            self._note_counts[slow.name] += 1
            group.note(slow)
        self._record(group_spans(group, end_s, parts, drafting_s, self._names, self._error))

    def _note(self, note: Note, now_s: float) -> None:
        """Records an event outside the rounds."""
        if self._group is not None:
            said = {f"specdec.{key}": value for key, value in note.attributes.items()}
            self._group.note(SpanEvent(note.name, now_s, said))
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
        more: dict[str, Any] = {"attributes": {"error.type": DRAFT_LOST}, "error": DRAFT_LOST}
        names, more["service"] = self._names, self._names.draft
        lost = names.span("draft unavailable", b"", names.root_id, began_s, now_s, **more)
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
        self._leave_group()

    def failed(self, error: SpecdecError) -> None:
        """Records the error's reason and code on the root; its message may quote the user's text and is left out."""
        super().failed(error)
        code = code_of(error)
        self._attributes |= {"error.type": error.reason, "rpc.grpc.status_code": code.value[0]}
        self._error = error.reason if code.name in FAULTS else ""

    def _leave_group(self) -> None:
        """Ends the current group, with the verification in flight if there is one: its answer will not be handled."""
        group, self._group = self._group, None
        now_s = time.monotonic()
        self._end_draft_loss(now_s)
        if group is None:
            return
        if self._sent_s is not None:
            name = self.statistics.rounds, self._sent_s, now_s
            self._record(unanswered_spans(*name, group, self._names, self._error))
        self._end_group(group, max(now_s, group.round_began_s))

    def closed(self) -> None:
        super().closed()
        self._leave_group()
        if self._choices:
            self._close_choices()
        elif not {"error.type", "gen_ai.response.finish_reasons"} & self._attributes.keys():
            self._attributes["specdec.cancelled"] = True
        said = {**self._attributes, **milliseconds(**self._times._asdict()), **self._troubles()}
        more: dict[str, Any] = {"kind": self._kind, "attributes": said, "error": self._error}
        ids = self._names.root_id, self._names.parent_id
        name = "Choices" if self._choices else "Generate"
        self._record((self._names.span(name, *ids, self._began_s, time.monotonic(), **more),))

    def _close_choices(self) -> None:
        """All choices are closed: says what they are together."""
        own = [choice.statistics for choice in self._choices]
        self._error = next(filter(None, (choice._error for choice in self._choices)), "")
        self._attributes |= {
            "specdec.request_id": self.request_id,
            "specdec.choices": len(own),
            "gen_ai.usage.input_tokens": own[0].prompt_tokens,
            "gen_ai.usage.output_tokens": sum(each.output_tokens for each in own),
        }

    def _troubles(self) -> dict[str, AttributeValue]:
        """Returns attributes to search for: what happened to this request, where it did."""
        return not_empty(
            draft_ms=round(1000 * self._drafting_s, 3),
            draft_lost=self._note_counts[DRAFT_LOST],
            draft_unavailable_ms=round(1000 * self._draft_unavailable_s, 3),
            policy_switches=self._note_counts[POLICY_SWITCHED],
            moves=self._note_counts[MOVED],
            draft_changes=self._note_counts[DRAFT_CHANGED],
            resumed=bool(self._attributes.get("specdec.resumed_tokens")),
        )

    def _observe(self, histogram: Histogram, value_s: float) -> None:
        histogram.add_traced(value_s, self.context.trace_id.hex(), time.time())

    def _record(self, spans: Iterable[Span]) -> None:
        self._tracing.record(spans, self._offset_ns)
