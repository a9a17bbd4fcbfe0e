"""Spans as values: ids that two services derive alike, times on the wall clock, and traces of the caller."""

from __future__ import annotations

import time

import pytest
from opentelemetry.sdk.resources import Resource

from specdec.telemetry.clock import wall_offset_ns
from specdec.telemetry.sdk_spans import Waiting
from specdec.telemetry.spans import Span, SpanEvent, SpanKind, SpanLink, derived_span_id
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


def test_a_span_is_exported_with_all_its_fields():
    """Claim: name, ids, kind, wall times, attributes, events, links and failure arrive in the SDK's span as they were;
    an end before the start is no negative duration."""
    moment = SpanEvent("wait expired", 2.5, {"specdec.count": 3})
    link = SpanLink(b"\x07" * 16, b"\x08" * 8, {"specdec.round": 4})
    ids = (b"\x01" * 16, b"\x02" * 8, b"\x03" * 8)
    span = Span("verify", *ids, 2.0, 1.0, SpanKind.CLIENT, {"specdec.round": 1}, (moment,), (link,), "TARGET_LOST")
    made = Waiting(span, Resource.get_empty(), 10**18).readable()
    assert made.name == "verify" and made.kind.name == "CLIENT"
    assert made.start_time == made.end_time == 10**18 + 2 * 10**9
    context = made.get_span_context()
    assert context is not None and made.parent is not None
    assert (context.trace_id, context.span_id) == (int.from_bytes(b"\x01" * 16), int.from_bytes(b"\x02" * 8))
    assert made.parent.span_id == int.from_bytes(b"\x03" * 8)
    assert [(event.name, event.timestamp, dict(event.attributes)) for event in made.events] == [
        ("wait expired", 10**18 + 2_500_000_000, {"specdec.count": 3})
    ]
    assert made.links[0].context.span_id == int.from_bytes(b"\x08" * 8)
    assert not made.status.is_ok and made.status.description == "TARGET_LOST"


def test_wall_time_is_the_monotonic_clock_and_an_offset():
    """Claim: the offset turns a reading of the monotonic clock into the wall time of that moment, within 1 ms."""
    offset_ns = wall_offset_ns()
    before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    assert before_ns + offset_ns - 1_000_000 <= wall_ns <= after_ns + offset_ns + 1_000_000


@pytest.mark.parametrize(
    "value",
    ["", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-" + "1" * 32 + "-" + "0" * 16 + "-01", "00-xyz-1-01", b"00"],
)
def test_a_malformed_traceparent_counts_as_none(value):
    """Claim: W3C trace context: a malformed or all-zero header is ignored, and a new trace begins."""
    assert caller_trace([("traceparent", value)]) is None
    assert caller_trace(None) is None


def test_a_callers_context_is_taken_as_it_is():
    """Claim: trace id, span id and the sampled flag come from the header, other metadata does not matter."""
    header = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-"
    for flags, sampled in (("00", False), ("01", True), ("03", True)):
        trace = caller_trace([("user-agent", "x"), ("traceparent", header + flags)])
        assert trace is not None and trace.sampled is sampled
        assert (trace.trace_id, trace.span_id) == (b"\xab" * 16, b"\xcd" * 8)
