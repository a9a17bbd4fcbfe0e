"""A coordinator whose event loop stands still while gRPC's own threads keep its connection alive: a real replica, a
real connection, and a stream on which nothing is written or read any more."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.support.pages import free_address, read_page
from tests.support.planted_client import PlantedTarget
from tests.support.planted_target import PLAIN

SILENCE_S = 2.0  # in place of SILENCE_S_MAX
BUSY_S = 8.0  # for what follows, on a busy machine


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `condition` holds within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.more
def test_a_coordinator_that_is_stuck_loses_its_stream_and_one_that_pings_does_not(
    table_models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Claim: a replica ends a stream from which nothing came for its bound, with its sessions, although the connection
    lives; while pings come the stream stays, also over a pause of the replica that is longer than the bound.

    Conclusive: the stream is written and read by this test only, so that once it stops, only gRPC's threads answer for
    it; a health check on the same connection is answered after the end of the stream; the page counts the sessions.
    """
    page = free_address()
    target = PlantedTarget(table_models[0], tmp_path / "log", str(SILENCE_S), page)
    is_stuck = threading.Event()

    def ping() -> None:
        while not is_stuck.wait(SILENCE_S / 8):
            target.ping()

    pinging = threading.Thread(target=ping)
    pinging.start()
    try:
        target.verify(PLAIN)
        target.check_answered()
        target.process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * SILENCE_S)
        target.process.send_signal(signal.SIGCONT)
        time.sleep(SILENCE_S)
        assert sessions(page) == 1
        is_stuck.set()
        assert wait_until(lambda: sessions(page) == 0, SILENCE_S + BUSY_S)
        assert target.status() == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            while True:
                next(target.answers)
        assert caught.value.code() is grpc.StatusCode.ABORTED and "not even a ping" in caught.value.details()
    finally:
        is_stuck.set()
        pinging.join()
        target.process.send_signal(signal.SIGCONT)
        target.stop()


def sessions(page: str) -> float:
    """The sessions open on the replica."""
    return read_page(page).value("specdec_sessions")
