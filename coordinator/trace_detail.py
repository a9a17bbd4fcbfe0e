"""Which rounds of a traced generation are recorded in full detail: the first ones, and then a sample.

A round in detail is up to five spans in two services, and the draft's messages around it two spans each. With a span
for every 32 rounds beside them, 2,000 rounds stay below 300 spans. Pure: it sees round indices and nothing else.
"""

from __future__ import annotations

SEGMENT_ROUND_COUNT = 32
FIRST_ROUND_COUNT = 4  # round 0, which reads the prompt, and the three after it
FIRST_SEGMENTS = (1, 2, 4)
SEGMENT_INTERVAL = 8
ROUND_IN_SEGMENT = 16  # in the middle, so that the draft's work for it belongs to the same segment
DRAFT_ROUNDS_BEFORE = 2  # with a window of some rounds, what a round offers was drafted in those before it
SLOW_ROUND_COUNT_MAX = 8  # rounds recorded because they were slow, by this process alone


def segment_of(round_index: int) -> int:
    """The segment a round belongs to, from 0; -1 is round 0, which is the prefill."""
    return (round_index - 1) // SEGMENT_ROUND_COUNT


def is_round_detailed(round_index: int) -> bool:
    """Whether a round's verification is recorded in detail, by the target too."""
    segment = segment_of(round_index)
    if round_index < FIRST_ROUND_COUNT:
        return True
    is_sampled = segment in FIRST_SEGMENTS or (segment > 0 and segment % SEGMENT_INTERVAL == 0)
    return is_sampled and round_index == 1 + segment * SEGMENT_ROUND_COUNT + ROUND_IN_SEGMENT


def is_drafting_detailed(round_index: int) -> bool:
    """Whether the first draft steps after the commit that goes with a round are recorded in detail."""
    return any(is_round_detailed(round_index + later) for later in range(DRAFT_ROUNDS_BEFORE + 1))
