"""The watch over a process: ends one whose event loop hangs, or in which a thread holds the interpreter's lock, such as
a library's call that does not return.

While the lock is held no thread of that process can notice or report it. A second process, of 6 MB, does: a thread here
writes to it after each turn of the loop, and cannot while the lock is held. The clock is the second process's own
ticks, without those at which this process was stopped: a pause of one or of both does not count.

This file is also the program of the second process, which imports nothing else of specdec.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import asyncio  # in the second process it would take twice the memory and time

HELD_S_MAX = 60.0  # as for work without measurement: loading a kernel or a library may hold the lock for long
BEAT_S = TICK_S = 0.5
DUMP_S = 1.0  # for the stacks of all threads
END_S = 2.0  # for the end of the second process
DUMP_SIGNAL = signal.SIGUSR1


class ProcessWatch:
    """A context in which this process ends by SIGKILL, with the reason and the stacks of all threads on standard error,
    when for HELD_S_MAX its event loop, if one is given, makes no turn, or no other thread gets the interpreter's lock.
    No effect on systems without /proc.

    DUMP_SIGNAL writes the stacks of all threads at any time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._is_over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if not Path("/proc/self/stat").exists():
            return self
        faulthandler.register(DUMP_SIGNAL, 2, all_threads=True)  # needs no lock
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(HELD_S_MAX)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        except OSError as error:  # no process, or no memory for one: this one serves all the same
            _tell(f"nothing watches process {os.getpid()}: {error}")
            return self
        threading.Thread(target=self._run, args=(self._process,), name="process watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._process is not None:
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:  # it was stopped
                self._process.kill()

    def _run(self, process: subprocess.Popen[bytes]) -> None:
        """Writes until the context is left; the second process ends with its input."""
        assert process.stdin is not None
        has_turned = threading.Event()
        has_turned.set()
        with process.stdin as pipe, contextlib.suppress(OSError):  # the second process was killed
            while not self._is_over.wait(BEAT_S):
                if not has_turned.is_set():
                    continue
                os.write(pipe.fileno(), b".")
                if self._loop is not None:
                    has_turned.clear()
                    with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                        self._loop.call_soon_threadsafe(has_turned.set)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"


def _tell(sentence: str) -> None:
    """Writes a line on standard error, unless it is closed, full or not read for DUMP_S: the process must be ended."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], DUMP_S)[1]:
            os.write(2, f"specdec: {sentence}\n".encode())


def _watch(pid: int, held_s_max: float) -> None:
    """Watches the parent; returns when it has ended or writes no more because it is done."""
    held_s = 0.0
    while held_s <= held_s_max:
        if select.select([0], [], [], TICK_S)[0]:
            if not os.read(0, 4096):
                return
            held_s = 0.0
        elif not _is_stopped(pid):
            held_s += TICK_S
    _tell(f"process {pid} is ended: for {held_s_max:g} s its event loop hung, or a thread held the interpreter's lock")
    for number in (DUMP_SIGNAL, signal.SIGKILL):
        if os.getppid() == pid:
            os.kill(pid, number)
        select.select([], [], [], DUMP_S)


if __name__ == "__main__":
    for interrupt in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a container: the parent decides
        signal.signal(interrupt, signal.SIG_IGN)
    with contextlib.suppress(FileNotFoundError):  # the parent has ended
        _watch(int(sys.argv[1]), float(sys.argv[2]))
