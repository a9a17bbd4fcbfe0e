"""The watch over a process: ends one whose event loop hangs, or in which a thread holds the interpreter's lock, such as
a library's call that does not return.

While the lock is held no thread of that process can notice or report it. A second process, of 6 MB, does: a thread here
writes to it after each turn of the loop, and cannot while the lock is held. The clock is the second process's own
ticks, without those at which this process was stopped: a pause of one or of both does not count. A second process that
ends is replaced: a system short of memory that kills it takes the watch away for a second only.

This file is also the program of the second process, which imports nothing else of specdec.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import asyncio  # in the second process it would take twice the memory and time

HELD_S_MAX = 60.0  # as for work without measurement: loading a kernel or a library may hold the lock for long
BEAT_S = TICK_S = 0.5
DUMP_S = 1.0  # for the stacks of all threads
END_S = 2.0  # for the end of the second process
RESTART_S, RESTART_S_MAX = 1.0, 60.0  # until a second process that ended is replaced; doubled if it lived no longer
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
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if not Path("/proc/self/stat").exists():
            return self
        faulthandler.register(DUMP_SIGNAL, _unblocking(2), all_threads=True)  # needs no lock
        self._thread = threading.Thread(target=self._run, name="process watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(2 * END_S)

    def _run(self) -> None:
        """Keeps a second process until the context is left: starts one, writes to it, replaces it when it has ended."""
        wait_s = RESTART_S
        while True:
            start_s = time.monotonic()
            try:
                with self._start() as process:
                    self._write(process)
                    self._end(process)
                why = f"the watch over process {os.getpid()} has ended ({process.returncode}); it is started again"
            except OSError as error:  # no process, or no memory for one: this one serves all the same
                why = f"nothing watches process {os.getpid()}: {error}"
            if time.monotonic() - start_s > RESTART_S_MAX:
                wait_s = RESTART_S
            if self._is_over.is_set():
                return
            _say(why)
            self._is_over.wait(wait_s)
            wait_s = min(2 * wait_s, RESTART_S_MAX)

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(HELD_S_MAX)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        """Writes after each turn of the loop until the context is left or the process has ended."""
        assert process.stdin is not None
        has_turned = threading.Event()
        has_turned.set()
        while not self._is_over.wait(BEAT_S) and process.poll() is None:
            if not has_turned.is_set():
                continue
            with contextlib.suppress(BrokenPipeError):  # it has ended since
                os.write(process.stdin.fileno(), b".")
            if self._loop is not None:
                has_turned.clear()
                with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                    self._loop.call_soon_threadsafe(has_turned.set)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """Ends the process with its input; by SIGKILL if it was stopped."""
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _say(text: str, patience_s: float = 0.0) -> None:
    """Writes a line on standard error, unless it is closed or its reader takes longer than `patience_s`: by default
    none, as a thread of the watched process that waits here looks hung."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], patience_s)[1]:
            os.write(2, f"specdec: {text}\n".encode())


def _unblocking(descriptor: int) -> int:
    """Returns a descriptor of the same pipe or terminal that loses what it does not take at once, so that stacks for
    which there is no reader do not stop the thread that writes them. A file, or what cannot be opened again: itself.
    """
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"


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
    reason = f"for {held_s_max:g} s its event loop hung, or a thread held the interpreter's lock"
    _say(f"process {pid} is ended: {reason}", DUMP_S)
    for number in (DUMP_SIGNAL, signal.SIGKILL):
        if os.getppid() == pid:
            os.kill(pid, number)
        select.select([], [], [], DUMP_S)


if __name__ == "__main__":
    for interrupt in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a container: the parent decides
        signal.signal(interrupt, signal.SIG_IGN)
    with contextlib.suppress(FileNotFoundError):  # the parent has ended
        _watch(int(sys.argv[1]), float(sys.argv[2]))
