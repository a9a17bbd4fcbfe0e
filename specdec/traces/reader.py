"""Traces read from Jaeger's `/api/v3/traces` or a file: the tree of spans on one clock, and the shares of the time.

Both give OTLP's JSON: ids are hexadecimal and numbers may be strings. The root's totals contain the time of every
round, detailed or not.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from specdec.errors import ConfigError, SessionUnknown

ANSWER_BYTES_MAX = 256 << 20
TIMEOUT_S = 10.0
SERVER, CLIENT = (2, "SPAN_KIND_SERVER"), (3, "SPAN_KIND_CLIENT")
FAILED = (2, "STATUS_CODE_ERROR")
VALUES: dict[str, Callable[[Any], Any]] = {"stringValue": str, "boolValue": bool, "intValue": int, "doubleValue": float}
COORDINATOR, DRAFT = "specdec-coordinator", "specdec-draft"
SEARCH_HOURS = 24 * 14
OFFSET, DRAFT_ARRIVED = "specdec.clock_offset_ms", "draft tokens arrived"
# In the order of display: name, the root's attributes summed, meaning.
PARTS = (
    ("draft", ("specdec.wait_ms",), "held back for draft tokens"),
    ("network", ("specdec.network_ms",), "on the way to the target and back"),
    ("queue", ("specdec.queue_ms",), "at the target, before its step"),
    ("forward", ("specdec.forward_ms", "specdec.sampling_ms"), "the target's model and its sampler"),
    ("heads", ("specdec.heads_ms",), "the heads on the target, after its steps"),
    ("rule", ("specdec.rule_ms",), "the coordinator's own work"),
)


@dataclass(frozen=True, slots=True)
class ReadEvent:
    """An event of a span; `at_ns` is a wall time of its machine."""

    name: str
    at_ns: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A span as read; `start_ns` and `end_ns` are wall times of its own machine."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int | str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: tuple[ReadEvent, ...]
    is_failed: bool

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the waterfall: a span, or several of one name below one line; their depth, and their starts by the
    root's clock."""

    spans: tuple[ReadSpan, ...]
    depth: int
    starts_ms: tuple[float, ...]

    @property
    def span(self) -> ReadSpan:
        """The first span."""
        return self.spans[0]

    @property
    def start_ms(self) -> float:
        """The start of the first span."""
        return self.starts_ms[0]


def fetch(address: str, trace_id: str) -> list[dict[str, Any]]:
    """Returns the resource spans of a trace, from Jaeger's API at `address` (http://HOST:16686).

    Raises SessionUnknown if there is no such trace, ConfigError without an answer or for one that is not Jaeger's.
    """
    return resource_spans(_get(f"{address.rstrip('/')}/api/v3/traces/{trace_id}"))


def find(address: str, request_id: str, since: datetime, until: datetime) -> list[dict[str, Any]]:
    """Returns the resource spans of the trace whose root has `specdec.request_id`, begun between two times.

    Raises SessionUnknown if there is none: a version that does not search by attributes answers with any trace.
    """
    found = search(address, {"specdec.request_id": request_id}, since, until, 1)
    if all(span.attributes.get("specdec.request_id") != request_id for span in spans_of(found)):
        raise SessionUnknown(f"no trace has request id {request_id}; give its trace id, which `finished` contains")
    return found


def search(
    address: str,
    attributes: Mapping[str, str],
    since: datetime,
    until: datetime,
    count: int,
    service: str = COORDINATOR,
) -> list[dict[str, Any]]:
    """Returns the resource spans of the `count` newest traces, begun between two times, that have a span of `service`
    with all `attributes`, if this version of Jaeger searches by attributes. Raises SessionUnknown without any.

    Newer versions spell parameters in another way; both spellings are sent.
    """
    values = (service, json.dumps(attributes), since.isoformat(), until.isoformat(), str(count))
    spellings = (
        ("serviceName", "attributes", "startTimeMin", "startTimeMax", "searchDepth"),
        ("service_name", "attributes", "start_time_min", "start_time_max", "search_depth"),
    )
    query = {f"query.{name}": value for names in spellings for name, value in zip(names, values)}
    return resource_spans(_get(f"{address.rstrip('/')}/api/v3/traces?{urlencode(query)}"))


