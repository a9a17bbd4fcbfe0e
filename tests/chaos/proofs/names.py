"""Targets and drafts behind names whose records come, go and fail under load: members in time, no error at a client.

The services run apart (`tests.support.dns_server`), beside a real DNS server; there
`python -m tests.chaos.proofs.names` prints what was measured. Each replica has an address of loopback of its own and
the port of its service.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.bars import Bar, worst_of
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.engine.table_model import write_table_model
from specdec.errors import ConfigError
from specdec.launch.children import Child, start, stop_all, wait_all_ready
from tests.chaos.tables import REPLICA, VOCABULARY_SIZE, table_texts
from tests.chaos.texts import Readers, references_of
from tests.support.dns_server import DnsServer, Failure, apart
from tests.support.processes import cpu_seconds
from tests.support.services import Client

NAMES = {"targets.test": 50052, "drafts.test": 50053}
TARGETS, DRAFTS = NAMES
HOSTS = [f"127.0.0.{number}" for number in (2, 3, 4)]
MANY = [*HOSTS, *(f"127.1.{number // 250}.{number % 250 + 1}" for number in range(297))]  # no server at the others
USED_S = 6.0
LOOK_S = 2.0  # without a lost link: 4.5 s
STEP_S = 60.0  # after which a step fails
FAILURE_S = 12.0  # at most, of each failure with an answer: two look-ups
MAX_TOKENS = 48


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its sizes."""
    parser.add_argument("--streams", type=int, default=16, help="readers of texts (%(default)s)")
    parser.add_argument("--silence-s", type=float, default=60.0, help="time without an answer (%(default)s)")


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Runs the services apart and returns what their clients met. ConfigError where they cannot run."""
    with tempfile.TemporaryDirectory() as folder:
        module = [sys.executable, "-m", __name__, folder, str(asked.streams), str(asked.silence_s)]
        done = subprocess.run(apart(Path(folder), module), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"the services apart ended with {done.returncode}: {done.stdout}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    console.print(found)
    return [
        Bar("errors at clients", 0, found["error_count"], str(found["codes"]), is_limit=True),
        Bar("texts that differ or did not end", 0, len(found["wrong"]), "; ".join(found["wrong"][:3]), is_limit=True),
        worst_of("seconds until a change of records is in use", USED_S, found["seconds"], is_limit=True),
        worst_of("looks at which a failure changed the members", 0, found["changes"], is_limit=True),
        Bar("seconds from a lost link to the look-up of its name", LOOK_S, found["looked_s"], is_limit=True),
        Bar("texts read", 20 * asked.streams, found["text_count"]),
    ]


@contextlib.contextmanager
def names_served() -> Iterator[DnsServer]:
    """A DNS server in a thread of its own, until this process ends."""
    server, is_ready = DnsServer(), threading.Event()

    async def serve() -> None:
        async with server.listening():
            is_ready.set()
            await asyncio.Event().wait()

    threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
    assert is_ready.wait(10.0)
    yield server


class World:
    """Three targets and two drafts, a coordinator that knows their names, and what was measured by step."""

    def __init__(self, folder: Path, server: DnsServer) -> None:
        self.server = server
        self._folder = folder
        self.targets: dict[str, Child] = {}
        self.children: list[Child] = []
        for name, seed in (("target", 1), ("draft", 2)):
            write_table_model(folder / name, VOCABULARY_SIZE, seed=seed)
        self.seconds: dict[str, float] = {}
        self.changes: dict[str, float] = {}
        self.looked_s = float("inf")

    def begin(self) -> str:
        """Starts all; two targets and a draft have records. Returns the coordinator's address."""
        for host in HOSTS:
            self.targets[host] = self.begin_target(host)
        own = {**REPLICA, "port": NAMES[DRAFTS], "model": str(self._folder / "draft")}
        self.children += [start("draft", DraftSettings(**{**own, "host": host})) for host in HOSTS[:2]]
        wait_all_ready(self.children)
        self.server.records |= {TARGETS: HOSTS[:2], DRAFTS: HOSTS[:1]}
        settings = CoordinatorSettings(
            port=0,
            target=(f"{TARGETS}:{NAMES[TARGETS]}",),
            draft=(f"{DRAFTS}:{NAMES[DRAFTS]}",),
            tokenizer=str(self._folder / "target"),
            log_level="error",
            insecure=True,
        )
        self.coordinator = start("coordinator", settings)
        self.children.append(self.coordinator)
        address = self.coordinator.wait_ready()
        self.client = Client(address)
        return address

    def begin_target(self, host: str) -> Child:
        """Starts a target at this address."""
        own = {**REPLICA, "host": host, "port": NAMES[TARGETS], "model": str(self._folder / "target")}
        child = start("target", TargetSettings(**own))
        self.children.append(child)
        return child

    def counts(self) -> tuple[int, int]:
        """The numbers of targets and drafts that the coordinator uses."""
        said = self.client.described()
        target_count, draft_count = (
            sum(group.num_replicas for group in groups) for groups in (said.targets, said.drafts)
        )
        return target_count, draft_count

    def until(self, step: str, counts: tuple[int, int], is_timed: bool = True) -> None:
        """Waits until this number of targets and drafts is used, and notes the time."""
        begun_s = time.monotonic()
        while self.counts() != counts:
            if time.monotonic() > begun_s + STEP_S:
                raise TimeoutError(f"{step}: {self.counts()} are used after {STEP_S} s, not {counts}")
            time.sleep(0.02)
        if is_timed:
            self.seconds[step] = time.monotonic() - begun_s

    def stays(self, step: str, for_s: float, counts: tuple[int, int]) -> float:
        """Looks ten times a second, for so long, and counts the looks that show another number of members. Returns the
        share of a core that the coordinator used."""
        begun_s, used_s = time.monotonic(), cpu_seconds(self.coordinator.process.pid)
        self.changes.setdefault(step, 0)
        while time.monotonic() < begun_s + for_s:
            self.changes[step] += self.counts() != counts
            time.sleep(0.1)
        return (cpu_seconds(self.coordinator.process.pid) - used_s) / (time.monotonic() - begun_s)

    def look_after_loss(self, host: str) -> float:
        """Kills the target at this address soon after a look-up of its name; returns the seconds until the next one."""
        before = self.server.counts[TARGETS]
        while self.server.counts[TARGETS] == before:
            time.sleep(0.01)
        time.sleep(0.5)
        before, begun_s = self.server.counts[TARGETS], time.monotonic()
        self.targets[host].signal(signal.SIGKILL)
        while self.server.counts[TARGETS] == before:
            time.sleep(0.01)
        seconds = time.monotonic() - begun_s
        self.replace_target(host)
        return seconds

    def replace_target(self, host: str) -> None:
        """Kills the target at this address and starts another one there."""
        self.targets[host].signal(signal.SIGKILL)
        self.targets[host].process.wait()
        self.targets[host] = self.begin_target(host)
        self.targets[host].wait_ready()


