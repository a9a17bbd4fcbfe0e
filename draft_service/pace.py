"""The pace of a draft: whether its steps keep up with the rounds of its sessions. Pure.

A tree is of use if its first nodes are there when the round ends. So the share of its time that a draft needs is that
of STEPS_PER_ROUND steps in the time between two commits of a session. Time in steps says less: a draft that keeps up
fills the rest with ever less likely nodes, and one more session takes the place of these.
"""

from __future__ import annotations

STEPS_PER_ROUND = 2  # a proposal, and the one after it
ROUND_S_MAX = 1.0  # between two commits: a longer pause is a client's
WEIGHT = 0.05  # of the newest time in a mean
FADED_S = 2.0  # without a commit nothing is drafted


class Pace:
    """Of one draft. Times are arguments, of one clock."""

    def __init__(self) -> None:
        self._step_s = self._round_s = 0.0  # means; 0 before the first
        self._committed_s = 0.0

    def on_step(self, step_s: float) -> None:
        """A step of nodes took as long."""
        self._step_s += (WEIGHT if self._step_s else 1.0) * (step_s - self._step_s)

    def on_commit(self, round_s: float, now_s: float) -> None:
        """A session that drafts has a commit, `round_s` after the one before."""
        self._committed_s, round_s = now_s, min(round_s, ROUND_S_MAX)
        self._round_s += (WEIGHT if self._round_s else 1.0) * (round_s - self._round_s)

    def share(self, now_s: float) -> float:
        """Returns the share of the time that is needed, 0 to 1: at 1 the steps are late for the rounds."""
        if not self._round_s or now_s - self._committed_s > FADED_S:
            return 0.0
        return min(1.0, STEPS_PER_ROUND * self._step_s / self._round_s)
