"""Steps by their rows: against the values the samples were drawn around."""

from __future__ import annotations

import random

import pytest

from specdec.step_curve import FADE_EVERY_S, StepCurve


def step_s(rows: int) -> float:
    return 0.016 + 0.0005 * max(0, rows - 8)


def test_a_step_curve_finds_the_times_behind_noise_and_pauses() -> None:
    """Claim: within 5 % of the true time at every row count seen, though one sample in fifty is a pause twenty times
    as long. Conclusive: the plain mean of the same samples is off by 40 %."""
    rng, curve = random.Random(1), StepCurve()
    for _ in range(3000):
        rows = rng.randrange(1, 17)
        curve.add(rows, step_s(rows) * rng.uniform(0.95, 1.05) * (20 if rng.random() < 0.02 else 1))
    for rows in (1, 4, 8, 12, 16):
        assert curve.seconds(rows) == pytest.approx(step_s(rows), rel=0.05)


def test_a_step_curve_never_falls_and_goes_on_beyond_what_was_seen() -> None:
    """Claim: more rows never cost less, and far beyond the largest step seen the slope is that over its upper half,
    not the noise between two neighbours. Conclusive: the neighbours here would give a slope of 0 and of ten times."""
    curve = StepCurve()
    for rows, seconds in ((1, 0.02), (2, 0.019), (4, 0.022), (6, 0.0261), (8, 0.026)):
        for _ in range(300):
            curve.add(rows, seconds)
    values = [curve.seconds(rows) for rows in range(1, 40)]
    assert all(value is not None for value in values) and values == sorted(values)
    assert curve.seconds(16) == pytest.approx(0.0261 + 8 * (0.0261 - 0.022) / 4, rel=1e-6)


def test_a_step_curve_follows_a_machine_that_changes() -> None:
    """Claim: after 100 steps of a machine half as fast, the estimate is the new time within 2 %; before any, None."""
    curve = StepCurve()
    assert curve.seconds(1) is None
    for seconds in [0.01] * 1000 + [0.02] * 100:
        curve.add(1, seconds)
    assert curve.seconds(1) == pytest.approx(0.02, rel=0.02)


def test_times_that_no_step_measures_return_to_those_at_start() -> None:
    """Claim: after steps of 4 to 16 rows that took ten times as long as at start, and then a minute of steps of one
    row, twice as long as at start, the estimate of any number of rows is within 10 % of twice its time at start; while
    rows are measured their time stays, and without a start so does all.

    Conclusive: the only steps after the slow ones have one row; before the fading the estimate was ten times the start.
    """
    curve, bare = StepCurve(0.003), StepCurve(0.003)
    curve.prime(tuple((rows, step_s(rows)) for rows in (1, 2, 4, 8, 16)))
    for own in (curve, bare):
        for rows in (4, 6, 8, 12, 16) * 400:
            own.add(rows, 10 * step_s(rows))
    assert curve.seconds(12) == pytest.approx(10 * step_s(12), rel=0.05)
    for period in range(1 + round(60 / FADE_EVERY_S)):
        for own in (curve, bare):
            for _ in range(250):
                own.add(1, 2 * step_s(1))
            own.fade(period * FADE_EVERY_S)
    for rows in (1, 2, 4, 6, 8, 12, 16):
        assert curve.seconds(rows) == pytest.approx(2 * step_s(rows), rel=0.1), rows
    assert bare.seconds(12) == pytest.approx(10 * step_s(12), rel=0.05)
