"""The times that stream messages carry, and what they tell about the hop: arithmetic only, no clock.

A stamp names the last stamp its sender had received, when it left (t2), and how long the named one had been there by
then (t2 - t1). With t0 the time the named one was sent and t3 the time this one arrived, the network took
(t3 - t0) - (t2 - t1): differences of one clock each, so no common clock is needed. How far the clocks stand apart is
((t1 - t0) + (t2 - t3)) / 2, wrong by half the network time at most; the quickest of the last exchanges tells it best.
Both sides of a stream use the same class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

UNECHOED_COUNT_MAX = 4096  # stamps on the way at once, far more than a link that is not silent can have
WINDOW_LENGTH = 64  # about a minute of an idle link, a second of a busy one
INTERVAL_NS = 5_000_000  # between stamps on a busy stream: more would cost bytes and tell nothing
WALL_INTERVAL_NS = 1_000_000_000  # between tellings of the wall time, which nobody sets more often
OFFSET_AGE_NS = 5_000_000_000  # of exchanges that clocks are compared by: badly kept ones part by 0.3 ms in it


@dataclass(frozen=True, slots=True)
class Exchange:
    """One stamp that echoed one of ours: the peer's clock when it left, ours when it arrived, network time both ways.

    All in nanoseconds; the two clocks have nothing in common.
    """

    peer_ns: int
    own_ns: int
    network_ns: int


class Stamps:
    """One side of one stream. Times are readings of this side's monotonic clock, in nanoseconds.

    `wall_offset_ns` gives wall time less that clock; without it nothing is told of wall time.
    """

    def __init__(self, wall_offset_ns: Callable[[], int] | None = None) -> None:
        self.network_s: float | None = None  # of the last stamp that told one, both ways
        self._wall_offset_ns = wall_offset_ns
        self._own_wall_offset_ns: int | None = None
        self._peer_wall_offset_ns: int | None = None
        self._wall_told_ns: int | None = None
        self._sequence = 0
        self._echo_sequence = 0
        self._echo_received_ns = 0
        self._stamped_ns: int | None = None
        self._is_forced = False
        self._sent_ns: dict[int, int] = {}
        self._exchanges: deque[Exchange] = deque(maxlen=WINDOW_LENGTH)

    def force(self) -> None:
        """The next message is stamped, however short ago the last one was: something in it is to be timed."""
        self._is_forced = True

    def is_due(self, now_ns: int) -> bool:
        """Whether a message with items is worth a stamp."""
        return self._is_forced or self._stamped_ns is None or now_ns - self._stamped_ns >= INTERVAL_NS

    def stamp(self, message: Any, now_ns: int) -> None:
        """Stamps a stream message about to be sent: a ping always, others as often as it is worth it."""
        if message.items and not self.is_due(now_ns):
            return
        self._stamped_ns, self._is_forced = now_ns, False
        self._sequence += 1
        stamp = message.stamp
        stamp.sequence = self._sequence
        stamp.sent_time_us = now_ns // 1000
        if self._echo_sequence:
            stamp.echo_sequence = self._echo_sequence
            stamp.echo_held_us = (now_ns - self._echo_received_ns) // 1000
        if self._wall_offset_ns is not None:
            self._tell_wall_time(stamp, now_ns)
        self._sent_ns[self._sequence] = now_ns
        if len(self._sent_ns) > UNECHOED_COUNT_MAX:
            del self._sent_ns[next(iter(self._sent_ns))]

    def _tell_wall_time(self, stamp: Any, now_ns: int) -> None:
        assert self._wall_offset_ns is not None
        if self._wall_told_ns is None or now_ns - self._wall_told_ns >= WALL_INTERVAL_NS:
            self._wall_told_ns = now_ns
            self._own_wall_offset_ns = self._wall_offset_ns()
            stamp.wall_time_us = (now_ns + self._own_wall_offset_ns) // 1000

    def received(self, message: Any, now_ns: int) -> float | None:
        """Takes note of a stream message; returns the network time in seconds, both ways, where it tells one.

        What a peer claims can only spoil what is measured about that peer: nonsense is passed over.
        """
        if not message.HasField("stamp"):
            return None
        stamp = message.stamp
        self._echo_sequence, self._echo_received_ns = stamp.sequence, now_ns
        if stamp.wall_time_us:
            self._peer_wall_offset_ns = 1000 * (stamp.wall_time_us - stamp.sent_time_us)
        sent_ns = self._sent_ns.get(stamp.echo_sequence)
        if sent_ns is None:
            return None
        self._forget_before(stamp.echo_sequence)
        network_ns = now_ns - sent_ns - 1000 * stamp.echo_held_us
        if network_ns < 0:
            return None
        self.network_s = network_ns / 1e9
        self._exchanges.append(Exchange(1000 * stamp.sent_time_us, now_ns, network_ns))
        return self.network_s

    def _forget_before(self, sequence: int) -> None:
        """Echoes only grow, so earlier messages will not be named again."""
        while (first := next(iter(self._sent_ns))) < sequence:
            del self._sent_ns[first]

    def _best(self) -> Exchange | None:
        """The quickest exchange of the last few seconds: it tells best how the clocks stand."""
        if not self._exchanges:
            return None
        since_ns = self._exchanges[-1].own_ns - OFFSET_AGE_NS
        return min((one for one in self._exchanges if one.own_ns >= since_ns), key=lambda one: one.network_ns)

    @property
    def clock_offset_s(self) -> float | None:
        """The peer's wall clock less this side's, as estimated; None before both have been told."""
        best = self._best()
        if best is None or self._own_wall_offset_ns is None or self._peer_wall_offset_ns is None:
            return None
        monotonic_ns = best.peer_ns - best.own_ns + best.network_ns // 2
        return (monotonic_ns + self._peer_wall_offset_ns - self._own_wall_offset_ns) / 1e9

    def earliest_own_ns(self, peer_time_us: int) -> int | None:
        """The earliest that this side's clock can have shown when the peer's showed `peer_time_us`; None: unknown.

        As if all of the network time had been on the way here; later by that time if all was on the way there.
        """
        best = self._best()
        return None if best is None else best.own_ns - best.network_ns + 1000 * peer_time_us - best.peer_ns

    @property
    def network_min_s(self) -> float | None:
        """Shortest network time, both ways, of the last messages; None before the first."""
        return min((one.network_ns for one in self._exchanges), default=0) / 1e9 if self._exchanges else None

    @property
    def network_median_s(self) -> float | None:
        """Median network time, both ways, of the last messages; None before the first."""
        exchanges = list(self._exchanges)  # whole, for readers on other threads
        return median(one.network_ns for one in exchanges) / 1e9 if exchanges else None
