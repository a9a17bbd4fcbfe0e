"""Joining: the ranks find each other, agree on what must agree, and are connected for commands, pulses and exchanges.

Rank 0 listens on one address; nothing listens anywhere else. What travels is numbers and JSON, never objects.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed

from specdec.engine.parallel.commands import CommandReceiver, CommandSender
from specdec.engine.parallel.exchange import (
    FOLDER,
    Exchange,
    SharedExchange,
    file_bytes,
    is_supported,
    open_gloo,
    open_nccl,
)
from specdec.engine.parallel.place import RankPlace, listen
from specdec.engine.parallel.watch import OnLost, Watch
from specdec.errors import ConfigError, Mismatch

JOIN_TIMEOUT_S = 600.0  # machines of one group may start minutes apart
POLL_S = 0.2
SECRET_BYTES = 16
KINDS = ("commands", "pulses")
Facts = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a rank may be silent, and late at an exchange, once all have taken a step.

    A stall under a second ends nothing; three seconds after a freeze all ranks are gone.
    """

    silence_s: float = 1.3
    exchange_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Ending:
    """When a rank gives the others up, and what it does at the end of all ranks: see `Watch`."""

    on_lost: OnLost
    bounds: Bounds = field(default_factory=Bounds)
    exit_grace_s: float | None = 0.0
    on_stop_asked: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One rank's ends of everything that joins the ranks. `sender` is rank 0's, `receiver` everybody else's."""

    place: RankPlace
    store: torch.distributed.Store
    exchange: Exchange
    watch: Watch
    bounds: Bounds
    sender: CommandSender | None
    receiver: CommandReceiver | None

    def tighten(self) -> None:
        """All ranks have taken a step: from here on the bounds hold."""
        self.exchange.set_patience(self.bounds.exchange_s)
        self.watch.tighten(self.bounds.silence_s)

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks share this machine's memory."""
        return isinstance(self.exchange, SharedExchange)


def join(place: RankPlace, facts: Facts, ending: Ending, is_cuda: bool = False) -> RankGroup:
    """Returns when all ranks have joined. `facts` must be the same on all of them.

    Raises ConfigError when one does not come, Mismatch naming the fact that differs. From here on a rank that is lost
    ends this process, as `Watch` says.
    """
    store = _open_store(place)
    connections = _accept_all(place, store) if place.rank == 0 else _connect(place, store)
    others = range(1, place.rank_count) if place.rank == 0 else (0,)
    pulses = dict(zip(others, connections["pulses"]))
    watch = Watch(pulses, ending.on_lost, ending.exit_grace_s, ending.on_stop_asked)
    try:
        _check_facts(place, store, facts, watch)
        exchange = _open_exchange(place, store, watch, is_cuda)
    except BaseException as error:
        watch.fail(place.rank, error)
        raise
    commands = connections["commands"]
    sender = CommandSender(commands) if place.rank == 0 else None
    receiver = None if sender else CommandReceiver(commands[0])
    return RankGroup(place, store, exchange, watch, ending.bounds, sender, receiver)


def _open_store(place: RankPlace) -> torch.distributed.Store:
    """The meeting point: rank 0 holds it, the others wait for it."""
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        if place.rank:
            return torch.distributed.TCPStore(place.host, place.port, place.rank_count, False, timeout)
        listener = place.listener or listen(place.host, place.port)
        port = listener.getsockname()[1]
        return torch.distributed.TCPStore(
            place.host, port, place.rank_count, True, timeout, False, master_listen_fd=listener.detach()
        )
    except (RuntimeError, torch.distributed.DistError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"rank {place.rank} did not meet the others on {place.host}:{place.port}: {reason}") from None


def _accept_all(place: RankPlace, store: torch.distributed.Store) -> dict[str, list[socket.socket]]:
    """Rank 0: one connection of each kind from every other rank, by rank. Others have to name the store's secret."""
    secret = secrets.token_bytes(SECRET_BYTES)
    found: dict[tuple[str, int], socket.socket] = {}
    ranks = range(1, place.rank_count)
    with listen(place.host) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        store.set("star", f"{secret.hex()} {listener.getsockname()[1]}")
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        while len(found) < len(KINDS) * len(ranks):
            place.check_coming()
            if time.monotonic() > deadline_s:
                missing = sorted({rank for rank in ranks} - {rank for _, rank in found})
                raise ConfigError(f"ranks {missing} did not join within {JOIN_TIMEOUT_S:g} s")
            if selector.select(POLL_S):
                connection, _ = listener.accept()
                connection.settimeout(POLL_S)
                name = _name_of(connection, secret)
                if name is None or name[1] not in ranks:
                    connection.close()
                else:
                    found[name] = connection
    for connection in found.values():
        connection.settimeout(None)
    return {kind: [found[kind, rank] for rank in ranks] for kind in KINDS}


