"""What the engine and a model say to each other: a ragged batch goes in, logits and a health flag per segment come out.

A segment is one sequence's tokens in this step, at absolute positions; a batch is any mix of segments. A model owns the
storage of cached positions, in blocks it is told about through block ids; it knows nothing of sessions or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy
import torch


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a service says about its model. `vocabulary_size` counts the ids that have a string; logits end there."""

    model_digest: str
    model_name: str
    vocabulary_size: int
    positions_max: int
    end_token_ids: tuple[int, ...]
    dtype: str
    device: str
    libraries: str
    tensor_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Where the rows of a segment lie that are nodes of a tree, and what each of them sees.

    A cell is one place in a sequence's blocks: cell c is offset c % block size of block_ids[c // block size]. Row i is
    written to cell cells[i] and stands at position positions[i]; it attends to the cells of visible[i], its own
    included, which stand at cell_positions. Cells that no row sees may hold anything.
    """

    cells: Sequence[int]
    positions: Sequence[int]
    visible: numpy.ndarray  # [rows, cells] bool
    cell_positions: numpy.ndarray  # [cells] int64


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence to run at positions [start, start + len(token_ids)); logits of the last `logit_count`.

    `block_ids` cover at least those positions, in order. Positions [0, start) are read from the cache, those of the
    segment are written to it; what the blocks hold beyond is ignored. `logit_count` is 0 inside a long prompt. With
    `tree` it says where the rows lie, and `start` has no meaning: for models whose rows may depend on each other.
    """

    block_ids: Sequence[int]
    start: int
    token_ids: Sequence[int]
    logit_count: int
    tree: TreeRows | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def rows_of_tree(self) -> TreeRows:
        """Its rows as those of a tree: without one, a chain on the positions before it."""
        if self.tree is not None:
            return self.tree
        places = numpy.arange(self.end)
        own = places[self.start :]
        return TreeRows(own.tolist(), own.tolist(), places[None] <= own[:, None], places)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The segments of one step; no sequence twice."""

    segments: tuple[Segment, ...]

    @property
    def row_count(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def logit_count(self) -> int:
        return sum(segment.logit_count for segment in self.segments)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Logits of the rows asked for, in segment order, and per segment whether everything it computed is finite."""

    logits: torch.Tensor  # [sum of logit counts, vocab] float32
    is_finite: Sequence[bool]  # on a GPU reading it waits for the step


class Storage(Protocol):
    """Blocks of cached positions. Block 0 is all zero for ever: it stands where a table has no block."""

    def copy_block(self, source: int, destination: int) -> None:
        """Makes `destination` equal to `source`."""

    def scrub(self, block_id: int, start: int, end: int) -> None:
        """Zeroes offsets [start, end) of one block, so that not-a-number left there cannot reach a later owner."""


class CausalModel(Protocol):
    """A model the engine can step. One thread at a time. A target's rows do not depend on what else is in the batch."""

    description: ModelDescription

    @property
    def cache_bytes_per_position(self) -> int:
        """Bytes of storage one cached position takes, all layers together."""

    def allocate(self, block_count: int, block_size: int) -> Storage:
        """Zeroed storage of `block_count` blocks, which later batches refer to. Called once, before any forward."""

    def forward(self, batch: RaggedBatch) -> StepOutput:
        """Runs the batch and writes its positions to the cache. Running it again writes the same values."""
