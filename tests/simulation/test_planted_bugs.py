"""The simulator finds bugs: one function is replaced at a time, and some schedule shows it."""

from __future__ import annotations

import pytest

from tests.simulation.bugs import BUGS, HARMLESS
from tests.simulation.planting import Bug, hunt
from tests.simulation.schedule import run_seed

SCHEDULE_COUNT = 1500
RARE = "dead nodes stay usable"  # only in some thousand schedules
LATE = (  # found after hundreds, or after long schedules: for make test-more
    RARE,
    "cells are moved one after the other",
    "a replica that is no member is never removed",
    "a session without space is never tried again",
)
CASES = [pytest.param(bug, id=bug.title, marks=[pytest.mark.more] * (bug.title in LATE)) for bug in BUGS]


@pytest.mark.parametrize("bug", CASES)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    """Claim: every bug of the table is found within 1500 schedules, all but RARE within 1000, most within
    ten (`python -m tests.simulation --bugs 1500` prints in which and as what).

    Conclusive: the same schedule without the bug keeps every property, so the problem is the bug. There are no
    survivors in the table; the one change that no schedule can find is in bugs.py (HARMLESS) with its reason, and is
    tested below.
    """
    found = hunt(bug, SCHEDULE_COUNT)
    assert found.schedule, f"{bug.title}: no property broke in {SCHEDULE_COUNT} schedules"
    assert not run_seed(found.seed).problem, "the schedule shows it without the bug too"


def test_the_table_is_long_enough() -> None:
    """Claim: at least 20 bugs, each planted once; a survivor in every twenty would still be too many."""
    assert len({bug.title for bug in BUGS}) == len(BUGS) >= 20
    assert len(HARMLESS) <= len(BUGS) / 20


@pytest.mark.slow
@pytest.mark.parametrize("bug", HARMLESS, ids=lambda bug: bug.title)
def test_a_harmless_change_breaks_nothing(bug: Bug) -> None:
    """Claim: the survivor survives because it does no harm, as bugs.py says, and not for want of schedules.

    A change listed as harmless that some schedule finds does harm, and belongs in the table.
    """
    assert hunt(bug, 10 * SCHEDULE_COUNT).schedule == 0
