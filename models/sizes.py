"""How large a pair is and how long it is trained: the two sizes the recipe knows.

`full` is the size of the shipped pair. `small` runs the whole recipe in under a minute on one thread, so that a test
can hold it; its text means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of data, shape of both models and length of training. Learning rates are those of AdamW."""

    name: str
    characters_max: int | None  # source text collected; None for all there is
    heldout_one_in: int  # one file in this number is held out
    vocabulary_size: int
    hidden_size: int
    mlp_size: int
    layer_count: int  # of the target; the draft has one
    head_count: int
    kv_head_count: int
    positions_max: int
    sequence_length: int  # tokens predicted per training sequence
    batch_size: int
    target_steps: int
    draft_text_count: int  # each of a sequence's length at most
    draft_tokens: int
    learning_rate: float = 2e-3
    weight_decay: float = 0.1


FULL = Size(
    name="full",
    characters_max=None,
    heldout_one_in=50,
    vocabulary_size=4096,
    hidden_size=256,
    mlp_size=704,
    layer_count=12,
    head_count=4,
    kv_head_count=2,
    positions_max=2048,
    sequence_length=512,
    batch_size=8,
    target_steps=3052,  # 12.5M tokens
    draft_text_count=4096,
    draft_tokens=5_800_000,
)

SMALL = Size(
    name="small",
    characters_max=400_000,
    heldout_one_in=10,
    vocabulary_size=512,
    hidden_size=64,
    mlp_size=176,
    layer_count=2,
    head_count=2,
    kv_head_count=1,
    positions_max=256,
    sequence_length=64,
    batch_size=8,
    target_steps=150,
    draft_text_count=128,
    draft_tokens=40_000,
)

SIZES = {size.name: size for size in (FULL, SMALL)}
