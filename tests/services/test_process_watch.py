"""A service whose event loop hangs is ended: a real process, a planted hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from specdec import process_watch
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2
from tests.support.planted_client import TIMEOUT_S, PlantedTarget
from tests.support.planted_coordinator import HELD_S_MAX

PAUSE_S = 3.0  # longer than the event loop may hang
RETRY_S = 0.2


def generate(stub: pb_grpc.CoordinatorServiceStub, asked: pb.GenerateRequest) -> None:
    """Runs one generation to its end, once the target is connected again: it drops a link that was silent."""
    for _ in range(round(TIMEOUT_S / RETRY_S)):
        try:
            assert list(stub.Generate(asked, timeout=TIMEOUT_S))[-1].HasField("finished")
            return
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            time.sleep(RETRY_S)
    raise AssertionError("no target")


def watch_of(pid: int, former: int = 0) -> int:
    """Waits for the second process of `pid` other than `former`; returns its id."""
    for _ in range(round(TIMEOUT_S / RETRY_S)):
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended since
                command = (folder / "cmdline").read_bytes().split(b"\0")
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                if process_watch.__file__.encode() in command and parent == str(pid) and int(folder.name) != former:
                    return int(folder.name)
        time.sleep(RETRY_S)
    raise AssertionError("nothing watches it")


@pytest.mark.more
def test_a_coordinator_whose_event_loop_hangs_is_ended(table_models: tuple[Path, Path], tmp_path: Path) -> None:
    """Claim: a coordinator whose event loop makes no turn for longer than it may is ended by SIGKILL, with the reason
    and the place of the hang on standard error, also after its watch was killed; one that was stopped for as long goes
    on.

    Source: Kubernetes restarts a service that does not answer its health check, `specdec serve` only one that has
    ended; a system short of memory kills any process. Conclusive: the hanging call lets other threads run, so the watch
    over the interpreter's lock alone would not end it; the same process generates after the pause, one token: others
    plant faults in the target; the first watch is dead before the hang.
    """
    target, log = PlantedTarget(table_models[0], tmp_path / "target log"), tmp_path / "log"
    command = [sys.executable, "-m", "tests.support.planted_coordinator", target.address, str(table_models[0])]
    with log.open("w") as writing, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, text=True) as own:
        try:
            with grpc.insecure_channel(own.stdout.readline().strip()) as channel:
                first = watch_of(own.pid)
                os.kill(first, signal.SIGKILL)
                assert watch_of(own.pid, first) != first
                stub = pb_grpc.CoordinatorServiceStub(channel)
                own.send_signal(signal.SIGSTOP)
                time.sleep(PAUSE_S)
                own.send_signal(signal.SIGCONT)
                asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), sampling=pb.SamplingParams(max_tokens=1))
                generate(stub, asked)
                with pytest.raises(grpc.RpcError):
                    stub.Describe(types_pb2.DescribeRequest(), timeout=TIMEOUT_S)
                assert own.wait(TIMEOUT_S) == -signal.SIGKILL
        finally:
            own.kill()
            target.stop()
    text = log.read_text(encoding="utf-8")
    assert f"for {HELD_S_MAX:g} s its event loop hung" in text
    assert "planted_coordinator.py" in text and "in hang" in text
    assert text.count("it is started again") == 1


def test_the_second_process_stays_small() -> None:
    """Claim: the second process imports neither asyncio nor anything of specdec. Source: an import for a type doubled
    its memory and the time of its start, which every service pays. Conclusive: the interpreter lists every import."""
    command = [sys.executable, "-I", "-S", "-X", "importtime", process_watch.__file__, str(os.getpid()), "60"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "subprocess" in imported and not imported & {"asyncio", "specdec"}
