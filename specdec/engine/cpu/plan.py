"""From a ragged batch to the rows of one step on a CPU: the token and position of each, where its key and value are
written, and the keys that it sees, in the order of their positions.

Targets and drafts share it: a row sees the positions below its base in the cells of these positions, then those of its
path. Written with numpy over all rows of a step at once, since it runs before every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy
import torch

from specdec.engine.interface import Chunk, RaggedBatch

NONE = numpy.zeros(0, dtype=numpy.int32)
NO_INDEX = torch.zeros(0, dtype=torch.int64)


class RowArrays(NamedTuple):
    """The fields of `sd_rows` (native/kernels.h): int32, those that end in `_start` int64."""

    sequence: numpy.ndarray
    position: numpy.ndarray
    slot: numpy.ndarray
    base: numpy.ndarray
    path_start: numpy.ndarray
    path: numpy.ndarray
    table_start: numpy.ndarray
    table: numpy.ndarray
    first: numpy.ndarray | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`input_ids`, `position_ids` [1, rows] int64; `logit_rows` [logits] int64; the rows themselves."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    rows: RowArrays

    @property
    def row_count(self) -> int:
        return self.input_ids.shape[1]


def plan_step(batch: RaggedBatch, block_size: int) -> StepPlan:
    """Returns the plan of a step. Pure. Raises ValueError for rows beyond their blocks."""
    chunks = batch.chunks
    counts = [len(chunk.token_ids) for chunk in chunks]
    ends = [*accumulate(counts)]
    ids = numpy.array([*chain.from_iterable(chunk.token_ids for chunk in chunks)], dtype=numpy.int64)
    logit_rows = [*chain.from_iterable(range(end - c.logit_count, end) for end, c in zip(ends, chunks))]
    tables = [_table(chunk, block_size) for chunk in chunks]
    table_start = numpy.array([0, *accumulate(map(len, tables))], dtype=numpy.int64)
    table = _joined(tables)
    position = numpy.arange(ends[-1], dtype=numpy.int32)
    if len(chunks) == 1:
        sequence = numpy.zeros(ends[-1], dtype=numpy.int32)
        position += numpy.int32(chunks[0].start)
    else:
        sequence = numpy.arange(len(chunks), dtype=numpy.int32).repeat(counts)
        before = [chunk.start - end + count for chunk, end, count in zip(chunks, ends, counts)]
        position += numpy.array(before, dtype=numpy.int32).repeat(counts)

    def slots_of(cells: numpy.ndarray, sequences: numpy.ndarray) -> numpy.ndarray:
        """The storage slots of cells of these sequences.  # int32"""
        slots = table[table_start[sequences] + cells // block_size] * block_size + cells % block_size
        found: numpy.ndarray = slots.astype(numpy.int32, copy=False)
        return found

    cells, base, path_start, path = position, position + numpy.int32(1), numpy.zeros(ends[-1] + 1, numpy.int64), NONE
    if any(chunk.paths for chunk in chunks):
        cells, path_cells = _add_nodes(chunks, ends, position, base)
        if len(path_cells):  # not all nodes are in place
            (position + numpy.int32(1) - base).cumsum(out=path_start[1:])
            path = slots_of(path_cells, sequence.repeat(path_start[1:] - path_start[:-1]))
    slot = slots_of(cells, sequence)
    return StepPlan(
        torch.from_numpy(ids)[None],
        torch.from_numpy(position.astype(numpy.int64))[None],
        torch.tensor(logit_rows, dtype=torch.int64),
        RowArrays(sequence, position, slot, base, path_start, path, table_start, table),
    )


@dataclass(frozen=True, slots=True)
class StackRows:
    """The rows of a step of an encoder-decoder model; None: there are none. An encoder's row sees its whole input; a
    decoder's sees the cells from its input's end on, and in cross attention the input's (`rows_before`).
    `encoder_index`, `decoder_index` [rows] int64: which rows of the step they are."""

    encoder: RowArrays | None
    decoder: RowArrays | None
    encoder_index: torch.Tensor
    decoder_index: torch.Tensor

    @property
    def cross(self) -> RowArrays | None:
        """The decoder's rows as cross attention sees them."""
        return None if self.decoder is None else rows_before(self.decoder)


def divide_rows(batch: RaggedBatch, rows: RowArrays) -> StackRows:
    """Returns the rows of both stacks of a planned step whose chunks `check_inputs` has passed. Pure."""
    lengths = numpy.array([chunk.encoder_length for chunk in batch.chunks], dtype=numpy.int32)[rows.sequence]
    decoder = rows._replace(first=lengths)
    is_input = rows.position < lengths
    if not is_input.any():
        return StackRows(None, decoder, NO_INDEX, torch.arange(len(lengths)))
    index, other = is_input.nonzero()[0], (~is_input).nonzero()[0]
    stacks = rows_before(_some(decoder, index)), _some(decoder, other) if len(other) else None
    return StackRows(*stacks, torch.from_numpy(index), torch.from_numpy(other))


def rows_before(rows: RowArrays) -> RowArrays:
    """Returns the rows as they see the positions before the first that they see."""
    assert rows.first is not None
    count = len(rows.position)
    first, path_start = numpy.zeros(count, numpy.int32), numpy.zeros(count + 1, numpy.int64)
    return rows._replace(base=rows.first, first=first, path_start=path_start, path=NONE)


def _some(rows: RowArrays, index: numpy.ndarray) -> RowArrays:
    """Returns some rows, in their order; the others have no paths, or none of these has."""
    path_start = numpy.zeros(len(index) + 1, numpy.int64)
    (rows.path_start[index + 1] - rows.path_start[index]).cumsum(out=path_start[1:])
    arrays = {name: getattr(rows, name)[index] for name in ("sequence", "position", "slot", "base", "first")}
    return rows._replace(path_start=path_start, **arrays)


def _add_nodes(
    chunks: tuple[Chunk, ...], ends: list[int], position: numpy.ndarray, base: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Writes the positions and bases of nodes; returns the cell of each row, and the cells on the paths, row by row.

    What a path has in the cells of its positions counts as below its base: it is read block by block.
    """
    cells = position.copy()
    path_cells: list[int] = []
    for chunk, end in zip(chunks, ends):
        for row, path in enumerate(chunk.paths, end - len(chunk.paths)):
            own = chunk.base
            in_place_count = next((i for i, cell in enumerate(path) if cell != own + i), len(path))
            position[row], cells[row] = own + len(path) - 1, path[-1]
            base[row] = own + in_place_count
            path_cells += path[in_place_count:]
    return cells, numpy.array(path_cells, dtype=numpy.int32)


def _joined(parts: Iterable[Iterable[int]]) -> numpy.ndarray:
    return numpy.array([*chain.from_iterable(parts)], dtype=numpy.int32)


def _table(chunk: Chunk, block_size: int) -> Sequence[int]:
    """Returns the blocks that the rows of a chunk read and write. Raises ValueError if it has fewer."""
    first, end = chunk.start, chunk.base
    if chunk.paths:
        first, end = min(first, *map(min, chunk.paths)), max(end, 1 + max(map(max, chunk.paths)))
    if first < 0 or end > len(chunk.block_ids) * block_size:
        raise ValueError(f"rows from {first} to {end - 1} lie beyond {len(chunk.block_ids)} blocks of {block_size}")
    return chunk.block_ids[: -(-end // block_size)]
