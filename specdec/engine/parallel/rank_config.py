"""A rank's place: its number, the number of ranks, and the address where they meet.

The whole interface of a launcher to tensor parallelism: it starts one process for each place, on any machine, and
passes the place to it. The launcher may be a command, a pod template or an actor.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from specdec.errors import ConfigError

KINDS = ("commands", "pulses")  # the connections between rank 0 and each other rank
Connections: TypeAlias = Mapping[str, Sequence[socket.socket]]  # one rank's, by kind: of rank 0 to the others in order


def none_missing() -> None:
    """The check of a launcher without access to the other ranks."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of `rank_count`, and the address of rank 0 where the ranks meet.

    `store_file`: an open file in memory that rank 0 handed to all other ranks, its children, when it started them; the
    ranks meet in it, so that no other user of the machine can write there. Absent: they meet at `port`.
    `connections`: beside `store_file`, this rank's ends of socket pairs, which the others inherited too. Absent: the
    others connect to rank 0, at a port that it names in the store.
    `listener`: on rank 0, a socket that already listens there, so that this process keeps a free port; absent: it is
    made. `local_rank`: number of the rank on its machine, hence its GPU. `check_coming` raises when a rank has failed
    before it joined. `parent_pid`: rank 0, if it started this rank on the same machine.
    """

    rank: int
    rank_count: int
    host: str
    port: int
    listener: socket.socket | None = None
    local_rank: int = 0
    check_coming: Callable[[], None] = none_missing
    parent_pid: int | None = None
    store_file: int | None = None
    connections: Connections | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.rank_count:
            raise ConfigError(f"rank is {self.rank}; it must be from 0 to {self.rank_count - 1}")


def listen(host: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens on one address only. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"ranks cannot meet on {host} port {port}: {reason}; see --master-addr") from error
    return listener