def _name_of(connection: socket.socket, secret: bytes) -> tuple[str, int] | None:
    """(kind, rank) that a connection names itself with; None for a stranger."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        data = connection.recv(len(secret) + 3, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(data) != len(secret) + 3 or not secrets.compare_digest(data[: len(secret)], secret):
        return None
    kind = data[len(secret)]
    return (KINDS[kind], int.from_bytes(data[-2:], "little")) if kind < len(KINDS) else None


def _connect(place: RankPlace, store: torch.distributed.Store) -> dict[str, list[socket.socket]]:
    """A follower: its two connections to rank 0."""
    stated, port = store.get("star").decode().split()
    secret = bytes.fromhex(stated)
    connections: dict[str, list[socket.socket]] = {}
    for index, kind in enumerate(KINDS):
        connection = socket.create_connection((place.host.strip("[]"), int(port)), timeout=JOIN_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(secret + bytes([index]) + place.rank.to_bytes(2, "little"))
        connection.settimeout(None)
        connections[kind] = [connection]
    return connections


def _check_facts(place: RankPlace, store: torch.distributed.Store, facts: Facts, watch: Watch) -> None:
    """Rank 0 compares; raises Mismatch. The others go on, and hear of a mismatch as the end of rank 0."""
    if place.rank:
        store.set(f"facts/{place.rank}", json.dumps(facts))
        return
    for rank in range(1, place.rank_count):
        theirs = json.loads(_wait(store, f"facts/{rank}", watch))
        for name, own in facts.items():
            if theirs.get(name) != own:
                raise Mismatch(f"rank {rank} has {name} {theirs.get(name)!r}, rank 0 has {own!r}: ranks must agree")


def _open_exchange(place: RankPlace, store: torch.distributed.Store, watch: Watch, is_cuda: bool) -> Exchange:
    if is_cuda:
        return open_nccl(store, place.rank, place.rank_count)
    shared = _open_shared(place, store, watch)
    return shared or open_gloo(store, place.rank, place.rank_count, _own_host(place))


def _open_shared(place: RankPlace, store: torch.distributed.Store, watch: Watch) -> SharedExchange | None:
    """Shared memory, where every rank can open the file rank 0 made. It has no name once all have tried."""
    if place.rank:
        file = _find_shared_file(_wait(store, "memory", watch).decode())
        store.set(f"memory/{place.rank}", "0" if file is None else "1")
    else:
        path, file = _make_shared_file(place)
        try:
            store.set("memory", "" if file is None else str(path))
            answers = [_wait(store, f"memory/{rank}", watch) for rank in range(1, place.rank_count)]
        finally:
            path.unlink(missing_ok=True)
        store.set("shared", "1" if all(answer == b"1" for answer in answers) else "0")
    if file is None:
        return None
    try:
        is_shared = _wait(store, "shared", watch) == b"1"
        return SharedExchange(file, place.rank, place.rank_count, watch.check) if is_shared else None
    finally:
        os.close(file)


def _make_shared_file(place: RankPlace) -> tuple[Path, int | None]:
    """A file under a random name, open, and all of it there; None where there is no room or no such memory."""
    path = FOLDER / f"specdec-{secrets.token_hex(16)}"
    if not is_supported():
        return path, None
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return path, None
    try:
        os.posix_fallocate(file, 0, file_bytes(place.rank_count))
    except OSError:  # too little of it, as in containers that were given 64 MB
        os.close(file)
        return path, None
    return path, file


def _find_shared_file(name: str) -> int | None:
    """The file rank 0 made, if this rank sees it: its random name is found on no other machine."""
    try:
        return os.open(name, os.O_RDWR) if name else None
    except OSError:
        return None


def _wait(store: torch.distributed.Store, key: str, watch: Watch) -> bytes:
    """A key's value once it is there; raises when a rank is lost before."""
    while not store.check([key]):
        watch.check()
        time.sleep(0.01)
    value: bytes = store.get(key)
    return value


def _own_host(place: RankPlace) -> str:
    """The address of this machine on the way to rank 0: what the ranks' own connections are bound to."""
    if place.rank == 0:
        return place.host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in place.host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.host.strip("[]"), place.port))
        host: str = probe.getsockname()[0]
    return host
