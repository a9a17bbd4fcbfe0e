"""The metrics of a coordinator: requests by outcome, latencies, and the statistics of all generations.

Each generation counts its rounds in its own `Statistics`. Those of ended generations are summed here once; those of
running ones are read on request, so a metric is never late and a round costs a few additions. Changed on the event
loop, read from any thread.
"""

from __future__ import annotations

import threading

from specdec.coordinator.fleet import Choice
from specdec.errors import SpecdecError
from specdec.protocol.events import Event, FromDraft, Ready, WaitExpired
from specdec.protocol.items import DraftItem, Failure, Nodes, Open, TargetItem, Trace, within
from specdec.protocol.report import Finished, Started, Statistics
from specdec.protocol.request import GenerationRequest
from specdec.protocol.types import FinishReason
from specdec.rpc.status import REASONS
from specdec.telemetry.metrics import LATENCY_BOUNDS_S, TOKEN_BOUNDS_S, Histogram

CANCELLED = "cancelled"
OUTCOMES = (*(reason.name.lower() for reason in FinishReason), CANCELLED, *REASONS)


class CoordinatorMetrics:
    """The metrics of one coordinator process."""

    def __init__(self) -> None:
        self.requests = dict.fromkeys(OUTCOMES, 0)
        self.time_to_first_token = Histogram(LATENCY_BOUNDS_S)
        self.inter_token = Histogram(TOKEN_BOUNDS_S)
        self.e2e_latency = Histogram(LATENCY_BOUNDS_S)
        self.queue_time = Histogram(LATENCY_BOUNDS_S)
        self._ended = Statistics()
        self._running: set[RequestStatistics] = set()
        self._lock = threading.Lock()  # no reader may see a generation in neither place, or in both

    def enter(self, request: RequestStatistics) -> None:
        """A request was admitted: its statistics are read from now on."""
        with self._lock:
            self._running.add(request)

    def leave(self, request: RequestStatistics) -> None:
        """A request ended."""
        with self._lock:
            self._running.discard(request)
            self._ended.add(request.statistics)
            self.requests[request.outcome] += 1

    def totals(self) -> Statistics:
        """Returns the sums over all generations since the start, running ones included."""
        sums = Statistics()
        with self._lock:
            for statistics in (self._ended, *(request.statistics for request in self._running)):
                sums.add(statistics)
        return sums

    def counts(self) -> tuple[int, int]:
        """Returns the number of running generations after their first token, and before it."""
        with self._lock:
            with_tokens = [request.statistics.rounds > 0 for request in self._running]
        return sum(with_tokens), len(with_tokens) - sum(with_tokens)


class RequestStatistics:
    """One request: its call and its generation report every event here, and it updates the metrics.

    This class records no trace, only its ids; the subclass in tracing.py records it. Every method may be called at any
    time; those of a round are a few additions.
    """

    def __init__(self, metrics: CoordinatorMetrics, context: Trace, request_id: str) -> None:
        self.context = context
        self.request_id = request_id
        self.statistics = Statistics()
        self.outcome = ""  # one of OUTCOMES; empty before the end
        self._metrics = metrics

    def in_context(self, item: TargetItem | DraftItem) -> TargetItem | DraftItem:
        """Returns an item of its generation with the trace context that it is sent in."""
        return within(item, self.context) if isinstance(item, Open) else item

    def admitted(self, request: GenerationRequest, started: Started, choice: Choice) -> None:
        """The request passed validation, and got this choice; its generation is about to begin."""
        self.statistics.rule, self.statistics.rule_reason = started.rule, started.rule_reason
        self.statistics.prompt_tokens = started.prompt_length
        self._metrics.enter(self)

    def on_step(self, event: Event, ready: Ready, now_s: float) -> None:
        """The session has taken an event, and what it is ready with is about to be sent."""
        if isinstance(event, FromDraft) and isinstance(event.item, Nodes):
            self.statistics.on_nodes(event.item)
        if ready.note is not None:
            self.statistics.draft_waits_expired += isinstance(event, WaitExpired)
            self.statistics.draft_refusals += isinstance(event, FromDraft) and isinstance(event.item, Failure)
        if (record := ready.record) is not None:
            self.statistics.on_round(record)
            if record.round_index:
                times, kept_count = record.times, record.tokens.kept_count
                self._metrics.inter_token.add(times.round_s / kept_count, kept_count)
            else:
                self._observe(self._metrics.queue_time, record.step.queue_s)
                self._observe(self._metrics.time_to_first_token, record.times.round_s)

    def finished(self, finished: Finished) -> None:
        """The text ended."""
        if self._end(finished.reason.name.lower()):
            self._observe(self._metrics.e2e_latency, finished.statistics.total_s)

    def failed(self, error: SpecdecError) -> None:
        """The request was refused, or its generation failed."""
        self._end(error.reason if error.reason in OUTCOMES else SpecdecError.reason)

    def closed(self) -> None:
        """The call is over: without an outcome until now, its client has disconnected."""
        self._end(CANCELLED)

    def _end(self, outcome: str) -> bool:
        if self.outcome:
            return False
        self.outcome = outcome
        self._metrics.leave(self)
        return True

    def _observe(self, histogram: Histogram, value_s: float) -> None:
        histogram.add(value_s)
