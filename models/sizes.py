"""How large a pair is and how long it is trained: the two sizes the recipes know.

`full` is the size of the shipped pair. `small` runs a whole recipe in under a minute on one thread, so that a test can
hold it; its text means nothing.
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


@dataclass(frozen=True, slots=True)
class EncoderDecoderSize:
    """Shape of both models of an encoder-decoder pair, and length of their training in tokens of outputs. The draft has
    the target's encoder layers and one decoder layer."""

    name: str
    hidden_size: int
    mlp_size: int
    encoder_layer_count: int
    decoder_layer_count: int
    head_count: int
    head_size: int
    batch_tokens: int
    target_tokens: int
    draft_tokens: int
    draft_text_count: int
    heldout_text_count: int  # of each training's tests
    evaluation_count: int  # of each training; each writes a checkpoint
    learning_rate: float = 2e-3


ENCODER_DECODER_FULL = EncoderDecoderSize(
    name="full",
    hidden_size=128,
    mlp_size=384,
    encoder_layer_count=3,
    decoder_layer_count=7,
    head_count=4,
    head_size=32,
    batch_tokens=2048,
    target_tokens=5_000_000,
    draft_tokens=2_000_000,
    draft_text_count=8_192,
    heldout_text_count=192,
    evaluation_count=20,
)

ENCODER_DECODER_SMALL = EncoderDecoderSize(
    name="small",
    hidden_size=64,
    mlp_size=128,
    encoder_layer_count=2,
    decoder_layer_count=2,
    head_count=2,
    head_size=32,
    batch_tokens=256,
    target_tokens=150_000,
    draft_tokens=160_000,
    draft_text_count=512,
    heldout_text_count=16,
    evaluation_count=4,
)

ENCODER_DECODER_SIZES = {size.name: size for size in (ENCODER_DECODER_FULL, ENCODER_DECODER_SMALL)}
