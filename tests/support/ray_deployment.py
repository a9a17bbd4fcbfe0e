"""A deployment by `specdec ray up` on three emulated machines, its user, and its enemy. Root.

Ray's head node, a large node for a target of two ranks, a small one for the draft. Services are killed and machines
lost here; what must come back of it is said by those who use it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client.request import make_request
from specdec.errors import ConfigError
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL
from tests.support.network.machines import emulated
from tests.support.ray_machines import HEAD, RayMachines

LARGE, SMALL = "large", "small"
DEPLOYMENT = {
    "insecure": True,
    "log_level": "warning",
    "drain_grace_s": 5,
    "target": {"model": str(TARGET_MODEL), "tensor_parallel_size": 2},
    "draft": {"model": str(DRAFT_MODEL)},
    "coordinator": {"speculation_policy": "fixed"},
    "placement": {"target": {"labels": {"specdec-role": "target"}}, "draft": {"gpus": 0}},
}
COORDINATOR_PORT, DRAFT_PORT = 50051, 50053
PROMPT, TOKEN_COUNT = "def main():", 200
NOTICED_S_MAX, AWAY_S_MAX = 30.0, 300.0
POLL_S = 0.02


class Deployment:
    """A deployment on the machines, its user, and its enemy. The calling thread is on the head's machine."""

    def __init__(self, ray: RayMachines, hosts: dict[str, str], folder: Path) -> None:
        self._ray = ray
        self._draft_host = hosts[SMALL]
        self._pool = ThreadPoolExecutor(1)
        self._disturbed: list[Future[tuple[str, int]]] = []
        self.coordinator_host = hosts[LARGE]
        file = folder / "deployment.yaml"
        file.write_text(yaml.safe_dump(DEPLOYMENT), encoding="utf-8")
        ray.run(HEAD, ["ray", "up", "--config", str(file)])

    def generate(self, token_count: int = TOKEN_COUNT, act: Callable[[], object] = lambda: None) -> tuple[str, int]:
        """A text, and how many draft tokens it was offered; `act` is called at the first delta. Raises RpcError."""
        request = make_request(PROMPT, max_tokens=token_count, temperature=0, ignore_eos=True)
        text, acted, offered = "", False, 0
        with channel_to(self.coordinator_host, COORDINATOR_PORT) as channel:
            for response in pb_grpc.CoordinatorServiceStub(channel).Generate(request, timeout=60):
                text += response.delta.text
                if response.HasField("delta") and not acted:
                    acted = True
                    act()
                offered = response.finished.statistics.num_draft_tokens
        return text, offered

    def service(self, machine: str, *words: str) -> int:
        """The one service process whose command line has all the words."""
        every = self._ray.processes(machine).items()
        (pid,) = (pid for pid, line in every if "specdec.cli" in line and all(word in line for word in words))
        return pid

    def kill_actor(self, machine: str, *words: str) -> None:
        """SIGKILL to the actor of such a service."""
        status = Path(f"/proc/{self.service(machine, *words)}/stat").read_text(encoding="ascii")
        os.kill(int(status.rpartition(")")[2].split()[1]), signal.SIGKILL)

    def away_s(self, harm: Callable[[], object], is_back: Callable[[], bool]) -> float:
        """Seconds from the harm until all is well again, seen first that it is not. Raises ConfigError."""
        harm()
        began_s = time.monotonic()
        while holds(is_back):
            if time.monotonic() - began_s > NOTICED_S_MAX:
                raise ConfigError(f"no harm was seen within {NOTICED_S_MAX:g} s")
            time.sleep(POLL_S)
        while not holds(is_back):
            if time.monotonic() - began_s > AWAY_S_MAX:
                raise ConfigError(f"not back within {AWAY_S_MAX:g} s")
            time.sleep(POLL_S)
        return time.monotonic() - began_s

    def away_amid_text_s(self, harm: Callable[[], object], is_back: Callable[[], bool]) -> float:
        """The same, harmed at the first token of a generation. Raises RpcError, and ConfigError if its text changed."""
        expected = self.generate()[0]

        def act() -> None:
            harmed = threading.Event()
            done = (harm, harmed.set)
            self._disturbed.append(self._pool.submit(self.generate, act=lambda: [each() for each in done]))
            harmed.wait(AWAY_S_MAX)

        away_s = self.away_s(act, is_back)
        if any(text.result()[0] != expected for text in self._disturbed):
            raise ConfigError("a draft that was lost changed a text")
        return away_s

    def answers(self) -> bool:
        """Whether a request gets a token now."""
        return bool(self.generate(1)[0])

    def drafts(self) -> bool:
        """Whether a request is helped by the draft now."""
        return self.generate(30)[1] > 0

    def draft_serves(self) -> bool:
        """Whether the draft says so itself, at the address it had."""
        with channel_to(self._draft_host, DRAFT_PORT) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def holds(condition: Callable[[], bool]) -> bool:
    """False where the service cannot be asked."""
    try:
        return condition()
    except grpc.RpcError:
        return False


def channel_to(host: str, port: int) -> grpc.Channel:
    """A connection of its own."""
    return grpc.insecure_channel(f"{host}:{port}", options=[("grpc.use_local_subchannel_pool", 1)])


@contextlib.contextmanager
def machines(one_way_ms: float) -> Iterator[tuple[RayMachines, dict[str, str], Path]]:
    """Ray on three machines, their addresses, and a folder; this thread is on the head's."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = stack.enter_context(emulated({HEAD: (), LARGE: (), SMALL: ()}))
        for first, second in ((HEAD, LARGE), (HEAD, SMALL), (LARGE, SMALL)):
            network.set_delay(first, second, one_way_ms)
        ray = RayMachines(network.machines, folder)
        stack.callback(ray.close)
        ray.add(LARGE, cpus=3, gpus=2, role="target")
        ray.add(SMALL, cpus=1, gpus=0, role="draft")
        stack.enter_context(network.machines[HEAD].inside())
        yield ray, {name: machine.address for name, machine in network.machines.items()}, folder
