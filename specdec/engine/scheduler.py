"""The engine thread: gathers ready work first come first served, runs steps, hands results back.

Everything a service does with the cache or with session state it posts as a closure to this thread, so nothing is
shared and nothing is locked. Long feeds are cut into chunks at absolute positions, and an unfinished feed rejoins the
queue at its end, so a long prompt never keeps a short verification waiting for more than one step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from specdec.engine.interface import CausalModel
from specdec.engine.kv_cache import BlockTable, KVCache
from specdec.engine.runner import Evidence, Piece, StepRunner
from specdec.errors import ReplicaUnavailable, SpecdecError

logger = logging.getLogger("specdec.engine")

BeforeStep = Callable[[], float]

CHUNK_SIZE_DEFAULT = 64
ROWS_MAX_DEFAULT = 512  # rows of one step: bounds how long a decode waits behind other sessions' prompts


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where a feed's time went, in seconds: `forward_s` sums over its steps.

    `row_count` and `feed_count`, rows and feeds of all sequences together, are of its last step.
    """

    queue_s: float
    forward_s: float
    evidence_s: float
    row_count: int
    step_count: int
    feed_count: int = 1


@dataclass(slots=True, eq=False)
class Feed:
    """Tokens to run through the model for one sequence, and what to do with the logits of the last `logit_count`.

    Rows are positions [start_position, start_position + len(token_ids)). The caller truncates the table to
    `start_position` first; a feed that finds another length when its turn comes fails. Exactly one of `done` and
    `failed` is called, on the engine thread, unless `is_current` says the feed no longer matters: then neither is.
    """

    table: BlockTable
    start_position: int
    token_ids: Sequence[int]
    logit_count: int
    payload: object
    done: Callable[[object, StepTiming], None]
    failed: Callable[[SpecdecError], None]
    is_current: Callable[[], bool] = lambda: True
    submitted_s: float = field(default=0.0, init=False)
    queue_s: float = field(default=0.0, init=False)
    forward_s: float = field(default=0.0, init=False)
    step_count: int = field(default=0, init=False)
    fed_count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.logit_count <= len(self.token_ids):
            raise ValueError(f"logit_count is {self.logit_count}; it must be from 1 to {len(self.token_ids)}")

    @property
    def next_position(self) -> int:
        return self.start_position + self.fed_count

    def piece(self, chunk_size: int) -> Piece:
        """The rows of the next step: all that remain, or up to an absolute multiple of the chunk size.

        Rows with logits are never divided between steps, so that evidence sees a request whole.
        """
        remaining = len(self.token_ids) - self.fed_count
        count = remaining
        if remaining > max(chunk_size, self.logit_count):
            to_boundary = chunk_size - self.next_position % chunk_size
            count = min(to_boundary, remaining - self.logit_count)
        is_last = count == remaining
        token_ids = self.token_ids[self.fed_count : self.fed_count + count]
        return Piece(self.table, self.next_position, token_ids, self.logit_count if is_last else 0, self.payload)


