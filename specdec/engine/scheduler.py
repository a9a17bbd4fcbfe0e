"""The engine thread: gathers ready work, runs steps, hands results back.

Everything a service does with the cache or with session state it posts as a closure to this thread, so nothing is
shared and nothing is locked. What the next step takes of the work that waits is decided by `choose`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from specdec.engine.block_table import BlockTable
from specdec.engine.feed import Feed, choose
from specdec.engine.interface import CausalModel
from specdec.engine.kv_cache import KVCache
from specdec.engine.runner import Answer, Evidence, Payload, Piece, StepReport, StepRunner
from specdec.errors import ReplicaUnavailable, SpecdecError

logger = logging.getLogger("specdec.engine")

Stepped = Callable[[int, int, float], None]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Turn(Generic[Payload, Answer]):
    """What a service wants of the engine next.

    `pieces`: a step of these, whose report goes to `done`. Otherwise a step of the feeds that wait, `delay_s` later at
    the earliest, so that more can come; where none waits, another turn `wake_s` later, None for when something is
    posted.
    """

    delay_s: float = 0.0
    wake_s: float | None = None
    pieces: Sequence[Piece[Payload]] = ()
    done: Callable[[StepReport[Answer]], None] = lambda report: None


NOTHING: Turn[Any, Any] = Turn()
BeforeStep = Callable[[], Turn[Payload, Answer]]


class Engine(Generic[Payload, Answer]):
    """One thread that owns a model, its cache and whatever its users keep in closures they post.

    `post` may be called from any thread, `submit` and `cache` only on the engine thread. `evidence(payloads,
    row_counts, logits)` turns the logits of a step into one result per payload, in order. `stepped(rows, feeds,
    seconds)` is told of every step, on the engine thread.
    """

    def __init__(
        self,
        model: CausalModel,
        cache_block_count: int,
        block_size: int,
        evidence: Evidence[Payload, Answer],
        chunk_size: int = 64,
        rows_max: int = 512,
        stepped: Stepped = lambda row_count, feed_count, step_s: None,
    ):
        if not 1 <= chunk_size <= rows_max:
            raise ValueError(f"chunk_size is {chunk_size}; it must be from 1 to rows_max, {rows_max}")
        self.model = model
        self.cache = KVCache(cache_block_count, block_size, model.allocate(cache_block_count, block_size))
        self.chunk_size = chunk_size
        self.rows_max = rows_max
        self._stepped = stepped
        self._runner = StepRunner(model, self.cache, evidence)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: dict[Feed[Payload, Answer], None] = {}  # in order of age
        self._is_stopping = False
        self._before_step: BeforeStep[Payload, Answer] = lambda: NOTHING
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, before_step: BeforeStep[Payload, Answer] = lambda: NOTHING) -> None:
        """Starts the thread and returns after one warm-up step on it; raises what that step raised.

        `before_step` is the service's turn on the engine thread, after everything posted and before every step: it may
        submit feeds, and says what it wants next.
        """
        self._before_step = before_step
        self._thread.start()
        try:
            self.call(self._runner.warm_up)
        except BaseException:
            self.stop()
            raise

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` on the engine thread, waits, and returns or raises what it does. Not from that thread."""
        outcome: Future[Result] = Future()

        def run() -> None:
            try:
                outcome.set_result(function())
            except BaseException as error:  # handed to the caller, which decides
                outcome.set_exception(error)

        self.post(run)
        return outcome.result()

    def run(self, pieces: Sequence[Piece[Payload]]) -> StepReport[Answer]:
        """One step of these pieces, at once. Engine thread only. Never raises for what a piece did."""
        return self._runner.run(list(pieces))

    def stop(self) -> None:
        """Ends the thread after the step in progress; feeds still waiting fail with ReplicaUnavailable. Idempotent."""

        def end() -> None:
            self._is_stopping = True

        if self._thread.is_alive():
            self._inbox.put(end)
            self._thread.join()

    def post(self, function: Callable[[], None]) -> None:
        """Runs `function` on the engine thread before its next step. Raises ReplicaUnavailable once stopped.

        An exception in it is logged and goes no further: what is posted answers for its own errors.
        """
        if self._is_stopping:
            raise ReplicaUnavailable("the engine has stopped")
        self._inbox.put(function)

    def submit(self, feed: Feed[Payload, Answer]) -> None:
        """Queues a feed for the next step with room for it. Engine thread only."""
        feed.submitted_s = time.perf_counter()
        self._waiting[feed] = None

    @property
    def waiting_count(self) -> int:
        """Feeds queued or unfinished; a figure for metrics when read from another thread."""
        return len(self._waiting)

    def _run(self) -> None:
        while True:
            self._drain(timeout_s=0.0)
            if self._is_stopping:
                break
            turn = self._call(self._before_step) or NOTHING
            if turn.pieces:
                self._run_pieces(turn)
            elif not self._waiting:
                self._drain(timeout_s=turn.wake_s)
            elif turn.delay_s > 0:
                self._drain(timeout_s=turn.delay_s)
            else:
                self._step()
        for feed in list(self._waiting):
            self._waiting.pop(feed, None)
            self._call(feed.failed, ReplicaUnavailable("the engine has stopped"))

    def _drain(self, timeout_s: float | None) -> None:
        """Runs what was posted; sleeps until something is, `timeout_s` at most (None: without end)."""
        while True:
            try:
                function = self._inbox.get(block=timeout_s != 0, timeout=timeout_s)
            except queue.Empty:
                return
            timeout_s = 0.0
            self._call(function)

    def _run_pieces(self, turn: Turn[Payload, Answer]) -> None:
        """One step of the pieces a service chose."""
        report, _, _ = self._timed(turn.pieces)
        self._call(turn.done, report)

    def _step(self) -> None:
        """Gather, run, hand back: the engine's loop."""
        chosen = choose(self._ready(), self.chunk_size, self.rows_max, self.cache.is_decoding)
        if not chosen:
            return
        report, started_s, ended_s = self._timed([piece for _, piece in chosen])
        for (feed, piece), outcome in zip(chosen, report.outcomes):
            timing = feed.timing
            if not timing.step_count:
                timing.queue_s, timing.first_started_s = started_s - feed.submitted_s, started_s
            timing.step_count += 1
            timing.forward_s += report.forward_s
            feed.fed_count += len(piece.token_ids)
            if isinstance(outcome, SpecdecError):
                self._waiting.pop(feed, None)
                self._call(feed.failed, outcome)
            elif piece.logit_count:
                self._waiting.pop(feed, None)
                feed.table.is_decoding = True
                timing.evidence_s, timing.row_count = report.evidence_s, report.row_count
                timing.feed_count, timing.started_s, timing.ended_s = len(chosen), started_s, ended_s
                self._call(feed.done, outcome, timing)

    def _timed(self, pieces: Sequence[Piece[Payload]]) -> tuple[StepReport[Answer], float, float]:
        """One step, when it began and when it ended."""
        started_s = time.perf_counter()
        try:
            report = self.run(pieces)
        except Exception as error:  # the runner answers for its pieces; what escapes it is an error of the engine
            logger.exception("a step failed")
            failure = SpecdecError(f"{type(error).__name__}: {error}")
            report = StepReport([failure] * len(pieces), 0.0, 0.0, 0)
        ended_s = time.perf_counter()
        self._stepped(report.row_count, len(pieces), ended_s - started_s)
        return report, started_s, ended_s

    def _ready(self) -> list[Feed[Payload, Answer]]:
        """The feeds that may run, oldest first and one per sequence; what is stale or misplaced leaves the queue."""
        ready: list[Feed[Payload, Answer]] = []
        tables: set[BlockTable] = set()
        for feed in list(self._waiting):
            if not feed.is_current():
                del self._waiting[feed]
            elif feed.table in tables:
                continue
            elif feed.table.is_released or feed.table.length != feed.next_position:
                del self._waiting[feed]
                message = f"a feed for position {feed.next_position} found {feed.table!r}"
                self._call(feed.failed, SpecdecError(message))
            else:
                tables.add(feed.table)
                ready.append(feed)
        return ready

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Calls back into a service; its exceptions are logged, the thread goes on."""
        try:
            return function(*arguments)
        except Exception:
            logger.exception("a callback of the engine failed")
            return None
