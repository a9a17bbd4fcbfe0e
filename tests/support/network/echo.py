"""The round trip between two emulated machines as a program sees it: a byte there and back on an open connection."""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time

from tests.support.network.machines import Network

ANSWER_TIMEOUT_S = 5.0


class Echo:
    """A connection from one machine to another on which every byte comes back. Use it in a `with` statement."""

    def __init__(self, network: Network, source: str, destination: str) -> None:
        there, here = network.machines[destination], network.machines[source]
        with there.inside():
            self._listener = socket.create_server((there.address, 0))
        threading.Thread(target=self._answer, name="echo", daemon=True).start()
        address = "{}:{}".format(*self._listener.getsockname())
        host, _, port = network.address_from(source, destination, address).rpartition(":")
        with here.inside():
            self._socket = socket.create_connection((host, int(port)), timeout=ANSWER_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._listener.close()

    def _answer(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, contextlib.suppress(OSError):  # the machine may go before the connection does
            while data := connection.recv(64):
                connection.sendall(data)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self, byte_count: int, timeout_s: float = ANSWER_TIMEOUT_S) -> bytes:
        """The next bytes that come back. TimeoutError when one does not come in time."""
        self._socket.settimeout(timeout_s)
        data = b""
        while len(data) < byte_count:
            part = self._socket.recv(byte_count - len(data))
            if not part:
                raise ConnectionError("the echo went away")
            data += part
        return data

    def round_trip_ms(self, timeout_s: float = ANSWER_TIMEOUT_S) -> float:
        """One byte there and back. TimeoutError when it does not come back in time."""
        began_s = time.perf_counter()
        self.send(b".")
        self.receive(1, timeout_s)
        return (time.perf_counter() - began_s) * 1e3


def median_rtt_ms(network: Network, source: str, destination: str, count: int = 21) -> float:
    """The median of `count` round trips, in milliseconds."""
    with Echo(network, source, destination) as echo:
        return statistics.median(echo.round_trip_ms() for _ in range(count))
