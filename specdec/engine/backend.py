"""The interface between a `transformers` model (`transformers_model`) and the device it runs on.

A backend replaces modules, holds the cache, plans steps and runs them; the model computes a step from a plan's tensors
on any device. One backend serves one model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from specdec.engine.attention import AttentionMetadata, AttentionShape, EncoderDecoderMetadata
from specdec.engine.interface import RaggedBatch, StepOutput, Storage
from specdec.engine.packed import PackedWeight

StepAttention = AttentionMetadata | EncoderDecoderMetadata  # of a decoder alone; of an encoder-decoder model


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. `logits` [logits, vocab] float32; `is_finite` [rows + logits], rows first, or [rows], each for
    its logits too, bool or int32; `hidden` [logits, hidden] and `features` [rows, layers * hidden], if the model
    returns them; `best_ids` [logits] int64, the lowest id with each row's largest logit, if the step's own kernels find
    it."""

    logits: torch.Tensor
    is_finite: torch.Tensor
    hidden: torch.Tensor | None = None
    features: torch.Tensor | None = None
    best_ids: torch.Tensor | None = None


@dataclass(slots=True)
class Asked:
    """What the steps of a model return beside logits: hidden states, and features of these layers."""

    hidden: bool = False
    feature_layers: tuple[int, ...] = ()


class WholeStep(Protocol):
    """A planned step that the backend runs in one call, in place of the model's modules."""

    def run(self, input_ids: torch.Tensor, logit_rows: torch.Tensor, output: nn.Module, asked: Asked) -> StepResult:
        """Runs the step: input_ids [1, rows] int64, logit_rows [logits] int64, `output` the model's output layer."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """Tensors of one step: `input_ids`, `position_ids` [1, rows] int64; `logit_rows` [logits] int64; and the plan of
    its attention modules; or `whole`, with which the step is one call."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    plan: StepAttention | None
    whole: WholeStep | None = None


@runtime_checkable
class Product(Protocol):
    """A matrix product x @ weight.T + bias that a backend computes in place of a library's layer, whatever its weight
    is made of. Ranks cut weights when they are read (`loading.weights.Cut`): the product is that of the part."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight: [out, in]."""

    @property
    def byte_count(self) -> int:
        """Bytes of the weight, which every step reads."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out] float32, not rounded, or of the type of x where a library rounds."""

    def take_bias(self) -> torch.Tensor | None:
        """Returns the bias [out] float32, if any; the product no longer adds it."""


Compute = Callable[[StepInput], StepResult]


class Backend(Protocol):
    """One device's parts of one model. One thread at a time."""

    device: torch.device

    def replace_modules(self, base: nn.Module) -> None:
        """Replaces modules of a base model in place. Raises ModelRefused for modules that it does not support."""

    def output_layer(
        self, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None, scale: float, softcap: float | None
    ) -> nn.Module:
        """Returns the output layer in float32, softcap * tanh(scale * x @ weight / softcap). weight [vocab, in]."""

    def attach(self, base: nn.Module, output: nn.Module, shape: AttentionShape, ids_end: int) -> None:
        """Takes the finished modules; called once, before the methods below. All ids are below `ids_end`."""

    @property
    def product_bytes(self) -> int:
        """Bytes of the weights of all matrix products, which every step reads."""

    @property
    def numerics(self) -> str:
        """What decides the bits of results beside the libraries, and whether a row has the same in every step; empty
        where the device says all. Known after `attach`."""

    @property
    def cache_bytes_per_position(self) -> int:
        """See `CausalModel`."""

    def allocate(self, block_count: int, block_size: int) -> Storage:
        """See `CausalModel`."""

    def finite(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Whether each row of `hidden`, then of `logits`, is finite.  # [rows + logits] bool"""

    def run(self, batch: RaggedBatch, compute: Compute) -> StepOutput:
        """Runs one step. Raises for an invalid batch before anything is computed."""

    def counters(self) -> dict[str, float]:
        """Device statistics for the log when serving ends; may wait for the device."""


def check_inputs(batch: RaggedBatch, has_encoder: bool) -> None:
    """Raises ValueError for chunks of another kind of model, and for a part of an encoder's input."""
    for chunk in batch.chunks:
        length, start, end = chunk.encoder_length, chunk.start, chunk.base
        if (length > 0) != has_encoder:
            limit = "1 or more: the model has an encoder" if has_encoder else "0: the model is a decoder alone"
            raise ValueError(f"encoder_length is {length}; it must be {limit}")
        if chunk.input_count and (start or end < length or chunk.logit_count > len(chunk.token_ids) - length):
            raise ValueError(
                f"rows from {start} to {end - 1} with {chunk.logit_count} logits; the encoder's input, {length} "
                "tokens, runs whole and without logits"
            )


def finite_rows(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """See `Backend.finite`; computed from the sum of each row."""
    return torch.cat((torch.isfinite(hidden.sum(-1, dtype=torch.float32)), torch.isfinite(logits.sum(-1))))


def chunk_flags(batch: RaggedBatch, is_finite: Sequence[bool], logit_offset: int) -> tuple[bool, ...]:
    """Whether all rows and logits of each chunk are finite. `logit_offset`: index of the first flag of logits."""
    flags: list[bool] = []
    row, logit = 0, logit_offset
    for chunk in batch.chunks:
        row_end, logit_end = row + len(chunk.token_ids), logit + chunk.logit_count
        flags.append(all(is_finite[row:row_end]) and all(is_finite[logit:logit_end]))
        row, logit = row_end, logit_end
    return tuple(flags)
