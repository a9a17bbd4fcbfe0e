"""The spans of the target for detailed rounds, step by step.

Each such round has a `verify` span from the arrival of its message to its answer, and below it its wait (`queue`), its
forward pass (`forward`), its sampler (`sampling`) and what heads took after it (`heads`). Of a step that served several
rounds, the `forward` of the first detailed round has a link to every round; those of the others link to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.engine.scheduling.feed import StepTiming
from specdec.protocol.items import Verification
from specdec.telemetry.spans import Attributes, Span, SpanKind, SpanLink, derived_span_id, drawn_span_id


@dataclass(frozen=True, slots=True)
class Served:
    """An answered round; times by the monotonic clock. `node_count`: of its feature head's tree."""

    item: Verification
    timing: StepTiming
    arrived_s: float
    answered_s: float
    node_count: int = 0

    @property
    def link(self) -> SpanLink:
        """A link to the round, or to its round group if the round has no span of its own."""
        trace = self.item.trace
        return SpanLink(trace.trace_id, trace.span_id, {"specdec.round": self.item.round_index})

    @property
    def span_id(self) -> bytes:
        """The id of its `verify` span on this side."""
        return derived_span_id(self.item.trace.span_id, "verify", "target")

    def verify(self) -> Span:
        """Returns its `verify` span."""
        trace = self.item.trace
        ids = trace.trace_id, self.span_id, derived_span_id(trace.span_id, "verify")
        attributes = {"specdec.round": self.item.round_index, "specdec.offered": len(self.item.draft_token_ids)}
        return Span("verify", *ids, self.arrived_s, self.answered_s, SpanKind.SERVER, attributes)

    def below(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> Span:
        """Returns a span below its `verify`."""
        ids = self.item.trace.trace_id, drawn_span_id(), self.span_id
        return Span(name, *ids, start_s, end_s, attributes=attributes)


def spans_of(rounds: Sequence[Served]) -> list[Span]:
    """Returns the spans of one step that served these rounds; none if no round is detailed."""
    detailed = [served for served in rounds if served.item.trace.detailed]
    if not detailed:
        return []
    spans: list[Span] = []
    links = tuple(served.link for served in rounds)
    for served in detailed:
        own = served.timing
        shared = {"specdec.step_rows": own.row_count, "specdec.step_sessions": own.feed_count}
        sampling_began_s, heads_began_s = own.ended_s - own.sampling_s, own.ended_s - own.hidden_s
        forward = replace(served.below("forward", own.started_s, sampling_began_s, shared), links=links)
        if served is detailed[0]:
            links = (SpanLink(forward.trace_id, forward.span_id),)
        spans += [forward, served.below("sampling", sampling_began_s, heads_began_s, {}), served.verify()]
        if own.hidden_s:
            asked = {"specdec.window": served.item.head_plan.window, "specdec.nodes": served.node_count}
            spans.append(served.below("heads", heads_began_s, own.ended_s, asked))
        spans.append(served.below("queue", served.arrived_s, own.first_started_s, {}))
        if own.step_count > 1:
            steps = {"specdec.steps": own.step_count - 1}
            spans.append(served.below("chunks", own.first_started_s, own.started_s, steps))
    return spans
