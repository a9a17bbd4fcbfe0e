"""The interface between engine and model: a ragged batch in, logits and one finite flag per chunk out.

A chunk is one sequence's rows in this step, at absolute positions; a batch is any mix of chunks. A model
owns the storage of cached positions, addressed by block ids; it has no sessions and no scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int32
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from specdec.engine.readback import Readback
from specdec.engine.vocabulary_map import VocabularyMap


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A service's description of its model. `vocabulary_size` counts the ids with a string, and the logits of a row;
    `vocabulary`: of a draft that does not have its target's; `kernels`: family and instruction set of native kernels,
    if any. An encoder-decoder model takes inputs of at most `encoder_positions_max` tokens, and begins an output with
    `beginning_token_ids`; of a decoder alone these are 0 and empty."""

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
    beginning_token_ids: tuple[int, ...] = ()
    encoder_positions_max: int = 0

    @property
    def has_encoder(self) -> bool:
        """Whether it is an encoder-decoder model."""
        return self.encoder_positions_max > 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one sequence to run in a step; logits of the last `logit_count`.

    A cell is one place in a sequence's blocks: cell c is offset c % block size of block_ids[c // block size]. The first
    rows are a chain at the positions from `start` to `base`, each in the cell of its position; cells [0, start) hold
    the positions before them. The last len(paths) rows are nodes of a tree, below `base`: a node sees the positions
    before `base` and then the cells of its path, in the order of their positions; the last cell is its own, to which it
    is written. Cells that no row sees may hold any values. `logit_count` is 0 inside a long prompt.

    Of an encoder-decoder model the first `encoder_length` tokens of a sequence are the encoder's input, and those after
    it the decoder's. Rows of the input run whole, in one chunk from position 0 on, and have no logits; their cells hold
    the keys and values of cross attention, which all later rows see. Self attention sees later cells only.
    """

    block_ids: Sequence[int]
    start: int
    token_ids: Sequence[int]
    logit_count: int
    paths: Sequence[Sequence[int]] = ()
    encoder_length: int = 0

    @property
    def input_count(self) -> int:
        """Rows of the encoder's input: all of it, or none."""
        return self.encoder_length if self.start < self.encoder_length else 0

    @property
    def base(self) -> int:
        """The position after the chain, at which the paths of nodes begin."""
        return self.start + len(self.token_ids) - len(self.paths)

    @property
    def cell_end(self) -> int:
        """The cell after the last that its rows are written to, or that a chain sees."""
        return max(self.base, *(path[-1] + 1 for path in self.paths)) if self.paths else self.base

    @property
    def position_max(self) -> int:
        """The highest position of its rows."""
        return self.base + max(map(len, self.paths), default=0) - 1


def tree_paths(parents: Sequence[int], base: int) -> list[list[int]]:
    """Returns the paths of the nodes of a tree below `base`, node i in cell base + i. `parents[i]`: 0 for a child of
    the token before `base`, k + 1 for one of node k (`protocol.tree_shape`)."""
    paths: list[list[int]] = [[]]
    for index, parent in enumerate(parents):
        paths.append([*paths[parent], base + index])
    return paths[1:]


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
    """The chunks of one step; no sequence twice. `should_abandon` is asked in each
    layer, before its keys are written, by models on one CPU; others run the step to its end. One that is no `StepFlag`
    is asked by modules alone, so the step is not one call."""

    chunks: tuple[Chunk, ...]
    should_abandon: Callable[[], bool] | None = None

    @property
    def row_count(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def logit_count(self) -> int:
        return sum(chunk.logit_count for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Logits of the requested rows, in chunk order, and per chunk whether all its values are finite: all valid until
    the model's next forward.

    `hidden`: the final hidden states of the rows with logits, if the model returns them (`HiddenStates`); `features`
    those of all rows (`Features`). `readback`: of a step on a device, with the best token of each row.
    """

    logits: torch.Tensor  # [sum of logit counts, vocab] float32
    is_finite: Sequence[bool]  # on a GPU, reading a flag waits for the step
    hidden: torch.Tensor | None = None  # [sum of logit counts, hidden], of the model's type
    features: torch.Tensor | None = None  # [rows, layers asked for * hidden], of the model's type
    readback: Readback | None = None


class Storage(Protocol):
    """Blocks of cached positions. Block 0 is always zero: it stands in block tables where a sequence has no block. A
    slot is one place of the storage, block by block: offset o of block b is slot b * block size + o."""

    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies the values of the slots `sources` to `destinations`; reads all of them before it writes any."""

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


@runtime_checkable
class Features(Protocol):
    """A CausalModel that can return the residual of its rows as it enters some layers, for a head that drafts."""

    description: ModelDescription

    @property
    def hidden_size(self) -> int:
        """Numbers of a row's residual."""

    @property
    def layer_count(self) -> int:
        """Number of its layers, which stands for the residual after the last, before the last norm."""

    def return_features(self, layer_ids: Sequence[int]) -> None:
        """Makes forwards after the next `allocate` return the features of all rows, of the layers named last. Raises
        ModelRefused for a model that has none."""

    def load_embedding(self) -> torch.Tensor | torch.nn.Module:
        """Returns the table of embeddings, without the factor of some architectures: [tokens, hidden] of the model's
        type, or a `PackedEmbedding`. To be called between forwards."""
