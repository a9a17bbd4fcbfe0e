"""Which rounds are recorded in detail, the bound on their spans for any generation, and the sums of the others."""

from __future__ import annotations

import pytest

from specdec.coordinator.trace_rounds import (
    GROUP_ROUND_COUNT,
    PARTS,
    ROUND_GROUP,
    RoundGroup,
    begins_group,
    is_drafting_detailed,
    is_round_detailed,
    parts_of,
    round_group_of,
)
from specdec.draft_service.drafter import DETAILED_STEP_COUNT_MAX
from specdec.protocol.records import RoundRecord
from tests.support.records import round_record

ROUND_SPANS = 7  # round, wait, verify on both sides, queue, forward, sampling
PREFILL_SPANS = 7  # prefill, verify on both sides, queue, chunks, forward, sampling
SUM_SPANS = len(PARTS) + 1  # and the draft's


def most_spans(round_count: int) -> int:
    """The maximum number of spans of `round_count` rounds, in all services."""
    groups = {round_group_of(index) for index in range(1, round_count)}
    summed = {round_group_of(index) for index in range(1, round_count) if not is_round_detailed(index)}
    rounds = sum(ROUND_SPANS for index in range(1, round_count) if is_round_detailed(index))
    drafting = sum(DETAILED_STEP_COUNT_MAX for index in range(round_count) if is_drafting_detailed(index))
    return 1 + PREFILL_SPANS + len(groups) + SUM_SPANS * len(summed) + rounds + drafting + 2  # the draft's first sums


@pytest.mark.parametrize(("round_count", "count"), [(10, 29), (100, 79), (300, 140), (2000, 395)])
def test_a_generation_makes_few_spans_at_worst(round_count: int, count: int):
    """Claim: however many messages a draft sends, 300 rounds make at most 160 spans and 2,000 at most 550, in fact as
    many as docs/tracing.md says; counted, not sampled."""
    assert most_spans(round_count) == count <= {300: 160, 2000: 550}.get(round_count, count)


def test_the_first_rounds_and_a_sample_are_in_detail():
    """Claim: the first two rounds, then the first of some groups for ever; the tokens offered by a sampled round were
    drafted under commits in detail."""
    detailed = [index for index in range(2000) if is_round_detailed(index)]
    assert detailed[:3] == [0, 1, 1 + GROUP_ROUND_COUNT]
    sampled = detailed[2:]
    assert len(sampled) == 6 and all(map(begins_group, sampled))
    assert any(is_round_detailed(index) for index in range(100_000, 100_000 + 16 * GROUP_ROUND_COUNT))
    for index in sampled:
        assert is_drafting_detailed(index) and is_drafting_detailed(index - 1) and is_drafting_detailed(index - 2)
        assert not is_drafting_detailed(index + 1)


def test_groups_follow_each_other():
    """Claim: the prefill, ten groups of 32, then groups of 64; every round belongs to one."""
    sizes = [0] * (round_group_of(2000) + 1)
    for index in range(2000):
        sizes[round_group_of(index)] += 1
        assert index == 0 or round_group_of(index) - round_group_of(index - 1) == begins_group(index)
    assert sizes[:12] == [1, *[32] * 10, 64] and set(sizes[11:-1]) == {64}


def record(index: int, start_s: float, round_s: float) -> RoundRecord:
    """A round of which every part is a known share."""
    return round_record(
        index,
        start_s=start_s,
        end_s=start_s + round_s,
        wait_s=0.2 * round_s,
        round_trip_s=0.7 * round_s,
        queue_s=0.05 * round_s,
        forward_s=0.4 * round_s,
        sampling_s=0.05 * round_s,
        server_s=0.5 * round_s,
    )


def test_the_sums_fill_a_group_from_its_detailed_round_to_its_end():
    """Claim: the summed parts lie end to end from the end of the detailed round to the group's end, and each is the sum
    of its rounds' parts; the draft's run beside them. Conclusive: times are exact halves."""
    first = 1 + 2 * GROUP_ROUND_COUNT  # of a group that is not in detail, or is: both are tried
    for begin in (first, first + GROUP_ROUND_COUNT):
        group = RoundGroup(ROUND_GROUP, 1.0, drafting_s=10.0)
        for place in range(GROUP_ROUND_COUNT):
            group.add(record(begin + place, 1.0 + place * 0.5, 0.5))
        end_s = group.records[-1].times.end_s
        skipped = int(is_round_detailed(begin))
        sums = list(group.sums())
        assert sums[0][:3] == ("draft", 1.0 + 0.5 * skipped, 11.0 + 0.5 * skipped)
        at_s = 1.0 + 0.5 * skipped
        for (name, start_s, stop_s, count), part in zip(sums[1:], PARTS, strict=True):
            expected_s = sum(parts_of(own)[PARTS.index(part)] for own in group.records[skipped:])
            assert name == part and count == GROUP_ROUND_COUNT - skipped
            assert (start_s, stop_s - start_s) == (pytest.approx(at_s), pytest.approx(expected_s))
            at_s = stop_s
        assert at_s == pytest.approx(end_s)


def test_a_slow_round_is_an_event_with_its_largest_part():
    """Claim: a round of more than three times its group's mean is an event that says so, and others are none."""
    group = RoundGroup(ROUND_GROUP, 0.0)
    for index in range(4, 14):
        group.add(record(index, 0.1 * index, 0.1))
    assert not group.note_slow_round()
    group.add(record(14, 1.4, 1.0))
    assert group.note_slow_round()
    (event,) = [event for event in group if event.name == "slow round"]
    assert (event.attributes["specdec.round"], event.attributes["specdec.part"]) == (14, "forward")
    assert event.attributes["specdec.part_ms"] == 400.0
