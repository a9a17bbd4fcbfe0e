"""Writing to a descriptor whose reader may be slow, gone or a full disk, so that those who write never wait or fail.

A thread of its own writes, in order, what waits in a bounded queue. What does not fit, or cannot be written, is lost
and counted. It does not know what it writes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable

RETRY_S = 0.02  # of a descriptor that a neighbour has set to fail instead of waiting


class BackgroundWriter:
    """One descriptor and its thread, which never ends. All methods may be called from any thread, signal handler or
    finaliser.

    `bytes_max`: of what waits. On the thread, `failed(error)` is called for each piece that cannot be written, and
    `recovered(count)` after the first that can, with the number of pieces lost since the last such call. `write`: in
    place of the descriptor; it takes a piece whole, or raises OSError and takes nothing.
    """

    def __init__(
        self,
        descriptor: int,
        name: str,
        bytes_max: int,
        failed: Callable[[OSError], None] = lambda error: None,
        recovered: Callable[[int], None] = lambda count: None,
        write: Callable[[bytes], None] | None = None,
    ) -> None:
        self.descriptor = descriptor
        self.lost_count = 0
        self._bytes_max = bytes_max
        self._failed, self._recovered = failed, recovered
        self._write_whole = write or self._write_pieces
        self._waiting_bytes = 0
        self._reported_count = 0
        self._is_torn = False  # the last line on the descriptor is a part of one
        self._lock = threading.RLock()  # for the counts; a finaliser may run between any two lines
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, data: bytes) -> bool:
        """Queues whole lines; False if too much waits, and they are lost."""
        with self._lock:
            if self._waiting_bytes + len(data) > self._bytes_max:
                self.lost_count += 1
                return False
            self._waiting_bytes += len(data)
        self._queue.put(data)
        return True

    def lose(self) -> None:
        """Counts a line that could not be made."""
        with self._lock:
            self.lost_count += 1

    def flush(self, timeout_s: float) -> bool:
        """Waits until what was queued before is written or lost; False if that takes longer than `timeout_s`."""
        done = threading.Event()
        self._queue.put(done)
        return done.wait(timeout_s)

    def _run(self) -> None:
        while True:
            data = self._queue.get()
            if isinstance(data, threading.Event):
                data.set()
                continue
            with contextlib.suppress(Exception):  # of the callbacks: the thread goes on
                self._write(data)
            with self._lock:
                self._waiting_bytes -= len(data)

    def _write(self, data: bytes) -> None:
        try:
            self._write_whole(data)
        except OSError as error:
            self.lose()
            self._failed(error)
            return
        count = self.lost_count - self._reported_count
        if count:
            self._reported_count += count
            self._recovered(count)

    def _write_pieces(self, data: bytes) -> None:
        """Writes to the descriptor as much as it takes. A line that was cut is ended first."""
        left = memoryview(b"\n" + data if self._is_torn else data)
        size = len(left)
        try:
            while left:
                try:
                    left = left[os.write(self.descriptor, left) :]
                except BlockingIOError:
                    time.sleep(RETRY_S)
        except OSError:
            self._is_torn |= len(left) < size
            raise
        self._is_torn = False
