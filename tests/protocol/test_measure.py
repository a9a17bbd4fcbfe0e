"""Running estimates: against the values the samples were drawn around, and against what they must never look at."""

from __future__ import annotations

import random

import pytest

from specdec.policy.step_curve import StepCurve
from specdec.protocol.measure import Acceptance, Mean, Measurements
from specdec.protocol.types import Rule


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
        for _ in range(30):
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


def test_a_mean_forgets_and_is_not_moved_far_by_one_sample() -> None:
    """Claim: one sample a thousand times too long moves a settled mean by a fortieth of itself, no more."""
    mean = Mean()
    for _ in range(100):
        mean.add(1.0)
    mean.add(1000.0)
    assert mean.value == pytest.approx(1.025)


def test_nothing_after_the_first_rejection_counts() -> None:
    """Claim (docs/exactness.md): a round of five tokens whose second was rejected says that the first passed and the
    second did not, and nothing else. Conclusive: a round of two with the same outcome leaves the same estimates."""
    long, short = Acceptance(), Acceptance()
    for _ in range(200):
        long.add(5, 1)
        short.add(2, 1)
    assert [long.hazard(place) for place in range(8)] == [short.hazard(place) for place in range(8)]
    assert long.hazard(0) > 0.9 and long.hazard(1) < 0.1


def test_acceptance_by_place_is_found() -> None:
    """Claim: the estimate at each place is the share that passed of those that came so far, within 0.04 after 4000
    rounds. Conclusive: the places differ by more than that."""
    rng, acceptance, truth = random.Random(2), Acceptance(), (0.9, 0.75, 0.6, 0.5)
    for _ in range(4000):
        accepted = 0
        while accepted < 4 and rng.random() < truth[accepted]:
            accepted += 1
        acceptance.add(4, accepted)
    assert [acceptance.hazard(place) for place in range(4)] == pytest.approx(truth, abs=0.04)


def test_a_session_begins_with_the_services_record_and_then_has_its_own() -> None:
    """Claim: with no round of its own a session expects what the service saw, at every place; after some hundred
    tokens, its own level, and after a change of the text, the new one."""
    service = Acceptance()
    for _ in range(500):
        service.add(4, 3)
    session = Acceptance(service)
    assert [session.hazard(p) for p in range(4)] == pytest.approx([service.hazard(p) for p in range(4)])
    for _ in range(400):
        session.add(2, 0)
    assert session.overall < 0.15
    for _ in range(400):
        session.add(2, 2)
    assert session.overall > 0.85


def test_bonus_tokens_that_were_guessed_are_told_from_those_on_a_branch() -> None:
    """Claim: from how often bonus tokens and corrections are found in the tree, the share of bonus tokens that are the
    draft's own guess: found = m + (1 - m) h. Conclusive: m is 0.4, found 0.7, and the estimate is m."""
    rng, acceptance, match, hit = random.Random(3), Acceptance(), 0.4, 0.5
    for _ in range(6000):
        acceptance.add_next(False, rng.random() < hit)
        acceptance.add_next(True, rng.random() < match or rng.random() < hit)
    assert acceptance.hit == pytest.approx(hit, abs=0.04)
    assert acceptance.bonus_match == pytest.approx(match, abs=0.05)


def test_counts_survive_a_long_life() -> None:
    """Claim: the growing weight that stands for forgetting is scaled back in time: after a hundred thousand rounds the
    estimate is still exact and finite."""
    acceptance = Acceptance(Acceptance())
    for _ in range(100_000):
        acceptance.add(2, 1)
    assert acceptance.hazard(0) < 1 and acceptance.overall == pytest.approx(0.5, abs=0.03)


def test_plain_rounds_and_rounds_with_a_draft_are_kept_apart() -> None:
    """Claim: where draft and target share cores, off is judged by steps taken while the draft rests, corrected by what
    whole plain rounds took; and by the drafting ones only while there are no others."""
    measurements = Measurements()
    assert measurements.plain_rate is None
    measurements.on_target_step(5, 0.030, drafting=True)
    assert measurements.plain_rate == pytest.approx(1 / 0.030)
    measurements.on_target_step(1, 0.020, drafting=False)
    measurements.round_overhead.add(0.005)
    assert measurements.plain_rate == pytest.approx(1 / 0.025)
    measurements.plain_bias.add(1.2)
    assert measurements.plain_rate == pytest.approx(1 / 0.030)
    assert measurements.acceptance[Rule.GREEDY] is not measurements.acceptance[Rule.REJECTION]


def test_sessions_that_take_turns_wait_for_each_others_steps() -> None:
    """Claim: with eight sessions at work and four in a step, a round takes two steps."""
    measurements = Measurements()
    measurements.on_target_step(4, 0.020, False, step_sessions=4, active_sessions=8)
    assert measurements.session_count == 4 and measurements.plain_round_s == pytest.approx(0.040)


def test_a_thin_link_is_priced_into_the_draft_step() -> None:
    """Claim: where the link is slower than the draft it sets the pace, in proportion to the nodes; otherwise, and where
    nobody named its rate, the draft does. By arithmetic: 8 nodes of 250 bytes at 1 MB/s are 2 ms."""
    measurements = Measurements()
    for leaves, seconds in ((1, 0.001), (8, 0.0015)):
        measurements.on_draft_step(leaves, seconds)
    measurements.leaf_bytes[Rule.REJECTION].add(250.0)
    assert measurements.draft_step_s(8, Rule.REJECTION) == pytest.approx(0.0015)
    measurements.link_bytes_per_s = 1e6
    assert measurements.draft_step_s(8, Rule.REJECTION) == pytest.approx(0.002)
    assert measurements.draft_step_s(1, Rule.REJECTION) == pytest.approx(0.001)
    assert measurements.draft_step_s(8, Rule.GREEDY) == pytest.approx(0.0015)
