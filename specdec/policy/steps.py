"""Step time by rows: a curve learned from measured steps, and a target's T(rows, paths). Pure.

T(rows, paths) = level * (shape(rows) + path share * shape(1) * further paths) * contention: `level` is the machine's
current speed and moves within a second, `shape` is learned slowly, the path share where steps differ in their paths,
`contention` is the slowdown of the target by the draft's work on shared cores, 1 while no session speculates. A change
right after the draft began or stopped working is the draft's; any other is the machine's. After a jump rows may cost
anything: a new curve begins with the steps of the jump, and ends when steps take the time of the old one again.

What no step measures for some time fades to what was known at start. Otherwise requests of one kind could raise the
time of drafting's steps so far that nothing is drafted, and nothing would measure that time again.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

from specdec.protocol.records import RoundRecord

ROW_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # a bucket ends at each
SAMPLE_WEIGHT = 0.05  # of the newest sample in a running mean: about the last 20 count
OUTLIER_FACTOR = 1.5  # limit of a sample, relative to the mean: a pause of the machine is no step
SHAPE_WEIGHT = 0.003  # far slower than the level, or both would share every change
LEVEL_S = 0.7  # the level follows the machine within about this time
CONTENTION_FROM, CONTENTION_ROUNDS = 1, 8  # steps after the draft was told to begin or stop that measure its cost
CONTENTION_WEIGHT = 0.25
CONTENTION_MAX = 4.0
RATIO_MIN, RATIO_MAX = 0.5, 1.6  # limits of observed to expected, for pauses of the machine
FAR_FACTOR, FAR_STEPS, FAR_BACK = 4.0, 1.9, 0.5  # steps of that multiple of their expected time that are no pauses
FARTHEST = 16.0  # one step of that multiple is enough
SESSIONS_WEIGHT = 0.05
ALIKE = 0.2  # turns depend on waiting: learned while at most this share of the sessions differs
STEP_S_GUESS = 0.02
PATH_SHARE_GUESS, PATH_ERROR_MAX = 0.015, 0.1  # a further path of a tree, and the error of a step, over one of one row
PATH_WEIGHT, PATH_BACK = 0.05, 0.001  # per step, and back to the guess per step without further paths
FADE_EVERY_S, FADE_S = 5.0, 15.0  # what was not measured in the first of these times fades, by 1 / e in the second
FADE_SHARE = 1 - math.exp(-FADE_EVERY_S / FADE_S)


class Fading:
    """The times at which measurements fade: time without a call does not count, as nothing could be measured in it."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def is_due(self, now_s: float) -> bool:
        """Whether FADE_EVERY_S passed; the next period begins then."""
        if now_s < self._last_s + FADE_EVERY_S:
            return False
        self._last_s = now_s
        return True


class StepCurve:
    """Seconds of a step as a function of its rows (or nodes): robust means in buckets, linear interpolation between."""

    def __init__(self, sample_weight: float = SAMPLE_WEIGHT) -> None:
        self._sample_weight = sample_weight
        self._buckets: dict[int, list[float]] = {}  # bucket -> [samples, mean rows, mean seconds]
        self._points: list[tuple[float, float]] = []  # (mean rows, seconds) of every bucket; seconds never fall
        self._start: list[tuple[float, float]] = []  # the points as another machine measured them at start
        self._measured: set[int] = set()  # buckets of steps since the last fading

    def prime(self, step_times: tuple[tuple[int, float], ...]) -> None:
        """Begins again with the (rows, seconds) that another machine measured at start."""
        self._measured.clear()
        self._buckets = {bisect.bisect_left(ROW_EDGES, rows): [1.0, float(rows), s] for rows, s in step_times}
        self._points = self._start = self._rising()

    def add(self, rows: float, seconds: float) -> float:
        """Adds one step; returns the mean seconds of steps of about as many rows, this one included. The first step of
        a bucket counts beside the estimate of the others: it may have prepared something."""
        index = bisect.bisect_left(ROW_EDGES, rows)
        bucket = self._buckets.get(index)
        if bucket is None:
            guess_s = self.seconds(rows)
            bucket = self._buckets[index] = [float(guess_s is not None), float(rows), guess_s or seconds]
        self._points = []
        self._measured.add(index)
        bucket[0] += 1
        weight = max(self._sample_weight, 1 / bucket[0])
        bucket[1] += weight * (rows - bucket[1])
        bucket[2] += weight * (min(seconds, OUTLIER_FACTOR * bucket[2]) - bucket[2])
        return bucket[2]

    def seconds(self, rows: float) -> float | None:
        """Returns the seconds of a step of `rows` rows; None before the first sample. Never falls as rows grow.

        Constant below the smallest measured step. Beyond the largest it continues the line from a step of half its
        rows: the slope between two neighbours would be noise.
        """
        if not self._buckets:
            return None
        if not self._points:
            self._points = self._rising()
        return interpolated(self._points, rows)

    def _rising(self) -> list[tuple[float, float]]:
        points: list[tuple[float, float]] = []
        for _, (_, mean_rows, mean_s) in sorted(self._buckets.items()):
            points.append((mean_rows, max(mean_s, points[-1][1] if points else 0.0)))
        return points

    def fade(self) -> None:
        """Moves the buckets without a step since the last call towards the times at start, times the least slowdown of
        those with steps, which is the machine's: of some rows it may be their requests'. They weigh less against their
        next steps."""
        measured, self._measured = self._measured, set()
        if not self._start or len(measured) == len(self._buckets):
            return
        ratios = [own[2] / interpolated(self._start, own[1]) for own in map(self._buckets.__getitem__, measured)]
        slowdown = min(ratios, default=1.0)
        for index, bucket in self._buckets.items():
            if index not in measured:
                bucket[0] = max(1.0, (1 - FADE_SHARE) * bucket[0])
                bucket[2] += FADE_SHARE * (slowdown * interpolated(self._start, bucket[1]) - bucket[2])
        self._points = []


