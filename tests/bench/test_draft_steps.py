"""What a step of the draft takes as its service makes it: such steps are found, under every rule."""

from __future__ import annotations

from bench.harness import DRAFT_MODEL
from bench.pipeline.draft_steps import draft_steps_ms
from bench.pipeline.variants import RULES_DEFAULT


def test_steps_of_every_size_are_timed_under_every_rule() -> None:
    """The draft itself tells the times, with the nodes a step brought: no step of a size, and there is no median."""
    rules, leaf_counts = RULES_DEFAULT[:3], (1, 4)
    found = draft_steps_ms(DRAFT_MODEL, "float32", rules, leaf_counts)
    assert list(found) == list(rules)
    assert all(list(own) == list(leaf_counts) and min(own.values()) > 0 for own in found.values())
