"""Links cut and processes frozen under a text: each end notices within 3 s, and a stall below a second ends nothing.

Every service is reached over a link that can be cut. An end has noticed when its page says so: a coordinator's that its
link is down, or that no generation runs; a replica's that it has no session. The client's call has ended then.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from rich.console import Console

from bench.bars import Bar, worst_of
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.engine.table_model import write_table_model
from specdec.rpc.limits import KEEPALIVE_OPTIONS
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.chaos.processes import Link, Restartable, metric_values
from tests.chaos.texts import Text
from tests.support.ports import free_port
from tests.support.services import fixed
from tests.support.waiting import until

STRIKE_S, STALL_S, POLL_S = 5.0, 0.8, 0.02
LONG_TOKENS = 60_000  # more than are generated in a strike
LINKS, ROLES = ("client", "target", "draft"), ("coordinator", "target", "draft")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its sizes."""
    parser.add_argument("--repeats", type=int, default=3, help="of each strike (%(default)s)")
    parser.add_argument("--strikes", nargs="+", metavar="NAME", help="these only, and no stalls (all, and stalls)")
    parser.add_argument("--tokens", type=int, default=3000, help="of a text with stalls (%(default)s)")


class Call:
    """One text, read in a thread. `ended_s`: when its call ended."""

    def __init__(self, address: str, text: Text) -> None:
        self.token_ids: list[int] = []
        self.ended_s = 0.0
        self.code = grpc.StatusCode.OK
        self._channel = grpc.insecure_channel(
            address, options=[*KEEPALIVE_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        )
        self._responses = pb_grpc.CoordinatorServiceStub(self._channel).Generate(text.request(fixed(4)), timeout=600)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for response in self._responses:
                self.token_ids += response.delta.token_ids
        except grpc.RpcError as error:
            self.code = error.code()
        self.ended_s = time.monotonic()

    def close(self) -> None:
        """Cancels it, unless it has ended."""
        self._responses.cancel()
        self._thread.join()
        self._channel.close()

    def wait(self) -> None:
        """Waits until the text is complete or has failed."""
        self._thread.join()
        self._channel.close()


class World:
    """The services, the links by what is behind them, and a client that notices a lost peer as the coordinator does."""

    def __init__(self) -> None:
        self.services: dict[str, Restartable] = {}
        self.links: dict[str, Link] = {}

    def start(self, folder: Path) -> None:
        """Starts all."""
        for role, seed, kind in (("target", 1, TargetSettings), ("draft", 2, DraftSettings)):
            write_table_model(folder / role, 7, positions_max=LONG_TOKENS + 16, seed=seed)
            settings = kind(**self._common(), model=str(folder / role), threads=1)
            self.services[role] = Restartable(role, role, settings)
        for role in ("target", "draft"):
            self.links[role] = Link(self.services[role].wait_ready())
        own = CoordinatorSettings(
            **self._common(),
            tokenizer=str(folder / "target"),
            target=self.links["target"].address,
            target_wait_s=0.0,
            draft=self.links["draft"].address,
        )
        self.services["coordinator"] = Restartable("coordinator", "coordinator", own)
        self.links["client"] = Link(self.services["coordinator"].wait_ready())

    @staticmethod
    def _common() -> dict[str, object]:
        return {"port": 0, "log_level": "error", "metrics_address": f"127.0.0.1:{free_port()}"}

    def value(self, role: str, name: str) -> float:
        """A metric of a service, summed over its labels."""
        address = self.services[role].metrics_address
        assert address is not None
        return metric_values(address, name if name.startswith("vllm:") else f"specdec_{name}")

    def is_at_work(self) -> bool:
        """Whether one text runs, with both replicas."""
        pages = self.value("coordinator", "vllm:num_requests_running"), self.value("coordinator", "link_up")
        return (*pages, self.value("target", "sessions"), self.value("draft", "sessions")) == (1, 2, 1, 1)

    def call(self, text: Text) -> Call:
        """Starts a text; returns once both replicas work on it. What ends before, while links recover, is repeated."""
        until(lambda: self.value("coordinator", "link_up") == 2)
        call = Call(self.links["client"].address, text)

        def is_at_work() -> bool:
            nonlocal call
            if call.ended_s:
                call.close()
                call = Call(self.links["client"].address, text)
            return self.is_at_work()

        until(is_at_work)
        return call

    def stop(self) -> None:
        for service in reversed(self.services.values()):  # the coordinator first
            service.stop()
        for link in self.links.values():
            link.stop()


def strikes(world: World) -> dict[str, tuple[Callable[[float], None], tuple[str, ...]]]:
    """What is done to the services for some seconds, and the ends that must notice: names of `observers`."""
    return {
        "client's link cut": (world.links["client"].cut, ("client", "generation")),
        "target's link cut": (world.links["target"].cut, ("client", "link", "target")),
        "draft's link cut": (world.links["draft"].cut, ("link", "draft")),
        "target frozen": (world.services["target"].freeze, ("client", "link")),
        "draft frozen": (world.services["draft"].freeze, ("link",)),
        "coordinator frozen": (world.services["coordinator"].freeze, ("client", "target", "draft")),
    }


def observers(world: World, call: Call) -> dict[str, Callable[[], bool]]:
    """Whether an end has noticed, by its name."""
    return {
        "client": lambda: bool(call.ended_s) and call.code is not grpc.StatusCode.OK,
        "generation": lambda: world.value("coordinator", "vllm:num_requests_running") == 0,
        "link": lambda: world.value("coordinator", "link_up") < 2,
        "target": lambda: world.value("target", "sessions") == 0,
        "draft": lambda: world.value("draft", "sessions") == 0,
    }


def noticed_s(world: World, strike: Callable[[float], None], names: tuple[str, ...], text: Text) -> dict[str, float]:
    """Seconds from the strike until each end has noticed it; STRIKE_S for one that does not while it lasts."""
    call = world.call(text)
    try:
        waiting, found = {name: observers(world, call)[name] for name in names}, {}
        with ThreadPoolExecutor(1) as pool:
            began_s = time.monotonic()
            striking = pool.submit(strike, STRIKE_S)
            while waiting and not striking.done():
                for name in [name for name, has_noticed in waiting.items() if has_noticed()]:
                    found[name] = time.monotonic() - began_s
                    del waiting[name]
                time.sleep(POLL_S)
            striking.result()
        return {name: found.get(name, STRIKE_S) for name in names}
    finally:
        call.close()
        until(lambda: world.value("coordinator", "vllm:num_requests_running") == 0)


@contextlib.contextmanager
def running() -> Iterator[World]:
    """The services on table models, whose texts are long."""
    with tempfile.TemporaryDirectory() as folder:
        world = World()
        try:
            world.start(Path(folder))
            yield world
        finally:
            world.stop()


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Strikes under a long text each; then all of them, short, under one text."""
    worst: dict[str, float] = {}
    unnoticed: dict[str, float] = {}
    with running() as world:
        long, short = Text((1, 2), 1.0, 1, LONG_TOKENS, True), Text((2, 1), 1.0, 2, asked.tokens, True)
        every = strikes(world)
        for name in asked.strikes or every:
            strike, ends = every[name]
            for _ in range(asked.repeats):
                own = noticed_s(world, strike, ends, long)
                console.print(f"{name}: " + ", ".join(f"{end} after {after_s:.2f} s" for end, after_s in own.items()))
                for end, after_s in own.items():
                    key = f"{name}, {end}"
                    worst[key] = max(after_s, worst.get(key, 0.0))
                    unnoticed[key] = unnoticed.get(key, 0.0) + (after_s >= STRIKE_S)
        bars = [
            worst_of("seconds until an end notices", 3.0, worst, is_limit=True),
            worst_of("strikes that an end did not notice", 0, unnoticed, is_limit=True),
        ]
        if asked.strikes:
            return bars
        (whole := world.call(short)).wait()
        stalls = ended = differing = 0
        for strike, _ in every.values():
            call = world.call(short)
            strike(STALL_S)
            stalls += not call.ended_s
            call.wait()
            ended += call.code is not grpc.StatusCode.OK
            differing += call.token_ids != whole.token_ids
    return [
        *bars,
        Bar("texts under way when a stall ended", len(every), stalls),
        Bar("texts that a stall below a second ended", 0, ended, is_limit=True),
        Bar("texts that it changed", 0, differing, f"of {len(whole.token_ids)} tokens", is_limit=True),
    ]
