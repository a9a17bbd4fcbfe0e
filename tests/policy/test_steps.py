"""T(rows, paths) of a target, learned from rounds: against the times the rounds were made of."""

from __future__ import annotations

import random

import pytest

from specdec.policy.steps import PATH_SHARE, StepTimes
from specdec.protocol.plan import Plan
from specdec.protocol.records import RoundRecord
from specdec.protocol.types import TokenKind
from tests.policy.test_step_curve import step_s
from tests.support.records import round_record

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


def path_share(steps: StepTimes) -> float:
    """What a further path adds, as a share of a step of one row."""
    return steps.step_s(1, True, 1) / steps.step_s(1, True) - 1


def test_the_time_of_a_path_is_told_from_the_speed_of_the_machine() -> None:
    """Claim: with steps that jitter by 20 %, of which four in ten have further paths, on a machine that slows to 0.7 of
    its speed in between, a further path is estimated within 0.04 of its true 0.05 of a step of one row, and the step of
    one row within 10 %; a share that a disturbance pushed up falls back while no step has further paths.

    Conclusive: a share that took a part of the slowdown would be above 0.15, and without the way back it stays at 0.4.
    """
    rng, steps = random.Random(4), StepTimes()
    steps.prime(tuple((rows, step_s(rows)) for rows in (1, 2, 4, 8, 16)))
    for index in range(4000):
        slower = 1 / 0.7 if index >= 2000 else 1.0
        rows = rng.choice((1, 2, 3, 5, 7, 9, 13, 16))
        paths = rng.choice((1, 2, 4)) if rows > 4 else 1
        true_s = slower * (step_s(rows) + 0.05 * step_s(1) * max(0, paths - 1))
        steps.on_step(tree_round(index, rows, paths, true_s * rng.uniform(0.8, 1.2)))
    assert path_share(steps) == pytest.approx(0.05, abs=0.04)
    assert steps.step_s(1, True) == pytest.approx(step_s(1) / 0.7, rel=0.1)
    steps._path_share = 0.4
    for index in range(4000, 8000):
        steps.on_step(tree_round(index, 5, 1, step_s(5) / 0.7))
    assert path_share(steps) < 0.05
    steps.prime(((1, 0.01),))
    assert path_share(steps) == pytest.approx(PATH_SHARE)


def test_a_jump_begins_a_new_curve_that_ends_with_it() -> None:
    """Claim: one long step is a pause and changes no estimate by more than 2 %; after two the steps of the jump and
    those after it are the curve, a jump in the price of a row included; steps of the old times bring the old curve
    back, rows not seen since included. Conclusive: by the old curve times 8.6, the ratio of the first long steps, a
    step of 40 rows would take 1.7 times its true time."""
    steps, index = StepTimes(), 0

    def take(rows: int, seconds: float, count: int) -> None:
        nonlocal index
        for _ in range(count):
            steps.on_step(tree_round(index, rows, 1, seconds))
            index += 1

    def steep_s(rows: int) -> float:
        return 0.02 * (0.5 + rows / 8)

    steps.prime(((1, 0.02), (96, 0.025)))
    take(80, steps.step_s(80, True), 200)
    usual_s = steps.step_s(80, True)
    take(80, 6 * usual_s, 1)
    assert steps.step_s(80, True) == pytest.approx(usual_s, rel=0.02) and steps.jumps == 0
    take(80, usual_s, 20)
    take(80, steep_s(80), 2)
    assert steps.jumps == 1 and steps.step_s(80, True) == pytest.approx(steep_s(80))
    take(40, steep_s(40), 40)
    assert steps.step_s(40, True) == pytest.approx(steep_s(40), rel=0.3)
    take(80, usual_s, 3)
    assert steps.step_s(80, True) == pytest.approx(usual_s, rel=0.02)
    assert steps.step_s(1, True) == pytest.approx(0.02, rel=0.05)


def test_a_slowdown_is_not_taken_for_the_time_of_paths() -> None:
    """Claim: on a machine that slows by 30 % while trees are verified, as it does when a draft on its cores begins, the
    estimated time of a further path stays within 0.01 of its true 0.015 of a step, where all trees have as many paths
    and where they differ. Conclusive: a mean of the time beyond the rows' was 0.08 too high."""
    for choices in ((4,), (2, 4, 6)):
        rng, steps = random.Random(5), StepTimes()
        steps.prime(tuple((rows, step_s(rows)) for rows in (1, 2, 4, 8, 16)))
        for index in range(400):
            paths, slower = rng.choice(choices), 1.3 if index >= 100 else 1.0
            true_s = slower * (step_s(9) + PATH_SHARE * step_s(1) * (paths - 1))
            steps.on_step(tree_round(index, 9, paths, true_s))
            assert abs(path_share(steps) - PATH_SHARE) < 0.01, (choices, index)
