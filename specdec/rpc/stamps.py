"""The times that stream messages carry, and what they tell about the hop: arithmetic only, no clock.

Every message names the last message its sender had received, with its receive time t1, and its own send time t2.
With t0 the time the named message was sent and t3 the time this one arrived, the network took (t3 - t0) - (t2 - t1):
differences of one clock each, so no common clock is needed. Both sides of a stream use the same class.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Protocol

UNECHOED_COUNT_MAX = 4096  # messages on the way at once, far more than a link that is not silent can have
WINDOW_LENGTH = 64  # about a minute of an idle link, less than a second of a busy one


class LinkStamp(Protocol):
    """The message of the same name."""

    sequence: int
    sent_time_ns: int
    echo_sequence: int
    echo_received_time_ns: int


class Stamps:
    """One side of one stream. Times are readings of this side's monotonic clock, in nanoseconds."""

    def __init__(self) -> None:
        self._sequence = 0
        self._echo_sequence = 0
        self._echo_received_time_ns = 0
        self._sent_time_ns: dict[int, int] = {}
        self.network_s: float | None = None  # of the last message that told one, both ways
        self._network_s: deque[float] = deque(maxlen=WINDOW_LENGTH)

    def stamp(self, stamp: LinkStamp, now_ns: int) -> None:
        """Fills in the stamp of a message about to be sent; call it in the order of sending."""
        self._sequence += 1
        stamp.sequence = self._sequence
        stamp.sent_time_ns = now_ns
        stamp.echo_sequence = self._echo_sequence
        stamp.echo_received_time_ns = self._echo_received_time_ns
        self._sent_time_ns[self._sequence] = now_ns
        if len(self._sent_time_ns) > UNECHOED_COUNT_MAX:
            del self._sent_time_ns[next(iter(self._sent_time_ns))]

    def received(self, stamp: LinkStamp, now_ns: int) -> float | None:
        """Takes note of a message; returns the network time in seconds, both ways, where it tells one.

        What a peer claims can only spoil what is measured about that peer: nonsense is passed over.
        """
        self._echo_sequence, self._echo_received_time_ns = stamp.sequence, now_ns
        sent_ns = self._sent_time_ns.get(stamp.echo_sequence)
        if sent_ns is None:
            return None
        self._forget_before(stamp.echo_sequence)
        held_ns = stamp.sent_time_ns - stamp.echo_received_time_ns
        network_ns = now_ns - sent_ns - held_ns
        if held_ns < 0 or network_ns < 0:
            return None
        self.network_s = network_ns / 1e9
        self._network_s.append(self.network_s)
        return self.network_s

    def _forget_before(self, sequence: int) -> None:
        """Echoes only grow, so earlier messages will not be named again."""
        while (first := next(iter(self._sent_time_ns))) < sequence:
            del self._sent_time_ns[first]

    @property
    def network_min_s(self) -> float | None:
        """Shortest network time, both ways, of the last messages; None before the first."""
        return min(self._network_s, default=None)

    @property
    def network_median_s(self) -> float | None:
        """Median network time, both ways, of the last messages; None before the first."""
        return median(self._network_s) if self._network_s else None