def interpolated(points: list[tuple[float, float]], rows: float) -> float:
    """The seconds of `rows` rows by (rows, seconds) in order, as `StepCurve.seconds` says."""
    if rows <= points[0][0] or len(points) == 1:
        return points[0][1]
    last, last_s = points[-1]
    if rows > last:
        first, first_s = next((point for point in reversed(points) if point[0] <= last / 2), points[0])
        return last_s + (last_s - first_s) * (rows - last) / (last - first)
    index = bisect.bisect_left(points, (rows, 0.0))
    (low, low_s), (high, high_s) = points[index - 1], points[index]
    return low_s + (high_s - low_s) * (rows - low) / (high - low)


@dataclass(slots=True)
class StepTimes:
    """T(rows) of a machine in one state: see the module."""

    shape: StepCurve = field(default_factory=lambda: StepCurve(SHAPE_WEIGHT))
    level: float = 1.0
    contention: float = 1.0

    def speed(self, is_drafting: bool) -> float:
        """Seconds of a step over the shape's."""
        return self.level * (self.contention if is_drafting else 1.0)

    def seconds(self, rows: float, is_drafting: bool) -> float:
        """Seconds of a step of `rows` rows."""
        return (self.shape.seconds(rows) or STEP_S_GUESS) * self.speed(is_drafting)


