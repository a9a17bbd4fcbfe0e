"""Calls as HTTP/2 frames, written by hand: what no gRPC library sends. For tests of a server's limits.

The first call of a connection fills the header table (RFC 7541), each further one is an index or two per header, as in
a library: some 20 bytes a call.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
END_STREAM, ACK, END_HEADERS = 1, 1, 4
POST_HTTP = b"\x83\x86"  # entries of the static table
DYNAMIC = 62  # the newest entry of the table that a connection fills
CANCEL = (8).to_bytes(4)
EMPTY_MESSAGE = bytes(5)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def literal(name: str, value: str) -> bytes:
    """A header that enters the table; both strings are shorter than 127 bytes."""
    return b"\x40" + b"".join(bytes((len(text),)) + text.encode() for text in (name, value))


class RawConnection:
    """One connection, a context manager. `tail`: the kinds of frames after the headers of each call."""

    def __init__(self, address: str, path: str, tail: tuple[int, ...] = (), **more: str) -> None:
        self._address, self._tail = address, tail
        headers = {":authority": "x", ":path": path, "te": "trailers", "content-type": "application/grpc", **more}
        self._first = POST_HTTP + b"".join(literal(*item) for item in headers.items())
        self._later = POST_HTTP + bytes(0x80 | (DYNAMIC + age) for age in reversed(range(len(headers))))
        self._stream = 1

    async def __aenter__(self) -> Self:
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        self._writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0))
        self.ended = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self.ended.cancel()

    def call(self, count: int) -> None:
        """Sends calls, as fast as the connection takes them; none if it has ended."""
        frames: list[bytes] = []
        for _ in range(0 if self.ended.done() else count):
            block = self._first if self._stream == 1 else self._later
            frames.append(frame(HEADERS, END_HEADERS, self._stream, block))
            for kind in self._tail:
                payload = {DATA: EMPTY_MESSAGE, RST_STREAM: CANCEL}[kind]
                frames.append(frame(kind, END_STREAM if kind == DATA else 0, self._stream, payload))
            self._stream += 2
        self._writer.write(b"".join(frames))

    async def _read(self) -> None:
        """Reads to the end of the connection, and answers pings."""
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
                if head[3] == PING and not head[4] & ACK:
                    self._writer.write(frame(PING, ACK, 0, payload))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
