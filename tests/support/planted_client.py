"""The process of `tests.support.planted_target`, and a client of it that is no link: it sends only what a test says."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.protocol.items import Open, Verification
from specdec.protocol.types import ResolvedSamplingParams, Rule
from specdec.rpc.convert_items import item_to_bytes
from specdec.v1 import target_service_pb2 as target_pb

TIMEOUT_S = 40.0  # less than the 60 s after which a step of an unknown shape hangs
VOCABULARY_SIZE = 7  # of the table models of tests/services
PING = b""  # a message without items


class PlantedTarget:
    """A process of `tests.support.planted_target`, and one stream to it."""

    def __init__(self, folder: Path, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("w") as writing:
            command = [sys.executable, "-m", "tests.support.planted_target", str(folder), *arguments]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, text=True)
        self.address = self.line()
        self.channel = grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._requests: queue.Queue[bytes] = queue.Queue()
        method = self.channel.stream_stream("/specdec.v1.TargetService/Verify")
        self.answers = method(iter(self._requests.get, None), timeout=TIMEOUT_S)
        self._session = 0

    def line(self) -> str:
        """The next line of its output; "" when it has ended."""
        return self.process.stdout.readline().strip()

    def verify(self, token_id: int) -> None:
        """Sends a session with this token as its prompt: always a step of the same shape."""
        self._session += 1
        params = ResolvedSamplingParams(Rule.GREEDY, seed=1, prompt_length=1, temperature=0.0)
        for item in (
            Open(self._session, 1, params, 8, VOCABULARY_SIZE),
            Verification(self._session, 1, 0, 1, (token_id,)),
        ):
            self._requests.put(item_to_bytes(target_pb.VerifyRequest, item))

    def ping(self) -> None:
        """Sends a ping."""
        self._requests.put(PING)

    def check_answered(self) -> None:
        """Waits for the answer to the last session."""
        while not (items := target_pb.VerifyResponse.FromString(next(self.answers)).items):
            pass
        assert items[0].result.session == self._session

    def status(self) -> int:
        """Its health now, asked on the same connection."""
        return health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status

    def health(self) -> Iterator[health_pb2.HealthCheckResponse]:
        """Its health, as it changes."""
        return health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)

    def stop(self) -> None:
        """Ends the process if it still runs."""
        self.process.kill()
        self.process.wait()
        self.answers.cancel()
        self._requests.put(None)
        self.channel.close()
        self.process.stdout.close()
