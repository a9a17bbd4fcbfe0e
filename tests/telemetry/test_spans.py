"""Spans as values: ids that two services derive alike, times on the wall clock, and traces of the caller."""

from __future__ import annotations

import time

import pytest
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from specdec.protocol.items import Trace
from specdec.telemetry.clock import wall_offset_ns
from specdec.telemetry.sdk_spans import Waiting, export_request
from specdec.telemetry.spans import AttributeValue, Span, SpanEvent, SpanKind, SpanLink, derived_span_id
from specdec.telemetry.tracing import caller_trace


def test_derived_ids_tell_everything_apart():
    """Claim: an id is a function of the span it comes from and its names, eight bytes, never all zeros, and never that
    of other names, such as 1 and 23 against 12 and 3."""
    origins = [bytes([value] * 8) for value in range(8)]
    ids = {
        derived_span_id(origin, "draft", incarnation, epoch, node)
        for origin in origins
        for incarnation in range(1, 4)
        for epoch in range(1, 30)
        for node in range(1, 30)
    }
    assert len(ids) == 8 * 3 * 29 * 29
    assert all(len(own) == 8 and any(own) for own in ids)
    assert derived_span_id(b"x" * 8, 1, 23) != derived_span_id(b"x" * 8, 12, 3)
    assert derived_span_id(b"x" * 8, "verify") == derived_span_id(b"x" * 8, "verify")


def sdk_span_of(span: Span, resource: Resource, offset_ns: int) -> ReadableSpan:
    """The same span in the SDK's own form: what its own exporter would encode."""

    def context_of(trace_id: bytes, span_id: bytes) -> otel.SpanContext:
        return otel.SpanContext(int.from_bytes(trace_id), int.from_bytes(span_id), is_remote=False)

    def wall_ns(time_s: float) -> int:
        return round(time_s * 1e9) + offset_ns

    return ReadableSpan(
        name=span.name,
        context=context_of(span.trace_id, span.span_id),
        parent=context_of(span.trace_id, span.parent_id) if span.parent_id else None,
        resource=resource,
        attributes=span.attributes,
        events=[Event(event.name, event.attributes, wall_ns(event.time_s)) for event in span.events],
        links=[otel.Link(context_of(link.trace_id, link.span_id), link.attributes) for link in span.links],
        kind=otel.SpanKind[span.kind.name],
        status=otel.Status(otel.StatusCode.ERROR, span.error) if span.error else otel.Status(otel.StatusCode.UNSET),
        start_time=wall_ns(span.start_s),
        end_time=wall_ns(max(span.start_s, span.end_s)),
        instrumentation_scope=InstrumentationScope("specdec"),
    )


def test_an_export_request_is_the_sdks_own():
    """Claim: the request has all fields of all spans, by resource, as the SDK's own encoding of the same spans has
    them: kinds, wall times, attributes of every type, events, links, failure, no parent; an end before the start is no
    negative duration. Compared as messages, so a field that one of the two lacks, or a wrong one, shows."""
    attributes: dict[str, AttributeValue] = {"text": "é", "flag": True, "count": 3, "time_ms": 0.5, "names": ("a", "b")}
    moments = (SpanEvent("wait expired", 2.5, attributes), SpanEvent("round", 2.75))
    links = (SpanLink(b"\x07" * 16, b"\x08" * 8, {"specdec.round": 4}), SpanLink(b"\x09" * 16, b"\x0a" * 8))
    ids = (b"\x01" * 16, b"\x02" * 8, b"\x03" * 8)
    spans = [
        Span("verify", *ids, 2.0, 1.0, SpanKind.CLIENT, attributes, moments, links, "TARGET_LOST"),
        Span("Generate", *ids[:2], b"", 1.0, 3.25, SpanKind.SERVER, {"count": -1, "flag": False}),
        Span("forward", *ids, 1.0, 2.0),
    ]
    ours, others = Resource({"service.name": "specdec-target", "process.pid": 7}), Resource({"service.name": "b"}, "u")
    offset_ns, recorded = 10**18 + 1, list(zip(spans, (ours, others, ours)))
    made = export_request(Waiting(span, resource, offset_ns) for span, resource in recorded)
    assert made == encode_spans([sdk_span_of(span, resource, offset_ns) for span, resource in recorded])
    assert [len(group.scope_spans[0].spans) for group in made.resource_spans] == [2, 1]
    first = made.resource_spans[0].scope_spans[0].spans[0]
    assert first.start_time_unix_nano == first.end_time_unix_nano == offset_ns + 2 * 10**9


