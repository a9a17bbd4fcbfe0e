"""The page that Prometheus reads, on a port of its own: `/metrics`, made anew for every request.

It is plain HTTP, for it contains numbers only. One thread with an event loop of its own serves all readers, each for
REQUEST_TIMEOUT_S at most; of more than CONNECTION_COUNT_MAX the oldest gives way. So a reader that is slow, silent or
one of many delays no other, and neither the service nor its end. The metrics are an argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from functools import partial
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from specdec.config import split_address
from specdec.errors import ConfigError
from specdec.telemetry.logs import get_logger
from specdec.telemetry.metrics import gauge

PATH = "/metrics"
REQUEST_TIMEOUT_S = 5.0  # from the connection to the last byte of the answer
CONNECTION_COUNT_MAX = 32  # readers are a few Prometheus servers and people
HEAD_BYTES_MAX = 16 << 10  # of the request: what a proxy adds, twice


class MetricsPage(Collector):
    """The page of one process. `metrics` is called for every request, on the page's own thread."""

    def __init__(self, metrics: Callable[[], Iterable[Metric]]) -> None:
        self._metrics = metrics
        self._process = ProcessCollector(registry=None)
        self._loop: asyncio.AbstractEventLoop | None = None  # of the process
        self._stop: Callable[[], object] = lambda: None
        self._readers: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}  # oldest first

    def collect(self) -> Iterable[Metric]:
        """Returns the current metrics."""
        yield from self._metrics()
        if self._loop is not None:
            yield gauge("specdec_tasks", "Tasks of the event loop.", len(asyncio.all_tasks(self._loop)))
        yield from self._process.collect()

    def open(self, address: str | None) -> None:
        """Serves on HOST:PORT and logs the address; None: not at all. Raises ConfigError if it cannot be bound. Call it
        in the event loop of the process."""
        if address is None:
            return
        self._loop = asyncio.get_running_loop()
        host, port = split_address(address, port_min=0)
        try:
            version, _, _, _, listen = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(version)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(listen)
            listener.listen(CONNECTION_COUNT_MAX)
        except OSError as error:
            raise ConfigError(f"--metrics-address {address} cannot be had: {error.strerror or error}") from error
        loop = asyncio.SelectorEventLoop()
        serving = loop.create_task(self._serve_all(listener))
        self._stop = partial(loop.call_soon_threadsafe, serving.cancel)
        threading.Thread(target=_run, args=(loop, serving), name="metrics", daemon=True).start()
        get_logger().info("metrics", address=f"{host}:{listener.getsockname()[1]}", path=PATH)

    def close(self) -> None:
        """Stops serving, soon, whatever readers do; idempotent."""
        with contextlib.suppress(RuntimeError):  # it has stopped
            self._stop()

    async def _serve_all(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._serve, sock=listener, limit=HEAD_BYTES_MAX)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            for writer in self._readers.values():
                _abort(writer)
            await asyncio.gather(*self._readers, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request and closes its connection."""
        task = asyncio.current_task()
        assert task is not None
        self._readers[task] = writer
        if len(self._readers) > CONNECTION_COUNT_MAX:
            _abort(self._readers.pop(next(iter(self._readers))))
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                writer.write(_Request(await reader.readuntil(b"\r\n\r\n"), self).answer)
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            _abort(writer)
        finally:
            self._readers.pop(task, None)


def _abort(writer: asyncio.StreamWriter) -> None:
    """Ends a connection without waiting for its reader; no effect on one that has ended."""
    with contextlib.suppress(AttributeError):  # of Python 3.11, for a connection that has just ended
        writer.transport.abort()


def _run(loop: asyncio.AbstractEventLoop, serving: asyncio.Task[None]) -> None:
    with contextlib.closing(loop), contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(serving)


class _Request(BaseHTTPRequestHandler):
    """The answer to a whole request: the page to GET, with exemplars for readers that accept them; to every other
    method and path a refusal."""

    def __init__(self, head: bytes, page: Collector) -> None:
        self._page = page
        written = BytesIO()
        self.rfile, self.wfile = BytesIO(head), written
        self.handle_one_request()
        self.answer = written.getvalue()

    def do_GET(self) -> None:
        if urlsplit(self.path).path != PATH:
            self.send_error(404, explain=f"there is only {PATH}")
            return
        takes_exemplars = "application/openmetrics-text" in self.headers.get("Accept", "")
        make = openmetrics.generate_latest if takes_exemplars else generate_latest
        content_type = openmetrics.CONTENT_TYPE_LATEST if takes_exemplars else CONTENT_TYPE_PLAIN_0_0_4
        body = make(self._page, openmetrics.ALLOWUTF8)  # escaping would turn vllm: into vllm_
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Logs nothing: a request comes every few seconds."""
