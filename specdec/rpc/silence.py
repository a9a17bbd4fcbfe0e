"""Ends the connections to a port whose peers are silent: frozen, or behind a cut network.

gRPC's own pings cannot tell a silent peer from a process that did not get the processor to read the answer: their timer
runs on. So gRPC waits long for answers, and here the kernel is asked when the last data came, which it notes whether
they are read or not. Only what was sent after that counts as unanswered, and only while this process runs on time.
Linux only; elsewhere gRPC's own limit is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time

from specdec.rpc.connections import accepted
from specdec.telemetry.logs import get_logger

SILENT_S = 2.5  # a peer that stalls for a second, a second after its last ping, is not silent
TICK_S = 0.25
LATE_S = 0.5  # a tick that is so late: this process was paused, and silence is counted anew
_ESTABLISHED = 1  # the state of a connection
_TIMES = struct.Struct("=B43x3I")  # of the kernel's tcp_info: state; ms since data were sent, an ACK was, data came


async def end_silent(port: int) -> None:
    """Ends connections accepted on `port` once nothing has come over them for SILENT_S. Runs until cancelled."""
    on_time_s = 0.0
    while True:
        due_s = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        on_time_s = on_time_s + TICK_S if time.monotonic() < due_s + LATE_S else 0.0
        if on_time_s >= SILENT_S:
            for connection in accepted({port}):
                with contextlib.suppress(OSError):  # it has ended since
                    if _is_silent(connection):
                        connection.shutdown(socket.SHUT_RDWR)
                        get_logger().warning("a silent connection is ended", silence_s=SILENT_S)


def _is_silent(connection: socket.socket) -> bool:
    """Whether nothing answered what was sent. Raises OSError."""
    state, sent_ms, _, received_ms = _TIMES.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192))
    return bool(state == _ESTABLISHED and sent_ms < received_ms >= 1000 * SILENT_S)
