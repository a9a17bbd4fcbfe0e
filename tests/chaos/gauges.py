"""Memory, descriptors and threads of processes over an hour: the least value of each minute, and its slope."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.processes import anonymous_mb, descriptor_count, thread_count


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    memory_mb: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Sample:
        """A sample now."""
        return cls(anonymous_mb(pid), descriptor_count(pid), thread_count(pid))


def least(samples: Sequence[Sample]) -> Sample:
    """The least of each: what is there when nothing is under way."""
    return Sample(
        min(one.memory_mb for one in samples),
        min(one.descriptors for one in samples),
        min(one.threads for one in samples),
    )


@dataclass(slots=True)
class Series:
    """The least values of each minute of one process."""

    pid: int
    minutes: list[tuple[float, Sample]] = field(default_factory=list)  # (hours since the start, least of the minute)
    current: list[Sample] = field(default_factory=list)

    def sample(self) -> None:
        self.current.append(Sample.of(self.pid))

    def end_minute(self, began_s: float) -> Sample:
        """Files the minute and returns its least values."""
        found = least(self.current)
        self.minutes.append(((time.monotonic() - began_s) / 3600, found))
        self.current = []
        return found

    def after(self, warm_up_h: float) -> list[tuple[float, Sample]]:
        return [(moment_h, sample) for moment_h, sample in self.minutes if moment_h > warm_up_h]

    def memory_slope_mb_h(self, warm_up_h: float) -> float:
        """Theil and Sen's slope after the warm-up: the median over all pairs of minutes, which no single jump moves."""
        points = [(moment_h, sample.memory_mb) for moment_h, sample in self.after(warm_up_h)]
        return statistics.median((b - a) / (t - s) for (s, a), (t, b) in itertools.combinations(points, 2))

    def growth(self, name: str, warm_up_h: float) -> float:
        """Of a count: least in the last third after the warm-up minus least in the first third."""
        values = [getattr(sample, name) for _, sample in self.after(warm_up_h)]
        third = max(1, len(values) // 3)
        return float(min(values[-third:]) - min(values[:third]))


def by_name(series: Mapping[str, Series], name: str, warm_up_h: float) -> dict[str, float]:
    """The growth of a count of each process."""
    return {process: one.growth(name, warm_up_h) for process, one in series.items()}
