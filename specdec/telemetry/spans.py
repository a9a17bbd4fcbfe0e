"""A span as a value: name, start, end, parent, attributes.

Spans are made after the fact from measured times, so no span is open during work and there is no current span. If both
sides of a link must name one span, each derives its id from one that is sent. Attributes are numbers, names and flags:
never prompts, texts or token ids. This module knows no exporter.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec.protocol.items import Nodes

SPAN_ID_BYTES = 8

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]


class SpanKind(enum.Enum):
    """The side of a hop that a span is on; the numbers are OTLP's."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event at one moment; `time_s` is a reading of the monotonic clock."""

    name: str
    time_s: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanLink:
    """A link to a related span."""

    trace_id: bytes
    span_id: bytes
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times are readings of the monotonic clock, in seconds.

    `parent_id` is empty for a span without parent, `error` for one without failure, `service` unless another service
    than the recording one did the work. `events` may make its members while it is read, and is read once, by another
    thread.
    """

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    start_s: float
    end_s: float
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Attributes = field(default_factory=dict)
    events: Iterable[SpanEvent] = ()
    links: tuple[SpanLink, ...] = ()
    error: str = ""
    service: str = ""


def derived_span_id(span_id: bytes, *names: str | int) -> bytes:
    """Returns the id of the span with `names` below the given one: the same on every machine, never all zeros."""
    text = "/".join(map(str, names)).encode()
    digest = hashlib.sha256(span_id + text).digest()
    return next(digest[start : start + SPAN_ID_BYTES] for start in range(24) if any(digest[start : start + 8]))


def draft_span_id(request_span_id: bytes, nodes: Nodes) -> bytes:
    """Returns the id of the draft's span of one message in detail; `request_span_id` is sent with Open."""
    return derived_span_id(request_span_id, "draft", nodes.incarnation, nodes.epoch, nodes.nodes[0].node_id)
