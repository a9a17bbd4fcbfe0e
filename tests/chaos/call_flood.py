"""`python -m tests.chaos.call_flood ADDRESS KIND CONNECTIONS PER_S SECONDS [reopen]`: PER_S calls a second of each
connection; with `reopen` one that is closed is opened again. Prints the calls sent and the connections that were
closed. The address may be that of `python -m tests.chaos.call_flood sink`, which reads and answers nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

from tests.support.raw_calls import DATA, RST_STREAM, RawConnection

SERVICE = "/specdec.v1.CoordinatorService"
KINDS: dict[str, tuple[str, tuple[int, ...], dict[str, str]]] = {
    "unknown method": (f"{SERVICE}/Nothing", (DATA,), {}),
    "unknown service": ("/no.such.Service/Method", (DATA,), {}),
    "no request": (f"{SERVICE}/Generate", (), {}),
    "no request, reset": (f"{SERVICE}/Generate", (RST_STREAM,), {}),
    "reset": (f"{SERVICE}/Describe", (DATA, RST_STREAM), {}),
    "expired": (f"{SERVICE}/Describe", (DATA,), {"grpc-timeout": "1n"}),
    "valid": (f"{SERVICE}/Describe", (DATA,), {}),
}
TICK_S = 0.005


async def flood(address: str, kind: str, per_s: float, until_s: float, reopens: bool) -> tuple[int, int]:
    """One connection, or one after the other; (calls, connections that were closed)."""
    path, tail, more = KINDS[kind]
    sent = closed = 0
    began_s = time.monotonic()
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            async with RawConnection(address, path, tail, **more) as connection:
                while not connection.ended.done() and (now_s := time.monotonic()) < until_s:
                    due = min(int((now_s - began_s) * per_s), sent + int(per_s * 10 * TICK_S))
                    connection.call(due - sent)
                    sent = due
                    await asyncio.sleep(TICK_S)
                closed += connection.ended.done()
        if not reopens:
            break
        await asyncio.sleep(TICK_S)
    return sent, closed


async def sink() -> None:
    """Reads what comes on a free port, which it prints."""

    async def read(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass

    server = await asyncio.start_server(read, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def main(address: str, kind: str, connections: str, per_s: str, seconds: str, reopen: str = "") -> None:
    until_s = time.monotonic() + float(seconds)
    floods = (flood(address, kind, float(per_s), until_s, bool(reopen)) for _ in range(int(connections)))
    ends = await asyncio.gather(*floods)
    print(sum(sent for sent, _ in ends), sum(closed for _, closed in ends), flush=True)


if __name__ == "__main__":
    asyncio.run(sink() if sys.argv[1:] == ["sink"] else main(*sys.argv[1:]))
