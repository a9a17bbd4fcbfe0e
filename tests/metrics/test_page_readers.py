"""Readers of a page that are slow, silent, or many: real sockets, and the end of real services."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.config import CoordinatorSettings, TargetSettings, split_address
from specdec.launch.children import Child, arguments_of, wait_all_ready
from specdec.telemetry import metrics_page
from specdec.telemetry.metrics import gauge
from specdec.telemetry.metrics_page import CONNECTION_COUNT_MAX, REQUEST_TIMEOUT_S, MetricsPage
from tests.support.pages import free_address, read_page, read_text
from tests.support.waiting import until

SILENT_COUNT = 20  # each kept an old page for REQUEST_TIMEOUT_S
SHORT_S = 1.0  # in place of REQUEST_TIMEOUT_S
ASKED = b"GET /metrics HTTP/1.1\r\n\r\n"


@contextlib.contextmanager
def connections(address: str, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that send this and read nothing, with small buffers."""
    host, port = split_address(address)
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(stack.enter_context(socket.socket()))
            made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            made[-1].connect((host, port))
            made[-1].sendall(sent)
        yield made


def test_silent_readers_of_the_page_delay_no_end(table_models: tuple[Path, Path]) -> None:
    """Claim: while connections to its page say nothing, read nothing or are read byte by byte, a service answers other
    readers of the page at once, and SIGTERM ends it with exit code 0.

    Source: the page was closed on the event loop, which waited for the page's thread, and that for each reader in turn:
    the service was killed in the end. Conclusive: together the readers could hold a page that serves them in turn for
    much longer than the limit here; the processes are real.
    """
    pages = [free_address(), free_address()]
    target = TargetSettings(model=str(table_models[0]), port=0, threads=1, metrics_address=pages[0])
    with Child("target", arguments_of(target)) as first:
        first.wait_ready()
        own = CoordinatorSettings(
            target=first.address, tokenizer=str(table_models[0]), port=0, metrics_address=pages[1], drain_grace_s=5.0
        )
        with Child("coordinator", arguments_of(own)) as second, contextlib.ExitStack() as stack:
            wait_all_ready([second])
            for page in pages:
                stack.enter_context(connections(page, SILENT_COUNT))
                stack.enter_context(connections(page, 3, ASKED))
                began_s = time.monotonic()
                assert read_page(page).value("specdec_serving") == 1
                assert time.monotonic() - began_s < REQUEST_TIMEOUT_S
            began_s = time.monotonic()
            assert second.stop(60.0) == 0 and first.stop(60.0) == 0
            assert time.monotonic() - began_s < SILENT_COUNT * REQUEST_TIMEOUT_S / 4


async def test_connections_are_few_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: of many connections at most CONNECTION_COUNT_MAX are held, and the oldest gives way, so a reader is
    answered among them; one that takes a large page slowly is ended at REQUEST_TIMEOUT_S; closing returns at once and
    frees the port. Conclusive: the server's own list of connections is counted; the slow reader reads all the time,
    of a page larger than the kernel's buffers.
    """
    monkeypatch.setattr(metrics_page, "REQUEST_TIMEOUT_S", SHORT_S)
    page = MetricsPage(lambda: [gauge(f"metric_{at}", "x" * 12_000, at) for at in range(1000)])
    address = free_address()
    page.open(address)

    def read() -> None:
        with connections(address, 10 * CONNECTION_COUNT_MAX):
            assert "metric_999" in read_text(address)
            assert len(page._readers) <= CONNECTION_COUNT_MAX
        until(lambda: not page._readers)
        with connections(address, 1, ASKED) as (slow,):
            until(lambda: bool(page._readers))
            began_s = time.monotonic()
            while page._readers and time.monotonic() - began_s < 30 * SHORT_S:
                slow.recv(1000)
                time.sleep(0.01)
            assert not page._readers and time.monotonic() - began_s > SHORT_S / 2

    await asyncio.to_thread(read)
    until(lambda: not page._readers)
    with connections(address, 2, ASKED):
        page.close()
        page.close()
        host, port = split_address(address)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

            def is_free() -> bool:
                with contextlib.suppress(OSError):
                    other.bind((host, port))
                    return True
                return False

            until(is_free)
