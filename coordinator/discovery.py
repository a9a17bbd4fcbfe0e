"""Finds the addresses of a pool: of names by the resolver of this machine, of files by their lines.

Each look-up of a name has a thread of its own that nothing waits for, so a resolver that hangs delays no other value
and no end of the process. An error, silence and an empty answer change nothing: whether a member serves is known by its
link.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from specdec.config import is_literal, is_loopback, read_addresses, split_address
from specdec.protocol.limits import REPLICA_COUNT_MAX
from specdec.telemetry.logs import get_logger

NAME_PERIOD_S = 5.0
LOOK_PERIOD_S = 1.0  # of files; also the shortest time between two look-ups of a name


class Member(NamedTuple):
    """An address of a pool; `tls_name`: the name that its certificate must have, "" for that of the address."""

    address: str
    tls_name: str = ""


def is_one(address: str) -> bool:
    """Whether HOST:PORT is one member as it is: an IP address or a loopback name."""
    host, _ = split_address(address)
    return is_literal(host) or is_loopback(host)


def look_up(address: str) -> tuple[Member, ...]:
    """Returns the members behind NAME:PORT, in order: all addresses of the family that the resolver puts first. Blocks.
    Raises OSError and UnicodeError."""
    name, port = split_address(address)
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    first = found[0][0]
    hosts = sorted({str(parts[0]) for family, *_, parts in found if family == first})
    form = "[{}]:{}" if first == socket.AF_INET6 else "{}:{}"
    return tuple(Member(form.format(host, port), name.rstrip(".")) for host in hosts)


class Discovery:
    """The members behind `values`, each HOST:PORT or @FILE. `changed` is called on the event loop with all of them, in
    the order of the values and without doubles, when `run` starts and whenever they change."""

    def __init__(self, values: Sequence[str], changed: Callable[[tuple[Member, ...]], None]) -> None:
        self._changed = changed
        self._files = {value: Path(value[1:]) for value in values if value.startswith("@")}
        ones = {value for value in values if value not in self._files and is_one(value)}
        self._names = {*values} - ones - self._files.keys()
        self._found: dict[str, tuple[Member, ...]] = {
            value: (Member(value),) if value in ones else () for value in values
        }
        self._failed: set[str] = set()  # values whose last look failed: logged once
        self._underway: set[str] = set()  # names that a thread looks up
        self._members: tuple[Member, ...] | None = None
        self._is_above = False
        self._looked_s = self._next_s = -LOOK_PERIOD_S  # of names
        self._wake = asyncio.Event()

    def look_now(self) -> None:
        """Looks the names up at once, at most once in LOOK_PERIOD_S; for a lost link."""
        self._next_s = min(self._next_s, self._looked_s + LOOK_PERIOD_S)
        self._wake.set()

    async def run(self) -> None:
        """Looks until cancelled. Threads of look-ups may live on; they do not hold the process."""
        loop = asyncio.get_running_loop()
        while True:
            if self._next_s <= loop.time():
                self._looked_s, self._next_s = loop.time(), loop.time() + NAME_PERIOD_S
                for name in self._names:
                    self._look_up(name, loop)
            for value, file in self._files.items():
                self._read(value, file)
            self._publish()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_PERIOD_S, max(0.0, self._next_s - loop.time()))):
                    await self._wake.wait()
            self._wake.clear()

    def _look_up(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        def resolve() -> None:
            found: tuple[Member, ...] = ()
            try:
                found, reason = look_up(name), ""
            except (OSError, UnicodeError) as error:
                reason = str(error)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._take, name, found, reason)

        if name not in self._underway:
            self._underway.add(name)
            try:
                threading.Thread(target=resolve, name="names", daemon=True).start()
            except RuntimeError as error:
                self._take(name, (), str(error))

    def _read(self, value: str, file: Path) -> None:
        try:
            self._take(value, tuple(map(Member, read_addresses(file))), "no address")
        except ValueError as error:
            self._take(value, (), str(error))

    def _take(self, value: str, found: tuple[Member, ...], reason: str) -> None:
        """Takes the result of a look; an empty one changes nothing."""
        self._underway.discard(value)
        if found:
            self._failed.discard(value)
            if found != self._found[value]:
                self._found[value] = found
                self._wake.set()
        elif value not in self._failed:
            self._failed.add(value)
            get_logger().warning("replicas not found", value=value, reason=reason)

    def _publish(self) -> None:
        first_of: dict[str, Member] = {}
        for member in (member for found in self._found.values() for member in found):
            first_of.setdefault(member.address, member)
        members = tuple(first_of.values())[:REPLICA_COUNT_MAX]
        if len(first_of) > REPLICA_COUNT_MAX and not self._is_above:
            get_logger().warning("too many replicas", count=len(first_of), used=REPLICA_COUNT_MAX)
        self._is_above = len(first_of) > REPLICA_COUNT_MAX
        if members != self._members:
            self._members = members
            self._changed(members)
