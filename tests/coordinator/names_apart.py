"""A discovery and a real DNS server whose records change, step by step; to be run apart (`tests.support.dns_server`).

`python -m tests.coordinator.names_apart FOLDER SILENCE_S` prints a line for each step that holds and ends at the first
that does not. It ends while the resolver hangs.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from specdec.coordinator.discovery import Discovery, Member
from tests.support.dns_server import RESOLVER_S, DnsServer, Failure

NAME, OTHER, BOTH = "targets.test", "others.test", "both.test"
PORT = 50052
NAME_S, FILE_S = 6.0, 2.0  # until a change is known
ENDING = "ending at"  # the last line begins so: the process should end at once


def found_by(name: str, hosts: list[str]) -> set[Member]:
    """The members that these addresses of a name are."""
    return {Member(f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}", name) for host in hosts}


class World:
    """A discovery of two names and a file, and what it says. `gap_s`: longest pause of the event loop."""

    def __init__(self, server: DnsServer, file: Path) -> None:
        self.server, self.file = server, file
        file.write_text("127.0.9.1:7\n")
        self.discovery = Discovery([f"{NAME}:{PORT}", f"@{file}", f"{OTHER}:{PORT}"], self._take)
        self.members: tuple[Member, ...] = ()
        self.gap_s = 0.0

    def _take(self, members: tuple[Member, ...]) -> None:
        assert len(set(members)) == len(members) and members != self.members
        self.members = members

    def of(self, name: str) -> set[Member]:
        """The members found by a name, "" for those of the file."""
        return {member for member in self.members if member.tls_name == name}

    async def follow_gaps(self) -> None:
        """Measures the pauses of the event loop."""
        while True:
            begun_s = time.monotonic()
            await asyncio.sleep(0.01)
            self.gap_s = max(self.gap_s, time.monotonic() - begun_s)

    async def until(self, condition: Callable[[], bool], timeout_s: float, step: str) -> None:
        """Waits for the condition, and prints the step with the seconds it took."""
        begun_s = time.monotonic()
        while not condition():
            assert time.monotonic() < begun_s + timeout_s, f"{step}: {self.members} after {timeout_s} s"
            await asyncio.sleep(0.01)
        print(f"{step}: {time.monotonic() - begun_s:.2f} s", flush=True)

    async def becomes(self, hosts: list[str], step: str, timeout_s: float = NAME_S) -> None:
        """The name gets these records, and has these members in time."""
        self.server.records[NAME] = hosts
        await self.until(lambda: self.of(NAME) == found_by(NAME, hosts), timeout_s, step)

    async def stays(self, failure: Failure, hosts: list[str]) -> None:
        """The name fails in two look-ups, and its members stay."""
        self.server.records[NAME] = failure
        for _ in range(2):
            before = self.server.counts[NAME]
            self.discovery.look_now()
            await asyncio.sleep(1.2)
            assert self.server.counts[NAME] > before and self.of(NAME) == found_by(NAME, hosts), failure
        print(f"{failure.name} changes nothing", flush=True)


async def steps(world: World, silence_s: float) -> None:
    """Takes the name's records through all that can become of them."""
    server, discovery = world.server, world.discovery
    hosts = ["127.0.0.2", "127.0.0.3"]
    server.records |= {NAME: hosts, OTHER: ["127.0.8.1"]}
    running = asyncio.create_task(discovery.run())
    await world.until(lambda: len(world.members) == 4, 2.0, "found at the start")
    assert [member.address for member in world.members] == [
        f"127.0.0.2:{PORT}",
        f"127.0.0.3:{PORT}",
        "127.0.9.1:7",
        f"127.0.8.1:{PORT}",
    ]
    await world.becomes([*hosts, "127.0.0.4"], "one added")
    before_s, before = time.monotonic(), server.counts[OTHER]
    for _ in range(150):
        discovery.look_now()
        await asyncio.sleep(0.01)
    rounds = (server.counts[OTHER] - before) / 2  # A and AAAA
    assert 1 <= rounds <= 1 + (time.monotonic() - before_s), rounds
    server.records[NAME] = ["127.0.0.4"]
    discovery.look_now()
    await world.until(lambda: world.of(NAME) == found_by(NAME, ["127.0.0.4"]), 1.5, "two removed, looked for at once")
    many = [f"127.1.{number // 250}.{number % 250 + 1}" for number in range(300)]
    server.records[NAME] = many
    discovery.look_now()
    await world.until(lambda: world.of(NAME) == found_by(NAME, many), 3.0, "300 records over TCP")
    assert server.tcp_count
    for failure in (Failure.NXDOMAIN, Failure.SERVFAIL):
        await world.stays(failure, many)
    await silence(world, silence_s, many)
    await world.becomes(hosts, "after the silence", NAME_S + RESOLVER_S)
    server.records[NAME] = ["::1", "127.0.0.2"]
    discovery.look_now()
    await world.until(lambda: world.of(NAME) == found_by(NAME, ["::1"]), NAME_S, "of two families the first")
    assert not running.done() and threading.active_count() < 8
    server.records[NAME] = Failure.SILENCE
    before = server.counts[NAME]
    discovery.look_now()
    await world.until(lambda: server.counts[NAME] > before, NAME_S, "hangs again")


async def silence(world: World, silence_s: float, hosts: list[str]) -> None:
    """The resolver hangs for the name: its members stay, another name and the file change in time, the event loop and
    the default executor go on."""
    server, begun_s = world.server, time.monotonic()
    server.records[NAME] = Failure.SILENCE
    before = server.counts[NAME]
    world.discovery.look_now()
    await world.until(lambda: server.counts[NAME] > before, NAME_S, "SILENCE was asked")
    world.gap_s = 0.0
    server.records[OTHER] = ["127.0.8.2"]
    await world.until(lambda: world.of(OTHER) == found_by(OTHER, ["127.0.8.2"]), NAME_S, "another name meanwhile")
    world.file.write_text("127.0.9.2:7\n")
    await world.until(lambda: world.of("") == {Member("127.0.9.2:7")}, FILE_S, "the file meanwhile")
    worked_s = time.monotonic()
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.01) for _ in range(64)))
    assert time.monotonic() < worked_s + 2.0
    await asyncio.sleep(max(0.0, begun_s + silence_s - time.monotonic()))
    assert world.of(NAME) == found_by(NAME, hosts)
    hanging = [thread for thread in threading.enumerate() if thread.name == "names"]
    assert len(hanging) <= 1 and world.gap_s < 1.0, (hanging, world.gap_s)
    print(
        f"SILENCE for {silence_s:g} s changes nothing; longest pause of the event loop {world.gap_s:.3f} s", flush=True
    )


async def main(folder: Path, silence_s: float) -> None:
    async with DnsServer().listening() as server:
        world = World(server, folder / "targets")
        gaps = asyncio.create_task(world.follow_gaps())
        await steps(world, silence_s)
        gaps.cancel()
    print(ENDING, time.monotonic(), flush=True)  # then the event loop and the interpreter end


if __name__ == "__main__":
    assert socket.getaddrinfo("localhost", 1)  # from /etc/hosts, without a question
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
