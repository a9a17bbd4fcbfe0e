"""Seconds a step takes by its rows, learnt from the steps that were seen. Pure; it forgets, so it follows a machine."""

from __future__ import annotations

import bisect

ROW_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # a bucket ends at each
SAMPLE_WEIGHT = 0.05  # of the newest sample in a running mean, once it holds a few: about the last 20 count
OUTLIER_FACTOR = 1.5  # a sample counts for at most so many times the mean: a pause of the machine is no step


class StepCurve:
    """Seconds a step takes, as a function of its rows (or leaves): robust means in buckets, straight lines between."""

    def __init__(self, sample_weight: float = SAMPLE_WEIGHT) -> None:
        self._sample_weight = sample_weight
        self._buckets: dict[int, list[float]] = {}  # bucket -> [samples, mean rows, mean seconds]
        self._points: list[tuple[float, float]] = []  # (mean rows, seconds) of every bucket; seconds never fall

    def add(self, rows: float, seconds: float) -> float:
        """Tells one step; returns the mean of steps of about so many rows, this one included."""
        self._points = []
        bucket = self._buckets.setdefault(bisect.bisect_left(ROW_EDGES, rows), [0.0, float(rows), seconds])
        bucket[0] += 1
        weight = max(self._sample_weight, 1 / bucket[0])
        bucket[1] += weight * (rows - bucket[1])
        bucket[2] += weight * (min(seconds, OUTLIER_FACTOR * bucket[2]) - bucket[2])
        return bucket[2]

    def seconds(self, rows: float) -> float | None:
        """The time of a step of so many rows; None before the first sample. Never falls as rows grow.

        Below the smallest step seen it is flat. Beyond the largest it goes on as from a step of half its rows to it: a
        slope between two neighbours would be their noise.
        """
        if not self._buckets:
            return None
        points = self._points
        if not points:
            for _, (_, mean_rows, mean_s) in sorted(self._buckets.items()):
                points.append((mean_rows, max(mean_s, points[-1][1] if points else 0.0)))
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        last, last_s = points[-1]
        if rows > last:
            first, first_s = next((point for point in reversed(points) if point[0] <= last / 2), points[0])
            return last_s + (last_s - first_s) * (rows - last) / (last - first)
        index = bisect.bisect_left(points, (rows, 0.0))
        (low, low_s), (high, high_s) = points[index - 1], points[index]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)
