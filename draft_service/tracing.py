"""The spans of the draft: one per message in detail, from the start of its step to its sending.

The coordinator records the other half, from the same start to the arrival; both name the pair by what travels anyway.
"""

from __future__ import annotations

from specdec.protocol.items import Nodes, Trace
from specdec.telemetry.spans import Span, SpanKind, derived_span_id, draft_span_id

DETAILED_STEP_COUNT_MAX = 2  # after each commit in detail; more would crowd out the rounds they serve


def draft_span(request: Trace, nodes: Nodes, began_s: float, sent_s: float, session_count: int) -> Span:
    """The span of one session's part in a step; `request` is the trace its session was opened with."""
    parent_id = draft_span_id(request.span_id, nodes)
    return Span(
        "draft",
        request.trace_id,
        derived_span_id(parent_id, "draft"),
        parent_id,
        began_s,
        sent_s,
        SpanKind.SERVER,
        {
            "specdec.draft_tokens": len(nodes.nodes),
            "specdec.step_rows": nodes.step_rows,
            "specdec.step_sessions": session_count,
        },
    )
