"""Spans for the OpenTelemetry SDK, with its queue, exporter and sampler as the environment configures them.

The one module that imports the SDK; it is imported only if tracing is on.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from specdec import __version__
from specdec.protocol.items import Trace
from specdec.telemetry.clock import wall_offset_ns
from specdec.telemetry.logs import get_logger
from specdec.telemetry.spans import AttributeValue, Span
from specdec.telemetry.tracing import CLOSE_TIMEOUT_S, Tracing

QUEUE_SPAN_COUNT_MAX = 16384  # above fifty generations of 2,000 rounds; some 30 MB without a collector
BATCH_SPAN_COUNT_MAX = 256  # collectors accept 4 MiB a message; a round group with all events has 14 KB
QUEUE_VARIABLE, BATCH_VARIABLE = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
WARNING_INTERVAL_S = 60.0
RESOURCE_COUNT_MAX = 16  # a name comes from a replica's description
SCOPE = InstrumentationScope("specdec")
SAMPLED = otel.TraceFlags(otel.TraceFlags.SAMPLED)
OK, FAILED = otel.Status(otel.StatusCode.UNSET), otel.StatusCode.ERROR


class SdkTracing(Tracing):
    """Tracing that is on: spans wait in the SDK's queue, and its thread sends them in batches."""

    is_on = True

    def __init__(self, service: str, endpoint: str | None, environment: Mapping[str, str]) -> None:
        sdk_log = logging.getLogger("opentelemetry")
        sdk_log.propagate, sdk_log.handlers = False, [_SdkLog()]
        about: dict[str, AttributeValue] = {"service.name": f"specdec-{service}", "host.name": socket.gethostname()}
        about |= {"process.pid": os.getpid(), "service.version": __version__}
        self._resource = own_resource(about)
        self.service = str(self._resource.attributes["service.name"])
        # OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG; without, everything unless a caller that is followed says no
        self._sampler = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False).sampler
        queue_max = None if environment.get(QUEUE_VARIABLE) else QUEUE_SPAN_COUNT_MAX
        batch_max = None if environment.get(BATCH_VARIABLE) else BATCH_SPAN_COUNT_MAX
        exporter = LateExporter(endpoint=endpoint)
        self._queue = BatchSpanProcessor(exporter, max_queue_size=queue_max, max_export_batch_size=batch_max)

    def samples(self, trace_id: bytes, caller: Trace | None) -> bool:
        number, parent = int.from_bytes(trace_id), None
        if caller is not None:
            flags = otel.TraceFlags(int(caller.sampled))
            context = otel.SpanContext(number, int.from_bytes(caller.span_id), is_remote=True, trace_flags=flags)
            parent = otel.set_span_in_context(otel.NonRecordingSpan(context))
        result = self._sampler.should_sample(parent, number, "Generate", otel.SpanKind.SERVER)
        return bool(result.decision.is_sampled())

    def record(self, spans: Iterable[Span], offset_ns: int | None = None) -> None:
        offset_ns = wall_offset_ns() if offset_ns is None else offset_ns
        for span in spans:
            resource = resource_of(span.service) if span.service else self._resource
            waiting = Waiting(span, resource, offset_ns)
            self._queue.on_end(waiting)  # type: ignore[arg-type]  # it asks for the flags only

    def close(self) -> None:
        flushing = threading.Thread(target=self._queue.shutdown, name="traces closing", daemon=True)
        flushing.start()
        flushing.join(CLOSE_TIMEOUT_S)


def context_of(trace_id: bytes, span_id: bytes) -> otel.SpanContext:
    """Returns the SDK's context of a recorded span."""
    return otel.SpanContext(int.from_bytes(trace_id), int.from_bytes(span_id), is_remote=False, trace_flags=SAMPLED)


@dataclass(slots=True)
class Waiting:
    """A span in the SDK's queue, which reads its flags only. The sending thread converts it to the SDK's span, so the
    event loop spends nothing on it."""

    context: ClassVar[otel.SpanContext] = context_of(b"", b"")
    span: Span
    resource: Resource
    offset_ns: int

    def readable(self) -> ReadableSpan:
        """Returns the span in the form for the SDK's exporter."""
        span = self.span
        return ReadableSpan(
            name=span.name,
            context=context_of(span.trace_id, span.span_id),
            parent=context_of(span.trace_id, span.parent_id) if span.parent_id else None,
            resource=self.resource,
            attributes=span.attributes,
            events=[Event(event.name, event.attributes, self._wall_ns(event.time_s)) for event in span.events],
            links=[otel.Link(context_of(link.trace_id, link.span_id), link.attributes) for link in span.links],
            kind=otel.SpanKind[span.kind.name],
            status=otel.Status(FAILED, span.error) if span.error else OK,
            start_time=self._wall_ns(span.start_s),
            end_time=self._wall_ns(max(span.start_s, span.end_s)),
            instrumentation_scope=SCOPE,
        )

    def _wall_ns(self, time_s: float) -> int:
        return round(time_s * 1e9) + self.offset_ns


class LateExporter(OTLPSpanExporter):
    """The SDK's exporter, for waiting spans."""

    def export(self, spans: Sequence[Waiting]) -> SpanExportResult:  # type: ignore[override]  # what the queue holds
        return super().export([waiting.readable() for waiting in spans])


class KeptResource(Resource):
    """A resource whose hash is computed once: the exporter needs it for every span."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def own_resource(attributes: Mapping[str, AttributeValue]) -> Resource:
    """Returns the resource of this service: `attributes`, overridden and extended by OTEL_SERVICE_NAME and
    OTEL_RESOURCE_ATTRIBUTES."""
    return KeptResource(Resource.create(attributes).merge(OTELResourceDetector().detect()))


@functools.lru_cache(RESOURCE_COUNT_MAX)
def resource_of(service: str) -> Resource:
    """Returns the resource of spans that this process records of the work of another service."""
    return KeptResource(Resource({"service.name": service}))


class _SdkLog(logging.Handler):
    """Logs warnings of the SDK: the first, and then one a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._quiet_until_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + WARNING_INTERVAL_S
            get_logger().warning("spans are lost", why=record.getMessage())
