"""Texts to their reader: their start, their parts as they come, and the answer as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.client.merging import merged
from specdec.gateway.answers import Answer, Choice, Part
from specdec.gateway.errors import HttpError, error_from
from specdec.gateway.gate import CLIENT_GONE, Watched
from specdec.gateway.stream import Response as GrpcResponse
from specdec.telemetry.logs import get_logger

PING_S = 10.0  # silence after which a comment is sent: proxies cut at 50 to 60 s, some clients at 20
PING = b": ping\n\n"
STALL_S_MAX = 60.0  # for an answer that its client does not read


class EventStream(Response):
    """An answer as server-sent events."""

    def __init__(
        self,
        answer: Answer,
        streams: list[AsyncGenerator[GrpcResponse, None]],
        headers: dict[str, str],
        running: set[Watched],
        count: Callable[[HttpError], None],
    ) -> None:
        """`running`: as for `Watched`; `count` is told of an error that ends it."""
        self._answer, self._streams, self._running, self._count = answer, streams, running, count
        self._last_s = time.monotonic()
        self.background = None
        more = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        self.init_headers(headers | more | {"x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with Watched(receive, self._running) as watched:
                pinging = asyncio.create_task(self._ping(send, watched))
                try:
                    await self._send_all(send)
                finally:
                    pinging.cancel()
        except Exception as error:
            described = error_from(error)
            if described.status == 500:
                get_logger().error("stream failed", error=repr(error))
            self._count(described)
            if described.status == CLIENT_GONE:
                return
            await send(chunk(b"data: " + described.body + b"\n\n"))
        finally:
            await close_all(self._streams)
        await send({"type": "http.response.body", "body": b""})

    async def _send_all(self, send: Send) -> None:
        answer = self._answer
        if first := answer.first_chunks():
            await send(chunk(first))
        async with aclosing(parts_of(self._streams, answer.choices)) as found:
            async for choice, part in found:
                await send(chunk(answer.chunks(choice, part)))
                self._last_s = time.monotonic()
        await send(chunk(answer.last_chunks()))

    async def _ping(self, send: Send, watched: Watched) -> None:
        """Sends a comment whenever nothing was sent for a while; ends the stream of a client that reads nothing."""
        while True:
            silence_s = time.monotonic() - self._last_s
            if silence_s < PING_S:
                await asyncio.sleep(PING_S - silence_s)
                continue
            try:
                async with asyncio.timeout(STALL_S_MAX):
                    await send(chunk(PING))
            except TimeoutError:
                watched.stop(HttpError(CLIENT_GONE, "the client reads nothing", "client_gone"))
                return
            self._last_s = time.monotonic()


def chunk(data: bytes) -> dict[str, Any]:
    """Returns the message of ASGI that sends some bytes of a body."""
    return {"type": "http.response.body", "body": data, "more_body": True}


async def start_all(streams: Sequence[AsyncGenerator[GrpcResponse, None]], choices: Sequence[Choice]) -> None:
    """Waits for the start of all streams, which is that of their first choices. Raises the first error, and has closed
    all streams then."""
    count = len(choices) // len(streams)

    async def start(stream: AsyncGenerator[GrpcResponse, None], choice: Choice) -> None:
        choice.started = (await anext(stream)).started

    tasks = [asyncio.create_task(start(stream, choice)) for stream, choice in zip(streams, choices[::count])]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await close_all(streams)
        raise


async def parts_of(
    streams: list[AsyncGenerator[GrpcResponse, None]], choices: list[Choice]
) -> AsyncGenerator[tuple[Choice, Part], None]:
    """Yields the parts of all texts until each has ended; a stream has as many choices as any other."""
    left, count = len(choices), len(choices) // len(streams)
    async with aclosing(merged(streams)) as responses:
        async for index, response in responses:
            choice = choices[index * count + response.choice]
            if response.HasField("prompt_logprobs"):
                choice.take_prompt(response.prompt_logprobs)
            if choice.has_ended or not (response.HasField("delta") or response.HasField("finished")):
                continue
            part = choice.take(response.delta) if response.HasField("delta") else choice.end(response.finished)
            if part is not None:
                yield choice, part
                left -= part.reason is not None
                if not left:
                    return


async def close_all(streams: Sequence[AsyncGenerator[GrpcResponse, None]]) -> None:
    """Closes the streams, which cancels their requests."""
    for stream in streams:
        await stream.aclose()
