"""A target killed under 32 streams, and a coordinator: clients resume, and every text is the one without faults.

Table models, GREEDY and COUPLED. A client sends its request again with the tokens it has received.
"""

from __future__ import annotations

import argparse
import math
import threading
import time

import grpc
from rich.console import Console

from bench.bars import Bar, worst_of
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.chaos.processes import Restartable
from tests.chaos.tables import Tables, table_texts, tables
from tests.chaos.texts import SPECULATIVE, Content, Reading, Text, open_channel, read, references_of

TEXT_TOKENS = 450
NOTICED_S_MAX = 2.0


class Streams:
    """Readings of many texts at once, each on its own connection; notes when each met its first error."""

    def __init__(self, address: str, texts: list[Text]) -> None:
        self.readings: dict[Text, Reading] = {}
        self.problems: list[str] = []
        self.lost_s: list[float] = []  # when each stream that a kill ended received its first error
        self.codes: set[str] = set()
        self._address = address
        self._started = threading.Semaphore(0)
        self._may_go_on = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=one, daemon=True) for one in enumerate(texts)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, text: Text) -> None:
        is_counted = is_lost = False

        def on_message(reading: Reading) -> None:
            nonlocal is_counted
            if not is_counted and len(reading.content.token_ids) > 5 + 2 * number % 40:
                is_counted = True
                self._started.release()
                self._may_go_on.wait(60)

        def on_error(error: grpc.RpcError) -> None:
            nonlocal is_lost
            if not is_lost:
                is_lost = True
                self.lost_s.append(time.monotonic())
            self.codes.add(error.code().name)

        try:
            with open_channel(self._address) as channel:
                stub = pb_grpc.CoordinatorServiceStub(channel)
                speculative = SPECULATIVE[number % len(SPECULATIVE)]
                self.readings[text] = read(stub, text, speculative, on_message=on_message, on_error=on_error)
        except AssertionError as error:
            self.problems.append(f"{text}: {error}")

    def wait_under_way(self) -> None:
        """Returns when each has received a few tokens."""
        for _ in self._threads:
            assert self._started.acquire(timeout=60), "a stream did not start"

    def go_on(self) -> None:
        """Lets them read on."""
        self._may_go_on.set()

    def join(self) -> None:
        """Waits for all."""
        for thread in self._threads:
            thread.join()

    def wrong(self, references: dict[Text, Content]) -> list[str]:
        """Texts that differ, have tokens doubled or missing, or did not end."""
        different = [
            f"{text}: {reading.content if reading.is_complete else reading.errors[-1:]}"
            for text, reading in self.readings.items()
            if not reading.is_complete or reading.content != references[text]
        ]
        return self.problems + different


def strike(place: Tables, service: Restartable, references: dict[Text, Content]) -> tuple[Streams, float, int]:
    """SIGKILL of a service under all streams, and its restart; returns the streams, the slowest notice in seconds and
    the number of streams that were resumed."""
    streams = Streams(place.coordinator.address, list(references))
    streams.wait_under_way()
    killed_s = time.monotonic()
    service.kill()
    streams.go_on()
    while len(streams.lost_s) < len(references) and time.monotonic() < killed_s + 2 * NOTICED_S_MAX:
        time.sleep(0.01)
    noticed_s = (max(streams.lost_s) if len(streams.lost_s) == len(references) else math.inf) - killed_s
    service.restart()
    streams.join()
    return streams, noticed_s, sum(1 for reading in streams.readings.values() if reading.errors)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=32, help="under way at each kill (%(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="of each service (%(default)s)")


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Runs the proof."""
    wrong: list[str] = []
    noticed_s: dict[str, float] = {"target": 0.0, "coordinator": 0.0}
    resumed: dict[str, float] = {"target": 0, "coordinator": 0}
    codes: set[str] = set()
    with tables() as place:
        references = references_of(place.coordinator.address, table_texts(asked.streams, TEXT_TOKENS))
        services: dict[str, Restartable] = {"target": place.target, "coordinator": place.coordinator}
        for number in range(asked.kills):
            for name, service in services.items():
                streams, slowest_s, count = strike(place, service, references)
                wrong += streams.wrong(references)
                codes |= streams.codes
                noticed_s[name] = max(noticed_s[name], slowest_s)
                resumed[name] += count
                console.print(f"{name} killed {number + 1} times: {count} resumed, noticed in {slowest_s:.2f} s")
    for line in wrong[:5]:
        console.print(line, highlight=False, soft_wrap=True)
    return bars_of(wrong, noticed_s, resumed, codes, asked.streams * asked.kills)


def bars_of(
    wrong: list[str], noticed_s: dict[str, float], resumed: dict[str, float], codes: set[str], stream_count: int
) -> list[Bar]:
    """The conditions."""
    other = sorted(codes - {grpc.StatusCode.UNAVAILABLE.name})
    return [
        Bar("texts wrong, with tokens doubled or missing, or not ended", 0, len(wrong), is_limit=True),
        worst_of("streams resumed", stream_count, resumed),
        worst_of("seconds from SIGKILL until every stream has its error", NOTICED_S_MAX, noticed_s, is_limit=True),
        Bar("codes other than UNAVAILABLE", 0, len(other), ", ".join(other), is_limit=True),
    ]
