"""Shared by hub and proxy: precise sleeping until a moment, lines that change a delay, an orderly end.

Timers of an event loop round to milliseconds; a delay of 0.1 ms needs `select` with the kernel's timer slack off and a
process that is run as soon as it wakes, before any other on its core.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

DELAY_MS_MAX = 60_000.0
_DELAY = re.compile(r"(?:([a-z]\w*):([a-z]\w*)=)?(\d+(?:\.\d*)?|\.\d+)")
_PR_SET_TIMERSLACK = 29


class Stopped(BaseException):
    """A stop of the process was requested; raised by the signal's handler, so that every wait ends."""


def parse_delay(text: str) -> tuple[str, str, float]:
    """(node, node, one-way seconds) of `A:B=MS`; two empty names for a bare `MS`. Raises ValueError saying why."""
    match = _DELAY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text.strip()!r} is not A:B=MILLISECONDS")
    delay_ms = float(match[3])
    if delay_ms > DELAY_MS_MAX:
        raise ValueError(f"{delay_ms:g} ms is above {DELAY_MS_MAX:g}")
    return match[1] or "", match[2] or "", delay_ms / 1e3


def run_precisely() -> None:
    """Timers without slack, and before other processes of the core where that is permitted."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


@contextlib.contextmanager
def until_stop_requested() -> Iterator[None]:
    """SIGTERM and SIGINT end the body quietly. Once it has ended they are ignored, so that cleaning up is not cut."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        ignore()
        raise Stopped

    def ignore() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        with contextlib.suppress(Stopped):
            yield
    finally:
        ignore()


class Orders:
    """Lines on standard input, answered one by one on standard output: `OK LINE` or `REFUSED WHY`.

    The end of a pipe ends the process that reads it, so that it does not outlive the one that steers it; the end of
    anything else ends the orders only.
    """

    def __init__(self, carry_out: Callable[[str], None]) -> None:
        """`carry_out(line)` raises ValueError for what it refuses."""
        self._carry_out = carry_out
        self._unread = b""
        self._is_pipe = stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode)
        self.descriptors = [sys.stdin.fileno()]  # for select; empty once they ended
        os.set_blocking(sys.stdin.fileno(), False)

    def read(self) -> None:
        """Carries out the lines that are there. Raises Stopped at the end of a pipe."""
        try:
            data = os.read(sys.stdin.fileno(), 65536)
        except BlockingIOError:
            return
        if not data:
            self.descriptors = []
            if self._is_pipe:
                raise Stopped
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._answer(line.decode("utf-8", "replace").strip())

    def _answer(self, line: str) -> None:
        try:
            self._carry_out(line)
        except ValueError as error:
            print(f"REFUSED {error}", flush=True)
        else:
            print(f"OK {line}", flush=True)


class CpuShare:
    """How much of one core this process has used since it was made."""

    def __init__(self) -> None:
        self._began_s, self._cpu_began_s = time.monotonic(), time.process_time()

    def __str__(self) -> str:
        seconds = time.monotonic() - self._began_s
        share = (time.process_time() - self._cpu_began_s) / seconds if seconds else 0.0
        return f"CPU {share:.2%} of a core over {seconds:.1f} s"
