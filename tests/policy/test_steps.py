"""T(rows, paths) of a target, learned from rounds: against the times the rounds were made of."""

from __future__ import annotations

import random

import pytest

from specdec.policy.steps import PATH_SHARE, StepTimes
from specdec.protocol.plan import OFF_PLAN, Plan
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


def test_a_machine_that_slows_is_followed_with_trees_too() -> None:
    """Claim: with steps that jitter by 20 %, of which four in ten have further paths, on a machine that slows to 0.7 of
    its speed in between, the step of one row is estimated within 10 %, and a further path at its share of it.
    Conclusive: before the machine slowed, the estimate was 0.7 of that."""
    rng, steps = random.Random(4), StepTimes()
    steps.prime(tuple((rows, step_s(rows)) for rows in (1, 2, 4, 8, 16)))
    for slower in (1.0, 1 / 0.7):
        for index in range(2000):
            rows = rng.choice((1, 2, 3, 5, 7, 9, 13, 16))
            paths = rng.choice((1, 2, 4)) if rows > 4 else 1
            true_s = slower * (step_s(rows) + PATH_SHARE * step_s(1) * (paths - 1))
            steps.on_step(tree_round(index, rows, paths, true_s * rng.uniform(0.8, 1.2)))
        assert steps.step_s(1, True) == pytest.approx(step_s(1) * slower, rel=0.1)
    assert steps.step_s(1, True, 1) / steps.step_s(1, True) - 1 == pytest.approx(PATH_SHARE)


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


def test_the_slowdown_by_a_draft_is_told_from_the_machine() -> None:
    """Claim: of a target whose steps take 1.3 times as long beside a working draft, and all 1.2 times as long from a
    time on while the draft works, both times are known within 8 % after the draft has worked and rested twice.
    Conclusive: taken for one, the two changes are 1.56 together."""
    rng, steps, index = random.Random(5), StepTimes(), 0
    steps.prime(tuple((rows, step_s(rows)) for rows in (1, 2, 4, 8, 16)))
    for is_drafting, slower, count in ((False, 1.0, 100), (True, 1.0, 100), (True, 1.2, 300)) + (
        (False, 1.2, 8),
        (True, 1.2, 100),
    ) * 2:
        for _ in range(count):
            index += 1
            true_s = step_s(1) * slower * (1.3 if is_drafting else 1.0) * rng.uniform(0.9, 1.1)
            record = tree_round(index, 1, 1, true_s)
            steps.on_step(record if is_drafting else record._replace(plan=OFF_PLAN))
    assert steps.step_s(1, False) == pytest.approx(1.2 * step_s(1), rel=0.08)
    assert steps.step_s(1, True) == pytest.approx(1.2 * 1.3 * step_s(1), rel=0.08)
