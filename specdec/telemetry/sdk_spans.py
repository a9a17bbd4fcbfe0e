"""Our spans as the OpenTelemetry SDK's, and its exporter, queue and sampler as the environment sets them up.

The one module that imports the SDK; it is imported only where tracing is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from specdec.protocol.items import Trace
from specdec.telemetry.spans import AttributeValue, Span, SpanEvent

SCOPE = InstrumentationScope("specdec")
SAMPLED, UNSAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
OK, FAILED = Status(StatusCode.UNSET), StatusCode.ERROR


class LateEvents:
    """A span's events, made by the thread that sends them: the loop that serves requests spends nothing on them."""

    def __init__(self, events: Iterable[SpanEvent], offset_ns: int) -> None:
        self._events = events
        self._offset_ns = offset_ns

    def __iter__(self) -> Iterator[Event]:
        for event in self._events:
            yield Event(event.name, dict(event.attributes), nanoseconds(event.time_s, self._offset_ns))


class OwnResource(Resource):
    """A resource whose hash is worked out once: the exporter asks for it at every span."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def nanoseconds(time_s: float, offset_ns: int) -> int:
    """Wall time in nanoseconds of a reading of the monotonic clock in seconds."""
    return round(time_s * 1e9) + offset_ns


def context_of(trace_id: bytes, span_id: bytes, is_remote: bool = False, flags: TraceFlags = SAMPLED) -> SpanContext:
    """The SDK's name of a span."""
    return SpanContext(int.from_bytes(trace_id), int.from_bytes(span_id), is_remote, flags)


def sdk_span(span: Span, resource: Resource, offset_ns: int) -> ReadableSpan:
    """A span as the SDK's exporter reads it."""
    return ReadableSpan(
        name=span.name,
        context=context_of(span.trace_id, span.span_id),
        parent=context_of(span.trace_id, span.parent_id) if span.parent_id else None,
        resource=resource,
        attributes=span.attributes,
        events=LateEvents(span.events, offset_ns) if span.events else (),  # type: ignore[arg-type]
        links=[Link(context_of(link.trace_id, link.span_id), dict(link.attributes)) for link in span.links],
        kind=SpanKind[span.kind.name],
        status=Status(FAILED, span.error) if span.error else OK,
        start_time=nanoseconds(span.start_s, offset_ns),
        end_time=nanoseconds(max(span.start_s, span.end_s), offset_ns),
        instrumentation_scope=SCOPE,
    )


def is_sampled(sampler: Sampler, trace_id: bytes, caller: Trace | None) -> bool:
    """What a sampler says of a new request; `caller`: the trace context it came with."""
    parent = None
    if caller is not None:
        flags = SAMPLED if caller.sampled else UNSAMPLED
        parent = set_span_in_context(NonRecordingSpan(context_of(trace_id, caller.span_id, True, flags)))
    result = sampler.should_sample(parent, int.from_bytes(trace_id), "Generate", SpanKind.SERVER)
    return result.decision.is_sampled()


def make_sampler() -> Sampler:
    """The sampler of OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG; without, everything unless the caller says no."""
    return TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False).sampler


def make_resource(attributes: Mapping[str, AttributeValue]) -> Resource:
    """`attributes`, and what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say instead or beside."""
    return OwnResource(Resource.create(attributes).merge(OTELResourceDetector().detect()))


def make_processor(endpoint: str | None, queue_max: int | None, batch_max: int | None) -> BatchSpanProcessor:
    """The queue and its thread, sending to `endpoint` or where the environment says. None: as it says, too.

    `queue_max` and `batch_max` are spans that wait, and spans in one message.
    """
    exporter = OTLPSpanExporter(endpoint=endpoint)
    return BatchSpanProcessor(exporter, max_queue_size=queue_max, max_export_batch_size=batch_max)
