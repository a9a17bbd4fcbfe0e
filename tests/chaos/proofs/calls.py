"""Thousands of calls a second that are of no use: another client's tokens, beside the same bytes to a sink.

The embedded target alone decodes a text, without speculation, so that every token passes the coordinator's event loop.
Windows with the flood at the coordinator and at the sink alternate; what counts is the median of the ratios of
neighbours. With --reopen a flood opens a connection that was closed again.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import grpc
from rich.console import Console

from bench.bars import Bar
from tests.chaos.call_flood import KINDS
from tests.support.pages import free_address
from tests.support.processes import cpu_seconds
from tests.support.services import MODELS, Client, Services, running

FLOOD = (sys.executable, "-m", "tests.chaos.call_flood")
SETTLE_S = 0.3


class Reader(threading.Thread):
    """A client whose texts follow each other without end; `times_s`: of its tokens."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.times_s: list[float] = []
        self.errors: list[grpc.RpcError] = []
        self.has_stopped = False
        self._client = Client(address)

    def run(self) -> None:
        ask: dict[str, Any] = {"speculative": {"policy": "POLICY_OFF"}, "max_tokens": 400, "ignore_eos": True}
        while not self.has_stopped:
            try:
                for response in self._client.stub.Generate(self._client.request("def main():", **ask), timeout=60):
                    self.times_s += [time.monotonic()] * len(response.delta.token_ids)
            except grpc.RpcError as error:
                self.errors.append(error)
                time.sleep(0.1)
        self._client.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="all by default")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4], help="of a flood (%(default)s)")
    parser.add_argument("--calls", type=int, default=8000, help="a second of each connection (%(default)s)")
    parser.add_argument("--pairs", type=int, default=6, help="of windows (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.5, help="of a window (%(default)s)")
    parser.add_argument("--reopen", action="store_true", help="connections that were closed")
    parser.add_argument("--port", choices=("service", "probes"), default="service", help="(%(default)s)")


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Runs the proof."""
    health, bars, errors = free_address(), [], 0
    with (
        subprocess.Popen([*FLOOD, "sink"], stdout=subprocess.PIPE, text=True) as sink,
        running(MODELS / "target", None, coordinator={"health_address": health}, threads=1) as services,
    ):
        assert sink.stdout is not None
        addresses = [f"127.0.0.1:{sink.stdout.readline().strip()}"]
        addresses.append(health if asked.port == "probes" else services.coordinator.address)
        reader = Reader(services.coordinator.address)
        reader.start()
        time.sleep(2)
        for kind in asked.kinds:
            for count in asked.connections:
                ratio = ratio_of_pairs(asked, services, reader, addresses, (kind, count), console)
                bars.append(Bar(f"{kind}, {count} connections: tokens beside the sink's", 0.9, ratio))
        reader.has_stopped, errors = True, len(reader.errors)
        reader.join()
        sink.kill()
    return [*bars, Bar("errors of the other client", 0, errors, is_limit=True)]


def ratio_of_pairs(
    asked: argparse.Namespace,
    services: Services,
    reader: Reader,
    addresses: list[str],
    flood: tuple[str, int],
    console: Console,
) -> float:
    """The median ratio of tokens a second, flood at the coordinator over flood at the sink."""
    pid, ratios, gaps, cpu_s, said = services.coordinator.process.pid, [], [], [], [""]
    for _ in range(asked.pairs):
        counts = []
        for address in addresses:
            kind, count = flood
            command = [*FLOOD, address, kind, str(count), str(asked.calls), str(asked.seconds + 2 * SETTLE_S)]
            command += ["reopen"] * asked.reopen
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                time.sleep(SETTLE_S)
                began_s, before_s = time.monotonic(), cpu_seconds(pid)
                time.sleep(asked.seconds)
                ended_s = time.monotonic()
                cpu_s.append((cpu_seconds(pid) - before_s) / (ended_s - began_s))
                said.append(process.communicate()[0].strip())
            own_s = [began_s, *(one for one in reader.times_s if began_s <= one < ended_s), ended_s]
            gaps.append(max(later - earlier for earlier, later in zip(own_s, own_s[1:])))
            counts.append(max(1, len(own_s) - 2))
        ratios.append(counts[1] / counts[0])
    console.print(
        f"{flood[0]}, {flood[1]} connections: ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
        f"{max(ratios):.2f}); longest gap {max(gaps[1::2]):.2f} s, of the sink {max(gaps[::2]):.2f} s; coordinator's "
        f"CPU {statistics.median(cpu_s[1::2]):.2f}, {statistics.median(cpu_s[::2]):.2f}; calls, closed: {said[-1]}"
    )
    return statistics.median(ratios)
