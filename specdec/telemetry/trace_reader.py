"""Traces as tools give them, read into plain values: OTLP's JSON, from a file or from Jaeger's `/api/v3/traces/{id}`.

Ids are hexadecimal there and numbers may be strings. It does not know what the spans of specdec mean.
"""

from __future__ import annotations

import base64
import binascii
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from specdec.errors import ConfigError, SessionUnknown

ANSWER_BYTES_MAX = 256 << 20
KINDS = {"SPAN_KIND_SERVER": 2, "SPAN_KIND_CLIENT": 3}
ERROR_STATUS = (2, "STATUS_CODE_ERROR")
SEARCH_SERVICE = "specdec-coordinator"
SEARCH_HOURS = 24 * 14


@dataclass(frozen=True, slots=True)
class ReadEvent:
    """An event; `time_ns` is wall time."""

    name: str
    time_ns: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A span as it was read; `start_ns` and `end_ns` are wall times of its own machine."""

    name: str
    service: str
    host: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[ReadEvent, ...] = ()
    is_failed: bool = False

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


def fetch(address: str, trace_id: str, timeout_s: float = 10.0) -> list[dict[str, Any]]:
    """The resource spans of a trace, from Jaeger's API at `address` (http://HOST:16686).

    Raises SessionUnknown where there is no such trace, ConfigError where nobody answers or not as Jaeger does.
    """
    return resource_spans(_get(f"{address.rstrip('/')}/api/v3/traces/{trace_id}", timeout_s))


def find(address: str, request_id: str, since: str, until: str, timeout_s: float = 10.0) -> list[dict[str, Any]]:
    """The same for the trace whose root has `specdec.request_id`, begun between two RFC 3339 times.

    Newer versions of Jaeger search by attributes here and spell parameters in another way; both spellings are sent.
    """
    values = (SEARCH_SERVICE, json.dumps({"specdec.request_id": request_id}), since, until, "1")
    spellings = (
        ("serviceName", "attributes", "startTimeMin", "startTimeMax", "searchDepth"),
        ("service_name", "attributes", "start_time_min", "start_time_max", "search_depth"),
    )
    query = {f"query.{name}": value for names in spellings for name, value in zip(names, values)}
    found = resource_spans(_get(f"{address.rstrip('/')}/api/v3/traces?{urlencode(query)}", timeout_s))
    wanted = {span.attributes.get("specdec.request_id") for span in spans_of(found)}
    if request_id not in wanted:  # a version that does not search by attributes answers with any trace
        raise SessionUnknown(f"no trace has request id {request_id}; give its trace id, which `finished` tells")
    return found


def _get(url: str, timeout_s: float) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            data: bytes = answer.read(ANSWER_BYTES_MAX)
            return data
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise SessionUnknown(f"{url} knows no such trace; spans arrive some seconds after the end") from None
        raise ConfigError(f"{url} answered {error.code}: {error.read(300).decode(errors='replace')}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"nobody answers at {url}: {error}; is --jaeger right?") from None


def resource_spans(data: bytes) -> list[dict[str, Any]]:
    """The resource spans in an answer of Jaeger's, an export, or lines of either. Raises ConfigError."""
    found: list[dict[str, Any]] = []
    try:
        for part in _json_values(data.decode("utf-8")):
            part = part.get("result", part)
            found += part["resourceSpans"]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ConfigError("this is no trace: JSON with resourceSpans is expected, as OTLP writes it") from None
    if not found:
        raise SessionUnknown("the trace has no spans")
    return found


def _json_values(text: str) -> Iterator[Any]:
    """JSON values that follow each other: a gateway that streams sends several."""
    decoder, start = json.JSONDecoder(), 0
    while text[start:].strip():
        start += len(text[start:]) - len(text[start:].lstrip())
        value, start = decoder.raw_decode(text, start)
        yield from value if isinstance(value, list) else [value]


def spans_of(found: list[dict[str, Any]]) -> list[ReadSpan]:
    """All spans, in order of their start; one that came twice is there once. Raises ConfigError."""
    spans: dict[str, ReadSpan] = {}
    try:
        for own in found:
            about = _attributes(own.get("resource", {}).get("attributes", []))
            for scope in own.get("scopeSpans", []):
                for span in scope.get("spans", []):
                    read = _span(span, about)
                    spans[read.span_id] = read
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"a span of this trace cannot be read: {error}") from None
    return sorted(spans.values(), key=lambda span: span.start_ns)


def _span(span: dict[str, Any], about: dict[str, Any]) -> ReadSpan:
    kind = span.get("kind", 1)
    return ReadSpan(
        name=span["name"],
        service=str(about.get("service.name", "?")),
        host=str(about.get("host.name", "?")),
        span_id=_identifier(span["spanId"], 16),
        parent_id=_identifier(span.get("parentSpanId", ""), 16),
        kind=KINDS.get(kind, 1) if isinstance(kind, str) else int(kind),
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=_attributes(span.get("attributes", [])),
        events=tuple(
            ReadEvent(event.get("name", ""), int(event["timeUnixNano"]), _attributes(event.get("attributes", [])))
            for event in span.get("events", [])
        ),
        is_failed=span.get("status", {}).get("code") in ERROR_STATUS,
    )


def _identifier(text: str, digit_count: int) -> str:
    """An id in hexadecimal; protobuf's own JSON has base64 in its place."""
    if len(text) != digit_count and text:
        try:
            return base64.b64decode(text, validate=True).hex()
        except binascii.Error:
            raise ValueError(f"{text!r} is no span id") from None
    return text.lower()


def _attributes(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {entry["key"]: _value(entry.get("value", {})) for entry in entries}


def _value(value: dict[str, Any]) -> Any:
    for name, made in (("stringValue", str), ("boolValue", bool), ("intValue", int), ("doubleValue", float)):
        if name in value:
            return made(value[name])
    if "arrayValue" in value:
        return tuple(_value(entry) for entry in value["arrayValue"].get("values", []))
    return None
