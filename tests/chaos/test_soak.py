"""The parts of the soak that count: slopes and growth of made-up series."""

from __future__ import annotations

import pytest

from tests.chaos.gauges import Sample, Series


def series_of(memory_mb: list[float], descriptors: list[int]) -> Series:
    """A sample a minute."""
    minutes = [(minute / 60, Sample(mb, fd, 14)) for minute, (mb, fd) in enumerate(zip(memory_mb, descriptors), 1)]
    return Series(pid=0, minutes=minutes)


def test_growth_is_seen_through_jumps_and_warm_up_is_not() -> None:
    """Claim: the slope is that of the memory which stays: 2 MB an hour are found beside a jump of 50 MB in one minute,
    and a steep warm-up does not count.

    Conclusive: the series are made with known slopes.
    """
    growing = [300 - 10 * max(0, 10 - minute) + 2 * minute / 60 + 50 * (minute == 30) for minute in range(1, 61)]
    leaking = series_of(growing, [20 + minute // 20 for minute in range(1, 61)])
    assert leaking.memory_slope_mb_h(10 / 60) == pytest.approx(2.0, abs=0.05)
    assert leaking.growth("descriptors", 10 / 60) == 2
    flat = series_of([400.0 + minute % 3 for minute in range(60)], [21 + minute % 2 for minute in range(60)])
    assert abs(flat.memory_slope_mb_h(10 / 60)) < 1e-6
    assert flat.growth("descriptors", 10 / 60) == 0
