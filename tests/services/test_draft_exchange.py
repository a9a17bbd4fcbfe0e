"""A draft is exchanged under load: the new one starts behind the same name, the old one drains."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.launch.children import Child, start
from tests.services.test_pair import PROMPTS
from tests.support.services import MODELS, Client, Outcome, fixed

WORKERS, TOKENS = 3, 40
COMMON: dict[str, Any] = {"port": 0, "threads": 1, "log_level": "error"}


class Name:
    """An address whose new connections go where it points, as a Kubernetes Service or a DNS name does."""

    def __init__(self) -> None:
        self.to = ("", 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def point(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.to = host, int(port)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection(self.to)
            except OSError:
                client.close()
                continue
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()


@pytest.fixture
def name() -> Iterator[Name]:
    made = Name()
    yield made
    made.close()


def draft(folder: str) -> Child:
    settings = DraftSettings(model=str(MODELS / folder), target_tokenizer=str(MODELS / "target"), **COMMON)
    return start("draft", settings)


@pytest.mark.more
def test_no_generation_fails_and_no_text_changes(name: Name) -> None:
    """Claim: while clients generate all the time, a poor draft is exchanged for a good one: no generation fails, every
    text is its reference, seeded and greedy, and the draft tokens after it are those of the new draft: the acceptance
    rises clearly. Conclusive: a generation that the exchange hurt, in its middle or at
    its start, would differ or raise; each is compared."""
    asked = [
        {"prompt": prompt, "temperature": temperature, "seed": 5, "max_tokens": TOKENS, "ignore_eos": True}
        for prompt in PROMPTS[:4]
        for temperature in (0, 0.7)
    ]
    with ExitStack() as stack:
        target = stack.enter_context(start("target", TargetSettings(model=str(MODELS / "target"), **COMMON)))
        old = stack.enter_context(draft("smollm2-draft"))
        target.wait_ready()
        old.wait_ready()
        name.point(old.address)
        links = {"target": target.address, "draft": name.address, "tokenizer": str(MODELS / "target")}
        settings = CoordinatorSettings(port=0, log_level="error", **links)
        coordinator = stack.enter_context(start("coordinator", settings))
        client = Client(coordinator.wait_ready())
        stack.callback(client.close)
        reference = [client.generate(**own, speculative={"policy": "POLICY_OFF"}).text for own in asked]
        done: list[tuple[float, int, Outcome]] = []
        is_over = threading.Event()

        def work(first: int) -> None:
            index = first
            while not is_over.is_set():
                own, began_s = index % len(asked), time.monotonic()
                done.append((began_s, own, client.generate(**asked[own], speculative=fixed(3, draft_wait_ms=200))))
                index += WORKERS

        with ThreadPoolExecutor(WORKERS) as pool:
            working = [pool.submit(work, first) for first in range(WORKERS)]
            try:
                time.sleep(6)
                new = stack.enter_context(draft("draft"))
                new.wait_ready()
                name.point(new.address)
                exchanged_s = time.monotonic()
                old.stop()
                gone_s = time.monotonic()
                time.sleep(8)
            finally:
                is_over.set()
            for one in working:
                one.result()
    assert all(outcome.text == reference[own] for _, own, outcome in done)
    before = acceptance(outcome for began_s, _, outcome in done if began_s < exchanged_s - 1)
    after = acceptance(outcome for began_s, _, outcome in done if began_s > gone_s + 1)
    print(f"{len(done)} generations; acceptance {before:.2f} before, {after:.2f} after")
    assert 0 < before < after - 0.15


def acceptance(outcomes: Iterator[Outcome]) -> float:
    """Accepted draft tokens by those offered."""
    statistics = [outcome.finished.statistics for outcome in outcomes]
    offered = sum(one.num_draft_tokens for one in statistics)
    return sum(one.num_accepted_draft_tokens for one in statistics) / max(1, offered)
