"""What a coordinator counts: requests by how they ended, times, and the statistics of all generations.

A generation counts its rounds in its own `Statistics` anyway; those of all that ended are added up here once each, and
those under way are read when somebody asks, so a figure is never late and a round costs next to nothing. Changed on the
event loop, read from any thread.
"""

from __future__ import annotations

import threading

from specdec.errors import SpecdecError
from specdec.protocol.items import NO_TRACE, DraftAsk, Nodes, Open, TargetAsk, Trace
from specdec.protocol.report import Finished, RoundRecord, Started, Statistics
from specdec.protocol.request import Ask
from specdec.protocol.session import Session
from specdec.protocol.types import Description, FinishReason
from specdec.rpc.link import Link
from specdec.rpc.status import REASONS
from specdec.telemetry.metrics import LATENCY_BOUNDS_S, TOKEN_BOUNDS_S, Histogram
from specdec.telemetry.spans import AttributeValue

CANCELLED = "cancelled"
OUTCOMES = (*(reason.name.lower() for reason in FinishReason), CANCELLED, *REASONS)


class Figures:
    """The figures of one coordinator process."""

    def __init__(self) -> None:
        self.requests = dict.fromkeys(OUTCOMES, 0)
        self.time_to_first_token = Histogram(LATENCY_BOUNDS_S)
        self.inter_token = Histogram(TOKEN_BOUNDS_S)
        self.e2e_latency = Histogram(LATENCY_BOUNDS_S)
        self.queue_time = Histogram(LATENCY_BOUNDS_S)
        self._ended = Statistics()
        self._running: set[RequestFigures] = set()
        self._lock = threading.Lock()  # nobody may see a generation in neither place, or in both

    def enter(self, request: RequestFigures) -> None:
        """It was admitted: what it counts is read from now on."""
        with self._lock:
            self._running.add(request)

    def leave(self, request: RequestFigures) -> None:
        """It ended."""
        with self._lock:
            self._running.discard(request)
            self._ended.add(request.statistics)
            self.requests[request.outcome] += 1

    def totals(self) -> Statistics:
        """Sums over all generations since the start, those under way included."""
        sums = Statistics()
        with self._lock:
            for statistics in (self._ended, *(request.statistics for request in self._running)):
                sums.add(statistics)
        return sums

    def counts(self) -> tuple[int, int]:
        """Generations that have given tokens, and those whose first token is not there yet."""
        with self._lock:
            with_tokens = [request.statistics.rounds > 0 for request in self._running]
        return sum(with_tokens), len(with_tokens) - sum(with_tokens)


class RequestFigures:
    """One request, told of everything by its call and its generation: it adds to the figures what is to be counted.

    Here its trace is not recorded, only the ids are known; tracing.py has the kind that records it. Every method may be
    called at any time; those of a round are a few additions.
    """

    def __init__(self, figures: Figures, context: Trace, request_id: str) -> None:
        self.context = context
        self.request_id = request_id
        self.statistics = Statistics()
        self.outcome = ""  # how it ended; empty before
        self._figures = figures

    def context_of(self, item: TargetAsk | DraftAsk) -> Trace:
        """The context an item of its generation is sent in."""
        return self.context if isinstance(item, Open) else NO_TRACE

    def admitted(self, ask: Ask, started: Started, target: Description) -> None:
        """It was found right."""
        self.statistics.rule, self.statistics.rule_reason = started.rule, started.rule_reason
        self.statistics.prompt_tokens = started.prompt_length
        self._figures.enter(self)

    def began(self, session: Session) -> None:
        """The session is about to be opened and its prompt to be read."""

    def sent(self, session: Session, now_s: float) -> None:
        """The verification in flight is sent; said again when it is sent again."""

    def nodes(self, session: Session, nodes: Nodes, link: Link) -> None:
        """The draft sent nodes, and the session has filed those it can use: none where its text has ended."""

    def on_round(self, session: Session, record: RoundRecord, link: Link) -> None:
        """A verdict is committed, and nothing of what follows is carried out yet; `link` is the target's."""
        self.statistics.on_round(record)
        if record.round_index:
            self._figures.inter_token.add(record.round_s / record.kept_count, record.kept_count)
        else:
            self._observe(self._figures.queue_time, record.queue_s)
            self._observe(self._figures.time_to_first_token, record.round_s)

    def note(self, name: str, **attributes: AttributeValue) -> None:
        """Something happened beside the rounds."""

    def finished(self, finished: Finished) -> None:
        """The text ended."""
        if self._end(finished.reason.name.lower()):
            self._observe(self._figures.e2e_latency, finished.statistics.total_s)

    def failed(self, error: SpecdecError) -> None:
        """It was refused, or given up."""
        self._end(error.reason if error.reason in OUTCOMES else SpecdecError.reason)

    def left(self) -> float:
        """The session is over on all sides; returns for how many seconds it is still to be told of nodes."""
        return 0.0

    def closed(self) -> None:
        """Its call is over: where nothing was said of an end, its reader is gone."""
        self._end(CANCELLED)

    def _end(self, outcome: str) -> bool:
        if self.outcome:
            return False
        self.outcome = outcome
        self._figures.leave(self)
        return True

    def _observe(self, histogram: Histogram, value_s: float) -> None:
        histogram.add(value_s)
