"""What every request passes before its handler: who may ask, from where, in which form; and how long it may take to
send its body, and stays connected."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from specdec.gateway.errors import HttpError
from specdec.gateway.keys import Keys
from specdec.gateway.metrics import OTHER, GatewayMetrics
from specdec.gateway.page import PAGE_PATHS
from specdec.settings import is_loopback

BODY_BYTES_MAX = 4 << 20
BODY_S_MAX = 30.0
OPEN_PATHS = frozenset(("/health", "/ping", *PAGE_PATHS))  # that need no key
CLIENT_GONE = 499  # never sent: it has no reader
IDENTITY = "specdec.identity"  # in the scope: the name of the key


class Gate:
    """The outermost application."""

    def __init__(self, app: Starlette, keys: Keys | None, is_local: bool, metrics: GatewayMetrics) -> None:
        """`is_local`: the port is on loopback; without keys, only loopback hosts are served there, so that no page of
        the web reaches it by a name of its own."""
        self._app, self._keys, self._metrics = app, keys, metrics
        self._paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
        self._checks_host = is_local and keys is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start_s, status = time.monotonic(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.open_count += 1
        try:
            try:
                self._check(scope)
            except HttpError as error:
                await send_error(error, counted)
            else:
                await self._app(scope, receive, counted)
        finally:
            self._metrics.open_count -= 1
            path = scope["path"] if scope["path"] in self._paths else OTHER
            method = scope["method"] if scope["method"] in ("GET", "POST", "OPTIONS", "HEAD") else OTHER
            self._metrics.answered(path, method, status or CLIENT_GONE, time.monotonic() - start_s)

    def _check(self, scope: Scope) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self._checks_host and not is_loopback(host_of(headers.get(b"host", ""))):
            raise HttpError(
                403, "without keys only the hosts localhost, 127.0.0.1 and [::1] are served", "host_not_allowed"
            )
        if scope["method"] == "OPTIONS":
            return
        if self._keys is not None and scope["path"] not in OPEN_PATHS:
            kind, _, key = headers.get(b"authorization", "").partition(" ")
            name = self._keys.name_of(key.strip()) if kind.lower() == "bearer" else None
            if name is None:
                sentence = "give a key of this server: Authorization: Bearer KEY"
                raise HttpError(401, sentence, "invalid_api_key", headers={"www-authenticate": "Bearer"})
            scope[IDENTITY] = name
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise HttpError(415, "the body must have Content-Type: application/json", "unsupported_media_type")


def host_of(header: str) -> str:
    """Returns the host of a Host header, without its port."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


async def send_error(error: HttpError, send: Send) -> None:
    """Sends an error as the whole answer."""
    body = error.body
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


async def read_whole(scope: Scope, receive: Receive) -> bytes:
    """Returns a body. Raises HttpError for one that is too long or too slow, and for a client that leaves."""
    too_long = HttpError(413, f"the body has more than {BODY_BYTES_MAX} bytes", "body_too_long")
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > BODY_BYTES_MAX:
            raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S_MAX):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HttpError(CLIENT_GONE, "the client left", "client_gone")
                body += message.get("body", b"")
                if len(body) > BODY_BYTES_MAX:
                    raise too_long
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {BODY_S_MAX:g} s", "request_timeout") from None


class Watched:
    """Ends the task of a request when its client leaves, or when `stop` is called: its `async with` raises the reason.

    A streaming answer would notice a client that left only at its next event, another one never.
    """

    def __init__(self, receive: Receive, running: set[Watched]) -> None:
        """`running`: all of the process; this one is in it while it runs."""
        self._receive, self._running = receive, running
        self._error: HttpError | None = None

    async def __aenter__(self) -> Watched:
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._watching = asyncio.create_task(self._until_gone())
        self._running.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        self._watching.cancel()
        self._running.discard(self)
        task, self._task = self._task, None
        if self._error is not None and kind is not None and issubclass(kind, asyncio.CancelledError):
            assert task is not None
            task.uncancel()
            raise self._error

    def stop(self, error: HttpError) -> None:
        """Ends the request by this error; idempotent."""
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.stop(HttpError(CLIENT_GONE, "the client left", "client_gone"))
