"""The step delay of the target, compared with the arithmetic of one full step or two half-empty ones."""

from __future__ import annotations

import heapq

import pytest

from specdec.target_service.step_delay import DELAY_SHARE_MAX, StepDelay


def memory_bound(rows: int) -> float:
    """A GPU's step, in seconds: the weights are read once for any number of rows."""
    return 0.020 + 0.00001 * rows


def compute_bound(rows: int) -> float:
    """A step in proportion to its rows: sharing it saves no time."""
    return 0.0001 + 0.002 * rows


def simulate(
    step_s, return_s: float, session_count: int, delays: bool, verdict_count: int = 2000
) -> tuple[float, float]:
    """Returns (verdicts per second, sessions per step). Sessions send a request `return_s` after every answer and begin
    half a step apart, in two groups."""
    step_delay = StepDelay(step_s)
    arrivals = [(0.0 if index % 2 else step_s(2) / 2, index) for index in range(session_count)]
    heapq.heapify(arrivals)
    now_s, done, steps = 0.0, 0, 0
    ready: list[int] = []

    def take(until_s: float) -> None:
        while arrivals and arrivals[0][0] <= until_s:
            at_s, session = heapq.heappop(arrivals)
            step_delay.arrived(session, 5, at_s)
            ready.append(session)

    while done < verdict_count:
        take(now_s)
        delay_s = step_delay.delay_s(now_s) if delays else 0.0
        if not ready:
            now_s = arrivals[0][0]
        elif delay_s > 0:
            now_s = min(now_s + delay_s, arrivals[0][0] if arrivals else now_s + delay_s)
        else:
            now_s += step_s(5 * len(ready))
            steps += 1
            done += len(ready)
            for session in ready:
                step_delay.answered(session, now_s)
                heapq.heappush(arrivals, (now_s + return_s, session))
            ready.clear()
    return done / now_s, done / steps


@pytest.mark.parametrize("session_count", [2, 4, 16])
def test_two_half_empty_groups_become_one(session_count: int) -> None:
    """Claim: where a step costs nearly the same for all, delaying it joins the groups: every step serves
    all sessions, and verdicts per second rise by (2 T) / (T + return), here 1.7 or more."""
    off = simulate(memory_bound, 0.003, session_count, delays=False)
    on = simulate(memory_bound, 0.003, session_count, delays=True)
    assert off[1] == pytest.approx(session_count / 2, rel=0.02)
    assert on[1] > 0.95 * session_count
    assert on[0] > 1.6 * off[0]


def test_no_delay_where_sharing_saves_nothing() -> None:
    """Claim: with a step proportional to its rows, or with one session, no step is delayed: the rates are equal."""
    assert simulate(compute_bound, 0.003, 8, True) == simulate(compute_bound, 0.003, 8, False)
    assert simulate(memory_bound, 0.003, 1, True) == simulate(memory_bound, 0.003, 1, False)


def test_the_delay_ends_when_a_session_does_not_come_back() -> None:
    """Claim: a session that stays away costs one bounded wait, at most half a step, not one per step: after its usual
    time it is not expected any more, and a session that left is not expected at all."""
    step_delay = StepDelay(memory_bound)
    for session in ("a", "b"):
        step_delay.arrived(session, 1, 0.0)
        step_delay.answered(session, 0.02)
        step_delay.arrived(session, 1, 0.024)
        step_delay.answered(session, 0.044)
    step_delay.arrived("a", 1, 0.048)
    assert 0 < step_delay.delay_s(0.048) <= DELAY_SHARE_MAX * memory_bound(2)
    assert step_delay.delay_s(0.048 + 0.012) == 0
    assert step_delay.active_count(0.048) == 2 and step_delay.active_count(0.1) == 1
    step_delay.left("b")
    assert step_delay.delay_s(0.0481) == 0 and step_delay.active_count(0.0481) == 1


def test_no_delay_before_a_measurement() -> None:
    """Claim: without a measured step time the target never waits."""
    step_delay = StepDelay(lambda rows: None)
    for now_s in (0.0, 0.1):
        for session in ("a", "b"):
            step_delay.arrived(session, 1, now_s)
            step_delay.answered(session, now_s + 0.02)
    step_delay.arrived("a", 1, 0.123)
    assert step_delay.delay_s(0.123) == 0
