"""What a target's step takes under one rule: T(rows), apart for steps beside a working draft. Pure.

T(rows) = level * shape(rows) * contention: `level` is how fast the machine is just now and moves within a second,
`shape` is learnt slowly, `contention` is what the draft's work costs the target where they share cores, 1 while no
session speculates. A change right after the draft began or ceased to work is the draft's; any other is the machine's.
"""

from __future__ import annotations

from specdec.policy.step_curve import StepCurve
from specdec.protocol.round_record import RoundRecord

SHAPE_WEIGHT = 0.003  # slower than the level by far, or both would share every change
LEVEL_S = 0.7  # the level follows the machine within about this time
CONTENTION_ROUNDS = 8  # steps after the draft began or ceased to work that tell what its work costs
CONTENTION_WEIGHT, CONTENTION_MAX = 0.15, 4.0
RATIO_MIN, RATIO_MAX = 0.5, 1.6  # of observed to expected: a pause of the machine counts for no more
SESSIONS_WEIGHT, STEP_S_GUESS = 0.05, 0.02
ALIKE = 0.2  # sessions take turns by whether they wait: learnt while at most this share of them does otherwise


class Steps:
    """Of all sessions of one rule."""

    def __init__(self) -> None:
        self._shape = StepCurve(SHAPE_WEIGHT)
        self._level = self._contention = 1.0
        self._is_drafting = False
        self._steps_since_change = CONTENTION_ROUNDS
        self._drafted_s = float("-inf")
        self.sessions = self.active = 1.0
        self._waiting = 0.0  # share of sessions whose plan waits
        self._turns = [1.0, 1.0]  # steps in a round where no session waits, and where all do

    def prime(self, step_times: tuple[tuple[int, float], ...]) -> None:
        """Another target is connected, and tells what it measured when it had loaded."""
        self._shape, self._level = StepCurve(SHAPE_WEIGHT), 1.0
        for rows, seconds in step_times:
            self._shape.add(rows, seconds)

    def on_step(self, record: RoundRecord) -> None:
        """One round's step; steps that read a prompt are left out."""
        weight = max(SESSIONS_WEIGHT, 0.2 / max(1, record.active_sessions))
        self.sessions += weight * (max(1, record.step_sessions) - self.sessions)
        self.active += weight * (max(1, record.step_sessions, record.active_sessions) - self.active)
        waits = record.plan.wait_length > 0
        self._waiting += weight * (waits - self._waiting)
        if abs(self._waiting - waits) < ALIKE:
            self._turns[waits] += weight * (self.active / self.sessions - self._turns[waits])
        if record.plan.draft_length_max:
            self._drafted_s = record.end_s
        is_drafting = self._drafted_s > record.start_s
        if is_drafting != self._is_drafting:
            self._is_drafting, self._steps_since_change = is_drafting, 0
        self._steps_since_change += 1
        contention = self._contention if is_drafting else 1.0
        speed = self._level * contention
        mean_s = self._shape.add(record.step_rows, record.step_s / speed)
        ratio = min(max(record.step_s / (speed * mean_s), RATIO_MIN), RATIO_MAX)
        if self._steps_since_change > CONTENTION_ROUNDS * self.sessions:
            self._level *= 1 + min(0.2, record.step_s / (LEVEL_S * self.sessions)) * (ratio - 1)
            return
        factor = 1 + CONTENTION_WEIGHT / self.sessions * (ratio - 1)
        if not is_drafting:  # what is expected of such steps moves, and what is expected of the others stays
            self._level *= factor
            factor = 1 / factor
        self._contention = min(max(self._contention * factor, 1.0), CONTENTION_MAX)

    def round_s(self, rows: float, is_drafting: bool, waits: bool) -> float:
        """The steps that pass in a round if all sessions bring so many rows each: more than one where they take turns,
        as those that wait for the draft may."""
        turns = max(1.0, self._turns[waits])
        step_s = self._shape.seconds(self.active / turns * rows) or STEP_S_GUESS
        return turns * step_s * self._level * (self._contention if is_drafting else 1.0)