def test_wall_time_is_the_monotonic_clock_and_an_offset():
    """Claim: the offset turns a reading of the monotonic clock into the wall time of that moment, within 1 ms."""
    offset_ns = wall_offset_ns()
    before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    assert before_ns + offset_ns - 1_000_000 <= wall_ns <= after_ns + offset_ns + 1_000_000


OWN = "ab" * 16 + "-" + "cd" * 8
MALFORMED = {
    "empty": "",
    "bytes": b"00",
    "no trace id": f"00-{'0' * 32}-{'1' * 16}-01",
    "no span id": f"00-{'1' * 32}-{'0' * 16}-01",
    "letters that are no digits": f"00-{OWN.replace('ab', 'xy')}-01",
    "upper case": f"00-{OWN.upper()}-01",
    "one digit of flags": f"00-{OWN}-1",
    "one digit of version": f"0-{OWN}-01",
    "version ff": f"ff-{OWN}-01",
    "version ff with more": f"ff-{OWN}-01-more",
    "version 00 with more": f"00-{OWN}-01-more",
    "version 00 with a dash": f"00-{OWN}-01-",
    "a later version with more, but no dash": f"cc-{OWN}-01.more",
    "a later version with long flags": f"cc-{OWN}-0123",
    "a later version, cut": f"cc-{OWN}",
    "two in one, as a proxy joins them": f"00-{OWN}-01,00-{OWN}-01",
    "a line break": f"00-{OWN}-01\n",
}


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_traceparent_counts_as_none(value):
    """Claim: W3C trace context, section 3.2: a malformed or all-zero header is ignored, and a new trace begins; version
    ff is forbidden, and version 00 has four fields and no more. Conclusive: each differs from a header that is read in
    the one thing it is named by."""
    assert caller_trace([("traceparent", value)]) is None
    assert caller_trace(None) is None


def test_a_callers_context_is_taken_as_it_is():
    """Claim: trace id, span id and the sampled flag come from the header, other metadata does not matter, nor spaces
    around the value, which are none of it in HTTP."""
    for flags, sampled in (("00", False), ("01", True), ("03", True), ("fe", False)):
        for value in (f"00-{OWN}-{flags}", f" \t00-{OWN}-{flags}\t "):
            trace = caller_trace([("user-agent", "x"), ("traceparent", value)])
            assert trace == Trace(b"\xab" * 16, b"\xcd" * 8, sampled)


@pytest.mark.parametrize("rest", ["", "-", "-what-the-future-will-be", "-\u00e9,x"])
def test_a_later_version_is_read_by_its_known_part(rest):
    """Claim: section 3.2.3: of a version above 00 the first fields are read as those of version 00, whatever follows
    after another dash, and of the flags the sampled bit only."""
    for version in ("01", "cc", "fe"):
        trace = caller_trace([("traceparent", f"{version}-{OWN}-09{rest}")])
        assert trace == Trace(b"\xab" * 16, b"\xcd" * 8, True)


def test_two_headers_are_none():
    """Claim: a call with two `traceparent` headers has none, though each alone is valid, equal or not, first or last
    malformed. Conclusive: of these only the one that stands alone, among other metadata, is read."""
    valid, other = f"00-{OWN}-01", f"00-{OWN.replace('ab', 'ba')}-01"
    for pair in ((valid, valid), (valid, other), (valid, "00"), ("00", valid), (valid, b"")):
        assert caller_trace([("traceparent", value) for value in pair]) is None
    assert caller_trace([("tracestate", valid), ("traceparent", valid), ("x-traceparent", other)]) is not None
