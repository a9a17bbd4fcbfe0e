"""The connections that gRPC has accepted: it owns the sockets and does not tell them, so they are found among this
process's descriptors.

Every descriptor is looked through as a copy, so that none can become another file's meanwhile. A socket that is shut
down here is for gRPC one that the peer has closed. Linux only: elsewhere none is found.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Collection, Iterator
from urllib.parse import unquote

_FILES = "/proc/self/fd"


def accepted(ports: Collection[int]) -> Iterator[socket.socket]:
    """Yields the connections to these ports of this process, each valid until the next."""
    try:
        names = os.listdir(_FILES)
    except OSError:  # no such folder, or no descriptor left to read it with
        return
    for name in names:
        with contextlib.suppress(OSError), _copied(int(name)) as one:  # closed meanwhile, or another file
            own = one.getsockname()
            if isinstance(own, tuple) and own[1] in ports and one.getpeername():
                yield one


def close_connections(peer: str, ports: Collection[int]) -> None:
    """Shuts down the connections of `peer`, named as by gRPC, to these ports."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    if not port.isdigit():
        return  # gRPC's "unknown"
    other_end = _end(host.strip("[]"), int(port))
    for one in accepted(ports):
        with contextlib.suppress(OSError, ValueError):
            if _end(*one.getpeername()[:2]) == other_end:
                one.shutdown(socket.SHUT_RDWR)


def _end(host: str, port: int) -> tuple[object, int]:
    """The end of a connection, in one form for IPv4 on sockets of both kinds."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address, port


@contextlib.contextmanager
def _copied(number: int) -> Iterator[socket.socket]:
    """A second descriptor of the socket with this one. Raises OSError if it is none."""
    copy = os.dup(number)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection
