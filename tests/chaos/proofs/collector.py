"""A collector of traces that takes connections and never answers, or cannot be reached: no error, no loss of speed.

Four sets of services on table models, with every request sampled: one with a collector that works, two with black
holes, one without tracing. Blocks of texts go to each in turns; what counts are ratios of neighbours to the set that
works. The ratios to the set without tracing, which contain the cost of sampling every request, are printed beside.

Then requests of every end are sent to traced services, with replicas killed under them: each has exactly one root span
that says how it ended.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
from rich.console import Console

from bench.bars import Bar, worst_of
from bench.results import Ratio, ratio_of
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.chaos.processes import Restartable
from tests.chaos.tables import Tables, table_texts, tables
from tests.chaos.texts import Content, Text, open_channel, read, references_of
from tests.support.otlp_receiver import Receiver, collector
from tests.support.processes import cpu_seconds, variables
from tests.support.services import fixed
from tests.support.waiting import until

ALL_SAMPLED = {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}
UNROUTABLE = "http://192.0.2.1:4317"  # RFC 5737: for documentation, no host has it
WORKS, TAKES, ABSENT, NONE = "works", "never answers", "cannot be reached", "is not configured"


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
    """Texts of one set, one after the other: their speed and CPU time, and what was wrong. One stream: of four, a set
    was 5 % slower than another in one run and 27 % faster in the next."""

    def __init__(self, place: Tables, references: dict[Text, Content], count: int) -> None:
        self.wrong: list[str] = []
        assert place.draft is not None
        pids = [service.pid for service in (place.coordinator, place.target, place.draft)]
        texts = list(references)
        with open_channel(place.coordinator.address) as channel:
            stub = pb_grpc.CoordinatorServiceStub(channel)
            before_s, began_s = sum(map(cpu_seconds, pids)), time.perf_counter()
            for index in range(count):
                text = texts[index % len(texts)]
                reading = read(stub, text, fixed(2))
                if reading.errors or reading.content != references[text]:
                    self.wrong.append(f"{text}: {reading.errors or 'differs'}")
            self.took_s = time.perf_counter() - began_s
            self.cpu_s = sum(map(cpu_seconds, pids)) - before_s


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=40, help="of each set (%(default)s)")
    parser.add_argument("--texts", type=int, default=6, help="of a block (%(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="of a text (%(default)s)")
    parser.add_argument("--requests", type=int, default=200, help="whose root spans count (%(default)s)")


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Runs the proof."""
    blocks: dict[str, list[Block]] = {WORKS: [], TAKES: [], ABSENT: [], NONE: []}
    with contextlib.ExitStack() as stack:
        stack.enter_context(variables(ALL_SAMPLED))
        endpoints = {WORKS: stack.enter_context(collector()), TAKES: stack.enter_context(black_hole())}
        own = {name: {"otlp_traces_endpoint": endpoint} for name, endpoint in endpoints.items()}
        own |= {ABSENT: {"otlp_traces_endpoint": UNROUTABLE}, NONE: {}}
        sets = {name: stack.enter_context(tables(every=every)) for name, every in own.items()}
        references = references_of(sets[WORKS].coordinator.address, table_texts(6, asked.tokens))
        for place in sets.values():
            Block(place, references, asked.texts)
        names = list(sets)
        for number in range(asked.blocks):
            turn = number % len(names)
            for name in (names[turn:] + names[:turn])[:: 1 if number % 2 else -1]:
                blocks[name].append(Block(sets[name], references, asked.texts))
    return [*bars_of(blocks, console), *roots(asked.requests)]


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
    for name in (WORKS, TAKES, ABSENT):
        pairs = list(zip(blocks[NONE], blocks[name]))
        rate = ratio_of([none.took_s / traced.took_s for none, traced in pairs])
        console.print(f"{name}: throughput {rate}, CPU time {ratio_of([t.cpu_s / n.cpu_s for n, t in pairs])} of none")
    return [
        Bar("requests that failed or differ", 0, len(wrong), "; ".join(wrong[:3]), is_limit=True),
        worst_of("throughput of one that works", 0.99, {name: ratio.median for name, ratio in rates.items()}),
        worst_of("CPU time of one that works", 1.01, {name: r.median for name, r in costs.items()}, is_limit=True),
    ]


def roots(count: int) -> list[Bar]:
    """Requests that end in every way, under killed replicas, and the root spans that tell of them."""
    ends: collections.Counter[str] = collections.Counter()
    with (
        Receiver() as receiver,
        variables(ALL_SAMPLED),
        tables(every={"otlp_traces_endpoint": receiver.endpoint}) as place,
    ):
        assert place.draft is not None
        for index in range(count):
            struck = {count // 3: place.draft, 2 * count // 3: place.target}.get(index)
            ends[end_of(place, index, struck)] += 1
            if struck is not None:
                struck.restart()
            if struck is place.target:
                until(lambda: place.has_target)

        def found() -> list[Any]:
            return [span for _, span in receiver.spans() if span.name == "Generate"]

        with contextlib.suppress(TimeoutError):
            receiver.wait_until(lambda: len(found()) >= count)
        place.coordinator.stop()  # sends what is left: roots that are too many
        spans = found()
    told = collections.Counter(map(told_end, spans))
    untold = told.pop("", 0)
    shown = ", ".join(f"{number} {end}" for end, number in sorted(ends.items()))
    return [
        Bar("requests without root span, or with several", 0, abs(len(spans) - count), shown, is_limit=True),
        Bar("root spans of one trace", 1, len(spans) / max(1, len({span.trace_id for span in spans})), "", True),
        Bar("root spans that say no end, or another", 0, untold + (told - ends).total(), f"{dict(told)}", True),
    ]


def end_of(place: Tables, index: int, struck: Restartable | None) -> str:
    """Sends one request, which finishes, is refused, is cancelled or is late, or loses a replica; returns its end."""
    request = table_texts(4, 400)[index % 4].request(fixed(2))
    is_refused, is_cut, is_late = (index % 4 == number and struck is None for number in (1, 2, 3))
    request.sampling.top_p = 7.0 if is_refused else 1.0
    with open_channel(place.coordinator.address) as channel:
        grpc.channel_ready_future(channel).result(10)  # a late request must reach the coordinator
        call = pb_grpc.CoordinatorServiceStub(channel).Generate(request, timeout=0.05 if is_late else 60)
        try:
            for number, _ in enumerate(call):
                if number == 3 and struck is not None:
                    struck.kill()
                if number == 3 and is_cut:
                    call.cancel()
        except grpc.RpcError as error:
            name: str = error.code().name
            return {"INVALID_ARGUMENT": "INVALID_FIELD", "UNAVAILABLE": "REPLICA_UNAVAILABLE"}.get(name, "cancelled")
    return "finished"


def told_end(span: Any) -> str:
    """How a root span says that its request ended: the reason of its error, `cancelled` or `finished`; empty if not."""
    said = {entry.key: entry.value for entry in span.attributes}
    if said["error.type"].string_value if "error.type" in said else "":
        return str(said["error.type"].string_value)
    if "specdec.cancelled" in said:
        return "cancelled"
    return "finished" if "gen_ai.response.finish_reasons" in said else ""
