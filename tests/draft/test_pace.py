"""The share of a draft's time that its sessions' rounds need. Pure: times are numbers of the test."""

from __future__ import annotations

import pytest

from specdec.draft_service.pace import FADED_S, ROUND_S_MAX, STEPS_PER_ROUND, Pace


def pace_of(step_s: float, round_s: float, count: int = 200) -> Pace:
    """A draft whose steps and whose sessions' rounds all take the same time; the last commit is at 100 s."""
    pace = Pace()
    for index in range(count):
        pace.on_step(step_s)
        pace.on_commit(round_s, 100.0 - (count - 1 - index) * round_s)
    return pace


@pytest.mark.parametrize(
    ("step_s", "round_s", "share"), [(0.005, 0.1, 0.1), (0.02, 0.1, 0.4), (0.05, 0.1, 1.0), (0.3, 0.1, 1.0)]
)
def test_the_share_is_that_of_the_steps_that_a_round_needs(step_s: float, round_s: float, share: float) -> None:
    """Claim: two steps in the time of a round, 1 at most: then the tokens are late. By definition, exact."""
    assert STEPS_PER_ROUND == 2
    assert pace_of(step_s, round_s).share(100.0) == pytest.approx(share)


def test_a_draft_without_commits_needs_no_time() -> None:
    """Claim: before the first commit, and FADED_S after the last, the share is 0: a draft that refuses gets no commits
    that would tell it that it is idle. Conclusive: both sides of the limit."""
    pace = Pace()
    pace.on_step(9.0)
    assert pace.share(100.0) == 0
    pace = pace_of(0.05, 0.1)
    assert pace.share(100.0 + FADED_S - 0.01) == pytest.approx(1) and pace.share(100.0 + FADED_S + 0.01) == 0


def test_the_share_follows_and_a_pause_of_a_client_is_no_long_round() -> None:
    """Claim: steps that become four times longer raise the share by as much within a hundred; one pause of a minute
    lowers it as one round of ROUND_S_MAX does. Conclusive: numbers on both sides."""
    pace = pace_of(0.01, 0.1)
    for _ in range(100):
        pace.on_step(0.04)
    assert pace.share(100.0) == pytest.approx(0.8, rel=0.02)
    paused, longest = pace_of(0.01, 0.1), pace_of(0.01, 0.1)
    paused.on_commit(60.0, 100.0)
    longest.on_commit(ROUND_S_MAX, 100.0)
    assert paused.share(100.0) == longest.share(100.0) < 0.2
