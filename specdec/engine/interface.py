"""The interface between engine and model: a ragged batch in, logits and one finite flag per chunk out.

A sequence chunk is one sequence's tokens in this step, at absolute positions; a batch is any mix of chunks. A model
owns the storage of cached positions, addressed by block ids; it has no sessions and no scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int32
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy
import torch

from specdec.engine.vocabulary_map import VocabularyMap


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A service's description of its model. `vocabulary_size` counts the ids with a string, and the logits of a row;
    `vocabulary`: of a draft that does not have its target's; `kernels`: family and instruction set of native kernels,
    if any."""

    model_digest: str
    model_name: str
    vocabulary_size: int
    positions_max: int
    end_token_ids: tuple[int, ...]
    dtype: str
    device: str
    libraries: str
    tensor_parallel_size: int = 1
    vocabulary: VocabularyMap | None = None
    kernels: str = ""


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Cells, positions and visible cells of the rows of a chunk that are nodes of a tree.

    A cell is one slot in a sequence's blocks: cell c is offset c % block size of block_ids[c // block size]. Row i is
    written to cell cells[i] and has position positions[i]; it attends to the cells of visible[i], its own included,
    whose positions are cell_positions. Cells invisible to every row may hold any values.
    """

    cells: Sequence[int]
    positions: Sequence[int]
    visible: numpy.ndarray  # [rows, cells] bool
    cell_positions: numpy.ndarray  # [cells] int64


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Tokens of one sequence to run at positions [start, start + len(token_ids)); logits of the last `logit_count`.

    `block_ids` cover at least those positions, in order. Positions [0, start) are read from the cache, those of the
    chunk are written to it; later positions of the blocks are ignored. `logit_count` is 0 inside a long prompt. `tree`,
    if given, holds the rows' cells, and `start` has no meaning: for models whose rows may depend on each other.

    A sequence with several paths has one chunk for each, one after the other in the batch. The `copied_count` positions
    before `start` are those of the chunk before, at the same positions: computed there, and written here too.
    """

    block_ids: Sequence[int]
    start: int
    token_ids: Sequence[int]
    logit_count: int
    tree: TreeRows | None = None
    copied_count: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def rows_of_tree(self) -> TreeRows:
        """Returns its rows as those of a tree; without a tree, a chain on the positions before it."""
        if self.tree is not None:
            return self.tree
        places = numpy.arange(self.end)
        own = places[self.start :]
        return TreeRows(own.tolist(), own.tolist(), places[None] <= own[:, None], places)


class StepFlag:
    """A flag that any thread sets while another runs a step; native code reads its `word` between layers."""

    __slots__ = ("word",)

    def __init__(self) -> None:
        self.word = c_int32(0)

    def set(self, is_set: bool) -> None:
        """Sets or clears it, at any time and from any thread."""
        self.word.value = is_set

    def __call__(self) -> bool:
        return bool(self.word.value)


class StepAbandoned(Exception):
    """A forward ended between two layers because `RaggedBatch.should_abandon` said so; its positions are not written
    in all layers."""


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The chunks of one step; no sequence twice, except one with several paths. `should_abandon` is asked in each
    layer, before its keys are written, by models on one CPU; others run the step to its end. One that is no `StepFlag`
    is asked by modules alone, so the step is not one call."""

    chunks: tuple[SequenceChunk, ...]
    should_abandon: Callable[[], bool] | None = None

    @property
    def row_count(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def logit_count(self) -> int:
        return sum(chunk.logit_count for chunk in self.chunks)

    def copied_rows(self) -> Iterator[tuple[SequenceChunk, list[int]]]:
        """Yields each chunk with copied positions, and the rows of the batch that these are, in order."""
        first_row, path, path_start = 0, list[int](), 0
        for chunk in self.chunks:
            above = path[chunk.start - chunk.copied_count - path_start :][: chunk.copied_count]
            if chunk.copied_count:
                yield chunk, above
            path = [*above, *range(first_row, first_row + len(chunk.token_ids))]
            path_start = chunk.start - chunk.copied_count
            first_row += len(chunk.token_ids)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Logits of the requested rows, in chunk order, and per chunk whether all its values are finite.

    `hidden`: the final hidden states of the rows with logits, if the model returns them (`HiddenStates`).
    """

    logits: torch.Tensor  # [sum of logit counts, vocab] float32
    is_finite: Sequence[bool]  # on a GPU, reading a flag waits for the step
    hidden: torch.Tensor | None = None  # [sum of logit counts, hidden], of the model's type


class Storage(Protocol):
    """Blocks of cached positions. Block 0 is always zero: it stands in block tables where a sequence has no block."""

    def copy_block(self, source: int, destinations: Sequence[int]) -> None:
        """Copies block `source` to the blocks `destinations`."""

    def scrub(self, block_id: int, start: int, end: int) -> None:
        """Zeroes offsets [start, end) of one block, so that not-a-number in it cannot reach a later owner."""


class CausalModel(Protocol):
    """A model the engine can step. One thread at a time. A target's rows do not depend on the rest of the batch."""

    description: ModelDescription

    @property
    def cache_bytes_per_position(self) -> int:
        """Bytes of storage for one cached position, all layers together."""

    def allocate(self, block_count: int, block_size: int) -> Storage:
        """Returns zeroed storage of `block_count` blocks for later batches. Called once, before any forward."""

    def forward(self, batch: RaggedBatch) -> StepOutput:
        """Runs the batch and writes its positions to the cache. A second run writes the same values. Raises
        StepAbandoned if the batch says so."""


@runtime_checkable
class HiddenStates(Protocol):
    """A CausalModel that can return its final hidden states, the inputs of its output layer."""

    @property
    def hidden_size(self) -> int:
        """Numbers of a row's hidden state."""

    def return_hidden(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Makes later forwards return hidden states. Returns the output layer alone, [rows, hidden] of the model's type
        -> [rows, vocab] float32, to be called between forwards. Called before any forward, at most once."""
