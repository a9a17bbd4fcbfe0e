"""The metrics of a coordinator: requests by outcome, latencies, and the statistics of all generations.

Each generation counts its rounds in its own `Statistics`. Those of ended generations are summed here once; those of
running ones are read on request, so a metric is never late and a round costs a few additions. Changed on the event
loop, read from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from specdec.coordinator.deadlines import OVERDUE
from specdec.coordinator.fleet import Choice
from specdec.coordinator.replicas import Draft, Target
from specdec.errors import SpecdecError
from specdec.protocol.events import Event, FromDraft, Ready, WaitExpired
from specdec.protocol.items import DraftItem, Failure, Nodes, Open, TargetItem, Trace, within
from specdec.protocol.report import Finished, Started, Statistics
from specdec.protocol.request import GenerationRequest
from specdec.protocol.types import FinishReason
from specdec.rpc.status import REASONS
from specdec.telemetry.metrics import Histogram

CANCELLED = "cancelled"
FINISHES = tuple(reason.name.lower() for reason in FinishReason)
OUTCOMES = (*FINISHES, CANCELLED, *REASONS)
CHOICES = "choices"  # the outcome of a request whose choices have their own
ABORT, ERROR = "abort", "error"  # vLLM's finished reasons of texts that did not end
# The bounds of vLLM's histograms (vllm/v1/metrics/loggers.py), which boards select by value, and finer ones below them.
_MINUTES_S = (7.5, 10.0, 20.0, 40.0, 80.0)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0)
FIRST_TOKEN_BOUNDS_S = (*_FIRST_TOKEN_S, *_MINUTES_S, 160.0, 640.0, 2560.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
TOKEN_BOUNDS_S = (*_TOKEN_S, *_MINUTES_S)
_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0)
REQUEST_BOUNDS_S = (*_REQUEST_S, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
LENGTH_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class CoordinatorMetrics:
    """The metrics of one coordinator process."""

    def __init__(self) -> None:
        self.requests = dict.fromkeys(OUTCOMES, 0)
        self.finished_reasons = dict.fromkeys((*FINISHES, ABORT, ERROR), 0)  # of admitted requests
        self.time_to_first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token = Histogram(TOKEN_BOUNDS_S)
        self.time_per_output_token = Histogram(TOKEN_BOUNDS_S)
        self.e2e_latency = Histogram(REQUEST_BOUNDS_S)
        self.queue_time = Histogram(REQUEST_BOUNDS_S)
        self.prompt_length = Histogram(LENGTH_BOUNDS)
        self.output_length = Histogram(LENGTH_BOUNDS)
        self.target_changes = dict.fromkeys(("lost", OVERDUE, "malformed", "failed", "refused"), 0)
        self.draft_changes = dict.fromkeys(("lost", "stopped", "refused"), 0)
        self._ended = Statistics()
        self._running: set[RequestStatistics] = set()
        self._lock = threading.Lock()  # no reader may see a generation in neither place, or in both

    def enter(self, request: RequestStatistics) -> None:
        """A request was admitted: its statistics are read from now on."""
        with self._lock:
            self._running.add(request)

    def leave(self, request: RequestStatistics) -> None:
        """A request ended."""
        outcome = request.outcome
        with self._lock:
            if request in self._running:
                reason = outcome if outcome in FINISHES else ABORT if outcome == CANCELLED else ERROR
                self.finished_reasons[reason] += 1
            self._running.discard(request)
            self._ended.add(request.statistics)
            self.requests[outcome] += 1

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
        self.outcome = ""  # one of OUTCOMES, or CHOICES; empty before the end
        self._metrics = metrics

    def choices(self, count: int) -> Sequence[RequestStatistics]:
        """Returns the statistics of each choice of a request that is about to be admitted: these, of a single one; of
        several each has its own, counts as a request, and nothing is counted here any more."""
        if count == 1:
            return (self,)
        self.outcome = CHOICES
        return [self._of_choice(index) for index in range(count)]

    def _of_choice(self, index: int) -> RequestStatistics:
        return RequestStatistics(self._metrics, self.context, self.request_id)

    def in_context(self, item: TargetItem | DraftItem) -> TargetItem | DraftItem:
        """Returns an item of its generation with the trace context that it is sent in."""
        return within(item, self.context) if isinstance(item, Open) else item

    def admitted(self, request: GenerationRequest, started: Started, choice: Choice) -> None:
        """The request passed validation, and got this choice; its generation is about to begin."""
        self.statistics.rule, self.statistics.rule_reason = started.rule, started.rule_reason
        self.statistics.prompt_tokens, self.statistics.encoder_tokens = started.prompt_length, started.encoder_length
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
                self._metrics.inter_token.add(record.times.round_s)
            else:
                self._observe(self._metrics.queue_time, record.step.queue_s)
                self._observe(self._metrics.time_to_first_token, record.times.round_s)

    def on_moved(self, target: Target, reason: str, cause: str, now_s: float) -> None:
        """The text goes on at another target, or at the same one again, since it left the last one for a reason."""
        self.statistics.num_target_changes += 1
        self._metrics.target_changes[cause] += 1

    def on_draft_changed(self, draft: Draft, cause: str) -> None:
        """The text goes on with another draft."""
        self.statistics.num_draft_changes += 1
        self._metrics.draft_changes[cause] += 1

    def finished(self, finished: Finished) -> None:
        """The text ended."""
        if self._end(finished.reason.name.lower()):
            metrics, own = self._metrics, finished.statistics
            self._observe(metrics.e2e_latency, own.total_s)
            later_s, later_count = own.total_s - own.time_to_first_token_s, own.output_tokens - 1
            self._observe(metrics.time_per_output_token, later_s / later_count if later_count > 0 else 0.0)
            metrics.prompt_length.add(own.prompt_tokens)
            metrics.output_length.add(own.output_tokens)

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
