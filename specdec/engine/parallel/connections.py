"""The connections between rank 0 and every other rank: one for commands, one for pulses.

Ranks of one parent inherit them as socket pairs, which no other process reaches. Others connect to rank 0 and greet
with a secret from the store. Every process that reaches that port may connect and say nothing, so greetings are read
side by side, each for a limited time, and a rank that was turned away calls again.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch.distributed

from specdec.engine.parallel.rank_config import KINDS, Connections, RankPlace, listen
from specdec.errors import ConfigError

JOIN_TIMEOUT_S = 600.0  # machines of one group may start minutes apart
POLL_S = 0.2
SECRET_BYTES = 16
GREETING_BYTES = SECRET_BYTES + 3  # the secret, the kind and the rank
GREETING_S = 5.0  # for a greeting: a rank sends its own as soon as it is connected
CALLERS_MAX = 128  # that have not greeted; beyond, the oldest are turned away
RETRY_S = 0.1  # before a rank calls again
WELCOME = b"w"


def connect(place: RankPlace, store: torch.distributed.Store) -> Connections:
    """Returns this rank's connections: of rank 0 to all others, of the others to rank 0. Raises ConfigError."""
    if place.connections is not None:
        _meet(place, place.connections["commands"])
        return place.connections
    return _accept_all(place, store) if place.rank == 0 else _call_twice(place, store)


def _meet(place: RankPlace, commands: Sequence[socket.socket]) -> None:
    """Over inherited connections: every rank tells rank 0 that it has come."""
    if place.rank:
        commands[0].sendall(WELCOME)
        return
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        for rank, connection in enumerate(commands, 1):
            selector.register(connection, selectors.EVENT_READ, rank)
        while coming := {key.data for key in selector.get_map().values()}:
            _check_coming(place, coming, deadline_s)
            for key, _ in selector.select(POLL_S):
                connection = commands[key.data - 1]
                if connection.recv(1):
                    selector.unregister(connection)
                else:  # it has ended, which `check_coming` explains
                    time.sleep(POLL_S / 10)


def _check_coming(place: RankPlace, coming: set[int], deadline_s: float) -> None:
    place.check_coming()
    if time.monotonic() > deadline_s:
        raise ConfigError(f"ranks {sorted(coming)} did not join within {JOIN_TIMEOUT_S:g} s")


def _accept_all(place: RankPlace, store: torch.distributed.Store) -> Connections:
    """Rank 0: accepts one connection of each kind from every other rank; each must send the store's secret."""
    ranks = range(1, place.rank_count)
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    with Door(listen(place.host), secrets.token_bytes(SECRET_BYTES), ranks) as door:
        store.set("star", f"{door.secret.hex()} {door.port}")
        while coming := {rank for kind in KINDS for rank in ranks if (kind, rank) not in door.found}:
            _check_coming(place, coming, deadline_s)
            door.attend()
    return {kind: [door.found[kind, rank] for rank in ranks] for kind in KINDS}


@dataclass(slots=True)
class Caller:
    """The beginning of a greeting, and when its sender connected."""

    since_s: float
    heard: bytearray = field(default_factory=bytearray)


class Door:
    """Rank 0's listener, those who have not greeted yet, and `found`: the connections of those who have, by kind and
    rank. At its end the first two are closed."""

    def __init__(self, listener: socket.socket, secret: bytes, ranks: range) -> None:
        self.secret = secret
        self.port: int = listener.getsockname()[1]
        self.found: dict[tuple[str, int], socket.socket] = {}
        self._ranks = ranks
        self._listener = listener
        self._callers: dict[socket.socket, Caller] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in (*self._callers, self._listener):
            connection.close()
        self._selector.close()

    def attend(self) -> None:
        """Hears those who have sent something, accepts one more, and turns away the late; waits up to POLL_S."""
        is_called = False
        for key, _ in self._selector.select(POLL_S):
            if key.fileobj in self._callers:
                self._hear(key.fileobj)
            else:
                is_called = True
        if is_called:
            self._accept()
        now_s = time.monotonic()
        for connection, caller in list(self._callers.items()):
            if now_s - caller.since_s <= GREETING_S and len(self._callers) <= CALLERS_MAX:
                break
            self._forget(connection).close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError:  # mostly for want of descriptors
            for oldest in list(self._callers)[:1]:
                self._forget(oldest).close()
            time.sleep(POLL_S / 10)
            return
        connection.setblocking(False)
        self._callers[connection] = Caller(time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        """Takes what a caller has sent; one that ends, or greets otherwise than a rank, is turned away."""
        heard = self._callers[connection].heard
        try:
            data = connection.recv(GREETING_BYTES - len(heard))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        heard += data
        if data and len(heard) < GREETING_BYTES:
            return
        self._forget(connection)
        name = self._name_in(bytes(heard))
        if name is None:
            connection.close()
            return
        with suppress(OSError):  # it has ended, or the watch learns so
            connection.setblocking(True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(WELCOME)
        if name in self.found:
            self.found[name].close()  # the rank called again
        self.found[name] = connection

    def _name_in(self, greeting: bytes) -> tuple[str, int] | None:
        """Returns (kind, rank) of a greeting; None without the secret."""
        secret, rest = greeting[:SECRET_BYTES], greeting[SECRET_BYTES:]
        if len(rest) != GREETING_BYTES - SECRET_BYTES or not secrets.compare_digest(secret, self.secret):
            return None
        kind, rank = rest[0], int.from_bytes(rest[1:], "little")
        return (KINDS[kind], rank) if kind < len(KINDS) and rank in self._ranks else None

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        del self._callers[connection]
        return connection


def _call_twice(place: RankPlace, store: torch.distributed.Store) -> Connections:
    """A follower: opens its two connections to rank 0."""
    stated, port = store.get("star").decode().split()
    rank = place.rank.to_bytes(2, "little")
    address = place.host.strip("[]"), int(port)
    greetings = {kind: bytes.fromhex(stated) + bytes([index]) + rank for index, kind in enumerate(KINDS)}
    return {kind: [_call(address, greeting)] for kind, greeting in greetings.items()}


def _call(address: tuple[str, int], greeting: bytes) -> socket.socket:
    """Connects to rank 0 and greets, again if it is turned away, until it is welcome."""
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            connection = socket.create_connection(address, timeout=JOIN_TIMEOUT_S)
        except OSError as error:  # rank 0 listens before it names the port: it has ended
            raise ConfigError(f"rank 0 does not answer on {address[0]} port {address[1]}: {error}") from None
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(greeting)
            if connection.recv(1) == WELCOME:
                connection.settimeout(None)
                return connection
        connection.close()
        time.sleep(RETRY_S)
    raise ConfigError(f"rank 0 on {address[0]} port {address[1]} had no place for this rank for {JOIN_TIMEOUT_S:g} s")
