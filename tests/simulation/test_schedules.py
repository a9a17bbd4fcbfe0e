"""Random schedules of faults: every property of the simulator holds in each."""

from __future__ import annotations

import pytest

from specdec.protocol.report import PROPOSER_FIELDS
from specdec.protocol.types import Proposer
from tests.simulation.faults import Fault
from tests.simulation.many import run_many
from tests.simulation.schedule import run_seed, run_without_faults
from tests.simulation.tally import Tally
from tests.simulation.transcript import Transcript

SCHEDULE_COUNT = 250
SCHEDULE_COUNT_MORE = 9_750
SCHEDULE_COUNT_LONG = 100_000


def check_schedules(first: int, count: int) -> Tally:
    """Runs schedules and asserts that no property broke, that each had its tokens and faults, and of all kinds."""
    *_, tally = run_many(first, count)
    assert not tally.problems, str(tally)
    assert min(tally.faults[fault] for fault in Fault) > count / 20, str(tally)
    assert tally.cache["preemptions"] > count / 40 and tally.cache["prefix_hit_tokens"] > count, str(tally)
    assert min(tally.sources[own.name] for own in PROPOSER_FIELDS if own is not Proposer.GRAMMAR) > count / 20, str(
        tally
    )
    assert tally.offered_count > 3 * count and tally.accepted_count > 1.5 * count, str(tally)
    assert tally.scored_count > count / 2, str(tally)
    assert tally.tree_count > count and 500 * tally.few_faults_count <= count, str(tally)
    return tally


def test_schedules_keep_every_property() -> None:
    """Claim: no late, lost, doubled, reordered or stale message, crash, freeze or partition changes a text, ends a
    request, is waited for without end or leaks anything.

    Conclusive because session, tree, draft, verifier and cache are the real ones, the text is known beforehand, each
    schedule commits at least 20 tokens under at least 3 faults (counted when they had an effect, all kinds alike; one
    in 500 may end before its third, as texts with a head have few messages), the draft takes part, and
    test_planted_bugs.py shows that the properties notice bugs.
    """
    assert check_schedules(0, SCHEDULE_COUNT).count == SCHEDULE_COUNT


@pytest.mark.more
def test_thousands_of_schedules_keep_every_property() -> None:
    """Claim: as above, over as many schedules more as make ten thousand."""
    assert check_schedules(SCHEDULE_COUNT, SCHEDULE_COUNT_MORE).count == SCHEDULE_COUNT_MORE


@pytest.mark.slow
def test_a_hundred_thousand_schedules_keep_every_property() -> None:
    """Claim: as above, over a hundred thousand schedules, all new."""
    assert check_schedules(SCHEDULE_COUNT + SCHEDULE_COUNT_MORE, SCHEDULE_COUNT_LONG).count == SCHEDULE_COUNT_LONG


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_a_seed_replays_to_the_last_message(seed: int) -> None:
    """Claim: `--seed N --trace` shows the run that failed: every message, step and fault, at the same virtual time.

    Conclusive: two runs of a seed, with other runs between them, write the same transcript line by line.
    """
    first, second = Transcript(), Transcript()
    run_seed(seed, first)
    run_seed(seed + 1)
    run_seed(seed, second)
    assert len(first.lines) > 50 and first.lines == second.lines


def test_without_faults_the_draft_is_worth_having() -> None:
    """Claim: the schedules disturb real speculation: without faults a good part of all tokens is drafted.

    Otherwise a simulation in which no draft token is ever offered would pass every other test.
    """
    tally = Tally()
    for seed in range(200):
        report = run_without_faults(seed)
        assert not report.problem, f"seed {seed}: {report.problem}"
        tally.add(seed, report)
    assert tally.accepted_count > 0.15 * tally.token_count, str(tally)
