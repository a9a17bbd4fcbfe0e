"""The engine thread: collects waiting feeds, runs steps, returns results.

A service posts its work on the cache and on session state as closures to this thread, so nothing is shared and nothing
is locked. `choose` decides the feeds of the next step.
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

from specdec.engine.cache.kv_cache import BlockTable, KVCache
from specdec.engine.interface import CausalModel, StepAbandoned, StepFlag
from specdec.engine.scheduling.feed import Answer, Feed, Payload, choose, rows_beside_short
from specdec.engine.scheduling.heartbeat import Heartbeat
from specdec.engine.scheduling.runner import Chosen, HiddenReader, Sampler, StepReport, StepRunner
from specdec.errors import ReplicaUnavailable, SpecdecError

logger = logging.getLogger("specdec.engine")

# After an abandoned step, steps are small until they have lost as much as it did, by what they were measured to lose:
# within these bounds, times its time, no other choice wastes less than half as much. At most a sixth of the time is
# wasted, where small steps lose a fifth or more.
SMALL_STEPS_FACTORS = 5.0, 30.0
KEPT = 0.95  # share of what earlier steps count, at each new one
POSTS_PER_TURN = 128  # between two steps a coordinator with 64 sessions sends 64 messages at most; more wait for a step

Stepped = Callable[[int, int, float], None]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Turn(Generic[Payload, Answer]):
    """A service's choice of the engine's next action.

    `feeds`: a step of these, whole, after which `done` gets its report. Otherwise a step of the waiting feeds after the
    step delay `delay_s`, so that more can arrive; without waiting feeds, another turn after `wake_s` (None: after the
    next post).
    """

    delay_s: float = 0.0
    wake_s: float | None = None
    feeds: Sequence[Feed[Payload, Answer]] = ()
    done: Callable[[StepReport[Answer]], None] = lambda report: None


@dataclass(slots=True)
class PromptSpeed:
    """Rows per second of steps of prompts, the latest ones most."""

    rows: float = 0.0
    seconds: float = 0.0

    def add(self, row_count: int, step_s: float) -> None:
        """Counts a step."""
        self.rows, self.seconds = KEPT * self.rows + row_count, KEPT * self.seconds + step_s

    @property
    def rate(self) -> float:
        """0 before the first step."""
        return self.rows / self.seconds if self.seconds else 0.0


def small_steps_factor(small: PromptSpeed, large: PromptSpeed) -> float:
    """The time of small steps after an abandoned one, over its time."""
    least, most = SMALL_STEPS_FACTORS
    lost_share = 1 - small.rate / large.rate if small.rate and large.rate else 0.0
    return min(max(1 / lost_share, least), most) if lost_share > 0 else most


NOTHING: Turn[Any, Any] = Turn()
BeforeStep = Callable[[], Turn[Payload, Answer]]


class Engine(Generic[Payload, Answer]):
    """One thread that owns a model, its cache and the state in closures posted by its users.

    `post` may be called from any thread, `submit` and `cache` only on the engine thread. `sampler(payloads,
    row_counts, logits, readback)` turns the logits of a step into one result per payload, in order. `prompt_rows_max`:
    most rows of prompts in a step without decodes; None: all rows. `abandons_steps`: that is for steps while a short
    feed waits, and for a while after an abandoned one; others have all rows, and an urgent post ends them between two
    layers. Their rows run again. `stepped(rows, feeds, seconds)` is called after every step, on the engine thread.
    `read_hidden(payloads, hidden states, results)` adds to the results what hidden states say, for a model that returns
    them.
    """

    def __init__(
        self,
        model: CausalModel,
        cache_block_count: int,
        block_size: int,
        sampler: Sampler[Payload, Answer],
        chunk_size: int = 64,
        rows_max: int = 512,
        prompt_rows_max: int | None = None,
        abandons_steps: bool = False,
        stepped: Stepped = lambda row_count, feed_count, step_s: None,
        read_hidden: HiddenReader[Payload, Answer] | None = None,
    ):
        if not 1 <= chunk_size <= rows_max:
            raise ValueError(f"chunk_size is {chunk_size}; it must be from 1 to rows_max, {rows_max}")
        self.model = model
        self.cache = KVCache(cache_block_count, block_size, model.allocate(cache_block_count, block_size))
        self.chunk_size = chunk_size
        self.rows_max = rows_max
        self._prompt_rows_max = prompt_rows_max
        self._abandons_steps = abandons_steps and prompt_rows_max is not None
        self._small_until_s = 0.0  # no step is made to be abandoned before
        self._small, self._large = PromptSpeed(), PromptSpeed()
        self._has_urgent_posts = StepFlag()  # set by those who post, and by the engine thread
        self.abandoned_count = 0
        self.heartbeat = Heartbeat()
        self._stepped = stepped
        self._runner = StepRunner(model, self.cache, sampler, read_hidden)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: dict[Feed[Payload, Answer], None] = {}  # oldest first
        self._is_stopping = False
        self._before_step: BeforeStep[Payload, Answer] = lambda: NOTHING
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, before_step: BeforeStep[Payload, Answer] = lambda: NOTHING) -> None:
        """Starts the thread and returns after one warm-up step on it; raises the error of that step.

        `before_step` is the service's turn on the engine thread, after posted closures and before every step: it may
        submit feeds and returns the next `Turn`.
        """
        self._before_step = before_step
        self._thread.start()
        try:
            self.call(self._runner.warm_up)
        except BaseException:
            self.stop()
            raise

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` on the engine thread and returns its result or raises its error. Not from that thread."""
        outcome: Future[Result] = Future()

        def run() -> None:
            try:
                outcome.set_result(function())
            except BaseException as error:  # handed to the caller, which decides
                outcome.set_exception(error)

        self.post(run)
        return outcome.result()

    def run(self, feeds: Sequence[Feed[Payload, Answer]]) -> StepReport[Answer]:
        """Runs one step of all rows of these feeds at once, and calls them back. Engine thread only. Never raises an
        error of a feed."""
        chosen = [(feed, feed.chunk()) for feed in feeds]
        started_s = time.perf_counter()
        report = self._run_rows(chosen)
        self._finish(chosen, report, started_s, time.perf_counter())
        return report

    def _run_rows(
        self, chosen: Chosen[Payload, Answer], should_abandon: Callable[[], bool] | None = None
    ) -> StepReport[Answer]:
        row_count = sum(len(chunk.token_ids) for _, chunk in chosen)
        block_count = sum(len(feed.table.block_ids) for feed, _ in chosen)
        self.heartbeat.begins_step(row_count, block_count)
        started_s = time.perf_counter()
        report = self._runner.run(chosen, should_abandon)
        self.heartbeat.ends_step(row_count, block_count, time.perf_counter() - started_s)
        return report

    def stop(self) -> None:
        """Ends the thread after the current step; waiting feeds fail with ReplicaUnavailable. Idempotent."""

        def end() -> None:
            self._is_stopping = True

        if self.is_alive:
            self._inbox.put(end)
            self._thread.join()

    def post(self, function: Callable[[], None], is_urgent: bool = False) -> None:
        """Runs `function` on the engine thread, in order, POSTS_PER_TURN at most before a step. `is_urgent`: it brings
        work for a step, which may be needed sooner than the rest of the current one.

        Raises ReplicaUnavailable once stopped. An exception in it is only logged: functions handle their own errors.
        """
        if self._is_stopping:
            raise ReplicaUnavailable("the engine has stopped")
        self._inbox.put(function)
        if is_urgent:  # a step that begins between these lines is abandoned before its first layer, without gain
            self._has_urgent_posts.set(True)

    def submit(self, feed: Feed[Payload, Answer]) -> None:
        """Queues a feed for the next step with free rows. Engine thread only."""
        feed.submitted_s = time.perf_counter()
        self._waiting[feed] = None

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs; False before `start` and after `stop`."""
        return self._thread.is_alive()

    @property
    def waiting_count(self) -> int:
        """Feeds queued or unfinished; an approximate metric when read from another thread."""
        return len(self._waiting)

    def _run(self) -> None:
        """The engine thread. An error outside feeds and callbacks ends it."""
        cause: BaseException | None = None
        try:
            while not self._is_stopping:
                self._turn()
        except BaseException as error:
            cause = error
        self._is_stopping = True
        for feed in list(self._waiting):
            self._waiting.pop(feed, None)
            self._call(feed.failed, ReplicaUnavailable("the engine has stopped"))
        if cause is not None:
            logger.error("the engine thread dies", exc_info=cause)

    def _turn(self) -> None:
        """Runs posted functions, then a step; without work for a step it waits."""
        self.heartbeat.works()
        self._drain()
        if self._is_stopping:
            return
        turn = self._call(self._before_step) or NOTHING
        if turn.feeds:
            self._run_turn(turn)
        elif not self._waiting:
            self._run_post(turn.wake_s)
        elif turn.delay_s > 0:
            self._run_post(turn.delay_s)
        else:
            self._step()

    def _drain(self) -> None:
        """Runs the posted functions, POSTS_PER_TURN at most."""
        self._has_urgent_posts.set(False)
        for _ in range(POSTS_PER_TURN):
            if not self._run_post(timeout_s=0.0):
                return
        self._has_urgent_posts.set(True)  # those that are left may be

    def _run_post(self, timeout_s: float | None) -> bool:
        """Runs the next posted function, after a sleep of `timeout_s` at most (None: no limit); False if none came."""
        if timeout_s != 0:
            self.heartbeat.waits()
        try:
            function = self._inbox.get(block=timeout_s != 0, timeout=timeout_s)
        except queue.Empty:
            return False
        self.heartbeat.works()
        self._call(function)
        return True

    def _run_turn(self, turn: Turn[Payload, Answer]) -> None:
        """Runs one step of the feeds chosen by a service."""
        chosen = [(feed, feed.chunk()) for feed in turn.feeds]
        report, started_s, ended_s = self._timed(chosen)
        self._finish(chosen, report, started_s, ended_s)
        self._call(turn.done, report)

    def _step(self) -> None:
        """Chooses feeds, runs them in one step and returns their results."""
        feeds, is_decoding = self._ready(), self.cache.is_decoding
        prompt_rows_max, is_large = self._prompt_rows(feeds, is_decoding)
        chosen = choose(feeds, self.chunk_size, self.rows_max, is_decoding, prompt_rows_max)
        if not chosen:
            return
        try:
            report, started_s, ended_s = self._timed(chosen, self._has_urgent_posts if is_large else None)
        except StepAbandoned:
            return
        small = self._prompt_rows_max or 0
        if not is_decoding and report.row_count > small // 2:
            (self._large if report.row_count > small else self._small).add(report.row_count, ended_s - started_s)
        self._finish(chosen, report, started_s, ended_s)

    def _finish(
        self, chosen: Chosen[Payload, Answer], report: StepReport[Answer], started_s: float, ended_s: float
    ) -> None:
        """Counts the rows that ran, and calls back the feeds that failed, have no more, or are told of each part."""
        for (feed, chunk), outcome in zip(chosen, report.outcomes):
            timing = feed.timing
            if not timing.step_count:
                timing.queue_s, timing.first_started_s = started_s - feed.submitted_s, started_s
            timing.step_count += 1
            timing.forward_s += report.forward_s
            feed.fed_count += len(chunk.token_ids)
            if isinstance(outcome, SpecdecError):
                self._waiting.pop(feed, None)
                self._call(feed.failed, outcome)
            elif not feed.row_count or feed.part is not None:
                if not feed.row_count:
                    self._waiting.pop(feed, None)
                    feed.table.is_decoding = feed.part is None
                timing.sampling_s, timing.row_count = report.sampling_s, report.row_count
                timing.hidden_s = report.hidden_s
                timing.feed_count, timing.started_s, timing.ended_s = len(chosen), started_s, ended_s
                self._call(feed.done, outcome, timing)

    def _prompt_rows(self, feeds: Sequence[Feed[Payload, Answer]], is_decoding: bool) -> tuple[int | None, bool]:
        """Returns the most rows of prompts in the next step, None for all, and whether it may be abandoned."""
        small = self._prompt_rows_max
        if small is None:
            return None, False
        if rows := rows_beside_short(feeds, self.chunk_size):
            return min(small, rows), False
        is_large = self._abandons_steps and not is_decoding and time.perf_counter() >= self._small_until_s
        return None if is_large else small, is_large

    def _timed(
        self, chosen: Chosen[Payload, Answer], should_abandon: Callable[[], bool] | None = None
    ) -> tuple[StepReport[Answer], float, float]:
        """Runs one step; returns its report, its start and its end. Raises StepAbandoned."""
        started_s = time.perf_counter()
        try:
            report = self._run_rows(chosen, should_abandon)
        except StepAbandoned:
            now_s = time.perf_counter()
            self._small_until_s = now_s + small_steps_factor(self._small, self._large) * (now_s - started_s)
            self.abandoned_count += 1
            raise
        except Exception as error:  # the runner catches errors of feeds; others are errors of the engine
            failure = SpecdecError(f"{type(error).__name__}: {error}")
            report = StepReport([failure] * len(chosen), 0.0, 0.0, 0)
            logger.exception("a step failed")
        ended_s = time.perf_counter()
        self._stepped(report.row_count, len(chosen), ended_s - started_s)
        return report, started_s, ended_s

    def _ready(self) -> list[Feed[Payload, Answer]]:
        """Returns the feeds that may run, oldest first, one per sequence; removes stale or misplaced ones."""
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
        """Calls a function of a service; logs its exceptions and continues."""
        try:
            return function(*arguments)
        except Exception:
            logger.exception("a callback of the engine failed")
            return None
