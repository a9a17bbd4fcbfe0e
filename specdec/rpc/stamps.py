"""The times that stream messages carry, and what they tell about the hop: arithmetic only, no clock.

A stamp names the last stamp its sender had received, when it left (t2), and how long the named one had been there by
then (t2 - t1). With t0 the time the named one was sent and t3 the time this one arrived, the network took
(t3 - t0) - (t2 - t1): differences of one clock each, so no common clock is needed. Both sides of a stream use the same
class.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

UNECHOED_COUNT_MAX = 4096  # stamps on the way at once, far more than a link that is not silent can have
WINDOW_LENGTH = 64  # about a minute of an idle link, a second of a busy one
INTERVAL_NS = 5_000_000  # between stamps on a busy stream: more would cost bytes and tell nothing


class Stamps:
    """One side of one stream. Times are readings of this side's monotonic clock, in nanoseconds."""

    def __init__(self) -> None:
        self.network_s: float | None = None  # of the last stamp that told one, both ways
        self._sequence = 0
        self._echo_sequence = 0
        self._echo_received_ns = 0
        self._began_ns: int | None = None
        self._stamped_ns: int | None = None
        self._sent_ns: dict[int, int] = {}
        self._network_s: deque[float] = deque(maxlen=WINDOW_LENGTH)

    def stamp(self, message: Any, now_ns: int) -> None:
        """Stamps a stream message about to be sent: a ping always, others as often as it is worth it."""
        if message.items and self._stamped_ns is not None and now_ns - self._stamped_ns < INTERVAL_NS:
            return
        self._began_ns = now_ns if self._began_ns is None else self._began_ns
        self._stamped_ns = now_ns
        self._sequence += 1
        stamp = message.stamp
        stamp.sequence = self._sequence
        stamp.sent_time_us = (now_ns - self._began_ns) // 1000
        if self._echo_sequence:
            stamp.echo_sequence = self._echo_sequence
            stamp.echo_held_us = (now_ns - self._echo_received_ns) // 1000
        self._sent_ns[self._sequence] = now_ns
        if len(self._sent_ns) > UNECHOED_COUNT_MAX:
            del self._sent_ns[next(iter(self._sent_ns))]

    def received(self, message: Any, now_ns: int) -> float | None:
        """Takes note of a stream message; returns the network time in seconds, both ways, where it tells one.

        What a peer claims can only spoil what is measured about that peer: nonsense is passed over.
        """
        if not message.HasField("stamp"):
            return None
        stamp = message.stamp
        self._echo_sequence, self._echo_received_ns = stamp.sequence, now_ns
        sent_ns = self._sent_ns.get(stamp.echo_sequence)
        if sent_ns is None:
            return None
        self._forget_before(stamp.echo_sequence)
        network_ns = now_ns - sent_ns - 1000 * stamp.echo_held_us
        if network_ns < 0:
            return None
        self.network_s = network_ns / 1e9
        self._network_s.append(self.network_s)
        return self.network_s

    def _forget_before(self, sequence: int) -> None:
        """Echoes only grow, so earlier messages will not be named again."""
        while (first := next(iter(self._sent_ns))) < sequence:
            del self._sent_ns[first]

    @property
    def network_min_s(self) -> float | None:
        """Shortest network time, both ways, of the last messages; None before the first."""
        return min(self._network_s, default=None)

    @property
    def network_median_s(self) -> float | None:
        """Median network time, both ways, of the last messages; None before the first."""
        return median(self._network_s) if self._network_s else None
