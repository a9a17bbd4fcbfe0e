"""Whether the other ranks live: a connection between rank 0 and every other, on which both sides send a pulse.

A closed connection is noticed at once, silence after a bound, whatever the thread that computes is doing. One lost rank
is the end of all: the others are told why and this process ends, even where its engine is stuck in an exchange.
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

from specdec.errors import ReplicaUnavailable

logger = logging.getLogger("specdec.engine")

PULSE_S = 0.2
STARTING_SILENCE_S_MAX = 30.0  # loading libraries and weights may keep every thread of a process waiting
EXIT_CODE = 3
SENTENCE_BYTES_MAX = 1000
PULSE, STOP_ASKED, SENTENCE = b".", b"t", b"!"  # what is said: all is well; let us end in peace; my last words


@dataclass(frozen=True, slots=True)
class Loss:
    """A rank was lost: why, and whether it was merely silent, so that its process may still be there."""

    rank: int
    reason: str
    is_silent: bool = False


OnLost = Callable[[Loss], object]


@dataclass(slots=True, eq=False)
class Peer:
    """The other end of one connection, when it was last heard, and what it said at its end."""

    rank: int
    connection: socket.socket
    heard_s: float
    last_words: bytearray | None = None

    def hear(self, data: bytes) -> bool:
        """Takes what it said; True when it asks to end in peace."""
        self.heard_s = time.monotonic()
        pulses, separator, words = (b"", SENTENCE, data) if self.last_words else data.partition(SENTENCE)
        if separator:
            self.last_words = (self.last_words or bytearray()) + words[:SENTENCE_BYTES_MAX]
        return STOP_ASKED in pulses

    @property
    def ended(self) -> Loss:
        """Its end, in its own words where it said some."""
        words = bytes(self.last_words or b"").decode("utf-8", "replace").strip()
        return Loss(self.rank, words or f"rank {self.rank} ended")


class Watch:
    """Pulses and the thread that keeps them. `on_lost` is called once, on that thread.

    `exit_grace_s` after that the process ends with EXIT_CODE, whatever its other threads do; None leaves it running.
    `on_stop_asked` is called on that thread when another rank was told to stop.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        on_lost: OnLost,
        exit_grace_s: float | None,
        on_stop_asked: Callable[[], None] = lambda: None,
    ) -> None:
        now_s = time.monotonic()
        self._peers = [Peer(rank, connection, now_s) for rank, connection in connections.items()]
        self._on_lost = on_lost
        self._on_stop_asked = on_stop_asked
        self._exit_grace_s = exit_grace_s
        self._silence_s_max = STARTING_SILENCE_S_MAX
        self._is_stopping = False
        self._is_stop_asked = False
        self._own_failure: Loss | None = None
        self._lost: Loss | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        for peer in self._peers:
            peer.connection.setblocking(False)
        self._thread.start()

    def check(self) -> None:
        """Raises ReplicaUnavailable once a rank is lost or cannot go on."""
        loss = self._own_failure or self._lost
        if loss is not None:
            raise ReplicaUnavailable(loss.reason)

    def tighten(self, silence_s_max: float) -> None:
        """From here on a rank may be silent for so long only: all have loaded."""
        self._silence_s_max = silence_s_max

    def fail(self, rank: int, error: BaseException) -> None:
        """This rank cannot go on: tells the others why, and ends like them."""
        self._own_failure = Loss(rank, f"rank {rank}: {error or type(error).__name__}")

    def ask_to_stop(self) -> None:
        """Asks the others to end in peace. Safe in a signal handler."""
        self._is_stop_asked = True

    def stop(self, parting_s: float = 0.0) -> None:
        """Watches no longer; leaves the connections open until the others have closed theirs, `parting_s` at most."""
        self._is_stopping = True
        if threading.current_thread() is not self._thread:
            self._thread.join()
        deadline_s = time.monotonic() + parting_s
        for peer in self._peers:
            # It may be late, gone without a word, or closed already because a rank was lost: it was waited for.
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
        """Sends pulses and looks for silence. Where this thread itself was late, others are not blamed for it."""
        now_s = time.monotonic()
        if self._own_failure is not None:
            self._lose(self._own_failure)
        for peer in self._peers:
            peer.heard_s += late_s
            silent_s = now_s - peer.heard_s
            if silent_s > self._silence_s_max:
                self._lose(Loss(peer.rank, f"rank {peer.rank} was silent for {silent_s:.1f} s", is_silent=True))
            self._send(peer, STOP_ASKED if self._is_stop_asked else PULSE)

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
            self._on_stop_asked()

    def _lose(self, loss: Loss) -> None:
        self._lost = self._lost or loss

    def _send(self, peer: Peer, data: bytes) -> None:
        try:
            peer.connection.send(data)
        except BlockingIOError:  # it reads nothing; its silence will tell
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
                logger.error("this rank ends: %s", loss.reason)
                os._exit(EXIT_CODE)
