"""Bombs: messages that cost little to send, refused at once, at a bounded cost of memory and of the event loop.

Each goes to a real process several times. The event loop's stall is the longest health check that another connection
makes meanwhile, less a usual one. Memory is the growth of the greatest resident size over the size before, of services
of their own, whose allocator returns at once everything that is freed: that makes them slower, so times are not theirs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.bars import Bar
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb
from tests.chaos.bomb_list import REFUSALS, Bomb, all_bombs
from tests.chaos.processes import peak_of
from tests.chaos.proofs.malformed import Witness, write_models
from tests.support.pages import watched
from tests.support.processes import cpu_seconds
from tests.support.traces import environment

RETURNED_AT_ONCE = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
LARGE_BYTES = 128 << 10  # below, the growth of a process is not the message's
NOISE_BYTES = 1 << 20  # a process grows by as much without cause
CALL_S_MAX = 30.0
PAUSE_S = 0.05


@dataclass(slots=True)
class Cost:
    """What one bomb took, in each of its repetitions. `code`: its last answer."""

    refused_ms: list[float] = field(default_factory=list)
    stall_ms: list[float] = field(default_factory=list)
    held_bytes: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    code: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The sizes of the proof."""
    parser.add_argument("--repeats", type=int, default=5, help="times that each bomb is sent; medians count")


class Prober:
    """Health checks of one server, one after the other, in a thread of its own."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = health_pb2_grpc.HealthStub(self._channel)
        self._is_over = threading.Event()
        self.longest_ms = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            began_s = time.perf_counter()
            self._stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S_MAX)
            self.longest_ms = max(self.longest_ms, 1e3 * (time.perf_counter() - began_s))
            time.sleep(0.0005)

    def close(self) -> None:
        """Ends the thread."""
        self._is_over.set()
        self._thread.join()
        self._channel.close()


def answer_of(channel: grpc.Channel, bomb: Bomb) -> str:
    """Sends a bomb; returns the code of the refusal, of an item's too, or what came instead."""
    compression = grpc.Compression.Gzip if bomb.is_compressed else None
    try:
        if bomb.service != "coordinator" and bomb.is_item:
            return item_answer(channel, bomb)
        for _ in channel.unary_stream(bomb.method)(bomb.data, timeout=CALL_S_MAX, compression=compression):
            pass
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def item_answer(channel: grpc.Channel, bomb: Bomb) -> str:
    """Sends items, and keeps the stream open until the first is answered."""
    is_answered = threading.Event()

    def requests() -> Iterator[bytes]:
        yield bomb.data
        is_answered.wait(CALL_S_MAX)

    call = channel.stream_stream(bomb.method)(requests(), timeout=CALL_S_MAX)
    try:
        response: Any = target_pb.VerifyResponse if bomb.service == "target" else draft_pb.DraftResponse
        answer = response.FromString(next(call)).items[0]
    finally:
        is_answered.set()
        call.cancel()
    code = next((code.name for code in grpc.StatusCode if code.value[0] == answer.error.code), "")
    return code if answer.HasField("error") else str(answer.WhichOneof("item"))


def is_refused(bomb: Bomb, code: str) -> bool:
    """Whether a bomb was answered as it must be."""
    return bomb.is_valid or code in [refusal.name for refusal in REFUSALS]


def explode(bomb: Bomb, channel: grpc.Channel, prober: Prober, pid: int, cost: Cost) -> None:
    """Sends a bomb once."""
    time.sleep(PAUSE_S)
    prober.longest_ms = 0.0
    time.sleep(PAUSE_S)
    usual_ms, prober.longest_ms = prober.longest_ms, 0.0
    with peak_of(pid) as held:
        cpu_s, began_s = cpu_seconds(pid), time.perf_counter()
        cost.code = answer_of(channel, bomb)
        cost.refused_ms.append(1e3 * (time.perf_counter() - began_s))
        time.sleep(PAUSE_S)  # until a check under way has its answer
        cost.cpu_us.append(1e6 * (cpu_seconds(pid) - cpu_s))
    cost.stall_ms.append(max(0.0, prober.longest_ms - usual_ms))
    cost.held_bytes.append(held[0])


