"""A rank of two killed or frozen under streams: nothing hangs, health says so, all ranks end.

The shipped target over two ranks. Health and exit are observed from outside, the streams by their clients: what they
received is the beginning of the text without faults, and UNAVAILABLE follows.

Rank 0 starts the other rank and ends without waiting for it. This process is the next to inherit it, so the code of
each rank can be read. A killed rank has the code of its SIGKILL. A frozen one cannot end itself: the other one kills
it; it is never continued here. When rank 0 is killed, the kernel may kill the other one with it, as its child.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from bench.bars import Bar, worst_of
from specdec.config import CoordinatorSettings, TargetSettings
from specdec.engine.parallel.group import Bounds
from specdec.errors import RANK_LOST_EXIT_CODE
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.chaos.processes import Restartable
from tests.chaos.tables import COMMON, REPLICA
from tests.chaos.texts import Content, Reading, Text, open_channel, references_of
from tests.support.harness import TARGET_MODEL, heldout_prompts

PATIENCE_S = 10.0
PROMPT_CHARACTERS = 100
PR_SET_CHILD_SUBREAPER = 36
STRIKES = {
    f"rank {rank} {name}": (rank, number)
    for rank in (0, 1)
    for name, number in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP))
}


@dataclass(frozen=True, slots=True)
class Loss:
    """Seconds from the signal until health was not SERVING, all ranks were gone and all streams had ended; the exit
    code of each rank, None if it did not end or its code was lost, and streams that ended otherwise than they
    should."""

    not_serving_s: float
    gone_s: float
    ended_s: float
    codes: tuple[int | None, ...]
    wrong: tuple[str, ...]


def ranks_of(target: Restartable) -> list[int]:
    """The process ids of all ranks, rank 0 first."""
    children = Path(f"/proc/{target.pid}/task/{target.pid}/children").read_text(encoding="ascii").split()
    return [target.pid, *map(int, children)]


def inherit_orphans() -> None:
    """Has this process inherit the children of its own children, so that their exit codes stay until they are read."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


class Ends:
    """The ends of processes as the kernel tells them: `codes` by process id, as those of `subprocess`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.codes: dict[int, int | None] = dict.fromkeys(pids)
        self.are_all_gone = False
        self._pids = pids

    def look(self) -> None:
        """Notes who has ended; nothing is collected, so that no code is lost."""
        states = [self._state(pid) for pid in self._pids]
        for pid, state in zip(self._pids, states):
            if state is not None and state[0] == "Z":
                self.codes[pid] = os.waitstatus_to_exitcode(int(state[-1]))
        self.are_all_gone = all(state is None or state[0] == "Z" for state in states)

    @staticmethod
    def _state(pid: int) -> list[str] | None:
        """The fields of a process after its name, from its state to its exit code; None if there is none."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return None

    def collect(self) -> None:
        """Collects the orphans that have ended."""
        for pid in self._pids[1:]:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def is_serving(stub: health_pb2_grpc.HealthStub) -> bool:
    """What health says within 0.2 s."""
    with contextlib.suppress(grpc.RpcError):
        status = stub.Check(health_pb2.HealthCheckRequest(), timeout=0.2).status
        return bool(status == health_pb2.HealthCheckResponse.SERVING)
    return False


class Streams:
    """Texts under way whose target will be lost; the end of each is noted, with its error."""

    def __init__(self, address: str, references: dict[Text, Content]) -> None:
        self.readings = {text: Reading() for text in references}
        self.ends: dict[Text, tuple[float, str]] = {}
        self._threads = [threading.Thread(target=self._run, args=(address, text), daemon=True) for text in references]
        for thread in self._threads:
            thread.start()

    def _run(self, address: str, text: Text) -> None:
        code = "OK"
        with open_channel(address) as channel:
            try:
                for response in pb_grpc.CoordinatorServiceStub(channel).Generate(text.request({}), timeout=120):
                    self.readings[text].take(response)
            except grpc.RpcError as error:
                code = error.code().name
        self.ends[text] = time.monotonic(), code

    def wait_under_way(self) -> None:
        """Returns when each has tokens."""
        deadline_s = time.monotonic() + 60
        while not all(reading.content.token_ids for reading in self.readings.values()):
            assert time.monotonic() < deadline_s, "a stream did not start"
            time.sleep(0.005)

    def join(self, timeout_s: float) -> None:
        """Waits for all, this time at most."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def wrong(self, references: dict[Text, Content]) -> Iterator[str]:
        """Streams that did not end, ended otherwise than UNAVAILABLE, or with tokens that are not the text's."""
        for text, reading in self.readings.items():
            got = reading.content.token_ids
            code = self.ends.get(text, (0.0, "no end"))[1]
            if code != "UNAVAILABLE" or got != references[text].token_ids[: len(got)]:
                yield f"{text.seed}: {code} after {len(got)} tokens"


