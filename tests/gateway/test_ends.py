"""Every way a request ends before its text does: the client leaves, reads nothing, or the gateway stops."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.settings import split_address
from tests.support.gateways import Streaming, ask, events_of, gateway, streamed_texts
from tests.support.services import Client, Services
from tests.support.waiting import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def single(services: Services, chat_model: Path) -> Iterator[tuple[str, Client]]:
    """A gateway before a coordinator with one place, and a client of that: a request is refused while another runs."""
    coordinator, client = services.start_coordinator(max_num_seqs=1)
    with gateway(coordinator.address, model=chat_model) as child:
        yield child.address, client
    client.close()
    coordinator.stop()


def is_free(address: str) -> bool:
    """Whether the one place is free."""
    return ask(address, COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status == 200


def post(address: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request and returns its connection."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    connection = socket.create_connection(split_address(address), 30.0)
    connection.sendall(head.encode() + b"\r\n" + data)
    return connection


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("is_long_prompt", [True, False])
def test_a_client_that_leaves_stops_its_work(
    single: tuple[str, Client], is_streamed: bool, is_long_prompt: bool
) -> None:
    """Claim: when a client leaves, streamed or not, in mid-text or while its prompt is read, its work stops: its place
    is free within a second or two, of the half minute that the text would take.

    Conclusive: the coordinator has one place, which is seen taken before the client leaves and free after it.
    """
    address, _ = single
    until(lambda: is_free(address))
    body = LONG | {"stream": is_streamed}
    if is_long_prompt:
        body |= {"prompt": [7] * 1900, "max_tokens": 100, "cache_salt": str(time.monotonic())}
    connection = post(address, COMPLETIONS, body)
    until(lambda: not is_free(address), 10.0)
    if is_streamed and not is_long_prompt:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    connection.close()
    start_s = time.monotonic()
    until(lambda: is_free(address), 10.0)
    assert time.monotonic() - start_s < 5.0


def test_headers_come_while_the_prompt_is_read(single: tuple[str, Client]) -> None:
    """Claim: a stream's headers and role come before its prompt is read, so that a slow prompt is no silence."""
    address, _ = single
    until(lambda: is_free(address))
    messages = [{"role": "user", "content": "word " * 600}]
    with post(address, CHAT, {"messages": messages, "max_tokens": 1, "stream": True}) as connection:
        seen, start_s, times_s = b"", time.monotonic(), []
        while b"[DONE]" not in seen:
            seen += connection.recv(1 << 16)
            times_s.append(time.monotonic() - start_s)
            if len(times_s) == 1:
                assert seen.startswith(b"HTTP/1.1 200") and b'"finish_reason":"' not in seen
    assert b'"role":"assistant"' in seen and len(times_s) > 1


def test_an_unread_stream_holds_little(services: Services, chat_model: Path) -> None:
    """Claim: a client that reads nothing costs the gateway no memory: what it does not take stays at the coordinator,
    and other streams go on."""
    with gateway(services.coordinator.address, model=chat_model) as child:
        ask(child.address, COMPLETIONS, LONG | {"max_tokens": 50})
        before = child.memory_peak_bytes
        body = LONG | {"stream": True, "logprobs": 20, "return_token_ids": True, "temperature": 0}
        unread = [post(child.address, COMPLETIONS, body | {"prompt": [9, index]}) for index in range(6)]
        answer = ask(child.address, COMPLETIONS, {"prompt": "a", "max_tokens": 60, "ignore_eos": True})
        assert answer.json["usage"]["completion_tokens"] == 60
        assert child.memory_peak_bytes - before < 24 << 20
        for connection in unread:
            connection.close()


def test_sigterm_lets_streams_finish(services: Services, chat_model: Path) -> None:
    """Claim: after SIGTERM running streams finish with the whole text, new connections are refused, health is 503 on
    one that is open, and the process ends with code 0."""
    with gateway(services.coordinator.address, model=chat_model, drain_grace_s=60.0) as child:
        body = LONG | {"max_tokens": 300, "temperature": 0}
        expected = ask(child.address, COMPLETIONS, body).json["choices"][0]["text"]
        streams = [Streaming(child.address, COMPLETIONS, body) for _ in range(3)]
        until(lambda: all(stream.event_count > 3 for stream in streams))
        assert not any(stream.has_ended for stream in streams)
        child.request_stop()

        def is_refused() -> bool:
            try:
                socket.create_connection(split_address(child.address), 2.0).close()
            except OSError:
                return True
            return False

        until(is_refused)
        for stream in streams:
            (text,) = streamed_texts(events_of(stream.result()))
            assert text.text == expected and text.reason == "length"
        assert child.process.wait(20) == 0


def test_a_stream_longer_than_the_grace_ends_with_an_error(services: Services, chat_model: Path) -> None:
    """Claim: a stream, and a whole answer, that outlast the grace end with an error that says so, not with a bare
    close, and the process ends soon."""
    with gateway(services.coordinator.address, model=chat_model, drain_grace_s=0.3) as child:
        stream = Streaming(child.address, COMPLETIONS, LONG)
        until(lambda: stream.event_count > 3)
        child.request_stop()
        *_, last, rest = stream.result().decode().split("\n\n")
        assert rest == "" and '"code": "stopping"' in last
        assert child.process.wait(20) == 0