def send_all(repeats: int, allocator: dict[str, str], console: Console) -> tuple[list[tuple[Bomb, Cost]], Witness]:
    """Sends every bomb to services with these variables of their allocator."""
    costs: list[tuple[Bomb, Cost]] = []
    with tempfile.TemporaryDirectory() as folder, environment(**allocator):
        with watched(write_models(Path(folder))) as running:
            witness = Witness(running)
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
            channels = {
                name: grpc.insecure_channel(address, options=options) for name, address in witness.addresses.items()
            }
            probers = {name: Prober(address) for name, address in witness.addresses.items()}
            with witness.watching_health():
                for bomb in track(all_bombs(), "bombs", console=console):
                    cost = Cost()
                    for _ in range(repeats):
                        explode(bomb, channels[bomb.service], probers[bomb.service], witness.pids[bomb.service], cost)
                    costs.append((bomb, cost))
                for prober in probers.values():
                    prober.close()
                witness.check()
            for channel in channels.values():
                channel.close()
    return costs, witness


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Sends every bomb and compares its costs with the bounds."""
    costs, *witnesses = send_all(asked.repeats, {}, console)
    again, *others = send_all(asked.repeats, RETURNED_AT_ONCE, console)
    for (_, cost), (_, other) in zip(costs, again):
        cost.held_bytes = other.held_bytes
    console.print(table_of(costs))
    return bars(costs, witnesses + others)


def table_of(costs: list[tuple[Bomb, Cost]]) -> Table:
    """Every bomb with its medians."""
    table = Table(title="bombs")
    for column in ("service", "bomb", "bytes", "answer", "refused ms", "stall ms", "held/byte", "CPU us/byte"):
        table.add_column(column, justify="left" if column in ("service", "bomb", "answer") else "right")
    for bomb, cost in costs:
        size = max(1, len(bomb.data))
        is_large = size >= LARGE_BYTES
        table.add_row(
            bomb.service,
            bomb.name,
            f"{len(bomb.data):,}",
            cost.code,
            f"{statistics.median(cost.refused_ms):.1f}",
            f"{statistics.median(cost.stall_ms):.1f}",
            f"{held_per_byte(bomb, cost):.1f}" if is_large else "",
            f"{statistics.median(cost.cpu_us) / size:.3f}" if is_large else "",
        )
    return table


def held_per_byte(bomb: Bomb, cost: Cost) -> float:
    """Bytes of growth for a byte sent, of a large bomb; beyond the noise for a small one."""
    return max(0.0, statistics.median(cost.held_bytes) - NOISE_BYTES) / max(LARGE_BYTES, len(bomb.data))


def bars(costs: list[tuple[Bomb, Cost]], witnesses: list[Witness]) -> list[Bar]:
    """The conditions of the proof; the worst bomb counts."""
    refused = sum(is_refused(bomb, cost.code) for bomb, cost in costs)
    open_names = ", ".join(f"{bomb.name}: {cost.code}" for bomb, cost in costs if not is_refused(bomb, cost.code))
    by_grpc = [(bomb, cost) for bomb, cost in costs if cost.code == "RESOURCE_EXHAUSTED"]  # above a message's cap
    own = [(bomb, cost) for bomb, cost in costs if cost.code != "RESOURCE_EXHAUSTED"]
    large = [(bomb, cost) for bomb, cost in costs if len(bomb.data) >= LARGE_BYTES]

    def worst(claim: str, bound: float, values: dict[str, float]) -> Bar:
        name = max(values, key=lambda one: values[one])
        return Bar(claim, bound, values[name], name, is_limit=True)

    def medians(name: str, of: list[tuple[Bomb, Cost]]) -> dict[str, float]:
        return {f"{bomb.service}: {bomb.name}": statistics.median(getattr(cost, name)) for bomb, cost in of}

    held = {f"{bomb.service}: {bomb.name}": held_per_byte(bomb, cost) for bomb, cost in costs}
    cpu = {f"{bomb.service}: {bomb.name}": statistics.median(cost.cpu_us) / len(bomb.data) for bomb, cost in large}
    return [
        Bar("bombs that are refused", len(costs), refused, open_names),
        worst("milliseconds to the refusal, median", 50, medians("refused_ms", own)),
        worst("milliseconds to gRPC's refusal by size, median", 1000, medians("refused_ms", by_grpc)),
        worst("milliseconds on the event loop, median", 20, medians("stall_ms", costs)),
        worst("bytes held for a byte sent", 20, held),
        worst("microseconds of CPU for a byte sent", 1, cpu),
        Bar("processes ended", 0, sum(one.ended_count for one in witnesses), is_limit=True),
        Bar("states of health other than SERVING", 0, sum(len(one.not_serving) for one in witnesses), is_limit=True),
        Bar(
            "texts that changed",
            0,
            sum(one.differing_count for one in witnesses),
            f"of {sum(one.text_count for one in witnesses)}",
            is_limit=True,
        ),
        Bar(
            "sessions, blocks and generations left",
            0,
            sum(sum(one.left_behind.values()) for one in witnesses),
            is_limit=True,
        ),
    ]
