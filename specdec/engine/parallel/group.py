"""Joining: the ranks meet, compare facts, and connect for commands, pulses and exchanges.

They meet in a file that rank 0 handed to its children, or, started by several parents, in a store that rank 0 serves
to all who reach its port. Only rank 0 listens, on one address, and only for ranks of other parents. Messages are
numbers and JSON, never pickled objects.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from specdec.engine.parallel.commands import CommandReceiver, CommandSender
from specdec.engine.parallel.connections import JOIN_TIMEOUT_S, connect
from specdec.engine.parallel.exchange import (
    FOLDER,
    Exchange,
    SharedExchange,
    file_bytes,
    is_supported,
    open_gloo,
    open_nccl,
)
from specdec.engine.parallel.rank_config import RankPlace, listen
from specdec.engine.parallel.watch import OnLost, Watch
from specdec.errors import ConfigError, Mismatch

FILE_NAME, FILE_NAME_BYTES = "specdec-", 16  # of the shared file: this, and random hexadecimal digits
Facts = Mapping[str, object]
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The longest silence of a rank, and its longest delay at an exchange, once all have run a step.

    A stall below one second has no effect; three seconds after a freeze all ranks have ended.
    """

    silence_s: float = 1.3
    exchange_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Ending:
    """The bounds for other ranks, and the actions at the end of all ranks: see `Watch`."""

    on_lost: OnLost
    bounds: Bounds = field(default_factory=Bounds)
    exit_grace_s: float | None = 0.0
    on_stop_requested: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One rank's ends of all connections between ranks. `sender` is rank 0's, `receiver` that of the other ranks."""

    place: RankPlace
    store: torch.distributed.Store
    exchange: Exchange
    watch: Watch
    bounds: Bounds
    sender: CommandSender | None
    receiver: CommandReceiver | None

    def tighten(self) -> None:
        """Applies the bounds, once all ranks have run a step."""
        self.exchange.set_patience(self.bounds.exchange_s)
        self.watch.tighten(self.bounds.silence_s)

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks share this machine's memory."""
        return isinstance(self.exchange, SharedExchange)


def join(
    place: RankPlace, facts: Facts, ending: Ending, device: torch.device = CPU, is_symmetric: bool = False
) -> RankGroup:
    """Returns when all ranks have joined. `facts` must be the same on all of them. `is_symmetric`: their GPUs exchange
    in symmetric memory.

    Raises ConfigError when one does not join, Mismatch with the fact that differs. From here on a lost rank ends this
    process: see `Watch`.
    """
    store = _open_store(place)
    connections = connect(place, store)
    others = range(1, place.rank_count) if place.rank == 0 else (0,)
    pulses = dict(zip(others, connections["pulses"]))
    watch = Watch(pulses, ending.on_lost, ending.exit_grace_s, ending.on_stop_requested)
    try:
        _check_facts(place, store, facts, watch)
        exchange = _open_exchange(place, store, watch, device, is_symmetric)
    except BaseException as error:
        watch.fail(place.rank, error)
        raise
    commands = connections["commands"]
    sender = CommandSender(commands) if place.rank == 0 else None
    receiver = None if sender else CommandReceiver(commands[0])
    return RankGroup(place, store, exchange, watch, ending.bounds, sender, receiver)


def _open_store(place: RankPlace) -> torch.distributed.Store:
    """Opens the store: on rank 0 it is created, the others wait for it."""
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    if place.store_file is not None:
        store = torch.distributed.FileStore(f"/proc/self/fd/{place.store_file}", place.rank_count)
        store.set_timeout(timeout)
        return store
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


def _check_facts(place: RankPlace, store: torch.distributed.Store, facts: Facts, watch: Watch) -> None:
    """Compares facts on rank 0; raises Mismatch there. For the other ranks a mismatch is the end of rank 0."""
    if place.rank:
        store.set(f"facts/{place.rank}", json.dumps(facts))
        return
    for rank in range(1, place.rank_count):
        theirs = json.loads(_wait(store, f"facts/{rank}", watch))
        for name, own in facts.items():
            if theirs.get(name) != own:
                raise Mismatch(f"rank {rank} has {name} {theirs.get(name)!r}, rank 0 has {own!r}: ranks must agree")


def _open_exchange(
    place: RankPlace, store: torch.distributed.Store, watch: Watch, device: torch.device, is_symmetric: bool
) -> Exchange:
    if is_symmetric:
        from specdec.engine.parallel.symmetric import open_symmetric

        return open_symmetric(store, place.rank, place.rank_count, device)
    if device.type == "cuda":
        return open_nccl(store, place.rank, place.rank_count)
    shared = _open_shared(place, store, watch)
    return shared or open_gloo(store, place.rank, place.rank_count, _own_host(place))


def _open_shared(place: RankPlace, store: torch.distributed.Store, watch: Watch) -> SharedExchange | None:
    """Opens shared memory, if every rank can open rank 0's file. The file is unlinked once all have tried."""
    if place.rank:
        file = _find_shared_file(_wait(store, "memory", watch).decode("utf-8", "replace"), place.rank_count)
        store.set(f"memory/{place.rank}", "0" if file is None else "1")
    else:
        path, file = _make_shared_file(place)
        try:
            store.set("memory", "" if file is None else str(path))
            answers = [_wait(store, f"memory/{rank}", watch) for rank in range(1, place.rank_count)]
        finally:
            if file is not None:
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
    """Creates an allocated file with a random name; none without shared memory that can be written and has the
    space."""
    path = FOLDER / f"{FILE_NAME}{secrets.token_hex(FILE_NAME_BYTES)}"
    if not is_supported():
        return path, None
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError:
        return path, None
    try:
        os.posix_fallocate(file, 0, file_bytes(place.rank_count))
    except OSError:  # too little, as in containers with 64 MB
        os.close(file)
        path.unlink(missing_ok=True)
        return path, None
    return path, file


def _find_shared_file(name: str, rank_count: int) -> int | None:
    """Opens rank 0's file, if this rank sees it: its random name exists on no other machine.

    Raises ConfigError for a name or a file that rank 0 does not make: the store may have been written by others.
    """
    if not name:
        return None
    if not re.fullmatch(f"{FOLDER}/{FILE_NAME}[0-9a-f]{{{2 * FILE_NAME_BYTES}}}", name):
        raise ConfigError(f"rank 0's shared file is {name[:80]!r}; it must be {FOLDER}/{FILE_NAME} and random digits")
    try:
        file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(
                f"rank 0's shared file {name} is a symbolic link; remove it, and see who made it"
            ) from None
        return None
    found = os.fstat(file)
    is_own = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
    if not (is_own and found.st_size == file_bytes(rank_count)):
        os.close(file)
        raise ConfigError(
            f"rank 0's shared file {name} must be a file of this user with {file_bytes(rank_count)} bytes"
        )
    return file


def _wait(store: torch.distributed.Store, key: str, watch: Watch) -> bytes:
    """Waits for a key and returns its value; raises when a rank is lost before."""
    while not store.check([key]):
        watch.check()
        time.sleep(0.01)
    value: bytes = store.get(key)
    return value


def _own_host(place: RankPlace) -> str:
    """Returns this machine's address on the route to rank 0, to which connections between ranks are bound."""
    if place.rank == 0:
        return place.host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in place.host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.host.strip("[]"), place.port or 1))  # sends nothing: any port selects the route
        host: str = probe.getsockname()[0]
    return host
