"""A collector of traces that takes connections and never answers, or cannot be reached: no error, no loss of speed.

Three sets of services on table models, with every request sampled: one with a collector that works, the others with
black holes. Blocks of texts go to each in turns; what counts are ratios of neighbours to the set that works.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from rich.console import Console

from specdec.bench.bars import Bar, worst_of
from specdec.bench.pipeline.measurements import Ratio, ratio_of
from specdec.bench.processes import cpu_seconds
from specdec.bench.trace_counts import collector, variables
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.chaos.tables import Tables, table_texts, tables
from tests.chaos.texts import Content, Text, open_channel, read, references_of
from tests.support.services import fixed

ALL_SAMPLED = {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}
UNROUTABLE = "http://192.0.2.1:4317"  # RFC 5737: for documentation, no host has it
WORKS, TAKES, ABSENT = "works", "never answers", "cannot be reached"
STREAM_COUNT = 4


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An endpoint that accepts connections, reads nothing and answers nothing."""
    held: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


class Block:
    """Texts on several streams of one set at once: their speed and CPU time, and what was wrong."""

    def __init__(self, place: Tables, references: dict[Text, Content], rounds: int) -> None:
        self.wrong: list[str] = []
        assert place.draft is not None
        pids = [service.pid for service in (place.coordinator, place.target, place.draft)]
        before_s, began_s = sum(map(cpu_seconds, pids)), time.perf_counter()
        threads = [
            threading.Thread(target=self._read, args=(place.coordinator.address, references, rounds, number))
            for number in range(STREAM_COUNT)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.took_s = time.perf_counter() - began_s
        self.cpu_s = sum(map(cpu_seconds, pids)) - before_s

    def _read(self, address: str, references: dict[Text, Content], rounds: int, number: int) -> None:
        texts = list(references)
        with open_channel(address) as channel:
            stub = pb_grpc.CoordinatorServiceStub(channel)
            for index in range(rounds):
                text = texts[(number + index) % len(texts)]
                reading = read(stub, text, fixed(2))
                if reading.errors or reading.content != references[text]:
                    self.wrong.append(f"{text}: {reading.errors or 'differs'}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=40, help="of each set (%(default)s)")
    parser.add_argument("--texts", type=int, default=2, help="of each stream in a block (%(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="of a text (%(default)s)")


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Runs the proof."""
    blocks: dict[str, list[Block]] = {WORKS: [], TAKES: [], ABSENT: []}
    with contextlib.ExitStack() as stack:
        stack.enter_context(variables(ALL_SAMPLED))
        endpoints = {WORKS: stack.enter_context(collector()), TAKES: stack.enter_context(black_hole())}
        endpoints[ABSENT] = UNROUTABLE
        sets = {
            name: stack.enter_context(tables(every={"otlp_traces_endpoint": endpoint}))
            for name, endpoint in endpoints.items()
        }
        references = references_of(sets[WORKS].coordinator.address, table_texts(6, asked.tokens))
        for place in sets.values():
            Block(place, references, asked.texts)
        names = list(sets)
        for number in range(asked.blocks):
            turn = number % len(names)
            for name in (names[turn:] + names[:turn])[:: 1 if number % 2 else -1]:
                blocks[name].append(Block(sets[name], references, asked.texts))
    return bars_of(blocks, console)


def bars_of(blocks: dict[str, list[Block]], console: Console) -> list[Bar]:
    """The conditions."""
    wrong = [line for own in blocks.values() for block in own for line in block.wrong]
    rates: dict[str, Ratio] = {}
    costs: dict[str, Ratio] = {}
    for name in (TAKES, ABSENT):
        pairs = list(zip(blocks[WORKS], blocks[name]))
        rates[name] = ratio_of([works.took_s / hole.took_s for works, hole in pairs])
        costs[name] = ratio_of([hole.cpu_s / works.cpu_s for works, hole in pairs])
        console.print(f"{name}: throughput {rates[name]}, CPU time {costs[name]} of a collector that works")
    return [
        Bar("requests that failed or differ", 0, len(wrong), "; ".join(wrong[:3]), is_limit=True),
        worst_of("throughput of one that works", 0.99, {name: ratio.median for name, ratio in rates.items()}),
        worst_of("CPU time of one that works", 1.01, {name: r.median for name, r in costs.items()}, is_limit=True),
    ]
