"""The export of spans: OTLP over gRPC, configured by the standard OTEL_* variables, never blocking a request.

A collector that is absent, slow or silent costs spans and nothing else. Without an endpoint no span is recorded, and
the SDK is not imported. This module does not know the spans' contents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from specdec.protocol.items import Trace
from specdec.telemetry.spans import Span

CLOSE_TIMEOUT_S = 2.0  # for the last batch: a stopping service does not wait for a silent collector
# ff is no version, and 00 ends after its flags; a later one may go on after another dash.
TRACEPARENT = re.compile(r"(?!ff|00.{54})[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


class Tracing:
    """The spans of one process: this class drops them; `open_tracing` returns one that sends them if an endpoint is
    set."""

    is_on = False
    service = ""  # service.name of the spans; empty: none are recorded

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
