"""The spans of the target: what it did for rounds in detail, step by step.

Each such round has a `verify` span from the arrival of its message to its answer, and below it what it waited (`queue`)
and what it was computed in (`forward`). A forward that served several rounds is one span, below the first round in
detail, with a link to every round it served; the others link to it. Engine thread only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from specdec.engine.feed import StepTiming
from specdec.protocol.items import Verification
from specdec.telemetry.spans import SPAN_ID_BYTES, Attributes, Span, SpanKind, SpanLink, derived_span_id
from specdec.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Served:
    """A round that was answered; times by the monotonic clock."""

    item: Verification
    timing: StepTiming
    arrived_s: float
    answered_s: float

    @property
    def span_id(self) -> bytes:
        """Of its `verify` span on this side."""
        return derived_span_id(self.item.trace.span_id, "verify", "target")

    @property
    def link(self) -> SpanLink:
        """To the round, or to its segment where the round has no span of its own."""
        trace = self.item.trace
        return SpanLink(trace.trace_id, trace.span_id, {"specdec.round": self.item.round_index})


class StepSpans:
    """Gathers the rounds of one step and records their spans once it is over."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._rounds: list[Served] = []

    def add(self, served: Served) -> None:
        """A round of a sampled request was answered."""
        self._rounds.append(served)

    def flush(self) -> None:
        """The step is over: every round it served has been told."""
        rounds, self._rounds = self._rounds, []
        if any(served.item.trace.detailed for served in rounds):
            self._tracing.record(tuple(spans_of(rounds)))


def spans_of(rounds: list[Served]) -> Iterator[Span]:
    """The spans of one step that served these rounds, one of which at least is in detail."""
    detailed = [served for served in rounds if served.item.trace.detailed]
    first, timing = detailed[0], detailed[0].timing
    forward_id = os.urandom(SPAN_ID_BYTES)
    shared = {
        "specdec.step_rows": timing.row_count,
        "specdec.step_sessions": timing.feed_count,
        "specdec.evidence_ms": round(1000 * timing.evidence_s, 4),
    }
    links = tuple(served.link for served in rounds)
    yield below(first, "forward", timing.started_s, timing.ended_s, shared, links, forward_id)
    for served in detailed:
        own = served.timing
        yield below(served, "queue", served.arrived_s, own.first_started_s)
        if own.step_count > 1:
            yield below(served, "chunks", own.first_started_s, own.started_s, {"specdec.steps": own.step_count - 1})
        trace, item = served.item.trace, served.item
        attributes = {"specdec.round": item.round_index, "specdec.offered": len(item.draft_token_ids)}
        yield Span(
            "verify",
            trace.trace_id,
            served.span_id,
            derived_span_id(trace.span_id, "verify"),
            served.arrived_s,
            served.answered_s,
            SpanKind.SERVER,
            attributes,
            links=() if served is first else (SpanLink(first.item.trace.trace_id, forward_id),),
        )


def below(
    served: Served,
    name: str,
    start_s: float,
    end_s: float,
    attributes: Attributes | None = None,
    links: tuple[SpanLink, ...] = (),
    span_id: bytes = b"",
) -> Span:
    """A span below a round's `verify`."""
    ids = (served.item.trace.trace_id, span_id or os.urandom(SPAN_ID_BYTES), served.span_id)
    return Span(name, *ids, start_s, end_s, attributes=attributes or {}, links=links)
