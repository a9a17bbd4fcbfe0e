"""From a ragged batch to the tensors of one step on the device, in one copy.

A step has a shape: its numbers of rows, sequences and keys. An exact shape is made for a step; a captured graph has a
fixed one, to which a step is padded: padding rows write to the scratch block and read from no sequence. All index
tensors of a step lie in one buffer, filled on the host in pinned memory and sent in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeAlias, TypeVar

import numpy
import torch

from specdec.engine.interface import Chunk, RaggedBatch

VIEWS_MAX = 256  # shapes whose views are kept: beyond, all are made again


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's tensors.

    `query_max`: most rows of one sequence; 1 means that every sequence, padding ones too, has exactly one row.
    `key_max`: most positions of one sequence. `logit_count`: rows with logits. `has_trees`: each row has a set of
    visible cells. `path_words`: cells of all paths together, of a step of our own kernels (`step_plan`).
    """

    row_count: int
    sequence_count: int
    logit_count: int
    query_max: int
    key_max: int
    has_trees: bool = False
    path_words: int = 0

    def table_width(self, block_size: int) -> int:
        """Returns the number of blocks in one sequence's table."""
        return -(-self.key_max // block_size)

    def holds(self, other: StepShape) -> bool:
        """Whether a step of the other shape can be padded to this one."""
        is_single = self.query_max == 1
        return (
            is_single == (other.query_max == 1)
            and self.has_trees == other.has_trees
            and self.row_count >= other.row_count
            and self.sequence_count >= other.sequence_count
            and self.logit_count >= other.logit_count
            and self.query_max >= other.query_max
            and self.key_max >= other.key_max
            and self.path_words >= other.path_words
        )


def exact_shape(batch: RaggedBatch, has_trees: bool = False) -> StepShape:
    """Returns the shape of a batch without padding. `has_trees`: also of one whose rows are all chains."""
    counts = [len(chunk.token_ids) for chunk in batch.chunks]
    return StepShape(
        row_count=sum(counts),
        sequence_count=len(counts),
        logit_count=sum([chunk.logit_count for chunk in batch.chunks]),
        query_max=max(counts),
        key_max=max([seen_end(chunk) for chunk in batch.chunks]),
        has_trees=has_trees or any([bool(chunk.paths) for chunk in batch.chunks]),
    )


def seen_end(chunk: Chunk) -> int:
    """Returns the cell after the last that the rows of a chunk see."""
    return max(chunk.base, *(1 + cell for path in chunk.paths for cell in path)) if chunk.paths else chunk.base


Array = TypeVar("Array", torch.Tensor, numpy.ndarray)


@dataclass(frozen=True, slots=True)
class StepFields(Generic[Array]):
    """Views of one buffer, on the device or in the host's memory.

    `input_ids`, `positions`, `slots` [rows] int64: token, position and storage slot of every row. `logit_rows` [logits]
    int64. `query_starts`, `key_starts` [sequences + 1] int32: running sums of rows and of positions up to each
    sequence's last row; `key_counts` [sequences] int32. `tables` [sequences, width] int32. With trees, `visible`
    [rows, width * block size] uint8 are the visible cells of each row, and `cell_positions` [sequences, width * block
    size] int32 their positions; without, both are empty.
    """

    shape: StepShape
    input_ids: Array
    positions: Array
    slots: Array
    logit_rows: Array
    query_starts: Array
    key_starts: Array
    key_counts: Array
    tables: Array
    visible: Array
    cell_positions: Array


StepTensors: TypeAlias = StepFields[torch.Tensor]
StepArrays: TypeAlias = StepFields[numpy.ndarray]


@dataclass(frozen=True, slots=True)
class Views:
    """What one shape has of a buffer: the part to copy on both sides, and its fields."""

    host: torch.Tensor
    device: torch.Tensor
    arrays: StepArrays
    tensors: StepTensors


class PinnedWords:
    """int64 words in pinned memory and on the device, copied without waiting."""

    def __init__(self, device: torch.device):
        self._device = device
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self.host, self.on_device = self._make(0)

    def grow(self, word_count: int) -> bool:
        """Whether there were fewer words: then both sides are new."""
        is_small = word_count > len(self.host)
        if is_small:
            self.host, self.on_device = self._make(1 << word_count.bit_length())  # growing texts ask for a few more
        return is_small

    def wait(self) -> None:
        """Waits until the last copy has been read: the host's side may be written."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, host: torch.Tensor, on_device: torch.Tensor) -> None:
        """Copies one part."""
        on_device.copy_(host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _make(self, word_count: int) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.zeros(word_count, dtype=torch.int64, pin_memory=self._device.type == "cuda" and word_count > 0)
        return host, torch.zeros(word_count, dtype=torch.int64, device=self._device)


class StepBuffer:
    """The buffer of one step, in pinned memory and on the device: `reserve` sizes it, `fill` writes, `send` copies.

    The views of a shape are made once. A captured graph reads the device's side at fixed addresses, so all shapes are
    reserved before the first capture.
    """

    def __init__(self, block_size: int, scratch_slot: int, device: torch.device):
        self._block_size = block_size
        self._scratch_slot = scratch_slot
        self._words = PinnedWords(device)
        self._views: dict[StepShape, Views] = {}

    def reserve(self, shape: StepShape) -> None:
        """Enlarges the buffer for a shape. Earlier views belong to the old buffer."""
        if self._words.grow(self._word_count(shape)):
            self._views.clear()

    def fill(self, batch: RaggedBatch, shape: StepShape) -> None:
        """Writes a batch, padded to `shape`, to the host's side. Raises for block tables that do not cover it."""
        self._words.wait()
        fill(self._views_of(shape).arrays, batch, self._block_size, self._scratch_slot)

    def send(self, shape: StepShape) -> StepTensors:
        """Copies the filled part to the device without waiting."""
        views = self._views_of(shape)
        self._words.send(views.host, views.device)
        return views.tensors

    def views(self, shape: StepShape) -> StepTensors:
        """Returns the device's views of a reserved shape, the same as `send` of that shape."""
        return self._views_of(shape).tensors

    def _views_of(self, shape: StepShape) -> Views:
        views = self._views.get(shape)
        if views is None:
            if len(self._views) >= VIEWS_MAX:  # steps of their own shape may have any number of them
                self._views.clear()
            host, device = (each[: self._word_count(shape)] for each in (self._words.host, self._words.on_device))
            arrays = StepFields(shape, *(field.numpy() for field in self._fields(host, shape)))
            views = self._views[shape] = Views(host, device, arrays, StepFields(shape, *self._fields(device, shape)))
        return views

    def _wide_counts(self, shape: StepShape) -> tuple[int, int, int, int]:
        """Returns the element counts of the int64 fields."""
        return shape.row_count, shape.row_count, shape.row_count, shape.logit_count

    def _half_counts(self, shape: StepShape) -> tuple[int, int, int, int, int]:
        """Returns the element counts of the int32 fields."""
        count, width = shape.sequence_count, shape.table_width(self._block_size)
        return count + 1, count + 1, count, count * width, count * self._cell_count(shape)

    def _cell_count(self, shape: StepShape) -> int:
        """Returns the number of cells of one sequence that rows of trees may see."""
        return shape.table_width(self._block_size) * self._block_size if shape.has_trees else 0

    def _sizes(self, shape: StepShape) -> tuple[int, int, int]:
        """Returns the word counts of the int64 fields, the int32 fields and the bytes."""
        byte_count = shape.row_count * self._cell_count(shape)
        return sum(self._wide_counts(shape)), -(-sum(self._half_counts(shape)) // 2), -(-byte_count // 8)

    def _word_count(self, shape: StepShape) -> int:
        return sum(self._sizes(shape))

    def _fields(self, words: torch.Tensor, shape: StepShape) -> tuple[torch.Tensor, ...]:
        """Returns the fields of a shape in a buffer of its word count, in the order of `StepFields`."""
        rows, count, cells = shape.row_count, shape.sequence_count, self._cell_count(shape)
        wide, halves, octets = words.split(self._sizes(shape))
        counts = self._half_counts(shape)
        *starts, tables, cell_positions = halves.view(torch.int32)[: sum(counts)].split(counts)
        tables = tables.view(count, shape.table_width(self._block_size))
        visible = octets.view(torch.uint8)[: rows * cells].view(rows, cells)
        return *wide.split(self._wide_counts(shape)), *starts, tables, visible, cell_positions.view(count, cells)


def fill(arrays: StepArrays, batch: RaggedBatch, block_size: int, scratch_slot: int) -> None:
    """Writes a batch into the host's arrays, and padding behind it. Mutates `arrays` only."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    ends: list[int] = []
    key_counts: list[int] = []
    tables = arrays.tables
    tables[:] = 0
    end = 0
    for index, chunk in enumerate(batch.chunks):
        start, tokens, paths = chunk.start, chunk.token_ids, chunk.paths
        base = start + len(tokens) - len(paths)
        key_count = seen_end(chunk) if paths else base
        blocks = chunk.block_ids[: -(-key_count // block_size)]
        tables[index, : len(blocks)] = blocks
        ids += tokens
        positions += range(start, base)
        slots += [blocks[cell // block_size] * block_size + cell % block_size for cell in range(start, base)]
        for path in paths:
            positions.append(base - 1 + len(path))
            slots.append(blocks[path[-1] // block_size] * block_size + path[-1] % block_size)
        end += len(tokens)
        logit_rows += range(end - chunk.logit_count, end)
        ends.append(end)
        key_counts.append(key_count)
    row_count, sequence_count = end, len(ends)
    for field, numbers, padding in (
        (arrays.input_ids, ids, 0),
        (arrays.positions, positions, 0),
        (arrays.slots, slots, scratch_slot),
        (arrays.logit_rows, logit_rows, 0),
    ):
        field[: len(numbers)] = numbers
        field[len(numbers) :] = padding
    # A padding sequence has one row and one key if every sequence has one row; otherwise no row and no key.
    is_single = int(arrays.shape.query_max == 1)
    padding_count = arrays.shape.sequence_count - sequence_count
    ends += [row_count + is_single * place for place in range(1, padding_count + 1)]
    key_counts += [is_single] * padding_count
    arrays.query_starts[:] = [0, *ends]
    arrays.key_starts[:] = [0, *accumulate(key_counts)]
    arrays.key_counts[:] = key_counts
    if arrays.shape.has_trees:
        fill_trees(arrays, batch)


def fill_trees(arrays: StepArrays, batch: RaggedBatch) -> None:
    """Writes the visible cells of a batch's rows. A padding row sees the first cell of its table only, so that no sum
    of weights is 0."""
    visible, cell_positions = arrays.visible, arrays.cell_positions
    visible[:] = 0
    visible[:, 0] = 1
    cell_positions[:] = numpy.arange(cell_positions.shape[1])
    row = 0
    for index, chunk in enumerate(batch.chunks):
        for position in range(chunk.start, chunk.base):
            visible[row, : position + 1] = 1
            row += 1
        for path in chunk.paths:
            visible[row, 0] = chunk.base > 0 or 0 in path
            visible[row, : chunk.base] = 1
            visible[row, path] = 1
            cell_positions[index, path] = range(chunk.base, chunk.base + len(path))
            row += 1
