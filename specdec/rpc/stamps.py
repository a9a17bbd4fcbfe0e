"""Stamps: the times that stream messages carry, and network time and clock offset computed from them; no clock.

A stamp names the last stamp its sender received, its own send time (t2), and the time since the named one's arrival
(t2 - t1). With t0 the send time of the named one and t3 the arrival of this one, the network time is
(t3 - t0) - (t2 - t1): differences of one clock each, so no common clock is needed. The clock offset is
((t1 - t0) + (t2 - t3)) / 2, wrong by half the network time at most; the quickest of the last exchanges is the best
estimate. Both sides of a stream use the same class.

With its stamps a replica tells its load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

UNECHOED_COUNT_MAX = 4096  # stamps on the way at once, far more than a link that is not silent can have
WINDOW_LENGTH = 64  # about a minute of an idle link, a second of a busy one
INTERVAL_NS = 5_000_000  # between stamps on a busy stream: more would cost bytes without information
WALL_INTERVAL_NS = 1_000_000_000  # between reports of the wall time, which is rarely set
LOAD_MAX = 2.0  # all is taken, and all sessions wait
OFFSET_AGE_NS = 5_000_000_000  # of exchanges for the clock offset: poor clocks drift by 0.3 ms in this time


@dataclass(frozen=True, slots=True)
class Exchange:
    """One stamp that echoed one of ours: the peer's clock when it left, ours when it arrived, network time both ways.

    All in nanoseconds; the two clocks have nothing in common.
    """

    peer_ns: int
    own_ns: int
    network_ns: int


def tell_load(message: Any, session_count: int, load: float) -> None:
    """Writes the load of a replica into a message with a stamp."""
    message.load.SetInParent()  # an idle one's too
    message.load.sessions, message.load.load_thousandths = session_count, round(1000 * load)


def load_of(message: Any) -> tuple[int, float] | None:
    """Returns (sessions, load) of a message, LOAD_MAX of a peer that claims more; None if it tells none."""
    if not message.HasField("load"):
        return None
    return message.load.sessions, min(message.load.load_thousandths / 1000, LOAD_MAX)


class Stamps:
    """One side of one stream. Times are readings of this side's monotonic clock, in nanoseconds.

    `wall_offset_ns` returns wall time less that clock; without it no wall time is sent.
    """

    def __init__(self, wall_offset_ns: Callable[[], int] | None = None) -> None:
        self.network_s: float | None = None  # both ways, of the last stamp that gave one
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
        self._best_exchange: Exchange | None = None

    def force(self) -> None:
        """Stamps the next message regardless of the last stamp's age, because an item in it is to be timed."""
        self._is_forced = True

    def is_due(self, now_ns: int) -> bool:
        """Whether the next message with items gets a stamp."""
        return self._is_forced or self._stamped_ns is None or now_ns - self._stamped_ns >= INTERVAL_NS

    def stamp(self, message: Any, now_ns: int) -> None:
        """Stamps a stream message about to be sent: a ping always, others if due."""
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
        """Takes the stamp of a stream message; returns the network time in seconds, both ways, if it gives one.

        Invalid stamps are ignored; a peer's false times affect only the measurements of that peer.
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
        self._best_exchange = None
        return self.network_s

    def _forget_before(self, sequence: int) -> None:
        """Drops earlier stamps: echoes only grow, so these are not named again."""
        while (first := next(iter(self._sent_ns))) < sequence:
            del self._sent_ns[first]

    def _best(self) -> Exchange | None:
        """The quickest exchange of the last few seconds: the best estimate of the clock offset."""
        if self._best_exchange is None and self._exchanges:
            since_ns = self._exchanges[-1].own_ns - OFFSET_AGE_NS
            recent = (one for one in self._exchanges if one.own_ns >= since_ns)
            self._best_exchange = min(recent, key=lambda one: one.network_ns)
        return self._best_exchange

    @property
    def clock_offset_s(self) -> float | None:
        """The estimate of the peer's wall clock less this side's; None before both are known."""
        best = self._best()
        if best is None or self._own_wall_offset_ns is None or self._peer_wall_offset_ns is None:
            return None
        monotonic_ns = best.peer_ns - best.own_ns + best.network_ns // 2
        return (monotonic_ns + self._peer_wall_offset_ns - self._own_wall_offset_ns) / 1e9

    @property
    def network_min_s(self) -> float | None:
        """Shortest network time, both ways, of the last messages; None before the first."""
        return min((one.network_ns for one in self._exchanges), default=0) / 1e9 if self._exchanges else None

    @property
    def network_median_s(self) -> float | None:
        """Median network time, both ways, of the last messages; None before the first."""
        exchanges = list(self._exchanges)  # whole, for readers on other threads
        return median(one.network_ns for one in exchanges) / 1e9 if exchanges else None
