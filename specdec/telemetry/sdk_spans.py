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
from typing import TYPE_CHECKING, Any, ClassVar

from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2 as trace_pb
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from specdec import __version__
from specdec.protocol.items import Trace
from specdec.telemetry.clock import wall_offset_ns
from specdec.telemetry.logs import get_logger
from specdec.telemetry.spans import AttributeValue, Span, SpanKind
from specdec.telemetry.tracing import CLOSE_TIMEOUT_S, Tracing

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue

QUEUE_SPAN_COUNT_MAX = 16384  # above fifty generations of 2,000 rounds; some 30 MB without a collector
BATCH_SPAN_COUNT_MAX = 256  # collectors accept 4 MiB a message; a round group with all events has 14 KB
QUEUE_VARIABLE, BATCH_VARIABLE = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
WARNING_INTERVAL_S = 60.0
RESOURCE_COUNT_MAX = 16  # a name comes from a replica's description
SCOPE = "specdec"
SAMPLED = otel.TraceFlags(otel.TraceFlags.SAMPLED)
KINDS = {kind: trace_pb.Span.SpanKind.Value(f"SPAN_KIND_{kind.name}") for kind in SpanKind}
OK, FAILED = trace_pb.Status.STATUS_CODE_UNSET, trace_pb.Status.STATUS_CODE_ERROR
PARENT_IS_KNOWN_LOCAL = trace_pb.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK  # flags: no parent or link is called remote


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
        queue_max = int(environment.get(QUEUE_VARIABLE, QUEUE_SPAN_COUNT_MAX))
        batch_max = min(int(environment.get(BATCH_VARIABLE, BATCH_SPAN_COUNT_MAX)), queue_max)  # the SDK refuses more
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


@dataclass(slots=True)
class Waiting:
    """A span in the SDK's queue, which reads its flags only. The sending thread encodes it, so the event loop spends
    nothing on it."""

    context: ClassVar[otel.SpanContext] = otel.SpanContext(0, 0, is_remote=False, trace_flags=SAMPLED)
    span: Span
    resource: Resource
    offset_ns: int

    def encode(self, encoded: trace_pb.Span) -> None:
        """Fills in the span of an export request."""
        span = self.span
        encoded.trace_id, encoded.span_id, encoded.parent_span_id = span.trace_id, span.span_id, span.parent_id
        encoded.name, encoded.flags = span.name, PARENT_IS_KNOWN_LOCAL
        encoded.kind = KINDS[span.kind]
        encoded.start_time_unix_nano = self._wall_ns(span.start_s)
        encoded.end_time_unix_nano = self._wall_ns(max(span.start_s, span.end_s))
        encode_attributes(span.attributes, encoded.attributes)
        for event in span.events:
            own = encoded.events.add(name=event.name, time_unix_nano=self._wall_ns(event.time_s))
            encode_attributes(event.attributes, own.attributes)
        for link in span.links:
            to = encoded.links.add(trace_id=link.trace_id, span_id=link.span_id, flags=PARENT_IS_KNOWN_LOCAL)
            encode_attributes(link.attributes, to.attributes)
        encoded.status.code, encoded.status.message = FAILED if span.error else OK, span.error

    def _wall_ns(self, time_s: float) -> int:
        return round(time_s * 1e9) + self.offset_ns


def encode_attributes(attributes: Mapping[str, Any], encoded: RepeatedCompositeFieldContainer[KeyValue]) -> None:
    """Adds attributes to a message: numbers, names, flags, and sequences of names."""
    for key, value in attributes.items():
        to = encoded.add(key=key).value
        if isinstance(value, str):
            to.string_value = value
        elif isinstance(value, bool):  # before int, of which it is one
            to.bool_value = value
        elif isinstance(value, int):
            to.int_value = value
        elif isinstance(value, float):
            to.double_value = value
        else:
            for name in value:
                to.array_value.values.add(string_value=name)


def export_request(spans: Iterable[Waiting]) -> ExportTraceServiceRequest:
    """Returns the request with these spans, by resource.

    Fields are filled in place: the SDK's own encoding makes three objects of everything and copies each message into
    the one around it, which takes five times as long.
    """
    request = ExportTraceServiceRequest()
    scopes: dict[Resource, trace_pb.ScopeSpans] = {}
    for waiting in spans:
        if waiting.resource not in scopes:
            encoded = request.resource_spans.add(schema_url=waiting.resource.schema_url)
            encode_attributes(waiting.resource.attributes, encoded.resource.attributes)
            scopes[waiting.resource] = encoded.scope_spans.add()
            scopes[waiting.resource].scope.name = SCOPE
        waiting.encode(scopes[waiting.resource].spans.add())
    return request


class LateExporter(OTLPSpanExporter):
    """The SDK's exporter, for waiting spans: its connection, retries and settings, with the encoding above."""

    _request: ExportTraceServiceRequest

    def export(self, spans: Sequence[Waiting]) -> SpanExportResult:  # type: ignore[override]  # what the queue holds
        self._request = export_request(spans)  # once for all retries; the queue exports one batch at a time
        return super().export(spans)  # type: ignore[arg-type]  # it counts them only

    def _translate_data(self, data: object) -> ExportTraceServiceRequest:
        return self._request


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