@contextlib.contextmanager
def split() -> Iterator[tuple[Restartable, Restartable]]:
    """A target of two ranks, and its coordinator."""
    with contextlib.ExitStack() as stack:
        settings = TargetSettings(**REPLICA, model=str(TARGET_MODEL), tensor_parallel_size=2)
        target = Restartable("target", "target", settings)
        stack.callback(target.stop)
        own = CoordinatorSettings(**COMMON, tokenizer=str(TARGET_MODEL), target=target.wait_ready(), target_wait_s=0.0)
        coordinator = Restartable("coordinator", "coordinator", own)
        stack.callback(coordinator.stop)
        coordinator.wait_ready()
        yield target, coordinator


def lose(target: Restartable, address: str, rank: int, number: int, references: dict[Text, Content]) -> Loss:
    """Signals a rank under streams and watches until all is over, or for PATIENCE_S."""
    pids = ranks_of(target)
    assert len(pids) == 2
    ends = Ends(pids)
    with open_channel(target.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert is_serving(stub)
        streams = Streams(address, references)
        streams.wait_under_way()
        began_s = time.monotonic()
        os.kill(pids[rank], number)
        not_serving_s = gone_s = float("inf")
        while gone_s == float("inf") and time.monotonic() < began_s + PATIENCE_S:
            if not_serving_s == float("inf") and not is_serving(stub):
                not_serving_s = time.monotonic() - began_s
            ends.look()
            if ends.are_all_gone:
                gone_s = time.monotonic() - began_s
            time.sleep(0.01)
    streams.join(PATIENCE_S)
    ended_s = max([end_s for end_s, _ in streams.ends.values()], default=float("inf")) - began_s
    ends.collect()
    codes = tuple(ends.codes[pid] for pid in pids)
    return Loss(not_serving_s, gone_s, ended_s, codes, tuple(streams.wrong(references)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="of each strike (%(default)s)")
    parser.add_argument("--strikes", nargs="+", choices=STRIKES, default=list(STRIKES), help="(%(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=300, help="of a stream (%(default)s)")


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Runs the proof."""
    inherit_orphans()
    losses: dict[str, list[Loss]] = {name: [] for name in asked.strikes}
    prompts = [prompt[:PROMPT_CHARACTERS] for prompt in heldout_prompts().values()][: asked.streams]
    texts = [Text(prompt, float(n % 2), n, asked.tokens, ignore_eos=True) for n, prompt in enumerate(prompts)]
    with split() as (target, coordinator):
        references = references_of(coordinator.address, texts)
        for turn, name in enumerate(asked.repeats * asked.strikes):
            if turn:
                target.kill()
                target.restart()
                wait_usable(coordinator.address, texts[0])
            losses[name].append(lose(target, coordinator.address, *STRIKES[name], references))
            console.print(f"{name}: {losses[name][-1]}", highlight=False, soft_wrap=True)
    return bars_of(losses)


def wait_usable(address: str, text: Text) -> None:
    """Returns when the coordinator generates again."""
    short = Text(text.prompt, 0.0, 0, 1)
    references_of(address, [short])


def is_expected(strike: str, loss: Loss) -> bool:
    """Whether the struck rank ended by SIGKILL, and each other one with the code of a lost rank, or with rank 0.

    Of the struck one the code may be unknown: rank 0 may have read it first, and a stopped process ends by nothing
    else."""
    struck, _ = STRIKES[strike]
    lost = {RANK_LOST_EXIT_CODE, -signal.SIGKILL} if struck == 0 else {RANK_LOST_EXIT_CODE}
    ended = {-signal.SIGKILL, None}
    return all(code in (ended if rank == struck else lost) for rank, code in enumerate(loss.codes))


def bars_of(losses: dict[str, Sequence[Loss]] | dict[str, list[Loss]]) -> list[Bar]:
    """The conditions."""
    wrong = [line for own in losses.values() for loss in own for line in loss.wrong]
    serving = {name: max(loss.not_serving_s for loss in own) for name, own in losses.items()}
    gone = {name: max(loss.gone_s for loss in own) for name, own in losses.items()}
    ended = {name: max(loss.ended_s for loss in own) for name, own in losses.items()}
    other = [f"{name}: {loss.codes}" for name, own in losses.items() for loss in own if not is_expected(name, loss)]
    killed = {name: value for name, value in serving.items() if name.endswith("killed")}
    frozen = {name: value - Bounds().silence_s for name, value in serving.items() if name.endswith("frozen")}
    late = "seconds until NOT_SERVING after the bound of silence, frozen"
    return [
        worst_of("seconds until all ranks are gone", 3.0, gone, is_limit=True),
        worst_of("seconds until all streams have ended", 3.0, ended, is_limit=True),
        *([worst_of("seconds until NOT_SERVING, killed", 1.0, killed, is_limit=True)] if killed else []),
        *([worst_of(late, 1.0, frozen, is_limit=True)] if frozen else []),
        Bar("losses after which a rank ended with another code, or not", 0, len(other), "; ".join(other[:3]), True),
        Bar("streams with other tokens, or not UNAVAILABLE", 0, len(wrong), "; ".join(wrong[:3]), is_limit=True),
    ]
