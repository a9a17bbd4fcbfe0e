"""The HTTP port: uvicorn's protocol on h11, with bounds on what a connection may cost before it asks for anything.

h11 stops at its bound of header bytes; a whole head must come in time; connections are counted. The body, which is the
application's, has its bounds in `body`.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.gateway.errors import HttpError

HEAD_BYTES_MAX = 32 << 10
HEAD_S_MAX = 10.0  # from the first byte, or the connection, to the whole head
IDLE_S_MAX = 75.0  # between requests: above the 60 s of common balancers, which would else reuse a closed connection
BACKLOG = 1024


class Door(H11Protocol):
    """One connection."""

    connection_count_max = 1024  # of the process; set once, before the port opens

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._late: asyncio.TimerHandle | None = None
        if len(self.connections) > self.connection_count_max:
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._late is None:
            self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0] and not self.transport.is_closing():
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP, or has too long a head, and closes the connection."""
        if len(self.conn.trailing_data[0]) > HEAD_BYTES_MAX:
            self._refuse(HttpError(431, f"the head has more than {HEAD_BYTES_MAX} bytes", "head_too_long"))
        else:
            self._refuse(HttpError(400, "this is not a valid HTTP request", "invalid_http"))

    def _await_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_S_MAX, self._refuse_late)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse_late(self) -> None:
        self._late = None
        self._refuse(HttpError(408, f"the head did not come within {HEAD_S_MAX:g} s", "request_timeout"))

    def _refuse(self, error: HttpError) -> None:
        body = error.body
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer: Any = h11.Response(status_code=error.status, headers=headers)
            try:
                self.transport.write(self.conn.send(answer) or b"")
                self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
                self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
            except h11.LocalProtocolError:  # an answer is under way
                self.transport.abort()
                return
        self.transport.close()


class HttpPort:
    """uvicorn's server without its signals: `start` listens, `drain` closes the listener and idle connections."""

    def __init__(self, app: Any, connection_count_max: int, certfile: str | None, keyfile: str | None) -> None:
        Door.connection_count_max = connection_count_max
        config = uvicorn.Config(
            app,
            http=Door,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(IDLE_S_MAX),
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            ssl_certfile=certfile,
            ssl_keyfile=keyfile,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)

    async def start(self, listener: socket.socket) -> None:
        """Accepts connections."""
        await self._server.startup(sockets=[listener])

    async def drain(self, grace_s: float) -> bool:
        """Takes no more connections and waits for the requests under way; returns whether all ended in time."""
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.shutdown()
        tasks = self._server.server_state.tasks
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        return not tasks

    def abort(self) -> None:
        """Ends what is left."""
        for task in self._server.server_state.tasks:
            task.cancel()
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
