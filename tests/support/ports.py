"""Ports for services that are told theirs, as they start again on it or others are told it before."""

from __future__ import annotations

import contextlib
import random
import socket

BELOW_CONNECTIONS = range(15_000, 30_000)  # Linux takes the ports of outgoing connections and of port 0 from 32,768 up


def free_ports(count: int) -> list[int]:
    """Different ports that nothing listens on. No connection of another process takes one before its service starts,
    as it does with ports that the system chose."""
    found: list[int] = []
    for port in random.SystemRandom().sample(BELOW_CONNECTIONS, len(BELOW_CONNECTIONS)):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} free ports from {BELOW_CONNECTIONS.start} to {BELOW_CONNECTIONS.stop - 1}")


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
