"""From a ragged batch to the tensors of one step on the device, in one copy.

A step has a shape: its numbers of rows, sequences and keys. An exact shape is made for a step; a captured graph has a
fixed one, to which a step is padded: padding rows write to the scratch block and read from no sequence. All index
tensors of a step lie in one buffer, filled on the host in pinned memory and sent in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from specdec.engine.interface import Chunk, RaggedBatch


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's tensors.

    `query_max`: most rows of one sequence; 1 means that every sequence, padding ones too, has exactly one row.
    `key_max`: most positions of one sequence. `logit_count`: rows with logits. `has_trees`: each row has a set of
    visible cells.
    """

    row_count: int
    sequence_count: int
    logit_count: int
    query_max: int
    key_max: int
    has_trees: bool = False

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
        )


def exact_shape(batch: RaggedBatch, has_trees: bool = False) -> StepShape:
    """Returns the shape of a batch without padding. `has_trees`: also of one whose rows are all chains."""
    return StepShape(
        row_count=batch.row_count,
        sequence_count=len(batch.chunks),
        logit_count=batch.logit_count,
        query_max=max(len(chunk.token_ids) for chunk in batch.chunks),
        key_max=max(seen_end(chunk) for chunk in batch.chunks),
        has_trees=has_trees or any(chunk.paths for chunk in batch.chunks),
    )


def seen_end(chunk: Chunk) -> int:
    """Returns the cell after the last that the rows of a chunk see."""
    return max(chunk.base, 1 + max((cell for path in chunk.paths for cell in path), default=-1))


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Views of one buffer on the device.

    `input_ids`, `positions`, `slots` [rows] int64: token, position and storage slot of every row. `logit_rows` [logits]
    int64. `query_starts`, `key_starts` [sequences + 1] int32: running sums of rows and of positions up to each
    sequence's last row; `key_counts` [sequences] int32. `tables` [sequences, width] int32. With trees, `visible`
    [rows, width * block size] uint8 are the visible cells of each row, and `cell_positions` [sequences, width * block
    size] int32 their positions; without, both are empty.
    """

    shape: StepShape
    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    key_counts: torch.Tensor
    tables: torch.Tensor
    visible: torch.Tensor
    cell_positions: torch.Tensor


class StepBuffer:
    """The buffer of one step, in pinned memory and on the device: `reserve` sizes it, `fill` writes, `send` copies.

    A captured graph reads the device's side at fixed addresses, so all shapes are reserved before the first capture.
    """

    def __init__(self, block_size: int, scratch_slot: int, device: torch.device):
        self._block_size = block_size
        self._scratch_slot = scratch_slot
        self._device = device
        self._sent: torch.cuda.Event | None = None
        self._host, self._on_device = self._make(0)

    def reserve(self, shape: StepShape) -> None:
        """Enlarges the buffer for a shape. Earlier views belong to the old buffer."""
        needed = self._word_count(shape)
        if needed > len(self._host):
            self._host, self._on_device = self._make(needed)

    def fill(self, batch: RaggedBatch, shape: StepShape) -> None:
        """Writes a batch, padded to `shape`, to the host's side. Raises for block tables that do not cover it."""
        if self._sent is not None:
            self._sent.synchronize()  # the last copy may still be reading
        fill(self._views(self._host, shape), batch, self._block_size, self._scratch_slot)

    def send(self, shape: StepShape) -> StepTensors:
        """Copies the filled part to the device without waiting."""
        count = self._word_count(shape)
        self._on_device[:count].copy_(self._host[:count], non_blocking=True)
        if self._device.type == "cuda":
            self._sent = torch.cuda.Event()
            self._sent.record()
        return self.views(shape)

    def views(self, shape: StepShape) -> StepTensors:
        """Returns the device's views of a reserved shape, the same as `send` of that shape."""
        return self._views(self._on_device, shape)

    def _make(self, word_count: int) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.zeros(word_count, dtype=torch.int64, pin_memory=self._device.type == "cuda" and word_count > 0)
        return host, torch.zeros(word_count, dtype=torch.int64, device=self._device)

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

    def _views(self, buffer: torch.Tensor, shape: StepShape) -> StepTensors:
        rows, count, cells = shape.row_count, shape.sequence_count, self._cell_count(shape)
        wide, halves, octets = buffer[: self._word_count(shape)].split(self._sizes(shape))
        input_ids, positions, slots, logit_rows = wide.split(self._wide_counts(shape))
        counts = self._half_counts(shape)
        fields = halves.view(torch.int32)[: sum(counts)].split(counts)
        query_starts, key_starts, key_counts, tables, cell_positions = fields
        tables = tables.view(count, shape.table_width(self._block_size))
        visible = octets.view(torch.uint8)[: rows * cells].view(rows, cells)
        return StepTensors(
            shape,
            input_ids,
            positions,
            slots,
            logit_rows,
            query_starts,
            key_starts,
            key_counts,
            tables,
            visible,
            cell_positions.view(count, cells),
        )


def fill(tensors: StepTensors, batch: RaggedBatch, block_size: int, scratch_slot: int) -> None:
    """Writes a batch into the host's tensors, and padding behind it. Mutates `tensors` only."""
    ids, positions, slots = tensors.input_ids.numpy(), tensors.positions.numpy(), tensors.slots.numpy()
    query_starts, key_counts = tensors.query_starts.numpy(), tensors.key_counts.numpy()
    tables, logit_rows = tensors.tables.numpy(), tensors.logit_rows.numpy()
    ids[:], positions[:], slots[:], logit_rows[:] = 0, 0, scratch_slot, 0
    query_starts[0] = 0
    row = logit = 0
    if tensors.shape.has_trees:
        fill_trees(tensors, batch)
    for index, chunk in enumerate(batch.chunks):
        count, end = len(chunk.token_ids), row + len(chunk.token_ids)
        chain, paths, key_count = range(chunk.start, chunk.base), chunk.paths, seen_end(chunk)
        places = numpy.array([*chain, *(path[-1] for path in paths)], dtype=numpy.int64)
        its_positions = numpy.array([*chain, *(chunk.base - 1 + len(path) for path in paths)], dtype=numpy.int64)
        blocks = numpy.asarray(chunk.block_ids[: -(-key_count // block_size)], dtype=numpy.int64)
        ids[row:end] = chunk.token_ids
        positions[row:end] = its_positions
        slots[row:end] = blocks[places // block_size] * block_size + places % block_size
        logit_rows[logit : logit + chunk.logit_count] = range(end - chunk.logit_count, end)
        tables[index, : len(blocks)] = blocks
        tables[index, len(blocks) :] = 0
        query_starts[index + 1] = end
        key_counts[index] = key_count
        row, logit = row + count, logit + chunk.logit_count
    sequence_count = len(batch.chunks)
    is_single = tensors.shape.query_max == 1
    # A padding sequence has one row and one key if every sequence has one row; otherwise no row and no key.
    padding = numpy.arange(1, tensors.shape.sequence_count - sequence_count + 1) * is_single
    query_starts[sequence_count + 1 :] = row + padding
    key_counts[sequence_count:] = is_single
    tables[sequence_count:] = 0
    tensors.key_starts[0] = 0
    tensors.key_starts.numpy()[1:] = key_counts.cumsum()


def fill_trees(tensors: StepTensors, batch: RaggedBatch) -> None:
    """Writes the visible cells of a batch's rows. A padding row sees the first cell of its table only, so that no sum
    of weights is 0."""
    visible, cell_positions = tensors.visible.numpy(), tensors.cell_positions.numpy()
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
