"""`python -m tests.support.network.proxy --to HOST:PORT --delay MS`: a TCP proxy that delays, where there is no root.

Prints READY and the address it listens on. Every byte is held for the one-way delay; opening a connection takes no
delay, unlike on a real link. A line `MS` on standard input changes the delay while it runs, `close` ends all
connections. SIGSTOP cuts the link, SIGCONT heals it. Ends on SIGTERM, SIGINT or the end of a pipe on standard input.
"""

from __future__ import annotations

import argparse
import select
import socket
import sys
import time
from collections import deque

from tests.support.network.waiting import CpuShare, Orders, parse_delay, run_precisely, until_stop_requested

READ_BYTES = 1 << 16
UNDER_WAY_BYTES_MAX = 16 << 20  # of one direction: 100 ms at more than a gigabit, then the sender is held back


class Direction:
    """Bytes of one connection on their way from `source` to `sink`, each due at its own moment."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.has_ended = False  # the source sends no more
        self.is_done = False  # and the sink knows
        self.is_full = False  # the sink takes no more for now
        self._under_way: deque[tuple[float, bytes]] = deque()  # (due, data); empty data is the end
        self._byte_count = 0

    @property
    def wants_to_read(self) -> bool:
        return not self.has_ended and self._byte_count < UNDER_WAY_BYTES_MAX

    def take(self, delay_s: float) -> None:
        """Takes what the source has sent."""
        try:
            data = self.source.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.has_ended = not data
        last_due_s = self._under_way[-1][0] if self._under_way else 0.0
        self._under_way.append((max(last_due_s, time.monotonic() + delay_s), data))
        self._byte_count += len(data)

    def deliver(self) -> float | None:
        """Hands over what is due; seconds until more is, None when nothing is or the sink is full."""
        self.is_full = False
        while self._under_way:
            due_s, data = self._under_way[0]
            wait_s = due_s - time.monotonic()
            if wait_s > 0:
                return wait_s
            sent = self._send(data)
            self._byte_count -= sent
            if sent < len(data):
                self._under_way[0] = (due_s, data[sent:])
                self.is_full = True
                return None
            self._under_way.popleft()
        return None

    def _send(self, data: bytes) -> int:
        """Bytes the sink took; a sink that is gone takes all, and its connection ends."""
        try:
            if data:
                return self.sink.send(data)
            self.is_done = True
            self.sink.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return 0
        except OSError:
            self.has_ended = self.is_done = True
        return len(data)


class Proxy:
    """All connections through one listening socket."""

    def __init__(self, to: tuple[str, int], delay_s: float) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._to = to
        self._delay_s = delay_s
        self._pairs: list[tuple[Direction, Direction]] = []

    def carry_out(self, order: str) -> None:
        """`MS`: the delay, one way, both ways alike; or `close`: drops all connections and what is under way. Raises
        ValueError."""
        if order != "close":
            _, _, self._delay_s = parse_delay(order)
            return
        for pair in self._pairs:
            for direction in pair:
                direction.source.close()
        self._pairs = []

    def accept(self) -> None:
        """Opens the onward connection for a new one; closes the new one at once if it is refused."""
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._to, timeout=5)
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pairs.append((Direction(near, far), Direction(far, near)))

    def deliver(self) -> float | None:
        """Hands over what is due and drops connections that have ended; seconds until more is due."""
        waits = []
        for pair in list(self._pairs):
            waits += [direction.deliver() for direction in pair]
            if all(direction.is_done for direction in pair):
                self._pairs.remove(pair)
                pair[0].source.close()
                pair[0].sink.close()
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def run(self, orders: Orders) -> None:
        """Forwards until interrupted. Asleep whenever nothing is due and nothing arrives."""
        while True:
            wait_s = self.deliver()
            sources = {direction.source: direction for pair in self._pairs for direction in pair}
            reading = [source for source, direction in sources.items() if direction.wants_to_read]
            full = [direction.sink for direction in sources.values() if direction.is_full]
            readable, _, _ = select.select([self._listener, *reading, *orders.descriptors], full, [], wait_s)
            for ready in readable:
                if ready is self._listener:
                    self.accept()
                elif ready in sources:
                    sources[ready].take(self._delay_s)
                else:
                    orders.read()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.network.proxy", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="where connections go on to")
    parser.add_argument("--delay", default="0", metavar="MS", help="one way, in milliseconds (0)")
    asked = parser.parse_args()
    host, _, port = asked.to.rpartition(":")
    try:
        proxy = Proxy((host, int(port)), parse_delay(asked.delay)[2])
    except ValueError as error:
        print(f"proxy: {error}", file=sys.stderr)
        return 1
    with until_stop_requested():
        run_precisely()
        print("READY", proxy.address, flush=True)
        share = CpuShare()
        try:
            proxy.run(Orders(proxy.carry_out))
        finally:
            print(share, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
