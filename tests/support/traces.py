"""Traced services for tests: three real processes whose exporters send to a real collector, and its traces."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opentelemetry.proto.trace.v1 import trace_pb2 as trace_pb

from tests.support.otlp_receiver import Receiver
from tests.support.services import Outcome, Services, running

SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # ms; spans are sent as they come, so that tests need not wait
INTERNAL, SERVER, CLIENT = 1, 2, 3
QUIET_POLLS = 25  # half a second


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """These variables are set for processes begun meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def traced(
    models: tuple[Path, Path], endpoint: str, coordinator: dict[str, Any] | None = None, **variables: str
) -> Iterator[Services]:
    """Services on these models that send spans to `endpoint`; `variables` are the environment of all three."""
    common = {"otlp_traces_endpoint": endpoint}
    own = {**common, **(coordinator or {})}
    with environment(**SOON, **variables), running(*models, own, threads=1, **common) as services:
        yield services


class ReadTrace:
    """One trace as the collector has it."""

    def __init__(self, receiver: Receiver, trace_id: str) -> None:
        self.spans = list(receiver.spans(bytes.fromhex(trace_id)))
        self.by_id = {span.span_id: span for _, span in self.spans}
        self.services = {span.span_id: service for service, span in self.spans}
        self.children: dict[bytes, list[trace_pb.Span]] = defaultdict(list)
        for _, span in self.spans:
            self.children[span.parent_span_id].append(span)

    @property
    def orphans(self) -> list[str]:
        """Spans whose parent did not come; roots are none."""
        return [f"{service} {span.name}" for service, span in self.spans if self._lacks_parent(span)]

    def _lacks_parent(self, span: trace_pb.Span) -> bool:
        return bool(span.parent_span_id) and span.parent_span_id not in self.by_id

    @property
    def count(self) -> Counter[tuple[str, str, int]]:
        """Spans by service, name and kind."""
        return Counter((service.removeprefix("specdec-"), span.name, span.kind) for service, span in self.spans)

    def named(self, name: str, kind: int | None = None) -> list[trace_pb.Span]:
        """Spans of a name, in order of their start."""
        found = [span for _, span in self.spans if span.name == name and kind in (None, span.kind)]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    @property
    def groups(self) -> list[trace_pb.Span]:
        """Round groups of all kinds, in order of their start."""
        found = [span for _, span in self.spans if span.name.startswith("round group, ")]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def parent(self, span: trace_pb.Span) -> trace_pb.Span:
        """The span above."""
        return self.by_id[span.parent_span_id]


def attributes(holder: Any) -> dict[str, Any]:
    """The attributes of a span, event, link or resource as plain values."""
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in holder.attributes}


def trace_of(receiver: Receiver, outcome: Outcome) -> ReadTrace:
    """The trace of a generation, after its root arrived and no span followed for a moment."""
    trace_id = outcome.finished.trace_id
    counts: list[int] = []

    def is_complete() -> bool:
        trace = ReadTrace(receiver, trace_id)
        counts.append(len(trace.spans))
        was_quiet = len(counts) > QUIET_POLLS and counts[-QUIET_POLLS] == counts[-1]
        return bool(trace.named("Generate")) and was_quiet

    receiver.wait_until(is_complete)
    return ReadTrace(receiver, trace_id)
