"""Whether a step of the target waits for sessions that were just answered, so that they share it.

Left alone, many sessions fall into two groups: while one is computed the other's verdicts are under way, and each step
is half empty. Holding a step costs the sessions that are ready a moment; it pays when one fuller step is cheaper than
two. Pure: seconds are told, not read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

RETURN_WEIGHT = 0.2  # of the newest return in a session's mean
RETURN_S_MAX = 1.0  # a session that stays away longer waits for its reader or its draft; it is not expected back soon
LATENESS = 1.5  # a session later than this many of its usual returns is not waited for any more
HOLD_SHARE_MAX = 0.5  # of a step: however the estimates err, nobody waits longer in one go


@dataclass(slots=True)
class Returning:
    """One session: rows it asked for last, when that was answered, and how long it usually takes to ask again."""

    rows: int
    answered_s: float | None = None
    return_s: float | None = None


class Gathering:
    """Who is ready, who was answered and is expected back, and what that means for the next step.

    `step_s(rows)` is the time a step of so many rows takes. Sessions are any hashable names.
    """

    def __init__(self, step_s: Callable[[int], float | None]) -> None:
        self._step_s = step_s
        self._ready: dict[Hashable, int] = {}
        self._sessions: dict[Hashable, Returning] = {}
        self._held_since_s: float | None = None

    def arrived(self, session: Hashable, rows: int, now_s: float) -> None:
        """A session asks for a verification of so many rows; what it asked before is superseded."""
        self._ready[session] = rows
        known = self._sessions.setdefault(session, Returning(rows))
        known.rows = rows
        if known.answered_s is not None:
            took_s = min(now_s - known.answered_s, RETURN_S_MAX)
            mean_s = took_s if known.return_s is None else known.return_s
            known.return_s = mean_s + RETURN_WEIGHT * (took_s - mean_s)
            known.answered_s = None

    def answered(self, session: Hashable, now_s: float) -> None:
        """Its verification was answered."""
        self._ready.pop(session, None)
        if session in self._sessions:
            self._sessions[session].answered_s = now_s

    def left(self, session: Hashable) -> None:
        """It asks no more; idempotent."""
        self._ready.pop(session, None)
        self._sessions.pop(session, None)

    def active_count(self, now_s: float) -> int:
        """Sessions that are ready, and those expected back."""
        return len(self._ready) + len(self._expected(now_s))

    def hold_s(self, now_s: float) -> float:
        """Seconds to hold the next step: until the sessions expected back are, where one step for all is cheaper than
        one for those ready and another for the rest: wait + T(all) < T(ready) + T(rest). 0 to go on at once."""
        expected = self._expected(now_s) if self._ready else []
        if not expected:
            self._held_since_s = None
            return 0.0
        ready_rows = sum(self._ready.values())
        rest_rows = sum(known.rows for known, _ in expected)
        wait_s = max(wait for _, wait in expected)
        first, second = self._step_s(ready_rows), self._step_s(rest_rows)
        together = self._step_s(ready_rows + rest_rows)
        if together is None or first is None or second is None:
            return 0.0
        since_s = now_s if self._held_since_s is None else self._held_since_s
        wait_s = min(wait_s, since_s + HOLD_SHARE_MAX * together - now_s)
        if wait_s <= 0 or wait_s + together >= first + second:
            self._held_since_s = None
            return 0.0
        self._held_since_s = since_s
        return wait_s

    def _expected(self, now_s: float) -> list[tuple[Returning, float]]:
        """Sessions under way back to us, and the seconds until each should be here."""
        found = []
        for known in self._sessions.values():
            if known.answered_s is None or known.return_s is None or known.return_s >= RETURN_S_MAX:
                continue
            late_s = now_s - known.answered_s
            if late_s < LATENESS * known.return_s:
                found.append((known, LATENESS * known.return_s - late_s))
        return found
