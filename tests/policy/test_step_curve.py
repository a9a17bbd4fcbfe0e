"""Steps by their rows: against the values the samples were drawn around."""

from __future__ import annotations

import random

import pytest

from specdec.policy.steps import FADE_EVERY_S, PATH_SHARE_GUESS, SHAPE_WEIGHT, StepCurve, Steps
from specdec.protocol.plan import Plan
from specdec.protocol.records import RoundRecord
from specdec.protocol.types import TokenKind
from tests.support.records import round_record


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
    curve, bare = StepCurve(SHAPE_WEIGHT), StepCurve(SHAPE_WEIGHT)
    curve.prime(tuple((rows, step_s(rows)) for rows in (1, 2, 4, 8, 16)))
    for own in (curve, bare):
        for rows in (4, 6, 8, 12, 16) * 400:
            own.add(rows, 10 * step_s(rows))
    assert curve.seconds(12) == pytest.approx(10 * step_s(12), rel=0.05)
    for _ in range(round(60 / FADE_EVERY_S)):
        for own in (curve, bare):
            for _ in range(250):
                own.add(1, 2 * step_s(1))
            own.fade()
    for rows in (1, 2, 4, 6, 8, 12, 16):
        assert curve.seconds(rows) == pytest.approx(2 * step_s(rows), rel=0.1), rows
    assert bare.seconds(12) == pytest.approx(10 * step_s(12), rel=0.05)


TREE = Plan(8, 12, 4, siblings=2)


def tree_round(index: int, rows: int, paths: int, seconds: float) -> RoundRecord:
    return round_record(
        index,
        TREE,
        offered_count=rows - 1,
        next_kind=TokenKind.RECOVERED,
        path_count=paths,
        start_s=index * 0.05,
        end_s=index * 0.05 + 0.04,
        round_trip_s=0.03,
        forward_s=seconds,
        rows=rows,
    )


def test_the_time_of_a_path_is_told_from_the_speed_of_the_machine() -> None:
    """Claim: with steps that jitter by 20 %, of which four in ten have further paths, on a machine that slows to 0.7 of
    its speed in between, a further path is estimated within 0.04 of its true 0.05 of a step of one row, and the step of
    one row within 10 %; a share that a disturbance pushed up falls back while no step has further paths.

    Conclusive: a share that took a part of the slowdown would be above 0.15, and without the way back it stays at 0.4.
    """
    rng, steps = random.Random(4), Steps()
    steps.prime(tuple((rows, step_s(rows)) for rows in (1, 2, 4, 8, 16)))
    for index in range(4000):
        slower = 1 / 0.7 if index >= 2000 else 1.0
        rows = rng.choice((1, 2, 3, 5, 7, 9, 13, 16))
        paths = rng.choice((1, 2, 4)) if rows > 4 else 1
        true_s = slower * (step_s(rows) + 0.05 * step_s(1) * max(0, paths - 1))
        steps.on_step(tree_round(index, rows, paths, true_s * rng.uniform(0.8, 1.2)))
    assert steps.path_s(True) / steps.seconds(1, True) == pytest.approx(0.05, abs=0.04)
    assert steps.seconds(1, True) == pytest.approx(step_s(1) / 0.7, rel=0.1)
    steps._path_share = 0.4
    for index in range(4000, 8000):
        steps.on_step(tree_round(index, 5, 1, step_s(5) / 0.7))
    assert steps.path_s(True) / steps.seconds(1, True) < 0.05
    steps.prime(((1, 0.01),))
    assert steps.path_s(True) == pytest.approx(PATH_SHARE_GUESS * 0.01, rel=0.05)


def test_a_jump_begins_a_new_curve_that_ends_with_it() -> None:
    """Claim: one long step is a pause and changes no estimate by more than 2 %; after two the steps of the jump and
    those after it are the curve, a jump in the price of a row included; steps of the old times bring the old curve
    back, rows not seen since included. Conclusive: by the old curve times 8.6, the ratio of the first long steps, a
    step of 40 rows would take 1.7 times its true time."""
    steps, index = Steps(), 0

    def take(rows: int, seconds: float, count: int) -> None:
        nonlocal index
        for _ in range(count):
            steps.on_step(tree_round(index, rows, 1, seconds))
            index += 1

    def steep_s(rows: int) -> float:
        return 0.02 * (0.5 + rows / 8)

    steps.prime(((1, 0.02), (96, 0.025)))
    take(80, steps.seconds(80, True), 200)
    usual_s = steps.seconds(80, True)
    take(80, 6 * usual_s, 1)
    assert steps.seconds(80, True) == pytest.approx(usual_s, rel=0.02) and steps.jump_s < 0
    take(80, usual_s, 20)
    take(80, steep_s(80), 2)
    assert steps.jump_s > 0 and steps.seconds(80, True) == pytest.approx(steep_s(80))
    take(40, steep_s(40), 40)
    assert steps.seconds(40, True) == pytest.approx(steep_s(40), rel=0.3)
    take(80, usual_s, 3)
    assert steps.seconds(80, True) == pytest.approx(usual_s, rel=0.02)
    assert steps.seconds(1, True) == pytest.approx(0.02, rel=0.05)


def test_a_slowdown_is_not_taken_for_the_time_of_paths() -> None:
    """Claim: on a machine that slows by 30 % while trees are verified, as it does when a draft on its cores begins, the
    estimated time of a further path stays within 0.01 of its true 0.015 of a step, where all trees have as many paths
    and where they differ. Conclusive: a mean of the time beyond the rows' was 0.08 too high."""
    for choices in ((4,), (2, 4, 6)):
        rng, steps = random.Random(5), Steps()
        steps.prime(tuple((rows, step_s(rows)) for rows in (1, 2, 4, 8, 16)))
        for index in range(400):
            paths, slower = rng.choice(choices), 1.3 if index >= 100 else 1.0
            true_s = slower * (step_s(9) + PATH_SHARE_GUESS * step_s(1) * (paths - 1))
            steps.on_step(tree_round(index, 9, paths, true_s))
            assert abs(steps.path_s(True) / steps.seconds(1, True) - PATH_SHARE_GUESS) < 0.01, (choices, index)
