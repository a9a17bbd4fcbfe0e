"""The engine thread: order, chunks, fences, and the isolation of one request's error.

Tests of order use a model that records its batches, tests of answers the table model.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from specdec.engine.interface import RaggedBatch
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.feed import Feed, StepTiming
from specdec.engine.scheduling.scheduler import POSTS_PER_TURN
from specdec.engine.table_model import write_table_model
from specdec.errors import ReplicaUnavailable, SpecdecError
from tests.support.engine_bench import TIMEOUT_S, VOCABULARY_SIZE, Bench


def test_prompts_are_cut_at_absolute_multiples(bench: Bench) -> None:
    """Claim: a feed longer than the chunk is cut at absolute multiples, and rows with logits stay together.

    Source: "fixed prefill chunks". Conclusive: a feed that starts off a multiple and wants logits over one.
    """

    def submit() -> None:
        table = bench.engine.cache.reserve(60)
        bench.feed("first", [1, 2, 3], table=table)

    bench.run(submit, 1)
    bench.model.batches.clear()
    table = next(iter(bench.engine.cache._tables))
    bench.run(lambda: bench.feed("second", [1] * 28, 4, table=table), 1)
    assert bench.model.batches == [[(3, 5, 0)], [(8, 8, 0)], [(16, 8, 0)], [(24, 7, 4)]]
    timing = bench.timings["second"]
    assert (timing.step_count, timing.row_count) == (4, 7) and timing.forward_s > 0 and timing.queue_s >= 0
    assert table.length == 31


def test_prompts_share_steps_by_age_and_decodes_come_first(bench: Bench) -> None:
    """Claim: prompts fill a step by age, one piece per sequence; a decode submitted last is in the next step, and from
    then on prompts have one chunk of a step.

    Source: design section 7, "chunks prefill so decodes are not starved". Conclusive: three prompts of five chunks are
    more than the two chunks that prompts have; the batches are compared one by one.
    """

    def submit() -> None:
        for name in "abc":
            bench.feed(name, [2] * 40)

    def decode_too(batch: RaggedBatch) -> None:
        if len(bench.model.batches) == 2:
            bench.feed("decode", [3])

    bench.model.batches.clear()
    bench.model.fault = decode_too  # on the engine thread, while the second step runs
    bench.run(submit, 4)
    assert bench.model.batches[:3] == [[(0, 8, 0)] * 2, [(8, 8, 0)] * 2, [(0, 1, 1), (16, 8, 0)]]
    assert bench.model.batches[3:5] == [[(24, 8, 0)], [(32, 8, 1)]], "the oldest prompt goes on, a chunk a step"
    assert all(sum(rows for _, rows, _ in batch) <= 8 for batch in bench.model.batches[3:])
    assert bench.timings["decode"].step_count == 1 and bench.timings["a"].step_count == 5


def test_feeds_submitted_by_callbacks_share_the_next_step(bench: Bench) -> None:
    """Claim: sequences that finish together go on together: continuous batching without idle steps.

    Source: scheduler.py. Conclusive: after the first step every batch has all three decodes.
    """
    bench.model.batches.clear()
    tables = []

    def again(feed: Feed, remaining: int) -> None:
        original = feed.done

        def done(result: object, timing: StepTiming) -> None:
            original((result, remaining), timing)
            if remaining:
                again(bench.feed((result[0], remaining), [1], table=feed.table), remaining - 1)

        feed.done = done

    def submit() -> None:
        for name in "abc":
            feed = bench.feed(name, [1, 2])
            tables.append(feed.table)
            again(feed, 3)

    bench.run(submit, 12)
    assert [len(batch) for batch in bench.model.batches] == [3, 3, 3, 3]


def test_stale_and_misplaced_feeds_touch_nothing(bench: Bench) -> None:
    """Claim: a feed that is no longer current is dropped in silence; one for another position fails alone.

    Source: design section 4, fences are checked when an item is executed. Conclusive: the cache's lengths are read
    afterwards, and only current feeds reached the model.
    """
    bench.model.batches.clear()
    feeds: list[Feed] = []

    def submit() -> None:
        feeds.append(bench.feed("stale", [1, 2], is_current=lambda: False))
        feeds.append(bench.feed("misplaced", [1, 2]))
        feeds[1].start_position = 1
        bench.feed("good", [1, 2])

    outcomes = bench.run(submit, 2)
    assert isinstance(outcomes["misplaced"], SpecdecError) and outcomes["good"][0] == "good"
    assert bench.model.batches == [[(0, 2, 1)]]
    assert [feed.table.length for feed in feeds] == [0, 0]


def test_an_exception_costs_one_request(bench: Bench) -> None:
    """Claim: an exception in the forward or in the sampler for one request fails that one; the others are answered.

    Source: "bisect once, never the thread". Conclusive: neighbours' answers equal those of a run without the fault, the
    failed tables did not advance, and the thread answers afterwards.
    """
    expected = bench.run(lambda: [bench.feed(name, [1, 2, 3], 3) for name in "ab"], 2)

    def planted(batch: RaggedBatch) -> None:
        if any(5 in chunk.token_ids for chunk in batch.chunks):
            raise RuntimeError("planted")

    bench.model.fault = planted
    failed: list[Feed] = []

    def submit() -> None:
        bench.feed("a", [1, 2, 3], 3)
        failed.append(bench.feed("forward", [1, 5, 3], 3))
        failed.append(bench.feed("sampler", [1, 2, 3], 3, payload="bad"))
        bench.feed("b", [1, 2, 3], 3)

    outcomes = bench.run(submit, 4)
    assert {name: outcomes[name] for name in "ab"} == expected
    assert all("planted" in str(outcomes[name]) for name in ("forward", "sampler"))
    assert [feed.table.length for feed in failed] == [0, 0]
    assert bench.run(lambda: bench.feed("a", [1, 2, 3], 3), 1)["a"] == expected["a"]


def test_callbacks_that_raise_do_not_stop_the_thread(bench: Bench) -> None:
    """Claim: an exception in a posted closure or in `done` is logged and the thread goes on.

    Source: "never the thread". Conclusive: a later feed is answered.
    """

    def raising() -> None:
        raise RuntimeError("planted")

    def submit() -> None:
        bench.feed("raises", [1]).done = lambda result, timing: raising()
        bench.feed("good", [1])

    bench.engine.post(raising)
    assert bench.run(submit, 1) == {"good": ("good", bench.outcomes["good"][1])}


def test_posts_do_not_keep_a_step_waiting(bench: Bench) -> None:
    """Claim: a step runs after POSTS_PER_TURN posted functions at most, and the others run after it, in order.

    Source: the inbox has no bound and was emptied before each step. Conclusive: the functions are counted when the step
    runs; there are ten times as many.
    """
    numbers: list[int] = []
    seen: list[int] = []
    bench.model.fault = lambda batch: seen.append(len(numbers))
    count = 10 * POSTS_PER_TURN

    def submit() -> None:
        for number in range(count):
            bench.engine.post(partial(numbers.append, number))
        bench.feed("feed", [1])

    bench.run(submit, 1)
    assert seen[0] <= POSTS_PER_TURN
    bench.engine.call(lambda: None)
    assert numbers == list(range(count))


def test_stop_joins_and_answers_what_waits(bench: Bench) -> None:
    """Claim: `stop` ends the thread, fails feeds that wait, can be called twice, and later posts are refused.

    Source: scheduler.py. Conclusive: the feed is submitted in the closure after which the thread sees the stop.
    """
    stopping = threading.Thread(target=bench.engine.stop)

    def submit() -> None:
        bench.feed("waiting", [1])
        bench.engine._inbox.put(lambda: stopping.start() or setattr(bench.engine, "_is_stopping", True))

    outcomes = bench.run(submit, 1)
    assert isinstance(outcomes["waiting"], ReplicaUnavailable)
    stopping.join(TIMEOUT_S)
    bench.engine.stop()
    assert not bench.engine._thread.is_alive()
    with pytest.raises(ReplicaUnavailable):
        bench.engine.post(lambda: None)


def test_start_raises_what_the_warm_up_raised(tmp_path: Path) -> None:
    """Claim: a model that cannot step fails `start`, not the first request.

    Source: "SERVING only after one warm-up step". Conclusive: the planted error itself arrives.
    """
    write_table_model(tmp_path, VOCABULARY_SIZE)
    bench = Bench(load_model(str(tmp_path)))

    def planted(batch: RaggedBatch) -> None:
        raise ZeroDivisionError("planted")

    bench.model.fault = planted
    with pytest.raises(ZeroDivisionError):
        bench.engine.start()
    assert not bench.engine._thread.is_alive()
