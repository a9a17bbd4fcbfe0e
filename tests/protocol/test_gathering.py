"""When the target holds a step: against the arithmetic of one full step or two half-empty ones."""

from __future__ import annotations

import heapq

import pytest

from target_service.gathering import HOLD_SHARE_MAX, Gathering


def memory_bound(rows: int) -> float:
    """A GPU's step, in seconds: the weights are read once whatever the rows."""
    return 0.020 + 0.00001 * rows


def compute_bound(rows: int) -> float:
    """A step whose rows cost what they cost: nothing is saved by sharing it."""
    return 0.0001 + 0.002 * rows


def simulate(
    step_s, return_s: float, session_count: int, holds: bool, verdict_count: int = 2000
) -> tuple[float, float]:
    """(verdicts per second, sessions per step) of sessions that ask again `return_s` after every answer; they begin
    half a step apart, in two groups."""
    gathering = Gathering(step_s)
    arrivals = [(0.0 if index % 2 else step_s(2) / 2, index) for index in range(session_count)]
    heapq.heapify(arrivals)
    now_s, done, steps = 0.0, 0, 0
    ready: list[int] = []

    def take(until_s: float) -> None:
        while arrivals and arrivals[0][0] <= until_s:
            at_s, session = heapq.heappop(arrivals)
            gathering.arrived(session, 5, at_s)
            ready.append(session)

    while done < verdict_count:
        take(now_s)
        hold_s = gathering.hold_s(now_s) if holds else 0.0
        if not ready:
            now_s = arrivals[0][0]
        elif hold_s > 0:
            now_s = min(now_s + hold_s, arrivals[0][0] if arrivals else now_s + hold_s)
        else:
            now_s += step_s(5 * len(ready))
            steps += 1
            done += len(ready)
            for session in ready:
                gathering.answered(session, now_s)
                heapq.heappush(arrivals, (now_s + return_s, session))
            ready.clear()
    return done / now_s, done / steps


@pytest.mark.parametrize("session_count", [2, 4, 16])
def test_two_half_empty_groups_become_one(session_count: int) -> None:
    """Claim: where a step costs nearly the same for all, holding it joins the groups: every step serves all sessions,
    and verdicts per second rise by what the arithmetic says, (2 T) / (T + return), here 1.7 or more."""
    off = simulate(memory_bound, 0.003, session_count, holds=False)
    on = simulate(memory_bound, 0.003, session_count, holds=True)
    assert off[1] == pytest.approx(session_count / 2, rel=0.02)
    assert on[1] > 0.95 * session_count
    assert on[0] > 1.6 * off[0]


def test_nothing_is_held_where_sharing_saves_nothing() -> None:
    """Claim: with a step proportional to its rows, or with a single session, nothing is held: the rates are equal."""
    assert simulate(compute_bound, 0.003, 8, True) == simulate(compute_bound, 0.003, 8, False)
    assert simulate(memory_bound, 0.003, 1, True) == simulate(memory_bound, 0.003, 1, False)


def test_holding_ends_when_a_session_does_not_come_back() -> None:
    """Claim: a session that stays away costs one bounded wait, at most half a step, not one per step: after its usual
    time it is not expected any more, and a session that left is not expected at all."""
    gathering = Gathering(memory_bound)
    for session in ("a", "b"):
        gathering.arrived(session, 1, 0.0)
        gathering.answered(session, 0.02)
        gathering.arrived(session, 1, 0.024)
        gathering.answered(session, 0.044)
    gathering.arrived("a", 1, 0.048)
    assert 0 < gathering.hold_s(0.048) <= HOLD_SHARE_MAX * memory_bound(2)
    assert gathering.hold_s(0.048 + 0.012) == 0
    assert gathering.active_count(0.048) == 2 and gathering.active_count(0.1) == 1
    gathering.left("b")
    assert gathering.hold_s(0.0481) == 0 and gathering.active_count(0.0481) == 1


def test_nothing_is_held_before_anything_was_measured() -> None:
    """Claim: without a measured step time the target never waits."""
    gathering = Gathering(lambda rows: None)
    for now_s in (0.0, 0.1):
        for session in ("a", "b"):
            gathering.arrived(session, 1, now_s)
            gathering.answered(session, now_s + 0.02)
    gathering.arrived("a", 1, 0.123)
    assert gathering.hold_s(0.123) == 0
