"""`python -m tests.support.network.hub --node NAME=IP --delay A:B=MS ...`: machines joined by a network that delays.

Each machine is a network namespace; every packet between two of them passes through this process, which holds it for
the one-way delay of the pair. READY is printed when all stand, after one line per machine saying how to run a command
there. A line `A:B=MS` on standard input changes a delay while it runs. SIGSTOP cuts the network, SIGCONT heals it.
SIGTERM, SIGINT or the end of a pipe on standard input remove everything; a start removes what a killed run left. Root.
"""

from __future__ import annotations

import argparse
import heapq
import ipaddress
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping

from tests.support.network import namespaces
from tests.support.network.namespaces import Tun
from tests.support.network.waiting import CpuShare, Orders, parse_delay, run_precisely, until_stop_requested

MTU_DEFAULT = 1500
PACKET_COUNT_MAX = 64  # read from one machine before the others get their turn
IPV4 = 4


class Hub:
    """Packets on their way. A machine's packets to another arrive in the order they were sent, whatever the delays."""

    def __init__(self, addresses: Mapping[str, str], tuns: Mapping[str, Tun]) -> None:
        self._tuns = dict(tuns)
        self._names = {int(ipaddress.IPv4Address(address)): name for name, address in addresses.items()}
        self._delays_s: dict[tuple[str, str], float] = {}
        self._under_way: list[tuple[float, int, Tun, bytes]] = []  # heap of (due, number, to, packet)
        self._last_due_s: dict[tuple[str, str], float] = {}
        self._packet_count = 0

    def set_delay(self, text: str) -> None:
        """`A:B=MS`, one way, both ways alike. Raises ValueError."""
        first, second, delay_s = parse_delay(text)
        for name in (first, second):
            if name not in self._tuns:
                raise ValueError(f"{name!r} is none of {', '.join(self._tuns)}")
        self._delays_s[first, second] = self._delays_s[second, first] = delay_s

    def take(self, source: str) -> None:
        """Takes the packets that a machine has sent. Packets to unknown machines, and all but IPv4, are dropped."""
        for _ in range(PACKET_COUNT_MAX):
            packet = self._tuns[source].read()
            if packet is None:
                return
            destination = self._names.get(int.from_bytes(packet[16:20], "big"))
            if packet[0] >> 4 != IPV4 or destination is None:
                continue
            pair = (source, destination)
            due_s = time.monotonic() + self._delays_s.get(pair, 0.0)
            due_s = max(due_s, self._last_due_s.get(pair, 0.0))
            self._last_due_s[pair] = due_s
            self._packet_count += 1
            heapq.heappush(self._under_way, (due_s, self._packet_count, self._tuns[destination], packet))

    def deliver(self) -> float | None:
        """Hands over what is due; seconds until the next packet is, None when none is under way."""
        while self._under_way:
            wait_s = self._under_way[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            _, _, destination, packet = heapq.heappop(self._under_way)
            destination.write(packet)
        return None

    def run(self, orders: Orders) -> None:
        """Forwards until interrupted. Asleep whenever nothing is due and nothing arrives."""
        names = {tun.fileno(): name for name, tun in self._tuns.items()}
        while True:
            readable, _, _ = select.select([*names, *orders.descriptors], [], [], self.deliver())
            for descriptor in readable:
                if descriptor in names:
                    self.take(names[descriptor])
                else:
                    orders.read()


def serve(addresses: Mapping[str, str], delays: Iterable[str], mtu: int) -> None:
    """Builds the machines, forwards until stopped, removes them. Raises ValueError for a delay of unknown machines."""
    owned = {name: namespaces.namespace_of(os.getpid(), name) for name in addresses}
    tuns: dict[str, Tun] = {}
    try:
        with until_stop_requested():
            for name, namespace in owned.items():
                namespaces.create(namespace)
                tuns[name] = namespaces.make_tun(namespace, addresses[name], mtu)
            hub = Hub(addresses, tuns)
            for delay in delays:
                hub.set_delay(delay)
            run_precisely()
            for name, namespace in owned.items():
                print(name, addresses[name], *namespaces.run_prefix(namespace))
            print("READY", flush=True)
            share = CpuShare()
            try:
                hub.run(Orders(hub.set_delay))
            finally:
                print(share, flush=True)
    finally:
        for tun in tuns.values():
            tun.close()
        for namespace in owned.values():
            namespaces.remove(namespace)


def node(text: str) -> tuple[str, str]:
    """(name, address) of `NAME=IP`. Raises ValueError."""
    name, _, address = text.partition("=")
    if not namespaces.NODE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a machine")
    return name, str(ipaddress.IPv4Address(address))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.network.hub", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--node", type=node, action="append", required=True, metavar="NAME=IP", help="a machine")
    parser.add_argument("--delay", action="append", default=[], metavar="A:B=MS", help="one way, in milliseconds (0)")
    parser.add_argument("--mtu", type=int, default=MTU_DEFAULT, help="bytes of a packet (%(default)s)")
    asked = parser.parse_args()
    reason = namespaces.why_unusable()
    if reason:
        print(f"hub: {reason}", file=sys.stderr)
        return 1
    for name in namespaces.remove_abandoned():
        print(f"removed {name}, which a killed run had left", file=sys.stderr)
    try:
        serve(dict(asked.node), asked.delay, asked.mtu)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"hub: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
