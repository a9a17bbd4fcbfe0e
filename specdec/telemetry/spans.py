"""A span as a value: what happened from when to when, below which other span, and what is to be known of it.

Spans are made after the fact from times that were taken anyway, so nothing is open while work goes on and there is no
current span. Where both sides of a link must name one span, each derives its id from one that travels. Attributes are
numbers, names and flags: never prompts, texts or token ids. How spans leave the process is not known here.
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
    """Which side of a hop a span is; the numbers are OTLP's."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened at one moment; `time_s` is a reading of the monotonic clock."""

    name: str
    time_s: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanLink:
    """Another span that this one has to do with."""

    trace_id: bytes
    span_id: bytes
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times are readings of the monotonic clock, in seconds.

    `parent_id` is empty for a span without parent. `error` says what failed and is empty where nothing did. `events`
    may make its members while it is read, and is read once, by another thread.
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


def derived_span_id(span_id: bytes, *names: str | int) -> bytes:
    """The id of the span that `names` tell apart below the one given: the same on every machine, never all zeros."""
    text = "/".join(map(str, names)).encode()
    digest = hashlib.sha256(span_id + text).digest()
    return next(digest[start : start + SPAN_ID_BYTES] for start in range(24) if any(digest[start : start + 8]))


def draft_span_id(request_span_id: bytes, nodes: Nodes) -> bytes:
    """The id of the coordinator's span of one draft message; `request_span_id` travels when the session is opened."""
    return derived_span_id(request_span_id, "draft", nodes.incarnation, nodes.epoch, nodes.nodes[0].node)
