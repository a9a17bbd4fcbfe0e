"""A DNS server over UDP and TCP for tests, and a network of one process tree where it is the only one.

It answers A and AAAA from a table that may change at any time. `apart` is a command in network and mount namespaces of
its own, with loopback only, whose resolver asks 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from struct import pack, unpack_from

A, AAAA = 1, 28
UDP_BYTES_MAX = 512
TRUNCATED, ANSWER = 0x0200, 0x8580  # flags: authoritative answer, recursion desired and available
HEADER = "!HHHHHH"  # id, flags, and the numbers of questions, answers and others
POINTER = 0xC00C  # to the name in the question
RESOLVER_S = 4.0  # until a look-up apart gives up
UNSHARED = "unshare", "--map-root-user", "--net", "--mount"
PREPARED = 'mount --bind "$0" /etc/resolv.conf && ip link set lo up && exec "$@"'


class Failure(enum.Enum):
    """How the server fails for a name: an error code, or no answer at all."""

    SERVFAIL = 2
    NXDOMAIN = 3
    SILENCE = -1


class DnsServer:
    """`records`: addresses by name, or the failure; a name without an entry does not exist. `counts`: questions by
    name; `tcp_count`: those over TCP."""

    def __init__(self) -> None:
        self.records: dict[str, Sequence[str] | Failure] = {}
        self.counts: Counter[str] = Counter()
        self.tcp_count = 0

    @asynccontextmanager
    async def listening(self, host: str = "127.0.0.1", port: int = 53) -> AsyncIterator[DnsServer]:
        """Serves on both transports."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), (host, port))
        server = await asyncio.start_server(self._serve_tcp, host, port)
        try:
            yield self
        finally:
            transport.close()
            server.close()

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while length := await reader.readexactly(2):
                question = await reader.readexactly(unpack_from("!H", length)[0])
                self.tcp_count += 1
                if (answer := self.answer(question)) is not None:
                    writer.write(pack("!H", len(answer)) + answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def answer(self, question: bytes, bytes_max: int = 65535) -> bytes | None:
        """Returns the answer to a question; one without records, marked as truncated, where it has more bytes; None for
        silence."""
        labels, at = [], 12
        while length := question[at]:
            labels.append(question[at + 1 : at + 1 + length].decode().lower())
            at += 1 + length
        (kind,) = unpack_from("!H", question, at + 1)
        name = ".".join(labels)
        self.counts[name] += 1
        found = self.records.get(name, Failure.NXDOMAIN)
        if found is Failure.SILENCE:
            return None
        code = found.value if isinstance(found, Failure) else 0
        known = () if isinstance(found, Failure) else tuple(map(ipaddress.ip_address, found))
        chosen = [own.packed for own in known if kind == (A if own.version == 4 else AAAA)]
        records = b"".join(pack("!HHHIH", POINTER, kind, 1, 0, len(own)) + own for own in chosen)
        flags, count, asked = ANSWER | code, len(chosen), question[12 : at + 5]
        if 12 + len(asked) + len(records) > bytes_max:
            flags, count, records = flags | TRUNCATED, 0, b""
        return pack(HEADER, unpack_from("!H", question)[0], flags, 1, count, 0, 0) + asked + records


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        if (answer := self._server.answer(data, UDP_BYTES_MAX)) is not None:
            self._transport.sendto(answer, address)


def apart(folder: Path, command: Sequence[str]) -> list[str]:
    """Returns the command line that runs `command` apart. `folder` gets its resolv.conf."""
    file = folder / "resolv.conf"
    file.write_text("nameserver 127.0.0.1\noptions timeout:4 attempts:1\n")
    return [*UNSHARED, "sh", "-c", PREPARED, str(file), *command]


def why_not_apart(folder: Path) -> str:
    """Returns why namespaces cannot be made here; empty if they can."""
    try:
        done = subprocess.run(apart(folder, ["true"]), capture_output=True, text=True, timeout=10, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""
