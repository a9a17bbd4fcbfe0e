"""The tracing of a process, as its settings and the standard OTEL_* variables ask for it."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from specdec.errors import ConfigError
from specdec.telemetry.logs import get_logger
from specdec.telemetry.tracing import Tracing

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def open_tracing(
    service: str, endpoint: str | None = None, environment: MutableMapping[str, str] = os.environ
) -> Tracing:
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
