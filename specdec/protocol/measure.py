"""What a process has learnt about its own steps and links: running estimates, told of samples, asked for times.

Pure: no clock, no messages. Everything forgets slowly, so that it follows a machine that changes.
"""

from __future__ import annotations

import bisect

ROW_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # a bucket ends at each
SAMPLE_WEIGHT = 0.1  # of the newest sample in a bucket's mean, once it holds a few
OUTLIER_FACTOR = 2.0  # a sample counts for at most so many times the mean: a pause of the machine is no step


class StepCurve:
    """Seconds a step takes, as a function of its rows (or leaves): robust means in buckets, straight lines between."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[float]] = {}  # bucket -> [samples, mean rows, mean seconds]

    def add(self, rows: int, seconds: float) -> None:
        """Tells one step."""
        bucket = self._buckets.setdefault(bisect.bisect_left(ROW_EDGES, rows), [0.0, float(rows), seconds])
        bucket[0] += 1
        weight = max(SAMPLE_WEIGHT, 1 / bucket[0])
        bucket[1] += weight * (rows - bucket[1])
        bucket[2] += weight * (min(seconds, OUTLIER_FACTOR * bucket[2]) - bucket[2])

    def seconds(self, rows: float) -> float | None:
        """The time of a step of so many rows; None before the first sample. Never falls as rows grow.

        Beyond the largest step seen it goes on in proportion to the last two; below the smallest it is flat.
        """
        points: list[tuple[float, float]] = []
        for _, bucket in sorted(self._buckets.items()):
            points.append((bucket[1], max(bucket[2], points[-1][1] if points else 0.0)))
        if not points:
            return None
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        index = min(bisect.bisect_left(points, (rows, 0.0)), len(points) - 1)
        (low, low_s), (high, high_s) = points[index - 1], points[index]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)
