"""`python -m bench.ray_restarts`: from `specdec ray up` to the first token, and how long what dies is away.

Three emulated machines with a link between each two: Ray's head node, a large node for a target of two ranks, a small
one for the draft. Actors are killed several times, machines once: for them the head's machine has a node in reserve,
which joins after the start; the coordinator must find a draft that moves there, without a restart. While the draft is
lost a generation runs, and its text must be the undisturbed one. Then, on machines begun anew, the draft's machine
falls silent without a word, and the head is lost. Root.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table

from bench.ray_machines import HEAD, RayMachines
from specdec.client.request import make_request
from specdec.config import DraftSettings
from specdec.launch.children import start
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL
from tests.support.network.machines import emulated
from tests.support.network.namespaces import why_unusable

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


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement in seconds, one entry per try."""

    what: str
    seconds: list[float]


class Restarts:
    """A deployment on the machines, its user, and its enemy. The calling thread is on the head's machine."""

    def __init__(self, ray: RayMachines, hosts: dict[str, str]) -> None:
        self._ray = ray
        self._hosts = hosts
        self.coordinator_host = hosts[LARGE]
        self.draft_host = hosts[SMALL]

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
        (pid,) = (
            pid
            for pid, line in self._ray.processes(machine).items()
            if "specdec.cli" in line and all(word in line for word in words)
        )
        return pid

    def kill_actor(self, machine: str, *words: str) -> None:
        """SIGKILL to the actor of such a service."""
        status = Path(f"/proc/{self.service(machine, *words)}/stat").read_text(encoding="ascii")
        os.kill(int(status.rpartition(")")[2].split()[1]), signal.SIGKILL)

    def away_s(self, harm: Callable[[], object], is_back: Callable[[], bool]) -> float:
        """Seconds from the harm until all is well again, seen first that it is not."""
        harm()
        began_s = time.monotonic()
        while holds(is_back):
            if time.monotonic() - began_s > NOTICED_S_MAX:
                raise TimeoutError(f"no harm was seen within {NOTICED_S_MAX:g} s")
            time.sleep(POLL_S)
        while not holds(is_back):
            if time.monotonic() - began_s > AWAY_S_MAX:
                raise TimeoutError(f"not back within {AWAY_S_MAX:g} s")
            time.sleep(POLL_S)
        return time.monotonic() - began_s

    def answers(self) -> bool:
        """Whether a request gets a token now."""
        return bool(self.generate(1)[0])

    def drafts(self) -> bool:
        """Whether a request is helped by the draft now."""
        return self.generate(30)[1] > 0

    def draft_serves(self) -> bool:
        """Whether the draft says so itself, at the address it had."""
        with channel_to(self.draft_host, DRAFT_PORT) as channel:
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
def machines(one_way_ms: float, folder: Path) -> Iterator[tuple[RayMachines, dict[str, str]]]:
    """Ray on three machines, and their addresses; this thread is on the head's."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(emulated({HEAD: (), LARGE: (), SMALL: ()}))
        for first, second in ((HEAD, LARGE), (HEAD, SMALL), (LARGE, SMALL)):
            network.set_delay(first, second, one_way_ms)
        ray = RayMachines(network.machines, folder)
        stack.callback(ray.close)
        ray.add(LARGE, cpus=3, gpus=2, role="target")
        ray.add(SMALL, cpus=1, gpus=0, role="draft")
        stack.enter_context(network.machines[HEAD].inside())
        yield ray, {name: machine.address for name, machine in network.machines.items()}


class Texts:
    """Generations that run while the draft is harmed, and go on."""

    def __init__(self, restarts: Restarts) -> None:
        self._restarts = restarts
        self._expected = restarts.generate()[0]
        self._pool = ThreadPoolExecutor(1)
        self._running: list[Future[tuple[str, int]]] = []

    def amid(self, harm: Callable[[], object]) -> Callable[[], None]:
        """Returns a function that does the harm at the first token of a generation, and then returns."""

        def act() -> None:
            harmed = threading.Event()
            done = (harm, harmed.set)
            self._running.append(self._pool.submit(self._restarts.generate, act=lambda: [each() for each in done]))
            harmed.wait(AWAY_S_MAX)

        return act

    def check(self) -> None:
        """Every text so far is the undisturbed one. Raises RpcError, AssertionError."""
        if any(running.result()[0] != self._expected for running in self._running):
            raise AssertionError("a draft that was lost changed a text")


def measure(ray: RayMachines, hosts: dict[str, str], folder: Path, try_count: int) -> Iterator[Measurement]:
    """Yields the measurements of each killed actor and machine."""
    restarts, tries = Restarts(ray, hosts), range(try_count)
    began_s = time.monotonic()
    begin(ray, folder)
    up_s = time.monotonic() - began_s
    restarts.generate(1)
    yield Measurement("specdec ray up", [up_s])
    yield Measurement("specdec ray up to the first token", [time.monotonic() - began_s])
    texts = Texts(restarts)
    kill = texts.amid(lambda: restarts.kill_actor(SMALL, "draft"))
    yield Measurement(
        "draft's actor killed, until it serves", [restarts.away_s(kill, restarts.draft_serves) for _ in tries]
    )
    texts.check()
    ranks = [
        restarts.away_s(lambda: restarts.kill_actor(LARGE, "target", "--node-rank=1"), restarts.answers) for _ in tries
    ]
    yield Measurement("a rank's actor killed, until a token", ranks)
    coordinators = [restarts.away_s(lambda: restarts.kill_actor(LARGE, "coordinator"), restarts.answers) for _ in tries]
    yield Measurement("coordinator's actor killed, until a token", coordinators)
    ray.add(HEAD, cpus=1, gpus=0, role="draft")
    before = restarts.service(LARGE, "coordinator")
    lose = texts.amid(lambda: ray.kill(SMALL))
    yield Measurement("draft's machine lost, until it drafts", [restarts.away_s(lose, restarts.drafts)])
    texts.check()
    if restarts.service(LARGE, "coordinator") != before:
        raise AssertionError("the coordinator was restarted for a draft that moved")
    ray.add(HEAD, cpus=3, gpus=2, role="target")
    restarts.coordinator_host = hosts[HEAD]
    yield Measurement(
        "target's machine lost, until a token", [restarts.away_s(lambda: ray.kill(LARGE), restarts.answers)]
    )
    print(ray.run(HEAD, ["ray", "status"]))
    began_s = time.monotonic()
    ray.run(HEAD, ["ray", "down"])
    yield Measurement("specdec ray down", [time.monotonic() - began_s])
    yield Measurement("for comparison: specdec draft alone, until it serves", [draft_alone_s() for _ in tries])


def measure_silence(ray: RayMachines, hosts: dict[str, str], folder: Path) -> Iterator[Measurement]:
    """A machine that vanishes without a word, and the head's end."""
    restarts = Restarts(ray, hosts)
    begin(ray, folder)
    ray.add(HEAD, cpus=1, gpus=0, role="draft")
    texts = Texts(restarts)
    freeze = texts.amid(lambda: ray.freeze(SMALL))
    yield Measurement("draft's machine silent, until another drafts", [restarts.away_s(freeze, restarts.drafts)])
    texts.check()
    ray.kill(HEAD)
    began_s = time.monotonic()
    while holds(restarts.answers) and time.monotonic() - began_s < AWAY_S_MAX:
        time.sleep(POLL_S)
    yield Measurement("the head lost, until requests are not answered", [time.monotonic() - began_s])


