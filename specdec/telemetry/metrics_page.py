"""The page that Prometheus reads, on a port of its own: `/metrics`, made anew for every request.

It is plain HTTP, for it contains numbers only. One thread answers one request at a time, so a slow reader delays other
readers of the page and nothing else. The metrics are an argument.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
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
REQUEST_TIMEOUT_S = 5.0  # for a reader that sends or reads nothing
POLL_S = 0.2


class MetricsPage(Collector):
    """The page of one process. `metrics` is called for every request, on the page's own thread."""

    def __init__(self, metrics: Callable[[], Iterable[Metric]]) -> None:
        self._metrics = metrics
        self._process = ProcessCollector(registry=None)
        self._server: TCPServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

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
            server = type("PageServer", (TCPServer,), {"address_family": version, "allow_reuse_address": True})
            self._server = server(listen, _handler(self))
        except OSError as error:
            raise ConfigError(f"--metrics-address {address} cannot be had: {error.strerror or error}") from error
        serving = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True)
        serving.start()
        get_logger().info("metrics", address=f"{host}:{self._server.server_address[1]}", path=PATH)

    def close(self) -> None:
        """Stops serving; idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _handler(page: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET of the page, with exemplars for readers that accept them; refuses every other method and path."""

        timeout = REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            if urlsplit(self.path).path != PATH:
                self.send_error(404, explain=f"there is only {PATH}")
                return
            takes_exemplars = "application/openmetrics-text" in self.headers.get("Accept", "")
            make = openmetrics.generate_latest if takes_exemplars else generate_latest
            content_type = openmetrics.CONTENT_TYPE_LATEST if takes_exemplars else CONTENT_TYPE_PLAIN_0_0_4
            body = make(page, openmetrics.ALLOWUTF8)  # escaping would turn vllm: into vllm_
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Logs nothing: a request comes every few seconds."""

    return Handler
