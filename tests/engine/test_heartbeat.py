"""The heartbeat of the engine thread and the watch that reads it: bounds, ticks, and a thread that dies."""

from __future__ import annotations

import threading

import pytest

from specdec.engine.scheduling.heartbeat import STEP_S_MIN, UNKNOWN_S, Heartbeat, Work
from specdec.engine.scheduling.scheduler import Engine
from specdec.errors import ReplicaUnavailable
from specdec.replica.watch import TICK_S, EngineWatch, HangTimer
from tests.support.engine_bench import TIMEOUT_S, Bench


def bound(heartbeat: Heartbeat, row_count: int, block_count: int) -> float:
    """The bound of a step that begins now."""
    heartbeat.begins_step(row_count, block_count)
    return heartbeat.work.seconds_max


def test_a_step_may_take_eight_times_as_long_as_such_steps_took() -> None:
    """Claim: the bound of a step is 8 times what steps of its shape took, 2 s at least; 60 s for a shape not seen, more
    where all steps are slow; one long step does not raise it for ever.

    Conclusive: shapes differ in rows and in the magnitude of blocks; all values are computed by hand.
    """
    heartbeat = Heartbeat()
    assert bound(heartbeat, 4, 5) == UNKNOWN_S
    heartbeat.ends_step(4, 5, 0.01)
    assert bound(heartbeat, 4, 7) == STEP_S_MIN, "5 and 7 blocks are one magnitude"
    assert bound(heartbeat, 4, 8) == bound(heartbeat, 5, 5) == UNKNOWN_S
    heartbeat.ends_step(4, 5, 1.0)
    assert bound(heartbeat, 4, 5) == STEP_S_MIN, "one long step is no usual one"
    for _ in range(6):
        heartbeat.ends_step(4, 5, 1.0)
    assert bound(heartbeat, 4, 5) == 8.0
    assert bound(heartbeat, 512, 5) == 8 * 512 / 4, "as long for each row as the quickest step"
    for _ in range(14):
        heartbeat.ends_step(4, 5, 0.01)
    assert bound(heartbeat, 4, 5) == STEP_S_MIN


def test_a_hang_is_found_at_the_first_tick_past_its_bound() -> None:
    """Claim: a piece of work is a hang from the first tick past its bound on, within one tick of it; waiting never is,
    and new work starts anew.

    Source: health turns NOT_SERVING within a second of the bound. Conclusive: time is the number of ticks, and a long
    pause of the process is one tick.
    """
    timer = HangTimer()
    tick_count = round(STEP_S_MIN / TICK_S)
    assert not any(timer.tick(None) for _ in range(10 * tick_count))
    for _ in range(3):
        work = Work(STEP_S_MIN, 4, 5)
        assert not any(timer.tick(work) for _ in range(tick_count))
    assert timer.tick(work) == "the engine hangs: a step of 4 rows over 5 cache blocks took longer than 2.0 s"


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineWatch, list[str], threading.Event]:
    """A watch of an engine, the reasons it gives, and whether it has ended the process."""
    reasons: list[str] = []
    ended = threading.Event()
    monkeypatch.setattr(EngineWatch, "_end", lambda watch: ended.set() or watch._is_stopping.set())
    return EngineWatch(engine, reasons.append), reasons, ended


def test_the_heartbeat_is_the_current_work(bench: Bench) -> None:
    """Claim: during a step the heartbeat is that step, between steps other work, and None while the thread waits.

    Conclusive: read by the model within the step, by a posted function, and after the thread went to sleep.
    """
    seen: list[tuple[int, int]] = []
    beat = bench.engine.heartbeat
    bench.model.fault = lambda batch: seen.append((beat.work.row_count, beat.work.block_count))
    bench.run(lambda: bench.feed("a", [1, 2, 3]), 1)
    assert seen == [(3, 15)], "a table of 120 positions has 15 blocks of 8"
    assert bench.engine.call(lambda: str(beat.work)) == "work between steps"
    asleep = threading.Event()
    beat.waits = lambda: setattr(beat, "work", None) or asleep.set()
    bench.engine.post(lambda: None)
    assert asleep.wait(TIMEOUT_S) and beat.work is None


def test_a_dead_engine_thread_is_noticed_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: an error that ends the engine thread ends the process at the next tick, its waiting feeds fail, and posts
    are refused.

    Source: the engine's thread dies, health stays SERVING and generations have no end. Conclusive: the error is planted
    outside every piece and callback, where nothing catches it.
    """
    watch, reasons, ended = watched(bench.engine, monkeypatch)

    def planted() -> bool:
        raise SystemExit

    outcomes = bench.run(lambda: bench.feed("a", [1, 2], is_current=planted), 1)
    assert isinstance(outcomes["a"], ReplicaUnavailable)
    assert ended.wait(TIMEOUT_S) and reasons == ["the engine thread has died; the log has its error"]
    with pytest.raises(ReplicaUnavailable):
        bench.engine.post(lambda: None)
    watch._thread.join(TIMEOUT_S)


def test_a_watched_engine_stops_without_a_word(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a watch that is stopped before its engine reports nothing and does not end the process."""
    watch, reasons, ended = watched(bench.engine, monkeypatch)
    bench.run(lambda: bench.feed("a", [1, 2, 3]), 1)
    watch.stop()
    assert not reasons and not ended.is_set() and not watch._thread.is_alive()
