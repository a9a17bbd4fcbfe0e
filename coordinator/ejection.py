"""Which replicas of a pool get no new texts for a time, and how often refused texts are tried elsewhere. Pure: times
are arguments, in seconds of one clock that never goes back.

A replica is ejected after FAULT_COUNT faults in a row, or where its rounds take SLOW_FACTOR times as long as those of
others with as many sessions: for EJECTION_S times the number of its ejections so far, as in Envoy's outlier detection.
Texts that it has continue. At most half of a pool is ejected at once: a cause common to all, such as a request that
none can answer, must not leave the pool empty.
"""

from __future__ import annotations

import statistics

FAULT_COUNT = 3
SLOW_FACTOR = 3.0
ROUND_COUNT = 50  # of which the median counts
ROUNDS_KEPT_S = 10.0  # for which a median is compared with others
EJECTION_S, EJECTION_MAX_S = 30.0, 300.0
FORGIVEN_S = 300.0  # without an ejection, after which the next is the first again
REPLICAS_PER_REQUEST = 3  # that may refuse a text before the refusal goes to the client
RETRY_SHARE, RETRIES_PER_S, WINDOW_S = 0.2, 3, 10


class PoolHealth:
    """The health of one pool's replicas: each is added when it joins and removed when it leaves."""

    def __init__(self) -> None:
        self._members: list[Health] = []

    def add(self) -> Health:
        """Returns the health of a replica that joins."""
        self._members.append(Health(self))
        return self._members[-1]

    def remove(self, health: Health) -> None:
        """The replica left the pool."""
        self._members.remove(health)

    def may_eject(self, now_s: float) -> bool:
        """Whether one more replica may be ejected."""
        return len(self.ejected(now_s)) < len(self._members) // 2

    def ejected(self, now_s: float) -> list[Health]:
        """Returns the ejected replicas: half of the pool at most, also after others left it; then those whose time
        ends first are used again."""
        found = [member for member in self._members if member.ejected_until_s > now_s]
        found.sort(key=lambda member: member.ejected_until_s, reverse=True)
        return found[: len(self._members) // 2]

    def usual_round_s(self, health: Health, band: int, now_s: float) -> float | None:
        """Returns the median of the round times of the other replicas with as many sessions; None if none was measured
        lately."""
        since_s = now_s - ROUNDS_KEPT_S
        found = [one.rounds[band] for one in self._members if one is not health and band in one.rounds]
        times = [round_s for round_s, measured_s in found if measured_s >= since_s]
        return statistics.median(times) if times else None


class Health:
    """The health of one replica; made by `PoolHealth.add`. `rounds`: the median of ROUND_COUNT rounds and when it was
    complete, by the bits of the number of sessions at work: a busy replica is no slow one."""

    def __init__(self, pool: PoolHealth) -> None:
        self.ejected_until_s = -float("inf")
        self.rounds: dict[int, tuple[float, float]] = {}
        self._pool = pool
        self._fault_count = self._ejection_count = 0
        self._measuring: dict[int, list[float]] = {}

    def fault(self, now_s: float) -> bool:
        """The replica failed: it was lost soon after it was reached, left a verification unanswered for too long, sent
        what is malformed, or ended a text by an error of its own. Returns whether this ejects it."""
        self._fault_count += 1
        return self._fault_count >= FAULT_COUNT and self._eject(now_s)

    def answered(self, round_s: float, session_count: int, now_s: float) -> bool:
        """A verification without a prompt was answered within `round_s`, while it had work for as many sessions.
        Returns whether this ejects the replica."""
        self._fault_count = 0
        band = session_count.bit_length()
        measuring = self._measuring.setdefault(band, [])
        measuring.append(round_s)
        if len(measuring) < ROUND_COUNT:
            return False
        median_s = statistics.median(measuring)
        self._measuring.clear()
        self.rounds[band] = median_s, now_s
        usual_s = self._pool.usual_round_s(self, band, now_s)
        return usual_s is not None and median_s > SLOW_FACTOR * usual_s and self._eject(now_s)

    def is_ejected(self, now_s: float) -> bool:
        """Whether the replica gets no new texts."""
        return self.ejected_until_s > now_s and self in self._pool.ejected(now_s)

    def _eject(self, now_s: float) -> bool:
        """Ejects the replica, unless it is or half of the pool is; returns whether it did."""
        if self.ejected_until_s > now_s or not self._pool.may_eject(now_s):
            return False
        if now_s > self.ejected_until_s + FORGIVEN_S:
            self._ejection_count = 0
        self._ejection_count += 1
        self._fault_count = 0
        self.ejected_until_s = now_s + min(EJECTION_S * self._ejection_count, EJECTION_MAX_S)
        return True


class RetryBudget:
    """How many refused texts are tried at another replica: as many in WINDOW_S as RETRY_SHARE of the openings in it,
    and RETRIES_PER_S, so that a full pool is not asked several times for each text (Finagle's retry budget)."""

    def __init__(self) -> None:
        self._second = 0
        self._openings, self._retries = [0] * WINDOW_S, [0] * WINDOW_S

    def opened(self, now_s: float) -> None:
        """A text was sent to its first replica."""
        self._openings[self._slot(now_s)] += 1

    def retry(self, refusal_count: int, now_s: float) -> bool:
        """Whether a text that `refusal_count` replicas refused may be tried at another; if so, it is counted."""
        slot = self._slot(now_s)
        budget = RETRY_SHARE * sum(self._openings) + RETRIES_PER_S * WINDOW_S
        if refusal_count >= REPLICAS_PER_REQUEST or sum(self._retries) + 1 > budget:
            return False
        self._retries[slot] += 1
        return True

    def _slot(self, now_s: float) -> int:
        """The place of this second's counts; those that are older than WINDOW_S are cleared."""
        second = int(now_s)
        for passed in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            self._openings[passed % WINDOW_S] = self._retries[passed % WINDOW_S] = 0
        self._second = second
        return second % WINDOW_S
