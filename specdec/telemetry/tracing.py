"""Where spans leave the process: OTLP over gRPC, as the standard OTEL_* variables say, and never in a request's way.

`Tracing.record` puts a span into a bounded queue; a thread of the OpenTelemetry SDK sends batches of them. A collector
that is absent, slow or silent costs spans and nothing else. Without an endpoint nothing is recorded, and the SDK is not
even imported. Which spans there are is not known here.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec import __version__
from specdec.errors import ConfigError
from specdec.protocol.items import Trace
from specdec.telemetry.clock import wall_offset_ns
from specdec.telemetry.logs import get_logger
from specdec.telemetry.spans import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import Sampler

QUEUE_SPAN_COUNT_MAX = 16384  # above fifty generations of 2,000 rounds; some 30 MB should the collector be away
CLOSE_TIMEOUT_S = 2.0  # for the last batch: a service that is told to stop does not wait for a silent collector
WARNING_INTERVAL_S = 60.0
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
BATCH_SPAN_COUNT_MAX = 256  # collectors take 4 MiB a message; a segment with all its rounds and notes takes 14 KB
QUEUE_VARIABLE, BATCH_VARIABLE = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"


@dataclass(frozen=True, slots=True)
class Sending:
    """What it takes to send spans: the SDK's queue with its exporter, who decides what is recorded, and who we are."""

    processor: BatchSpanProcessor
    sampler: Sampler
    resource: Resource


class Tracing:
    """The spans of one process. `record` may be called from any thread and never blocks; `is_on` False drops all."""

    def __init__(self, sending: Sending | None = None) -> None:
        self._sending = sending

    @property
    def is_on(self) -> bool:
        """Whether spans go anywhere."""
        return self._sending is not None

    @staticmethod
    def open(service: str, endpoint: str | None = None, environment: Mapping[str, str] | None = None) -> Tracing:
        """The tracing of this process as `endpoint`, or else the environment, asks for. Raises ConfigError.

        `service` is its name unless OTEL_SERVICE_NAME gives one. Does not connect: the exporter does, by itself.
        """
        environment = os.environ if environment is None else environment
        is_refused = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        is_refused |= environment.get("OTEL_TRACES_EXPORTER", "otlp").lower() != "otlp"
        wanted = endpoint or next((environment[name] for name in ENDPOINT_VARIABLES if environment.get(name)), None)
        if wanted is None or (is_refused and not endpoint):
            return Tracing()
        protocol = next((environment[name] for name in PROTOCOL_VARIABLES if environment.get(name)), "grpc")
        if protocol != "grpc":
            raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}; traces are sent over grpc, to port 4317")
        from specdec.telemetry.sdk_spans import make_processor, make_resource, make_sampler

        _hear_the_sdk()
        queue = None if environment.get(QUEUE_VARIABLE) else QUEUE_SPAN_COUNT_MAX
        batch = None if environment.get(BATCH_VARIABLE) else BATCH_SPAN_COUNT_MAX
        resource = make_resource({"service.name": f"specdec-{service}", **_about_this_process()})
        return Tracing(Sending(make_processor(endpoint, queue, batch), make_sampler(), resource))

    def samples(self, trace_id: bytes, caller: Trace | None) -> bool:
        """Whether the trace of a new request is recorded, as OTEL_TRACES_SAMPLER says; `caller`: its own context."""
        if self._sending is None:
            return False
        from specdec.telemetry.sdk_spans import is_sampled

        return is_sampled(self._sending.sampler, trace_id, caller)

    def record(self, spans: Iterable[Span], offset_ns: int | None = None) -> None:
        """Queues spans; the oldest are dropped where too many wait. `offset_ns`: wall time less monotonic time."""
        sending = self._sending
        if sending is None:
            return
        from specdec.telemetry.sdk_spans import sdk_span

        offset_ns = wall_offset_ns() if offset_ns is None else offset_ns
        for span in spans:
            sending.processor.on_end(sdk_span(span, sending.resource, offset_ns))

    def close(self) -> None:
        """Sends what is queued, within CLOSE_TIMEOUT_S; the rest is lost. Blocks; idempotent."""
        sending, self._sending = self._sending, None
        if sending is not None:
            flushing = threading.Thread(target=sending.processor.shutdown, name="traces closing", daemon=True)
            flushing.start()
            flushing.join(CLOSE_TIMEOUT_S)


def _about_this_process() -> dict[str, str | int]:
    return {"host.name": socket.gethostname(), "process.pid": os.getpid(), "service.version": __version__}


class _SdkLog(logging.Handler):
    """What the SDK complains of, as a line of ours: the first, and then one a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._quiet_until_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + WARNING_INTERVAL_S
            get_logger().warning("spans are lost", why=record.getMessage())


def _hear_the_sdk() -> None:
    own = logging.getLogger("opentelemetry")
    own.propagate = False
    if not any(isinstance(handler, _SdkLog) for handler in own.handlers):
        own.addHandler(_SdkLog())