def steps(world: World, silence_s: float) -> dict[str, float]:
    """Takes the records through all that can become of them. Returns the shares of a core that the coordinator used
    with live addresses only, and with 297 dead ones."""
    records, failure_s = world.server.records, min(FAILURE_S, silence_s)
    world.until("at the start", (2, 1))
    records |= {TARGETS: HOSTS, DRAFTS: HOSTS[:2]}
    world.until("added", (3, 2))
    records[TARGETS] = HOSTS[1:]
    world.until("removed", (2, 2))
    shares = {"live": world.stays("as they are", failure_s, (2, 2))}
    world.looked_s = world.look_after_loss(HOSTS[2])
    world.until("the target is back", (2, 2), is_timed=False)
    records[TARGETS] = MANY
    world.until("300 records", (3, 2))
    shares["dead"] = world.stays("300 records", failure_s, (3, 2))
    for failure in (Failure.NXDOMAIN, Failure.SERVFAIL):
        records |= dict.fromkeys(NAMES, failure)
        world.stays(failure.name, failure_s, (3, 2))
    records |= dict.fromkeys(NAMES, Failure.SILENCE)
    world.stays("silence", silence_s / 2, (3, 2))
    world.replace_target(HOSTS[1])
    world.until("a target replaced in the silence", (3, 2), is_timed=False)
    world.stays("silence", silence_s / 2, (3, 2))
    records |= {TARGETS: HOSTS[:1], DRAFTS: HOSTS[1:2]}
    world.until("after the silence", (1, 1), is_timed=False)
    return shares


def main(folder: Path, stream_count: int, silence_s: float) -> dict[str, Any]:
    """Runs all apart; returns what was measured."""
    with names_served() as server:
        world = World(folder, server)
        try:
            address = world.begin()
            readers = Readers(references_of(address, table_texts(12, MAX_TOKENS)), (0.05, 0.3), seed=1)
            readers.start([address] * stream_count)
            shares = steps(world, silence_s)
            readers.stop()
        finally:
            stop_all(reversed(world.children))
    return {
        "text_count": readers.text_count,
        "token_count": readers.token_count,
        "error_count": sum(readers.codes.values()),
        "codes": dict(readers.codes),
        "wrong": readers.wrong,
        "seconds": world.seconds,
        "changes": world.changes,
        "looked_s": world.looked_s,
        "coordinator_shares": shares,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
