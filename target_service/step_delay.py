"""Step delay: whether a step of the target waits for sessions that were just answered, so that they share it.

Without it many sessions fall into two groups: while one is computed the other's verdicts are under way, and each step
is half empty. A delay costs the ready sessions a moment; it pays when one fuller step is cheaper than two. Pure: times
are arguments, no clock is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

RETURN_WEIGHT = 0.2  # of the newest return in a session's mean
RETURN_S_MAX = 1.0  # a session away for longer waits for its client or its draft; it is not expected back soon
LATENESS = 1.5  # a session later than this many of its usual returns is no longer expected
DELAY_SHARE_MAX = 0.5  # of a step: the longest delay, however wrong the estimates


@dataclass(slots=True)
class Returning:
    """One session: rows of its last request, the time of the answer, and its mean time until the next request."""

    rows: int
    answered_s: float | None = None
    return_s: float | None = None


class StepDelay:
    """The sessions that are ready, those expected back after an answer, and the delay of the next step.

    `step_s(rows)`: seconds of a step of `rows` rows, None if unknown. Sessions are any hashable names.
    """

    def __init__(self, step_s: Callable[[int], float | None]) -> None:
        self._step_s = step_s
        self._ready: dict[Hashable, int] = {}
        self._sessions: dict[Hashable, Returning] = {}
        self._delayed_since_s: float | None = None

    def arrived(self, session: Hashable, rows: int, now_s: float) -> None:
        """A session requested a verification of `rows` rows, which replaces its request before."""
        self._ready[session] = rows
        known = self._sessions.setdefault(session, Returning(rows))
        known.rows = rows
        if known.answered_s is not None:
            took_s = min(now_s - known.answered_s, RETURN_S_MAX)
            mean_s = took_s if known.return_s is None else known.return_s
            known.return_s = mean_s + RETURN_WEIGHT * (took_s - mean_s)
            known.answered_s = None

    def answered(self, session: Hashable, now_s: float) -> None:
        """The session's verification was answered."""
        self._ready.pop(session, None)
        if session in self._sessions:
            self._sessions[session].answered_s = now_s

    def left(self, session: Hashable) -> None:
        """The session ended or waits for blocks; idempotent."""
        self._ready.pop(session, None)
        self._sessions.pop(session, None)

    def active_count(self, now_s: float) -> int:
        """The number of sessions that are ready or expected back."""
        return len(self._ready) + len(self._expected(now_s))

    def delay_s(self, now_s: float) -> float:
        """Seconds to delay the next step: until the expected sessions are back, if one step for all is cheaper than one
        for the ready and another for the rest: wait + T(all) < T(ready) + T(rest). 0 for no delay."""
        expected = self._expected(now_s) if self._ready else []
        if not expected:
            self._delayed_since_s = None
            return 0.0
        ready_rows = sum(self._ready.values())
        rest_rows = sum(known.rows for known, _ in expected)
        wait_s = max(wait for _, wait in expected)
        first, second = self._step_s(ready_rows), self._step_s(rest_rows)
        together = self._step_s(ready_rows + rest_rows)
        if together is None or first is None or second is None:
            return 0.0
        since_s = now_s if self._delayed_since_s is None else self._delayed_since_s
        wait_s = min(wait_s, since_s + DELAY_SHARE_MAX * together - now_s)
        if wait_s <= 0 or wait_s + together >= first + second:
            self._delayed_since_s = None
            return 0.0
        self._delayed_since_s = since_s
        return wait_s

    def _expected(self, now_s: float) -> list[tuple[Returning, float]]:
        """Returns the sessions expected back, and the longest remaining wait for each in seconds."""
        found = []
        for known in self._sessions.values():
            if known.answered_s is None or known.return_s is None or known.return_s >= RETURN_S_MAX:
                continue
            late_s = now_s - known.answered_s
            if late_s < LATENESS * known.return_s:
                found.append((known, LATENESS * known.return_s - late_s))
        return found
