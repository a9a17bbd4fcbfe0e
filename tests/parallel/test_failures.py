"""A rank that dies or hangs ends all ranks within three seconds: real processes, real signals.

The other ranks are observed from outside: exit codes, health, and the stream of a client.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.config import TargetSettings
from specdec.errors import RANK_LOST_EXIT_CODE
from specdec.launch.children import Child, start
from tests.support.services import Outcome, running

ENDED_S_MAX = 3.0
SERVING = health_pb2.HealthCheckResponse.SERVING
PROMPT = list(range(1, 20))


def processes_below(pid: int) -> list[int]:
    """Its child processes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in children.split()]


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    return False


class Target:
    """A target of two ranks, and its follower's process id."""

    def __init__(self, child: Child) -> None:
        child.wait_ready()
        self.child = child
        self.pids = [child.process.pid, *processes_below(child.process.pid)]
        assert len(self.pids) == 2

    def is_serving(self) -> bool:
        """What its health says; False when it says nothing."""
        with grpc.insecure_channel(self.child.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            with contextlib.suppress(grpc.RpcError):
                request = health_pb2.HealthCheckRequest()
                return health_pb2_grpc.HealthStub(channel).Check(request, timeout=0.3).status == SERVING
        return False

    def check_all_end(self, at_s: float) -> None:
        """Fails unless every rank has ended ENDED_S_MAX after `at_s`, and the first with an error."""
        while any(map(is_alive, self.pids)) and time.monotonic() < at_s + ENDED_S_MAX:
            self.child.process.poll()
            time.sleep(0.01)
        assert not [pid for pid in self.pids if is_alive(pid)], "a rank lives on"
        code = self.child.process.wait(1)
        assert code in (RANK_LOST_EXIT_CODE, -signal.SIGKILL), "the code of a lost rank, or of one that was frozen"


@pytest.fixture
def target(tiny_folder: Callable[..., Path]) -> Iterator[Target]:
    """A target of its own for each test: these are harmed."""
    settings = TargetSettings(model=str(tiny_folder("llama")), tensor_parallel_size=2, port=0, threads=1)
    with start("target", settings) as child:
        yield Target(child)


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        pytest.param(0, signal.SIGSTOP, id="rank 0 frozen", marks=pytest.mark.more),
        pytest.param(1, signal.SIGKILL, id="rank 1 killed"),
        pytest.param(0, signal.SIGKILL, id="rank 0 killed", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, id="rank 1 frozen", marks=pytest.mark.slow),
    ],
)
def test_one_rank_lost_ends_all(target: Target, rank: int, number: signal.Signals) -> None:
    """Claim: when any rank dies or hangs, all exit non-zero within 3 s.

    Conclusive: the kernel lists the processes. A frozen process cannot end itself; the other ranks end it.
    """
    assert target.is_serving()
    signalled_s = time.monotonic()
    os.kill(target.pids[rank], number)
    target.check_all_end(signalled_s)
    assert not target.is_serving()


@pytest.mark.more
def test_a_lost_follower_is_not_served_over(target: Target) -> None:
    """Claim (reliability table): health turns NOT_SERVING within a second of a rank's death.

    Conclusive: requested every few milliseconds; after NOT_SERVING there is no SERVING.
    """
    said: list[bool] = []
    signalled_s = time.monotonic()
    os.kill(target.pids[1], signal.SIGKILL)
    while target.child.is_running:
        said.append(target.is_serving())
        assert not said[-1] or time.monotonic() < signalled_s + 1.0, "still SERVING after a second"
    assert said == sorted(said, reverse=True)


@pytest.mark.more
def test_a_short_stall_ends_nothing(target: Target) -> None:
    """Claim: any rank may stall for less than a second without being taken for dead.

    Conclusive: both are stopped in turn and go on; afterwards the replica still serves, with the same processes.
    """
    for pid in target.pids:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
    assert target.is_serving() and all(map(is_alive, target.pids))


@pytest.mark.more
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_sigterm_of_any_rank_drains_and_ends_all(target: Target, rank: int) -> None:
    """Claim: SIGTERM drains and ends with 0, also when it reaches another rank first, as on a node that is emptied."""
    os.kill(target.pids[rank], signal.SIGTERM)
    assert target.child.process.wait(10) == 0
    assert not any(map(is_alive, target.pids))


@pytest.mark.more
def test_a_stream_in_flight_ends_unavailable(tiny_folder: Callable[..., Path]) -> None:
    """Claim: no half-reduced result is used: the tokens sent are a prefix of the text, then UNAVAILABLE follows.

    Conclusive: the text is known from an undisturbed run; the follower dies in the middle of steps.
    """
    folder = tiny_folder("llama")
    asked = {"max_tokens": 400, "temperature": 1, "seed": 5, "ignore_eos": True}
    with running(folder, None, threads=1, target={"tensor_parallel_size": 2}) as services:
        expected = services.client.generate(PROMPT, **asked).token_ids
        follower = processes_below(services.target.process.pid)[0]
        outcome = Outcome()
        started_s = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            for response in services.client.stub.Generate(services.client.request(PROMPT, **asked), timeout=60):
                services.client.take(outcome, response)
                if len(outcome.token_ids) == 50:
                    os.kill(follower, signal.SIGKILL)
                    started_s = time.monotonic()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() < started_s + ENDED_S_MAX
        count = len(outcome.token_ids)
        assert 50 <= count < 400 and outcome.token_ids == expected[:count]
