"""A replica whose engine hangs ends itself and says why: a real process, a planted hang, real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from specdec.engine.scheduling.heartbeat import STEP_S_MIN
from specdec.errors import ENGINE_LOST_EXIT_CODE
from tests.support.planted_client import TIMEOUT_S, PlantedTarget
from tests.support.planted_target import DIES, HANGS, LOCK_HELD_S_MAX, LOCKS, LOOP_HANGS, PLAIN, SLOW, SLOW_LINE

NOTICED_S_MAX = 2.0  # twice the second after the bound
PAUSE_S = 3.0  # longer than a step may take, and than the interpreter's lock may be held
STATES = health_pb2.HealthCheckResponse


@pytest.fixture
def target(table_models: tuple[Path, Path], tmp_path: Path) -> Iterator[PlantedTarget]:
    """A target of its own: the test ends it."""
    target = PlantedTarget(table_models[0], tmp_path / "log")
    yield target
    target.stop()


@pytest.mark.lengthy
def test_a_hang_ends_the_replica_and_a_pause_does_not(target: PlantedTarget) -> None:
    """Claim: a step that hangs makes health NOT_SERVING and ends the process with its own exit code and the reason; a
    process that is stopped in a step, for longer than the step may take, goes on.

    Source: a hang of the engine must not leave health SERVING and generations without an end. Conclusive: the same
    process answers after the pause, and the hanging step has the shape of the answered ones, so its bound is 2 s; after
    SERVING its health says NOT_SERVING before it ends, within a second of the bound, and one more for a busy machine.
    """
    target.verify(PLAIN)
    target.check_answered()
    target.verify(SLOW)
    assert target.line() == SLOW_LINE
    target.process.send_signal(signal.SIGSTOP)
    time.sleep(PAUSE_S)
    target.process.send_signal(signal.SIGCONT)
    target.check_answered()
    health = target.health()
    assert next(health).status == STATES.SERVING
    began_s = time.monotonic()
    target.verify(HANGS)
    assert next(health).status == STATES.NOT_SERVING
    assert STEP_S_MIN < time.monotonic() - began_s < STEP_S_MIN + NOTICED_S_MAX
    assert target.process.wait(TIMEOUT_S) == ENGINE_LOST_EXIT_CODE
    assert "the engine hangs: a step of 1 rows" in target.log.read_text(encoding="utf-8")


@pytest.mark.more
def test_a_dead_engine_ends_the_replica(target: PlantedTarget) -> None:
    """Claim: a replica whose engine thread dies says NOT_SERVING within a second, or is gone by then (a second more is
    left for a busy machine), and ends with the exit code of a lost engine. Conclusive: the thread ends by an exception
    that no handler of pieces catches, in a real process."""
    target.verify(PLAIN)
    target.check_answered()
    health = target.health()
    assert next(health).status == STATES.SERVING
    began_s = time.monotonic()
    target.verify(DIES)
    with contextlib.suppress(grpc.RpcError):
        assert next(health).status == STATES.NOT_SERVING
    assert time.monotonic() - began_s < NOTICED_S_MAX
    assert target.process.wait(TIMEOUT_S) == ENGINE_LOST_EXIT_CODE
    assert "the engine thread has died" in target.log.read_text(encoding="utf-8")


@pytest.mark.more
def test_a_hang_of_the_event_loop_ends_the_replica(target: PlantedTarget) -> None:
    """Claim: a replica whose event loop hangs is ended, with the reason on standard error, though its engine thread
    works on. Conclusive: the hang is a sleep in the loop, during which other threads run."""
    target.verify(PLAIN)
    target.check_answered()
    target.verify(LOOP_HANGS)
    assert target.process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert "its event loop hung" in target.log.read_text(encoding="utf-8")


@pytest.mark.more
def test_a_hang_that_holds_the_interpreters_lock_ends_the_replica(target: PlantedTarget) -> None:
    """Claim: a step that hangs without releasing the interpreter's lock ends the process, with the reason and the
    place of the hang on standard error.

    Source: such a hang stops every thread that runs Python, and so the watch over the engine; gRPC's own threads go on
    to answer the pings of connections. Conclusive: the step is a call through `ctypes.PyDLL`, which keeps the lock, and
    the test above shows that a pause longer than the bound does not end this process. The log is read to its end.
    """
    target.verify(PLAIN)
    target.check_answered()
    target.verify(LOCKS)
    assert target.process.wait(TIMEOUT_S) == -signal.SIGKILL
    log = target.log.read_text(encoding="utf-8")
    assert f"for {LOCK_HELD_S_MAX:g} s its event loop hung, or a thread held the interpreter's lock" in log
    assert "planted_target.py" in log and "in planted" in log


@pytest.mark.lengthy
def test_a_lost_engine_ends_the_replica_though_its_log_is_blocked(
    table_models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Claim: a replica whose engine is lost ends with its exit code though standard error takes nothing. Conclusive:
    the pipe is full before the process starts, and stays so; the process has no other way to end."""
    log = tmp_path / "log"
    os.mkfifo(log)
    unread = os.open(log, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(unread, bytes(4096))
    target = PlantedTarget(table_models[0], log)
    try:
        target.verify(PLAIN)
        target.check_answered()
        target.verify(DIES)
        assert target.process.wait(TIMEOUT_S) == ENGINE_LOST_EXIT_CODE
    finally:
        target.stop()
        os.close(unread)