class Engine:
    """One thread that owns a model, its cache and whatever its users keep in closures they post.

    `post` may be called from any thread, `submit` and `cache` only on the engine thread. `evidence(payloads,
    row_counts, logits)` turns the logits of a step into one result per payload, in order.
    """

    def __init__(
        self,
        model: CausalModel,
        cache_block_count: int,
        block_size: int,
        evidence: Evidence,
        chunk_size: int = CHUNK_SIZE_DEFAULT,
        rows_max: int = ROWS_MAX_DEFAULT,
    ):
        if not 1 <= chunk_size <= rows_max:
            raise ValueError(f"chunk_size is {chunk_size}; it must be from 1 to rows_max, {rows_max}")
        self.model = model
        self.cache = KVCache(cache_block_count, block_size, model.allocate(cache_block_count, block_size))
        self.chunk_size = chunk_size
        self.rows_max = rows_max
        self._runner = StepRunner(model, self.cache, evidence)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Feed] = deque()
        self._is_stopping = False
        self._before_step: BeforeStep = lambda: 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, before_step: BeforeStep = lambda: 0.0) -> None:
        """Starts the thread and returns after one warm-up step on it; raises what that step raised.

        `before_step` is the service's turn on the engine thread, after everything posted and before every step: it may
        submit feeds, and returns the seconds the step is to be held for more work, 0 for none.
        """
        self._before_step = before_step
        self._thread.start()
        warm: Future[None] = Future()

        def warm_up() -> None:
            try:
                self._runner.warm_up()
                warm.set_result(None)
            except BaseException as error:  # handed to the caller of start, which decides
                warm.set_exception(error)

        self.post(warm_up)
        try:
            warm.result()
        except BaseException:
            self.stop()
            raise

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

    def submit(self, feed: Feed) -> None:
        """Queues a feed for the next step with room for it. Engine thread only."""
        feed.submitted_s = time.perf_counter()
        self._waiting.append(feed)

    @property
    def waiting_count(self) -> int:
        """Feeds queued or unfinished; a figure for metrics when read from another thread."""
        return len(self._waiting)

    def _run(self) -> None:
        while True:
            self._drain(timeout_s=0.0)
            if self._is_stopping:
                break
            hold_s = self._call(self._before_step) or 0.0
            if not self._waiting:
                self._drain(timeout_s=None)
            elif hold_s > 0:
                self._drain(timeout_s=hold_s)
            else:
                self._step()
        while self._waiting:
            self._call(self._waiting.popleft().failed, ReplicaUnavailable("the engine has stopped"))

    def _drain(self, timeout_s: float | None) -> None:
        """Runs what was posted; sleeps until something is, `timeout_s` at most (None: without end)."""
        while True:
            try:
                function = self._inbox.get(block=timeout_s != 0, timeout=timeout_s)
            except queue.Empty:
                return
            timeout_s = 0.0
            self._call(function)

    def _step(self) -> None:
        """Gather, run, hand back: the engine's loop."""
        feeds, pieces = self._gather()
        if not feeds:
            return
        started_s = time.perf_counter()
        for feed in feeds:
            feed.queue_s = feed.queue_s if feed.step_count else started_s - feed.submitted_s
        try:
            report = self._runner.run(pieces)
        except Exception as error:  # the runner answers for its pieces; what escapes it is an error of the engine
            logger.exception("a step failed")
            for feed in feeds:
                self._call(feed.failed, SpecdecError(f"{type(error).__name__}: {error}"))
            return
        for feed, piece, outcome in zip(feeds, pieces, report.outcomes):
            feed.step_count += 1
            feed.forward_s += report.forward_s
            feed.fed_count += len(piece.token_ids)
            if isinstance(outcome, SpecdecError):
                self._call(feed.failed, outcome)
            elif piece.logit_count == 0:
                self._waiting.append(feed)
            else:
                timing = StepTiming(
                    feed.queue_s, feed.forward_s, report.evidence_s, report.row_count, feed.step_count, len(feeds)
                )
                self._call(feed.done, outcome, timing)

    def _gather(self) -> tuple[list[Feed], list[Piece]]:
        """The feeds of the next step in order of arrival, at most one per sequence, up to `rows_max` rows."""
        feeds: list[Feed] = []
        pieces: list[Piece] = []
        later: list[Feed] = []
        tables: set[BlockTable] = set()
        row_count = 0
        while self._waiting and row_count < self.rows_max:
            feed = self._waiting.popleft()
            if not feed.is_current():
                continue
            if feed.table in tables:
                later.append(feed)
                continue
            if feed.table.is_released or feed.table.length != feed.next_position:
                message = f"a feed for position {feed.next_position} found {feed.table!r}"
                self._call(feed.failed, SpecdecError(message))
                continue
            piece = feed.piece(self.chunk_size)
            if pieces and row_count + len(piece.token_ids) > self.rows_max:
                later.append(feed)
                break
            tables.add(feed.table)
            row_count += len(piece.token_ids)
            feeds.append(feed)
            pieces.append(piece)
        self._waiting.extendleft(reversed(later))
        return feeds, pieces

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Calls back into a service; its exceptions are logged, the thread goes on."""
        try:
            return function(*arguments)
        except Exception:
            logger.exception("a callback of the engine failed")
            return None
