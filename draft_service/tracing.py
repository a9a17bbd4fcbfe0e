"""The spans of the draft, one for each detailed message."""

from __future__ import annotations

from specdec.draft_service.session import DraftSession
from specdec.protocol.items import Nodes
from specdec.telemetry.spans import Span, SpanKind, draft_span_id


def draft_span(session: DraftSession, nodes: Nodes, began_s: float, sent_s: float, session_count: int) -> Span:
    """Returns the span of one detailed message, from the start of its step to its sending, below the group of the last
    commit. The coordinator derives the same id for its links."""
    request, group = session.opened.trace, session.group
    attributes = {
        "specdec.draft_tokens": len(nodes.nodes),
        "specdec.step_rows": nodes.step_rows,
        "specdec.step_sessions": session_count,
    }
    ids = (request.trace_id, draft_span_id(request.span_id, nodes), group.span_id)
    return Span("draft", *ids, began_s, sent_s, SpanKind.SERVER, attributes)
