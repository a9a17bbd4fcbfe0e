"""What a coordinator counts: requests by how they ended, tokens and times, and the statistics of all generations.

A generation counts its rounds in its own `Statistics` anyway; those of all that ended are added up here once each, and
those under way are read when somebody asks, so a figure is never late and a round costs next to nothing. Changed on the
event loop, read from any thread.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from specdec.errors import SpecdecError
from specdec.protocol.items import Trace
from specdec.protocol.report import Finished, Statistics
from specdec.protocol.round_record import RoundRecord
from specdec.protocol.types import FinishReason
from specdec.rpc.status import REASONS
from specdec.telemetry.metrics import LATENCY_BOUNDS_S, TOKEN_BOUNDS_S, Histogram

CANCELLED = "cancelled"
OUTCOMES = (*(reason.name.lower() for reason in FinishReason), CANCELLED, *REASONS)

@dataclass(slots=True)
class Totals:
    """Sums over generations: their statistics, and the tokens they read and wrote (resumed ones are not written)."""

    statistics: Statistics = field(default_factory=Statistics)
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, other: Totals) -> None:
        """Adds another sum to this one."""
        self.statistics.add(other.statistics)
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens


class RequestFigures:
    """What one request adds. Told of everything by its call and its generation; each method is a few additions."""

    def __init__(self, figures: Figures, trace: Trace) -> None:
        self._figures = figures
        self._trace = trace
        self._totals = Totals()
        self.outcome = ""  # how it ended; empty before

    @property
    def has_tokens(self) -> bool:
        """Whether its first token is there."""
        return self._totals.statistics.rounds > 0

    @property
    def output_tokens(self) -> int:
        """Tokens generated for it so far."""
        return self._totals.output_tokens

    def began(self, statistics: Statistics, prompt_tokens: int) -> None:
        """It was admitted; `statistics` are its generation's own, counted on until the end."""
        self._totals = Totals(statistics, prompt_tokens)
        self._figures.enter(self)

    def on_round(self, record: RoundRecord) -> None:
        """A round ended; its statistics are counted."""
        self._totals.output_tokens += record.kept_count
        if record.round_index:
            self._figures.inter_token.add(record.round_s / record.kept_count, record.kept_count)
        else:
            self._observe(self._figures.queue_time, record.queue_s)
            self._observe(self._figures.time_to_first_token, record.round_s)

    def draft_refused(self) -> None:
        """The draft does not draft for it, or not any more."""
        self._figures.draft_refusal_count += 1

    def finished(self, finished: Finished) -> None:
        """Its text ended."""
        if self._end(finished.reason.name.lower()):
            self._observe(self._figures.e2e_latency, finished.statistics.total_s)

    def failed(self, error: SpecdecError) -> None:
        """It was refused, or given up."""
        self._end(error.reason if error.reason in OUTCOMES else SpecdecError.reason)

    def closed(self) -> None:
        """Its call is over: whoever read it is gone, where nothing was said of an end."""
        self._end(CANCELLED)

    def _end(self, outcome: str) -> bool:
        if self.outcome:
            return False
        self.outcome = outcome
        self._figures.leave(self, self._totals, outcome)
        return True

    def _observe(self, histogram: Histogram, value_s: float) -> None:
        if self._trace.sampled:
            histogram.add_traced(value_s, self._trace.trace_id.hex(), time.time())
        else:
            histogram.add(value_s)


class Figures:
    """The figures of one coordinator process."""

    def __init__(self) -> None:
        self.requests = dict.fromkeys(OUTCOMES, 0)
        self.draft_refusal_count = 0
        self.time_to_first_token = Histogram(LATENCY_BOUNDS_S)
        self.inter_token = Histogram(TOKEN_BOUNDS_S)
        self.e2e_latency = Histogram(LATENCY_BOUNDS_S)
        self.queue_time = Histogram(LATENCY_BOUNDS_S)
        self._ended = Totals()
        self._running: dict[RequestFigures, Totals] = {}
        self._lock = threading.Lock()  # nobody may see a generation in neither place, or in both

    def request(self, trace: Trace) -> RequestFigures:
        """Those of a request that has just come."""
        return RequestFigures(self, trace)

    def enter(self, request: RequestFigures) -> None:
        """Its generation is under way: what it counts is read from now on."""
        with self._lock:
            self._running[request] = request._totals

    def leave(self, request: RequestFigures, totals: Totals, outcome: str) -> None:
        """It ended, `outcome` says how."""
        with self._lock:
            self._running.pop(request, None)
            self._ended.add(totals)
            self.requests[outcome] += 1

    def totals(self) -> Totals:
        """Sums over all generations since the start, those under way included."""
        sums = Totals()
        with self._lock:
            for part in (self._ended, *self._running.values()):
                sums.add(part)
        return sums

    def counts(self) -> tuple[int, int]:
        """Generations that have given tokens, and those whose first token is not there yet."""
        with self._lock:
            with_tokens = [request.has_tokens for request in self._running]
        return sum(with_tokens), len(with_tokens) - sum(with_tokens)