class Steps:
    """T(rows) of all sessions of one rule, with and without a working draft beside the target."""

    def __init__(self) -> None:
        self._times = StepTimes()
        self._before: StepTimes | None = None  # those before a jump
        self._heads = StepCurve()
        self._path_share = PATH_SHARE_GUESS
        self._path_mean = self._path_variance = 0.0  # of the further paths of late steps
        self._is_drafting = False
        self._steps_since_change = CONTENTION_ROUNDS
        self._contention_steps = 0.0
        self._drafted_s = float("-inf")
        self._far: list[tuple[int, float]] = []  # (rows, seconds) of steps that took far too long, lately
        self._far_steps = self._back_steps = 0.0
        self.jump_s = float("-inf")
        self.sessions = self.active = 1.0
        self._waiting = 0.0  # share of sessions whose plan waits
        self._turns = [1.0, 1.0]  # steps in a round where no session waits, and where all do
        self._fading = Fading()
        self._have_drafted = False  # since the last fading
        self._turns_measured: set[bool] = set()  # of `_turns`, since the last fading

    def prime(self, step_times: tuple[tuple[int, float], ...], head_times: tuple[tuple[int, float], ...] = ()) -> None:
        """Another target is connected: takes the (rows, seconds) of steps and the (sessions, seconds) of heads
        that it measured at start."""
        self._times, self._before = StepTimes(), None
        self._path_share, self._path_mean, self._path_variance = PATH_SHARE_GUESS, 0.0, 0.0
        self._times.shape.prime(step_times)
        self._heads.prime(head_times)

    def on_step(self, record: RoundRecord) -> None:
        """Takes one round's step; the caller leaves out steps that read a prompt."""
        weight = max(SESSIONS_WEIGHT, 0.2 / max(1, record.step.active_sessions))
        self.sessions += weight * (max(1, record.step.sessions) - self.sessions)
        self.active += weight * (max(1, record.step.sessions, record.step.active_sessions) - self.active)
        waits = record.plan.wait_length > 0
        self._waiting += weight * (waits - self._waiting)
        if abs(self._waiting - waits) < ALIKE:
            self._turns[waits] += weight * (self.active / self.sessions - self._turns[waits])
            self._turns_measured.add(waits)
        if record.plan.window:
            self._drafted_s = record.times.end_s
        is_drafting = self._drafted_s > record.times.start_s
        self._have_drafted |= is_drafting
        if is_drafting != self._is_drafting:
            self._is_drafting, self._steps_since_change = is_drafting, 0
        self._steps_since_change += 1
        self._return_to_old(record)
        times = self._times
        speed = times.speed(is_drafting)
        mean_s = self._expected_s(record, record.step.step_s / speed)
        ratio = record.step.step_s / (speed * mean_s)
        if self._is_device(record, ratio):
            return
        ratio = min(max(ratio, RATIO_MIN), RATIO_MAX)
        if self._steps_since_change <= CONTENTION_FROM * self.sessions:
            return
        if self._steps_since_change <= CONTENTION_ROUNDS * self.sessions:
            self._contention_steps += 1 / self.sessions
            gain = max(CONTENTION_WEIGHT, 1 / (1 + self._contention_steps)) / self.sessions
            self._learn_contention(1 + gain * (ratio - 1))
        else:
            times.level *= 1 + min(0.2, record.step.step_s / (LEVEL_S * self.sessions)) * (ratio - 1)

    def _is_device(self, record: RoundRecord, ratio: float) -> bool:
        """Takes a step and its ratio to the expected time; returns whether it took far longer. One alone is a pause;
        after several a new curve begins with them."""
        step = 1 / max(1, record.step.sessions)
        if ratio <= FAR_FACTOR:
            self._far_steps = max(0.0, self._far_steps - FAR_BACK * step)
            return False
        if not self._far_steps:
            self._far = []
        self._far.append((record.step.rows, record.step.step_s))
        self._far_steps += step if ratio < FARTHEST else FAR_STEPS * step
        if self._far_steps >= FAR_STEPS:
            self._before, self._times = self._before or self._times, StepTimes()
            self._times.shape.prime(tuple(self._far))
            self._far_steps = self._back_steps = 0.0
            self.jump_s = record.times.end_s
        return True

    def _return_to_old(self, record: RoundRecord) -> None:
        """Ends the curve of a jump after several steps that are not far from the one before it."""
        if self._before is None:
            return
        is_device = record.step.step_s > FAR_FACTOR * self._before.seconds(record.step.rows, self._is_drafting)
        self._back_steps = 0.0 if is_device else self._back_steps + 1 / max(1, record.step.sessions)
        if self._back_steps >= FAR_STEPS:
            self._times, self._before = self._before, None

    def _expected_s(self, record: RoundRecord, seconds: float) -> float:
        """Learns from a step of `seconds` at the usual speed; returns the seconds of steps of its rows and paths. Of
        the other sessions in the step nothing is known but their rows: they count as having as many paths. A slowdown
        that all steps share says nothing of paths: the share follows errors that come with more or fewer of them."""
        sessions, further = max(1, record.step.sessions), max(0, record.tokens.path_count - 1)
        shape = self._times.shape
        flat_s, unit_s = shape.seconds(record.step.rows), shape.seconds(1)
        if not further or flat_s is None or unit_s is None:
            expected_s = shape.add(record.step.rows, seconds)
            unit_s = shape.seconds(1) or seconds
            self._path_share += PATH_BACK / sessions * (PATH_SHARE_GUESS - self._path_share)
        else:
            expected_s = flat_s + further * sessions * self._path_share * unit_s
        beyond = further - self._path_mean
        self._path_mean += PATH_WEIGHT / sessions * beyond
        self._path_variance += PATH_WEIGHT / sessions * (beyond**2 - self._path_variance)
        error = min(max((seconds - expected_s) / unit_s, -PATH_ERROR_MAX), PATH_ERROR_MAX)
        self._path_share += PATH_WEIGHT * error * beyond / (sessions**2 * (1 + self._path_variance))
        self._path_share = max(self._path_share, 0.0)
        return expected_s

    def fade(self, now_s: float) -> None:
        """Lets what no step measured lately fade; call it from time to time while steps run."""
        if not self._fading.is_due(now_s):
            return
        self._times.shape.fade()
        if not self._have_drafted:
            self._times.contention += FADE_SHARE * (1 - self._times.contention)
        for waits in {False, True} - self._turns_measured:
            self._turns[waits] += FADE_SHARE * (1 - self._turns[waits])
        self._have_drafted = False
        self._turns_measured.clear()

    def _learn_contention(self, factor: float) -> None:
        """Scales the estimate of steps like the last (drafting or not) and leaves the estimate of the others."""
        if not self._is_drafting:
            self._times.level *= factor
            factor = 1 / factor
        self._times.contention = min(max(self._times.contention * factor, 1.0), CONTENTION_MAX)

    def seconds(self, rows: float, is_drafting: bool) -> float:
        """Seconds of a step; `rows`: of all its sessions together."""
        return self._times.seconds(rows, is_drafting)

    def heads_s(self, is_drafting: bool) -> float:
        """Seconds by which the target's heads lengthen a step if every session asks for them."""
        heads_s = self._heads.seconds(self.active)
        return (heads_s or 0.0) * self._times.speed(is_drafting)

    def path_s(self, is_drafting: bool) -> float:
        """Seconds by which a further path of a tree lengthens a step, beside its rows."""
        return self._path_share * self.seconds(1, is_drafting)

    def round_s(self, rows: float, is_drafting: bool, waits: bool, paths: float = 0.0) -> float:
        """Seconds of the steps in a round if every session has `rows` rows and `paths` further paths: more than one
        step where the sessions take turns, as those that wait for the draft may."""
        turns = max(1.0, self._turns[waits])
        flat_s = turns * self.seconds(self.active / turns * rows, is_drafting)
        return flat_s + self.active * paths * self.path_s(is_drafting)
