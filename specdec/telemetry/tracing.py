"""The export of spans: OTLP over gRPC, configured by the standard OTEL_* variables, never blocking a request.

A collector that is absent, slow or silent costs spans and nothing else. Without an endpoint no span is recorded, and
the SDK is not imported. This module does not know the spans' contents.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, MutableMapping

from specdec.errors import ConfigError
from specdec.protocol.items import Trace
from specdec.telemetry.logs import get_logger
from specdec.telemetry.spans import Span

CLOSE_TIMEOUT_S = 2.0  # for the last batch: a stopping service does not wait for a silent collector
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# ff is no version, and 00 ends after its flags; a later one may go on after another dash.
TRACEPARENT = re.compile(r"(?!ff|00.{54})[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


class Tracing:
    """The spans of one process: this class drops them; `open` returns one that sends them if an endpoint is set."""

    is_on = False
    service = ""  # service.name of the spans; empty: none are recorded

    @staticmethod
    def open(service: str, endpoint: str | None = None, environment: MutableMapping[str, str] = os.environ) -> Tracing:
        """Returns the tracing of this process by `endpoint`, or else by the environment. Raises ConfigError.

        `service` is its name unless OTEL_SERVICE_NAME is set. Does not connect: the exporter does, by itself. Variables
        of the environment that do not parse are removed, with a warning; where the SDK cannot start, spans are dropped.
        """
        is_refused = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        is_refused |= environment.get("OTEL_TRACES_EXPORTER", "otlp").lower() != "otlp"
        wanted = endpoint or next((environment[name] for name in ENDPOINT_VARIABLES if environment.get(name)), None)
        if wanted is None or (is_refused and not endpoint):
            return Tracing()
        protocol = next((environment[name] for name in PROTOCOL_VARIABLES if environment.get(name)), "grpc")
        if protocol != "grpc":
            raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}; traces are sent over grpc, to port 4317")
        from specdec.telemetry.otel_variables import drop_unusable

        drop_unusable(environment)
        try:
            from specdec.telemetry.sdk_spans import SdkTracing

            return SdkTracing(service, endpoint, environment)
        except Exception as error:  # of whatever else the SDK reads in its environment: spans are not worth a service
            get_logger().warning("traces are off", why=f"{type(error).__name__}: {error}")
            return Tracing()

    def samples(self, trace_id: bytes, caller: Trace | None) -> bool:
        """Whether the trace of a new request is recorded, by OTEL_TRACES_SAMPLER; `caller`: the context to follow."""
        return False

    def record(self, spans: Iterable[Span], offset_ns: int | None = None) -> None:
        """Queues spans, from any thread, without blocking; drops the oldest if too many wait.

        `offset_ns`: wall time less monotonic time; None: the current one.
        """

    def close(self) -> None:
        """Sends what is queued, within CLOSE_TIMEOUT_S; the rest is lost. Blocks; idempotent."""


def caller_trace(metadata: Iterable[tuple[str, str | bytes]] | None) -> Trace | None:
    """Returns the W3C trace context in a call's metadata. By the standard a malformed `traceparent` counts as none, and
    so do two, where gRPC does not hide the first; of a later version the fields that version 00 has are read."""
    values = [value for key, value in metadata or () if key == "traceparent"]
    if len(values) != 1 or not isinstance(values[0], str):
        return None
    match = TRACEPARENT.fullmatch(values[0].strip(" \t"))
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    return Trace(bytes.fromhex(match[1]), bytes.fromhex(match[2]), bool(int(match[3], 16) & 1))