def _get(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            data: bytes = answer.read(ANSWER_BYTES_MAX)
            return data
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise SessionUnknown(
                f"{url.partition('?')[0]} knows no such trace; spans arrive some seconds after the end"
            ) from None
        raise ConfigError(f"{url} answered {error.code}: {error.read(300).decode(errors='replace')}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"no answer from {url}: {error}; is --jaeger right?") from None


def resource_spans(data: bytes) -> list[dict[str, Any]]:
    """Returns the resource spans in an answer of Jaeger, an export, or lines of either. Raises ConfigError."""
    found: list[dict[str, Any]] = []
    try:
        text = data.decode("utf-8")
        while text := text.lstrip():  # values that follow each other: a gateway that streams sends several
            value, end = json.JSONDecoder().raw_decode(text)
            text = text[end:]
            for part in value if isinstance(value, list) else [value]:
                found += part.get("result", part)["resourceSpans"]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ConfigError("this is no trace: JSON with resourceSpans is expected, as OTLP writes it") from None
    if not found:
        raise SessionUnknown("the trace has no spans")
    return found


def spans_of(found: list[dict[str, Any]]) -> list[ReadSpan]:
    """Returns all spans in order of their start, duplicates once. Raises ConfigError."""
    spans: dict[str, ReadSpan] = {}
    try:
        for own in found:
            service = str(_attributes(own.get("resource", {})).get("service.name", "?"))
            for span in (span for scope in own.get("scopeSpans", []) for span in scope.get("spans", [])):
                read = ReadSpan(
                    name=span["name"],
                    service=service,
                    trace_id=str(span.get("traceId", "")),
                    span_id=_identifier(span["spanId"]),
                    parent_id=_identifier(span.get("parentSpanId", "")),
                    kind=span.get("kind", ""),
                    start_ns=int(span["startTimeUnixNano"]),
                    end_ns=int(span["endTimeUnixNano"]),
                    attributes=_attributes(span),
                    events=tuple(
                        ReadEvent(event["name"], int(event["timeUnixNano"]), _attributes(event))
                        for event in span.get("events", [])
                    ),
                    is_failed=span.get("status", {}).get("code") in FAILED,
                )
                spans[read.span_id] = read
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"a span of this trace cannot be read: {error}") from None
    return sorted(spans.values(), key=lambda span: span.start_ns)


def _identifier(text: str) -> str:
    """Returns a span's id in hexadecimal; protobuf's own JSON has base64 in its place."""
    if len(text) not in (0, 16):
        try:
            return base64.b64decode(text, validate=True).hex()
        except binascii.Error:
            raise ValueError(f"{text!r} is no span id") from None
    return text.lower()


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a resource or span that are words or numbers."""
    said = {}
    for entry in holder.get("attributes", []):
        for kind, value in entry.get("value", {}).items():
            if kind in VALUES:
                said[entry["key"]] = VALUES[kind](value)
    return said


def kind_of(span: ReadSpan) -> tuple[str, str]:
    """The name and service of a span; those of one kind may share a line."""
    return span.name, span.service


class TraceTree:
    """The spans of one generation. Raises SessionUnknown if there is no `Generate` among them."""

    def __init__(self, spans: list[ReadSpan]) -> None:
        self.roots = [span for span in spans if span.name == "Generate"]
        if not self.roots:
            raise SessionUnknown(f"none of the {len(spans)} spans is a Generate: its end has not arrived yet")
        self.root = self.roots[0]
        self._children: dict[str, list[ReadSpan]] = defaultdict(list)
        for span in spans:
            self._children[span.parent_id].append(span)
        self.spans = [span for siblings in self._children.values() for span in siblings]
        arrived = [event for span in self.spans for event in span.events if event.name == DRAFT_ARRIVED]
        self._draft_offset_ms = float(arrived[-1].attributes.get(OFFSET, 0.0)) if arrived else 0.0

    def below_root(self) -> Iterator[ReadSpan]:
        """Yields the first root and all spans below it; a trace may hold those of its caller too."""
        found = [self.root]
        while found:
            span = found.pop()
            yield span
            found += self._children[span.span_id]

    def lines(self, root: ReadSpan, fold_from: float = math.inf) -> Iterator[Line]:
        """Yields the tree in order, parents before children, each machine's times moved to the coordinator's clock.
        `fold_from`: from this number on, spans of one name below one line are one line, at the place of the first."""

        def below(members: list[tuple[ReadSpan, float]], depth: int) -> Iterator[Line]:
            starts_ms = tuple((span.start_ns - root.start_ns) / 1e6 - skew_ms for span, skew_ms in members)
            yield Line(tuple(span for span, _ in members), depth, starts_ms)
            children = [
                (child, skew_ms + self._hop_ms(span, child))
                for span, skew_ms in members
                for child in self._children[span.span_id]
            ]
            counts = Counter(kind_of(child) for child, _ in children)
            folded: set[tuple[str, str]] = set()
            for child, skew_ms in sorted(children, key=lambda one: one[0].start_ns):
                kind = kind_of(child)
                if counts[kind] < fold_from:
                    yield from below([(child, skew_ms)], depth + 1)
                elif kind not in folded:
                    folded.add(kind)
                    yield from below([one for one in children if kind_of(one[0]) == kind], depth + 1)

        return below([(root, 0.0)], 0)

    def _hop_ms(self, span: ReadSpan, child: ReadSpan) -> float:
        """The milliseconds between the clocks of a span and its child: none, unless the child is on another machine."""
        if child.kind not in SERVER:
            return 0.0
        return float(span.attributes.get(OFFSET, 0.0)) if span.kind in CLIENT else self._draft_offset_ms

    def shares(self) -> list[tuple[str, float, float, str]]:
        """Returns the parts of the call's time: name, milliseconds, share of the call, meaning. Their sum: the call."""
        total_ms = max(self.root.duration_ms, 1e-9)
        spent = [
            (name, sum(float(self.root.attributes.get(key, 0.0)) for key in attributes), meaning)
            for name, attributes, meaning in PARTS
        ]
        rest_ms = max(0.0, total_ms - sum(spent_ms for _, spent_ms, _ in spent))
        spent.append(("waiting", rest_ms, "before the first round, and for the reader"))
        return [(name, spent_ms, spent_ms / total_ms, meaning) for name, spent_ms, meaning in spent]

    def drafting_ms(self) -> float:
        """Milliseconds of the draft's steps; they run beside the rounds."""
        return float(self.root.attributes.get("specdec.draft_ms", 0.0))

    def clock_offsets_ms(self) -> Mapping[str, float]:
        """Returns, by service, by how many milliseconds its clock is ahead of the coordinator's (the link's stamps)."""
        targets = [span.attributes[OFFSET] for span in self.spans if span.kind in CLIENT and OFFSET in span.attributes]
        found = {"target": float(targets[-1])} if targets else {}
        return found | ({"draft": self._draft_offset_ms} if self._draft_offset_ms else {})
