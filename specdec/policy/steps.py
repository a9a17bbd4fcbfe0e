"""T(rows, paths) of a target: seconds of its steps, learned from the rounds of all sessions. Pure.

T = speed * slowdown * (curve(rows) + path share * curve(1) * further paths). `speed` is the machine's and moves within
a second, the curve is learned slowly, `slowdown` is that by a draft that works beside the target, on its cores. A
change right after the draft began or stopped working is the draft's, any other the machine's. After a jump rows may
cost anything: the curve starts anew, in proportion to the rows, until steps take the times of the start again.
"""

from __future__ import annotations

import math

from specdec.protocol.records import RoundRecord
from specdec.step_curve import StepCurve

CURVE_WEIGHT, SPEED_S = 0.003, 0.7  # the curve is far slower than the speed, or both would share every change
SETTLING_STEPS = 8  # after the draft began or stopped working, that measure its slowdown
SLOWDOWN_WEIGHT, SLOWDOWN_MAX = 0.15, 4.0
JUMP_FACTOR = 4.0  # twice a multiple of the expected time, or once its square, is a jump; less is a pause
PATH_SHARE, PATH_WEIGHT = 0.015, 0.05  # of a further path over a step of one row: a guess; per step
STEP_S_GUESS = 0.02


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
        self._path_share, self._path_mean, self._path_variance = PATH_SHARE, 0.0, 1.0
        self._curve.prime(step_times)
        self._restart()

    def _restart(self) -> None:
        self._speed, self._slowdown, self._slowdown_steps = 1.0, 1.0, 0.0
        self._settling_steps = self._far_steps = self._back_steps = 0.0
        self._has_jumped = False

    def step_s(self, rows: float, is_drafting: bool, paths: float = 0.0) -> float:
        """Seconds of a step; `rows`, further `paths`: of all its sessions together; with or without a draft at work."""
        seconds = self._curve.seconds(rows) or STEP_S_GUESS
        return self._factor(is_drafting) * (seconds + paths * self._path_share * (self._curve.seconds(1) or seconds))

    def heads_s(self) -> float:
        """Seconds by which the target's heads lengthen a step if every session asks for them."""
        return self._speed * (self._heads.seconds(self.load) or 0.0)

    def slowdown_s(self) -> float:
        """Seconds that a draft at work adds to a step of one row of each session."""
        return self.step_s(self.load, True) - self.step_s(self.load, False)

    def fade(self, now_s: float) -> None:
        """Lets what no step measured lately return to the times at start."""
        self._curve.fade(now_s)

    def forget_slowdown(self, kept_share: float) -> None:
        """A draft did not work for long: its slowdown is uncertain."""
        self._slowdown = 1 + kept_share * (self._slowdown - 1)

    def on_step(self, record: RoundRecord) -> None:
        """Takes the step of one round, which each of its sessions reports; the caller leaves out those that read a
        prompt."""
        step, sessions = record.step, max(1, record.step.sessions)
        active = max(sessions, step.active_sessions)
        self.load += max(0.05, 0.2 / active) * (active - self.load)
        if record.plan.window:
            self._drafted_s = record.times.end_s
        is_drafting = self._drafted_s > record.times.start_s
        if is_drafting != self._is_drafting:
            self._is_drafting, self._settling_steps = is_drafting, float(SETTLING_STEPS)
        paths = sessions * max(0, record.tokens.path_count - 1)
        ratio = step.step_s / self.step_s(step.rows, is_drafting, paths)
        if not self._curve.seconds(1):
            self._curve.add(step.rows, step.step_s)
        elif not self._is_jump(record, ratio):
            self._learn(record, min(max(ratio, 0.5), 1.6), 1 / sessions, paths)

    def _learn(self, record: RoundRecord, ratio: float, share: float, paths: int) -> None:
        step = record.step
        if self._settling_steps > 0:
            if self._settling_steps < SETTLING_STEPS:  # the draft may have begun or ended within the first
                self._slowdown_steps += share
                self._learn_slowdown(1 + share * max(SLOWDOWN_WEIGHT, 1 / (1 + self._slowdown_steps)) * (ratio - 1))
            self._settling_steps -= share
        else:
            self._speed *= 1 + min(0.2, step.step_s / SPEED_S) * share * (ratio - 1)
        seconds = step.step_s / self._factor(self._is_drafting)
        unit_s = self._curve.seconds(1) or seconds
        if paths:
            error = seconds / unit_s - (self._curve.seconds(step.rows) or seconds) / unit_s - paths * self._path_share
            self._learn_path(error, paths * share, share)
        else:
            self._curve.add(step.rows, seconds)
            self._learn_path(0.0, 0.0, share)

    def _factor(self, is_drafting: bool) -> float:
        return self._speed * (self._slowdown if is_drafting else 1.0)

    def _learn_slowdown(self, factor: float) -> None:
        """Scales the estimate of steps like the last (drafting or not) and leaves that of the others."""
        if not self._is_drafting:
            self._speed *= factor
            factor = 1 / factor
        self._slowdown = min(max(self._slowdown * factor, 1.0), SLOWDOWN_MAX)

    def _learn_path(self, error: float, paths: float, share: float) -> None:
        """Learns the share of a path from errors that come with more or fewer paths than usual, as a slowdown that all
        steps share says nothing of paths. Without paths it returns to the guess."""
        beyond = paths - self._path_mean
        self._path_mean += PATH_WEIGHT * share * beyond
        self._path_variance += PATH_WEIGHT * share * (beyond**2 - self._path_variance)
        error = min(max(error, -0.1), 0.1)
        self._path_share += PATH_WEIGHT * share**2 * error * beyond / (1 + self._path_variance)
        if not paths:
            self._path_share += CURVE_WEIGHT * share * (PATH_SHARE - self._path_share)
        self._path_share = max(self._path_share, 0.0)

    def _is_jump(self, record: RoundRecord, ratio: float) -> bool:
        """Whether a step took a multiple of its expected time; after two of them the curve starts anew, and after two
        that take no multiple of the time at start it is that of the start."""
        step, share = record.step, 1 / max(1, record.step.sessions)
        if self._has_jumped:
            is_back = step.step_s < JUMP_FACTOR * (self._start.seconds(step.rows) or 0.0)
            self._back_steps = self._back_steps + share if is_back else 0.0
            if self._back_steps > 2 - share:
                self._curve.prime(self._start.points)
                self._restart()
                return True
        if ratio <= JUMP_FACTOR:
            self._far_steps = max(0.0, self._far_steps - share / 2)
            return False
        self._far_steps += share * (2 if ratio > JUMP_FACTOR**2 else 1)
        if self._far_steps > 2 - share:
            self._curve.restart(((1, step.step_s / step.rows), (step.rows, step.step_s))[step.rows == 1 :])
            self._restart()
            self._has_jumped = True
            self.jumps += 1
        return True
