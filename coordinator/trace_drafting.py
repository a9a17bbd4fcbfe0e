"""Draft messages in detail: one span each, from the draft's step to its arrival, and what became of its tokens.

When a step began is known by the draft's clock only. The span starts at the earliest moment it can have been by ours,
so it never starts after the draft's own span of the step, whatever the link does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.trace_segments import Phase
from specdec.protocol.items import Nodes, Trace
from specdec.protocol.session import Session
from specdec.protocol.tree import Place
from specdec.rpc.stamps import Stamps
from specdec.telemetry.spans import AttributeValue, Span, SpanKind, SpanLink, draft_span_id

MESSAGE_COUNT_MAX = 32  # messages whose tokens a round may still offer
READING_S = 0.0001  # clocks are read and told to the microsecond; wall time is compared by a few readings


@dataclass(frozen=True, slots=True, eq=False)
class DraftMessage:
    """One message in detail: its span, when it came, and where its tokens stand in the tree."""

    span_id: bytes
    arrived_s: float
    places: tuple[Place, ...]


class DraftMessages:
    """The messages of one generation that are recorded in detail, and which of them the round in flight lives on."""

    def __init__(self) -> None:
        self._recent: deque[DraftMessage] = deque(maxlen=MESSAGE_COUNT_MAX)
        self._offered: list[tuple[DraftMessage, list[int]]] = []
        self._offered_s = 0.0

    def message(self, session: Session, nodes: Nodes, stamps: Stamps, root: Trace, phases: Sequence[Phase]) -> Span:
        """The span of a message that has just come; it hangs on the phase its step began in."""
        arrived_s = time.monotonic()
        places = [session.tree.named(nodes.epoch, node.node) for node in nodes.nodes]
        usable = tuple(place for place in places if place is not None and place.alive)
        span_id = draft_span_id(root.span_id, nodes)
        self._recent.append(DraftMessage(span_id, arrived_s, usable))
        earliest_ns = stamps.earliest_own_ns(nodes.step_began_us)
        start_s = arrived_s - nodes.step_us / 1e6 if earliest_ns is None else earliest_ns / 1e9
        start_s = max(start_s - READING_S, phases[0].start_s)
        phase = next((own for own in reversed(phases) if own.start_s <= start_s), phases[0])
        attributes: dict[str, AttributeValue] = {
            "specdec.draft_tokens": len(nodes.nodes),
            "specdec.branch_tokens": sum(not node.proposal for node in nodes.nodes),
            "specdec.tokens_too_late": len(nodes.nodes) - len(usable),
            "specdec.step_rows": nodes.step_rows,
            "specdec.server_ms": nodes.step_us / 1000,
            **link_attributes(stamps),
        }
        ids = (root.trace_id, span_id, phase.span_id)
        return Span("draft", *ids, start_s, arrived_s, SpanKind.CLIENT, attributes)

    def offer(self, path: Sequence[Place], now_s: float) -> None:
        """These places are offered by the round that is sent now."""
        self._offered_s = now_s
        self._offered = []
        for message in self._recent:
            indices = [index for index, place in enumerate(path) if place in message.places]
            if indices:
                self._offered.append((message, indices))

    def links(self, accepted_count: int, trace_id: bytes) -> tuple[SpanLink, ...]:
        """Links of the round that ended to the messages whose tokens it offered, with the tokens' fate."""
        offered, self._offered = self._offered, []
        return tuple(
            SpanLink(
                trace_id,
                message.span_id,
                {
                    "specdec.arrival_lead_ms": round(1000 * (self._offered_s - message.arrived_s), 4),
                    "specdec.offered": len(indices),
                    "specdec.accepted": sum(index < accepted_count for index in indices),
                },
            )
            for message, indices in offered
        )


def link_attributes(stamps: Stamps) -> dict[str, AttributeValue]:
    """What the stamps of a link tell: network time of its last exchange, and how the clocks stand."""
    said: dict[str, AttributeValue] = {}
    if stamps.network_s is not None:
        said["specdec.network_ms"] = round(1000 * stamps.network_s, 4)
    if (offset_s := stamps.clock_offset_s) is not None:
        said["specdec.clock_offset_ms"] = round(1000 * offset_s, 4)
    return said
