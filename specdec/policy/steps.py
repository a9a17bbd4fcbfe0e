"""T(rows, paths) of a target: seconds of its steps, learned from the rounds of all sessions. Pure.

T = speed * slowdown * (curve(rows) + PATH_SHARE * curve(1) * further paths). `speed` is the machine's and moves within
a second, the curve is learned slowly, `slowdown` is that by a draft that works beside the target, on its cores. A
change right after the draft began or stopped working is the draft's, any other the machine's. After a jump rows may
cost anything: the curve starts anew, in proportion to the rows, until steps take the times of the start again.
"""

from __future__ import annotations

import math

from specdec.protocol.records import RoundRecord
from specdec.step_curve import StepCurve

CURVE_WEIGHT, SPEED_S = 0.003, 0.7  # the curve is far slower than the speed, or both would share every change
SETTLING_STEPS, SETTLING_WEIGHT = 8, 0.2  # those after the draft began or stopped working measure its slowdown
JUMP_FACTOR = 4.0  # twice a multiple of the expected time, or once its square, is a jump; less is a pause
PATH_SHARE = 0.015  # of a further path, over a step of one row


class StepTimes:
    """Step times of one target under one rule. `load`: mean of the sessions that have work for it at a time; `jumps`:
    the number of fresh starts."""

    def __init__(self) -> None:
        self._curve, self._start, self._heads = StepCurve(CURVE_WEIGHT), StepCurve(), StepCurve()
        self._is_drafting, self._drafted_s = False, -math.inf
        self.load, self.jumps = 1.0, 0
        self.prime(())

    def prime(
        self, step_times: tuple[tuple[float, float], ...], head_times: tuple[tuple[int, float], ...] = ()
    ) -> None:
        """Another target is connected: takes the (rows, seconds) of steps and the (sessions, seconds) of heads that it
        measured at start."""
        self._start.prime(step_times)
        self._heads.prime(head_times)
        self._curve.prime(step_times)
        self._restart()

    def _restart(self, has_jumped: bool = False) -> None:
        self._speed = self._slowdown = 1.0
        self._settling = self._far = self._back = 0.0
        self._has_jumped = has_jumped
        self.jumps += has_jumped

    def step_s(self, rows: float, is_drafting: bool, paths: float = 0.0) -> float:
        """Seconds of a step; `rows`, further `paths`: of all its sessions together; with or without a draft at work."""
        return self._scaled(self._curve.seconds(rows) or 0.02, is_drafting, paths)

    def _scaled(self, seconds: float, is_drafting: bool, paths: float) -> float:
        seconds += paths * PATH_SHARE * (self._curve.seconds(1) or seconds) if paths else 0.0
        return seconds * self._speed * (self._slowdown if is_drafting else 1.0)

    def heads_s(self) -> float:
        """Seconds by which the target's heads lengthen a step if every session asks for them."""
        return self._speed * (self._heads.seconds(self.load) or 0.0)

    def fade(self, now_s: float) -> None:
        """Lets what no step measured lately return to the times at start."""
        self._curve.fade(now_s)

    def on_step(self, record: RoundRecord) -> None:
        """Takes the step of one round, which each of its sessions reports; the caller leaves out those that read a
        prompt."""
        step, share = record.step, 1 / max(1, record.step.sessions)
        active = max(1, step.sessions, step.active_sessions)
        self.load += max(0.05, 0.2 / active) * (active - self.load)
        if record.plan.window:
            self._drafted_s = record.times.end_s
        is_drafting = self._drafted_s > record.times.start_s
        if is_drafting != self._is_drafting:
            self._is_drafting, self._settling = is_drafting, float(SETTLING_STEPS)
        flat_s = self._curve.seconds(step.rows) or step.step_s
        further = max(0, record.tokens.path_count - 1)  # of the others it is not known: they count as having as many
        ratio = step.step_s / self._scaled(flat_s, is_drafting, further / share)
        if self._is_jump(record, ratio, share):
            return
        change = share * (min(max(ratio, 0.5), 1.6) - 1)
        if not self._settling:
            self._speed *= 1 + min(0.2, step.step_s / SPEED_S) * change
        elif self._settling < SETTLING_STEPS:  # the draft may have begun or ended within the first
            factor = 1 + SETTLING_WEIGHT * change
            self._speed *= 1.0 if is_drafting else factor
            self._slowdown = min(max(self._slowdown * (factor if is_drafting else 1 / factor), 1.0), JUMP_FACTOR)
        self._settling = max(0.0, self._settling - share)
        self._curve.add(step.rows, ratio * flat_s)

    def _is_jump(self, record: RoundRecord, ratio: float, share: float) -> bool:
        """Whether a step took a multiple of its expected time; after two of them the curve starts anew, and after two
        that take no multiple of the time at start it is that of the start."""
        rows, seconds = record.step.rows, record.step.step_s
        if self._has_jumped:
            is_back = seconds < JUMP_FACTOR * (self._start.seconds(rows) or 0.0)
            self._back = self._back + share if is_back else 0.0
            if self._back > 2 - share:
                self._curve.prime(self._start.points)
                self._restart()
                return True
        if ratio <= JUMP_FACTOR:
            self._far = max(0.0, self._far - share / 2)
            return False
        self._far += share * (2 if ratio > JUMP_FACTOR**2 else 1)
        if self._far > 2 - share:
            self._curve.restart(((1, seconds / rows), (rows, seconds))[rows == 1 :])
            self._restart(has_jumped=True)
        return True