def begin(ray: RayMachines, folder: Path) -> None:
    """`specdec ray up`."""
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(DEPLOYMENT), encoding="utf-8")
    print(ray.run(HEAD, ["ray", "up", "--config", str(file)]))


def draft_alone_s() -> float:
    """Seconds that a draft takes from its start to its readiness where nothing else runs, without Ray."""
    began_s = time.monotonic()
    with start("draft", DraftSettings(model=str(DRAFT_MODEL), threads=1, log_level="warning")) as draft:
        draft.wait_ready()
        return time.monotonic() - began_s


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delay", type=float, default=5.0, help="one way between two machines, ms (%(default)s)")
    parser.add_argument("--tries", type=int, default=3, help="kills of each actor (%(default)s)")
    parser.add_argument("--json", type=Path, default=Path("out/ray_restarts.json"), help="file (%(default)s)")
    asked = parser.parse_args()
    if reason := why_unusable():
        print(f"ray_restarts: it needs network namespaces: {reason}", file=sys.stderr)
        return 1
    measurements = []
    for act in (functools.partial(measure, try_count=asked.tries), measure_silence):
        with tempfile.TemporaryDirectory() as name, machines(asked.delay, Path(name)) as (ray, hosts):
            for measurement in act(ray, hosts, Path(name)):
                print(
                    f"{measurement.what}: {', '.join(f'{seconds:.1f}' for seconds in measurement.seconds)} s",
                    flush=True,
                )
                measurements.append(measurement)
    table = Table(title=f"Three machines, {asked.delay:g} ms one way between any two (seconds)")
    for column in ("what", "median", "all"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for measurement in measurements:
        every = " ".join(f"{seconds:.1f}" for seconds in measurement.seconds)
        table.add_row(measurement.what, f"{statistics.median(measurement.seconds):.1f}", every)
    Console().print(table)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(
        json.dumps([asdict(measurement) for measurement in measurements], indent=2) + "\n", encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
