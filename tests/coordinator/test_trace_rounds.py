"""Which rounds are recorded in detail, and the bound on their spans, for any generation."""

from __future__ import annotations

import pytest

from specdec.coordinator.trace_rounds import (
    FIRST_ROUND_COUNT,
    GROUP_ROUND_COUNT,
    SLOW_ROUND_COUNT_MAX,
    is_drafting_detailed,
    is_round_detailed,
    round_group_of,
)
from specdec.draft_service.drafter import DETAILED_STEP_COUNT_MAX

ROUND_SPANS = 5  # round, verify on both sides, queue, forward
PREFILL_SPANS = 6  # prefill, verify on both sides, queue, chunks, forward
DRAFT_SPANS = 2 * DETAILED_STEP_COUNT_MAX  # after each commit in detail, on both sides


def most_spans(round_count: int) -> int:
    """The maximum number of spans of `round_count` rounds, in all services."""
    chunks = {round_group_of(index) for index in range(1, round_count)}
    rounds = sum(ROUND_SPANS for index in range(1, round_count) if is_round_detailed(index))
    drafting = sum(DRAFT_SPANS for index in range(round_count) if is_drafting_detailed(index))
    return 1 + PREFILL_SPANS + len(chunks) + rounds + drafting + min(SLOW_ROUND_COUNT_MAX, len(chunks))


@pytest.mark.parametrize(("round_count", "limit"), [(10, 75), (100, 150), (2000, 300)])
def test_a_generation_makes_few_spans_at_worst(round_count: int, limit: int):
    """Claim: however many messages a draft sends, 2,000 rounds make at most 300 spans (docs/tracing.md); counted, not
    sampled."""
    assert most_spans(round_count) <= limit


def test_the_first_rounds_and_a_sample_are_in_detail():
    """Claim: the first rounds, then one in the middle of some round groups for ever; the tokens offered by a sampled
    round were drafted under commits in detail."""
    detailed = [index for index in range(2000) if is_round_detailed(index)]
    assert detailed[:FIRST_ROUND_COUNT] == list(range(FIRST_ROUND_COUNT))
    sampled = detailed[FIRST_ROUND_COUNT:]
    assert len(sampled) == 10 and all(1 <= (index - 1) % GROUP_ROUND_COUNT < 31 for index in sampled)
    assert any(is_round_detailed(index) for index in range(100_000, 100_000 + 8 * GROUP_ROUND_COUNT))
    for index in sampled:
        assert is_drafting_detailed(index) and is_drafting_detailed(index - 1) and is_drafting_detailed(index - 2)
        assert not is_drafting_detailed(index + 1)
