"""Step time by rows: robust means of measured steps in buckets of rows, linear interpolation between. Pure.

What no step measures for some time fades to what was known at start, if anything was. Otherwise requests of one kind
could raise the time of a plan's steps so far that the plan is not chosen, and nothing would measure that time again.
"""

from __future__ import annotations

import bisect
import math

ROW_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # a bucket ends at each
SAMPLE_WEIGHT = 0.05  # of the newest sample in a running mean: about the last 20 count
OUTLIER_FACTOR = 1.5  # limit of a sample, relative to the mean: a pause of the machine is no step
FADE_EVERY_S, FADE_S = 5.0, 15.0  # what was not measured in the first of these times fades, by 1 / e in the second
FADE_SHARE = 1 - math.exp(-FADE_EVERY_S / FADE_S)


class StepCurve:
    """Seconds of a step as a function of its rows (or nodes)."""

    def __init__(self, sample_weight: float = SAMPLE_WEIGHT) -> None:
        self._sample_weight = sample_weight
        self._buckets: dict[int, list[float]] = {}  # bucket -> [samples, mean rows, mean seconds]
        self._points: list[tuple[float, float]] = []  # (mean rows, seconds) of every bucket; seconds never fall
        self._start: list[tuple[float, float]] = []  # the points as another machine measured them at start
        self._measured: set[int] = set()  # buckets of steps since the last fading
        self._faded_s = -math.inf

    def prime(self, step_times: tuple[tuple[float, float], ...]) -> None:
        """Begins again with the (rows, seconds) that another machine measured at start."""
        self.restart(step_times)
        self._start = self._points

    def restart(self, step_times: tuple[tuple[float, float], ...]) -> None:
        """Begins again with (rows, seconds) that the next steps correct; nothing fades to them."""
        self._measured.clear()
        self._buckets = {bisect.bisect_left(ROW_EDGES, rows): [1.0, float(rows), s] for rows, s in step_times}
        self._points, self._start = self._rising(), []

    def add(self, rows: float, seconds: float) -> None:
        """Adds one step. The first step of a bucket counts beside the estimate of the others: it may have prepared
        something."""
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

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(rows, seconds) of all buckets."""
        return tuple(self._points or self._rising())

    def _rising(self) -> list[tuple[float, float]]:
        points: list[tuple[float, float]] = []
        for _, (_, mean_rows, mean_s) in sorted(self._buckets.items()):
            points.append((mean_rows, max(mean_s, points[-1][1] if points else 0.0)))
        return points

    def fade(self, now_s: float) -> None:
        """Every FADE_EVERY_S, moves the buckets without a step since then towards the times at start, times the least
        slowdown of those with steps, which is the machine's: of some rows it may be their requests'. They weigh less
        against their next steps. Call it from time to time while steps run."""
        if now_s < self._faded_s + FADE_EVERY_S:
            return
        self._faded_s = now_s
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
