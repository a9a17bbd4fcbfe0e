"""Where a rank stands: its number, how many there are, and where they meet.

All a launcher has to know of tensor parallelism: it starts one process for each place, on whatever machine, and hands
it the place. Whether the launcher is a command, a pod template or an actor is not known here.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from specdec.errors import ConfigError


def nobody_missing() -> None:
    """The check of a launcher that cannot see the other ranks."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of `rank_count`, and the address on which rank 0 lets the others meet.

    `listener`: on rank 0, a socket that listens there already, so that a free port stays this process's own; absent,
    it is made. `local_rank` counts the ranks of one machine: its GPU. `check_coming` raises when a rank that has not
    joined yet never will. `parent_pid`: the process that started this rank on its own machine and is rank 0; absent
    where it is not.
    """

    rank: int
    rank_count: int
    host: str
    port: int
    listener: socket.socket | None = None
    local_rank: int = 0
    check_coming: Callable[[], None] = nobody_missing
    parent_pid: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.rank_count:
            raise ConfigError(f"rank is {self.rank}; it must be from 0 to {self.rank_count - 1}")


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on one address only. Raises ConfigError when it cannot be had."""
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
