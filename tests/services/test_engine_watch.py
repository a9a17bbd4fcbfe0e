"""A replica whose engine hangs ends itself and says why: a real process, a planted hang, real signals."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.protocol.items import Open, Verification
from specdec.protocol.types import ResolvedSamplingParams, Rule
from specdec.replica import watch
from specdec.rpc.convert_items import item_to_bytes
from specdec.v1 import target_service_pb2 as target_pb
from tests.services.conftest import TABLE_VOCABULARY_SIZE
from tests.support.planted_target import HANGS, PLAIN, SLOW, SLOW_LINE

TIMEOUT_S = 40.0  # less than the 60 s after which a step of an unknown shape hangs
PAUSE_S = 3.0
STATES = health_pb2.HealthCheckResponse


class PlantedTarget:
    """A process of `tests.support.planted_target`, and one stream to it."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.log = log
        with log.open("w") as writing:
            command = [sys.executable, "-m", "tests.support.planted_target", str(folder)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, text=True)
        self.channel = grpc.insecure_channel(self.line(), options=[("grpc.use_local_subchannel_pool", 1)])
        self._requests: queue.Queue[bytes] = queue.Queue()
        method = self.channel.stream_stream("/specdec.v1.TargetService/Verify")
        self._answers = method(iter(self._requests.get, None), timeout=TIMEOUT_S)
        self._session = 0

    def line(self) -> str:
        """The next line of its output; "" when it has ended."""
        return self.process.stdout.readline().strip()

    def verify(self, token_id: int) -> None:
        """Sends a session with this token as its prompt: always a step of the same shape."""
        self._session += 1
        params = ResolvedSamplingParams(Rule.GREEDY, seed=1, prompt_length=1, temperature=0.0)
        for item in (
            Open(self._session, 1, params, 8, TABLE_VOCABULARY_SIZE),
            Verification(self._session, 1, 0, 1, (token_id,)),
        ):
            self._requests.put(item_to_bytes(target_pb.VerifyRequest, item))

    def check_answered(self) -> None:
        """Waits for the answer to the last session."""
        while not (items := target_pb.VerifyResponse.FromString(next(self._answers)).items):
            pass
        assert items[0].result.session == self._session

    def health(self) -> Iterator[health_pb2.HealthCheckResponse]:
        """Its health, as it changes."""
        return health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)

    def stop(self) -> None:
        """Ends the process if it still runs."""
        self.process.kill()
        self.process.wait()
        self._answers.cancel()
        self._requests.put(None)
        self.channel.close()
        self.process.stdout.close()


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
    SERVING its health says NOT_SERVING before it ends.
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
    target.verify(HANGS)
    assert next(health).status == STATES.NOT_SERVING
    assert target.process.wait(TIMEOUT_S) == watch.EXIT_CODE
    assert "the engine hangs: a step of 1 rows" in target.log.read_text(encoding="utf-8")
