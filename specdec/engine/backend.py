"""What differs between devices, behind the front of a `transformers` model (`transformers_model`).

A backend replaces modules, holds the cache, plans steps and runs them; the front computes a step from a plan's tensors
and knows nothing of where they lie. One backend serves one model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from specdec.engine.attention import AttentionShape
from specdec.engine.interface import RaggedBatch, StepOutput, Storage


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a step is computed from: `input_ids`, `position_ids` [1, rows] int64; `logit_rows` [logits] int64.

    `attention` is handed to the attention modules as their plan: an `AttentionPlan` or what stands in its place.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    attention: Any


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to. `logits` [logits, vocab] float32; `is_finite` [rows + logits] bool, rows first."""

    logits: torch.Tensor
    is_finite: torch.Tensor


Compute = Callable[[StepInput], StepResult]


class Backend(Protocol):
    """One device's parts of one model. One thread at a time."""

    device: torch.device

    def replace_modules(self, base: nn.Module) -> None:
        """Puts this device's stand-ins into a base model, in place. Raises ModelRefused for what it cannot serve."""

    def output_layer(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float | None
    ) -> nn.Module:
        """The output layer in float32, softcap * tanh(scale * x @ weight / softcap). weight [vocab, in]."""

    def adopt(self, base: nn.Module, output: nn.Module, shape: AttentionShape) -> None:
        """Takes the finished modules: called once, before everything below."""

    @property
    def product_bytes(self) -> int:
        """Bytes of the weights of all matrix products: what every step reads of them, whatever its rows."""

    @property
    def cache_bytes_per_position(self) -> int:
        """See `CausalModel`."""

    def allocate(self, block_count: int, block_size: int) -> Storage:
        """See `CausalModel`."""

    def finite(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Of every row of both, rows of `hidden` first, whether all of it is finite.  # [rows + logits] bool"""

    def run(self, batch: RaggedBatch, compute: Compute) -> StepOutput:
        """One step. Whatever can be wrong with a batch is raised before anything is computed."""

    def counters(self) -> dict[str, float]:
        """Figures of the device worth a line when serving ends; may wait for it."""


def finite_rows(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """See `Backend.finite`: found from the sum of each row."""
    return torch.cat((torch.isfinite(hidden.sum(-1, dtype=torch.float32)), torch.isfinite(logits.sum(-1))))


def segment_flags(batch: RaggedBatch, is_finite: Sequence[bool], logit_offset: int) -> tuple[bool, ...]:
    """Whether all rows of each segment, and all its logits, are finite. `logit_offset`: where flags of logits begin."""
    flags: list[bool] = []
    row, logit = 0, logit_offset
    for segment in batch.segments:
        row_end, logit_end = row + len(segment.token_ids), logit + segment.logit_count
        flags.append(all(is_finite[row:row_end]) and all(is_finite[logit:logit_end]))
        row, logit = row_end, logit_end
    return tuple(flags)
