"""A span as a value: name, start, end, parent, attributes.

Spans are made after the fact from measured times, so no span is open during work and there is no current span. If both
sides of a link must name one span, each derives its id from one that is sent. Attributes are numbers, names and flags:
never prompts, texts or token ids. This module knows no exporter.
"""

from __future__ import annotations

import enum
import hashlib
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec.protocol.items import Nodes

SPAN_ID_BYTES = 8
_ids = random.Random()  # seeded by the system once: ids must differ, not be secret, and a system call each costs more
os.register_at_fork(after_in_child=_ids.seed)

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


def drawn_span_id() -> bytes:
    """Returns a random span id; never all zeros. From any thread."""
    return _ids.randrange(1, 1 << 8 * SPAN_ID_BYTES).to_bytes(SPAN_ID_BYTES)


def derived_span_id(span_id: bytes, *names: str | int) -> bytes:
    """Returns the id of the span with `names` below the given one: the same on every machine, never all zeros."""
    digest = hashlib.sha256(span_id + "/".join(map(str, names)).encode()).digest()
    return digest[:SPAN_ID_BYTES] if any(digest[:SPAN_ID_BYTES]) else digest[SPAN_ID_BYTES : 2 * SPAN_ID_BYTES]


def draft_span_id(request_span_id: bytes, nodes: Nodes) -> bytes:
    """Returns the id of the draft's span of one message in detail; `request_span_id` is sent with Open."""
    return derived_span_id(request_span_id, "draft", nodes.incarnation, nodes.epoch, nodes.nodes[0].node_id)
