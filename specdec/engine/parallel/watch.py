"""The liveness of ranks: connections between rank 0 and every other rank, on which both sides send pulses.

A thread of its own detects a closed connection at once and silence after a bound. One lost rank ends all: the watch
sends the reason to the others and ends this process, even if its engine is blocked in an exchange.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specdec.errors import RANK_LOST_EXIT_CODE, ReplicaUnavailable

logger = logging.getLogger("specdec.engine")

PULSE_S = 0.2
STARTING_SILENCE_S_MAX = 30.0  # loading libraries and weights may block every thread of a process
SENTENCE_BYTES_MAX = 1000
PULSE, STOP_ASKED, SENTENCE = b".", b"t", b"!"  # alive; request to end normally; reason of the end follows


@dataclass(frozen=True, slots=True)
class Loss:
    """A lost rank, the reason, and whether it was only silent, so that its process may still exist."""

    rank: int
    reason: str
    is_silent: bool = False


OnLost = Callable[[Loss], object]


@dataclass(slots=True, eq=False)
class Peer:
    """The other end of one connection, the time of its last pulse, and the reason it sent at its end."""

    rank: int
    connection: socket.socket
    heard_s: float
    last_words: bytearray | None = None

    def hear(self, data: bytes) -> bool:
        """Takes received data; returns True when it contains a request to end normally."""
        self.heard_s = time.monotonic()
        pulses, separator, words = (b"", SENTENCE, data) if self.last_words else data.partition(SENTENCE)
        if separator:
            self.last_words = ((self.last_words or bytearray()) + words)[:SENTENCE_BYTES_MAX]
        return STOP_ASKED in pulses

    @property
    def ended(self) -> Loss:
        """The loss of this rank, with the reason it sent, if any."""
        words = bytes(self.last_words or b"").decode("utf-8", "replace").strip()
        return Loss(self.rank, words or f"rank {self.rank} ended")


class Watch:
    """The thread that sends and checks pulses. It calls `on_lost` once.

    `exit_grace_s` later it ends the process with RANK_LOST_EXIT_CODE, regardless of other threads; None leaves it
    running. It calls `on_stop_requested` when another rank requests a stop.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        on_lost: OnLost,
        exit_grace_s: float | None,
        on_stop_requested: Callable[[], None] = lambda: None,
    ) -> None:
        now_s = time.monotonic()
        self._peers = [Peer(rank, connection, now_s) for rank, connection in connections.items()]
        self._on_lost = on_lost
        self._on_stop_requested = on_stop_requested
        self._exit_grace_s = exit_grace_s
        self._silence_s_max = STARTING_SILENCE_S_MAX
        self._is_stopping = False
        self._is_stop_requested = False
        self._own_failure: Loss | None = None
        self._lost: Loss | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        for peer in self._peers:
            peer.connection.setblocking(False)
        self._thread.start()

    def check(self) -> None:
        """Raises ReplicaUnavailable once a rank is lost or has failed."""
        loss = self._own_failure or self._lost
        if loss is not None:
            raise ReplicaUnavailable(loss.reason)

    def tighten(self, silence_s_max: float) -> None:
        """Sets the longest silence of a rank, once all have loaded."""
        self._silence_s_max = silence_s_max

    def fail(self, rank: int, error: BaseException) -> None:
        """Reports this rank's error to the others and ends it as they end."""
        self._own_failure = Loss(rank, f"rank {rank}: {error or type(error).__name__}")

    def request_stop(self) -> None:
        """Asks the others to end normally. Safe in a signal handler."""
        self._is_stop_requested = True

    def expect_ends(self) -> None:
        """From here on the end of another rank is no loss: call it before the others are told to stop."""
        self._is_stopping = True

    def stop(self, parting_s: float = 0.0) -> None:
        """Stops watching; closes its connections after the others have closed theirs, or after `parting_s`."""
        self.expect_ends()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        deadline_s = time.monotonic() + parting_s
        for peer in self._peers:
            # The rank may be late, ended without a message, or closed after a loss: the wait is over either way.
            with contextlib.suppress(OSError):
                peer.connection.settimeout(max(0.01, deadline_s - time.monotonic()))
                while parting_s and peer.connection.recv(4096):
                    pass
            peer.connection.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            due_s = time.monotonic()
            while not self._is_stopping and self._lost is None:
                now_s = time.monotonic()
                if now_s >= due_s:
                    self._beat(now_s - due_s)
                    due_s = now_s + PULSE_S
                for key, _ in selector.select(max(0.0, due_s - time.monotonic())):
                    self._hear(key.data)
        if self._lost is not None and not self._is_stopping:
            self._end(self._lost)

    def _beat(self, late_s: float) -> None:
        """Sends pulses and checks for silence. A delay of this thread does not count as silence of the others."""
        now_s = time.monotonic()
        if self._own_failure is not None:
            self._lose(self._own_failure)
        for peer in self._peers:
            peer.heard_s += late_s
            silent_s = now_s - peer.heard_s
            if silent_s > self._silence_s_max:
                self._lose(Loss(peer.rank, f"rank {peer.rank} was silent for {silent_s:.1f} s", is_silent=True))
            self._send(peer, STOP_ASKED if self._is_stop_requested else PULSE)

    def _hear(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(peer.ended)
        elif peer.hear(data):
            self._on_stop_requested()

    def _lose(self, loss: Loss) -> None:
        self._lost = self._lost or loss

    def _send(self, peer: Peer, data: bytes) -> None:
        try:
            peer.connection.send(data)
        except BlockingIOError:  # it does not read; its silence is detected later
            pass
        except OSError:
            self._lose(peer.ended)

    def _end(self, loss: Loss) -> None:
        for peer in self._peers:
            self._send(peer, SENTENCE + loss.reason.encode()[:SENTENCE_BYTES_MAX])
        try:
            self._on_lost(loss)
        finally:
            for peer in self._peers:
                peer.connection.close()
            if self._exit_grace_s is not None:
                time.sleep(self._exit_grace_s)
                try:
                    logger.error("this rank ends: %s", loss.reason)
                finally:
                    os._exit(RANK_LOST_EXIT_CODE)
