"""Hostile clients beside an honest one: its stream's longest pause, and the gateway's memory."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.settings import split_address
from tests.support.gateways import Streaming, ask, gateway
from tests.support.services import Services
from tests.support.waiting import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PAUSE_S_MAX, MEMORY_BYTES_MAX = 0.1, 64 << 20
HALF_COUNT = 600
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def half_requests(address: str) -> None:
    """600 connections, each with half a head."""
    with contextlib.ExitStack() as stack:
        for _ in range(HALF_COUNT):
            with contextlib.suppress(OSError):
                connection = stack.enter_context(socket.create_connection(split_address(address), 5.0))
                connection.sendall(HEAD)
        time.sleep(0.5)


def huge_heads(address: str) -> None:
    """40 MiB of headers, a MiB a connection."""
    for _ in range(40):
        with contextlib.suppress(OSError), socket.create_connection(split_address(address), 5.0) as connection:
            connection.sendall(HEAD)
            for _ in range(1024):
                connection.sendall(b"X-Long: " + b"a" * 1014 + b"\r\n")


def asked(path: str, body: bytes, statuses: tuple[int, ...]) -> Callable[[str], None]:
    """Sends a body a few times, and checks the status."""

    def send(address: str) -> None:
        for _ in range(5):
            assert ask(address, path, body).status in statuses

    return send


CHAT_START = b'{"messages":[{"role":"user","content":"a"}],'
ATTACKS: dict[str, Callable[[str], None]] = {
    "600 half requests": half_requests,
    "40 MiB of headers": huge_heads,
    "100,000 prompts": asked(COMPLETIONS, json.dumps({"prompt": ["a"] * 100_000}).encode(), (400, 413)),
    "100,000 lists": asked(COMPLETIONS, json.dumps({"prompt": [[1]] * 100_000}).encode(), (400, 413)),
    "4 MiB of token ids": asked(COMPLETIONS, json.dumps({"prompt": [1] * 1_300_000}).encode(), (413,)),
    "4 MiB of brackets": asked(COMPLETIONS, b'{"prompt":' + b"[" * 4_000_000, (400, 413)),
    "a template argument of 1 MiB": asked(
        CHAT, CHAT_START + b'"chat_template_kwargs":{"x":"' + b"a" * (1 << 20) + b'"}}', (400,)
    ),
    "4 MiB of text": asked(COMPLETIONS, json.dumps({"prompt": "word " * 800_000}).encode(), (400,)),
    "300,000 keys": asked(COMPLETIONS, json.dumps({f"k{at}": 1 for at in range(300_000)}).encode(), (400, 413)),
    "a long chat": asked(CHAT, json.dumps({"messages": [{"role": "user", "content": "a b "}] * 4000}).encode(), (400,)),
}


@pytest.mark.more
@pytest.mark.parametrize("name", ATTACKS)
def test_another_stream_goes_on(services: Services, chat_model: Path, name: str) -> None:
    """Claim: under each attack the longest pause of another client's stream stays below 100 ms more than without, and
    the gateway's memory grows by less than 64 MiB; afterwards it answers.

    Conclusive: the pauses are measured at the client, between events, while the attack runs, and beside those of the
    same stream before it, which has the machine's own.
    """
    with gateway(services.coordinator.address, model=chat_model) as child:
        body = {"prompt": "Once upon", "max_tokens": 1900, "ignore_eos": True}
        ask(child.address, COMPLETIONS, body | {"max_tokens": 200})
        stream = Streaming(child.address, COMPLETIONS, body)
        until(lambda: stream.event_count > 5)
        time.sleep(1.0)
        before, begin_s = child.memory_peak_bytes, time.monotonic()
        failed: list[BaseException] = []

        def attack() -> None:
            try:
                ATTACKS[name](child.address)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=attack)
        thread.start()
        while thread.is_alive() and not stream.has_ended:
            time.sleep(0.01)
        end_s = time.monotonic()
        thread.join(60.0)
        assert not failed, failed
        pauses_s = [(later - sooner, sooner) for sooner, later in zip(stream.times_s, stream.times_s[1:])]
        quiet_s = max(pause_s for pause_s, at_s in pauses_s if at_s < begin_s - 0.1)
        worst_s = max((pause_s for pause_s, at_s in pauses_s if begin_s - 0.1 <= at_s <= end_s), default=0.0)
        print(
            f"{name}: longest pause {1000 * worst_s:.0f} ms (before {1000 * quiet_s:.0f} ms), "
            f"memory +{(child.memory_peak_bytes - before) / (1 << 20):.1f} MiB"
        )
        assert worst_s < quiet_s + PAUSE_S_MAX
        assert child.memory_peak_bytes - before < MEMORY_BYTES_MAX
        stream.leave()
        assert ask(child.address, "/health").status == 200
