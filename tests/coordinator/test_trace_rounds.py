"""Which rounds are recorded in detail, the bound on their spans for any generation, and the sums of the others."""

from __future__ import annotations

import pytest

from specdec.coordinator.trace_rounds import (
    GROUP_ROUND_COUNT,
    DraftMessage,
    Parts,
    RoundGroup,
    TraceNames,
    begins_group,
    is_drafting_detailed,
    is_round_detailed,
    parts_of,
    round_group_of,
    round_spans,
    slow_round_event,
    sum_spans,
)
from specdec.draft_service.drafter import DETAILED_STEP_COUNT_MAX
from specdec.protocol.items import Trace
from specdec.protocol.records import RoundRecord
from specdec.rpc.stamps import Stamps
from tests.support.records import round_record

ROUND_SPANS = 8  # round, wait, verify on both sides, queue, forward, sampling, heads
PREFILL_SPANS = 8  # prefill, verify on both sides, queue, chunks, forward, sampling, heads
SUM_SPANS = len(Parts._fields) + 1  # and the draft's


def most_spans(round_count: int) -> int:
    """The maximum number of spans of `round_count` rounds, in all services."""
    groups = {round_group_of(index) for index in range(1, round_count)}
    summed = {round_group_of(index) for index in range(1, round_count) if not is_round_detailed(index)}
    rounds = sum(ROUND_SPANS for index in range(1, round_count) if is_round_detailed(index))
    drafting = sum(DETAILED_STEP_COUNT_MAX for index in range(round_count) if is_drafting_detailed(index))
    return 1 + PREFILL_SPANS + len(groups) + SUM_SPANS * len(summed) + rounds + drafting + 2  # the draft's first sums


@pytest.mark.parametrize(("round_count", "count"), [(10, 32), (100, 87), (300, 155), (2000, 440)])
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
        sampling_s=0.03 * round_s,
        head_s=0.02 * round_s,
        server_s=0.5 * round_s,
    )


NAMES = TraceNames(bytes(15) + b"\1", bytes(7) + b"\1", b"", "target", "draft")


def group_of(records: list[RoundRecord]) -> RoundGroup:
    """A round group with these rounds."""
    return RoundGroup(Trace(NAMES.trace_id, bytes(7) + b"\2"), 1, records[0].times.start_s, records=records)


def test_the_sums_fill_a_group_from_its_detailed_round_to_its_end():
    """Claim: the summed parts lie end to end from the end of the detailed round to the group's end, and each is the sum
    of its rounds' parts; the draft's run beside them. Conclusive: times are exact halves."""
    first = 1 + 2 * GROUP_ROUND_COUNT  # of a group that is not in detail, or is: both are tried
    for begin in (first, first + GROUP_ROUND_COUNT):
        group = group_of([record(begin + place, 1.0 + place * 0.5, 0.5) for place in range(GROUP_ROUND_COUNT)])
        skipped, parts = int(is_round_detailed(begin)), list(map(parts_of, group.records))
        drafting, *sums = sum_spans(group, parts, 10.0, NAMES)
        at_s = 1.0 + 0.5 * skipped
        assert (drafting.name, drafting.service) == ("draft, summed", "draft")
        assert (drafting.start_s, drafting.end_s) == (at_s, at_s + 10.0)
        for span, part in zip(sums, Parts._fields, strict=True):
            expected_s = sum(getattr(own, part) for own in parts[skipped:])
            assert span.name == f"{part}, summed" and span.parent_id == group.span_id
            assert span.service == ("target" if part in ("queue", "forward", "sampling", "heads") else "")
            assert span.attributes["specdec.rounds"] == GROUP_ROUND_COUNT - skipped
            assert (span.start_s, span.end_s - span.start_s) == (pytest.approx(at_s), pytest.approx(expected_s))
            at_s = span.end_s
        assert at_s == pytest.approx(group.records[-1].times.end_s)


def test_a_slow_round_is_an_event_with_its_largest_part():
    """Claim: a round of more than three times its group's mean is an event that says so, and others are none."""
    records = [record(index, 0.1 * index, 0.1) for index in range(4, 14)]
    assert slow_round_event(records) is None
    event = slow_round_event([*records, record(14, 1.4, 1.0)])
    assert event is not None and event.name == "slow round"
    assert (event.attributes["specdec.round"], event.attributes["specdec.part"]) == (14, "forward")
    assert event.attributes["specdec.part_ms"] == 400.0


def test_a_round_links_to_the_messages_that_brought_its_tokens():
    """Claim: a round in detail has a link to each message with a token that it offered, of this group and the one
    before, with how many it offered and how many of them were accepted; tokens of other proposers and of messages
    without a span count for none. A name that two messages have is the later one's. Conclusive: every offered token is
    one of these kinds, and the counts are known."""
    messages = [
        DraftMessage(b"a", 1.0, frozenset({(1, 1), (1, 2)}), 0),
        DraftMessage(b"b", 1.5, frozenset({(1, 2), (1, 3)}), 0),
        DraftMessage(b"c", 1.75, frozenset({(2, 1)}), 0),
    ]
    names = ((1, 1), None, (1, 2), (9, 9), (1, 3))
    own = round_record(1, names=names, accepted=(0, 1, 2), sent_s=2.0, end_s=3.0)
    group = RoundGroup(Trace(NAMES.trace_id, bytes(7) + b"\2"), 1, 0.0, messages[:1], [own], messages[1:])
    (span,) = [span for span in round_spans(own, group, NAMES, Stamps()) if span.name == "round"]
    found = [(link.span_id, *link.attributes.values()) for link in span.links]
    assert found == [(b"a", 1000.0, 1, 1), (b"b", 500.0, 2, 1)]
