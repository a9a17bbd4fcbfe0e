"""From a ragged batch to the rows of one step on a CPU: the token and position of each, where its key and value are
written, and the keys that it sees, in the order of their positions.

Targets and drafts share it: a chain sees all positions of its block table, a node of a tree those below its base and
then its path. Written with numpy over all rows of a step at once, since it runs before every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy
import torch

from specdec.engine.interface import RaggedBatch, SequenceChunk, TreeRows

NONE = numpy.zeros(0, dtype=numpy.int32)


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
    copy_row: numpy.ndarray
    copy_slot: numpy.ndarray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`input_ids`, `position_ids` [1, rows] int64; `logit_rows` [logits] int64; the rows themselves."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    rows: RowArrays


def plan_step(batch: RaggedBatch, block_size: int) -> StepPlan:
    """Returns the plan of a step. Pure. Raises ValueError for rows beyond their blocks, and for nodes of a tree that do
    not see one key at each position up to their own."""
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
    if any(chunk.tree is not None for chunk in chunks):
        cells, base, path_start, path_cells = _trees(chunks, ends, position)
        path = slots_of(path_cells, sequence.repeat(path_start[1:] - path_start[:-1]))
    copy_row, copy_slot = NONE, NONE
    if any(chunk.copied_count for chunk in chunks):
        copy_row, copied, owners = _copies(batch)
        copy_slot = slots_of(copied, owners)
    slot = slots_of(cells, sequence)
    return StepPlan(
        torch.from_numpy(ids)[None],
        torch.from_numpy(position.astype(numpy.int64))[None],
        torch.tensor(logit_rows, dtype=torch.int64),
        RowArrays(sequence, position, slot, base, path_start, path, table_start, table, copy_row, copy_slot),
    )


def _copies(batch: RaggedBatch) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Returns the row, cell and sequence of each copy of a row that is on several paths."""
    paths = [index for index, chunk in enumerate(batch.chunks) if chunk.copied_count]
    copied = [(index, chunk.start, rows) for index, (chunk, rows) in zip(paths, batch.copied_rows())]
    return (
        _joined(rows for _, _, rows in copied),
        _joined(range(start - len(rows), start) for _, start, rows in copied),
        _joined([index] * len(rows) for index, _, rows in copied),
    )


def _joined(parts: Iterable[Iterable[int]]) -> numpy.ndarray:
    return numpy.array([*chain.from_iterable(parts)], dtype=numpy.int32)


def _table(chunk: SequenceChunk, block_size: int) -> Sequence[int]:
    """Returns the blocks that the rows of a chunk read and write. Raises ValueError if it has fewer."""
    held, tree = len(chunk.block_ids) * block_size, chunk.tree
    if tree is None:
        first, end = chunk.start - chunk.copied_count, chunk.end
    else:
        first, end = min(tree.cells), max(tree.cells) + 1
        if tree.visible.shape[1] > held:
            end = max(end, int(numpy.flatnonzero(tree.visible.any(0))[-1]) + 1)
    if end > held or first < 0:
        raise ValueError(f"rows from {first} to {end - 1} lie beyond {len(chunk.block_ids)} blocks of {block_size}")
    return chunk.block_ids if tree is not None else chunk.block_ids[: -(-end // block_size)]


def _trees(
    chunks: tuple[SequenceChunk, ...], ends: list[int], position: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Returns the cell of each row, its base, the starts of the paths, and the cells on them; writes the positions of
    nodes to `position`."""
    cells, base = position.copy(), position + numpy.int32(1)
    paths: list[numpy.ndarray] = []
    for chunk, end in zip(chunks, ends):
        if chunk.tree is not None:
            own = slice(end - len(chunk.token_ids), end)
            position[own], cells[own] = chunk.tree.positions, chunk.tree.cells
            base[own], its_paths = _paths(chunk.tree, position[own], cells[own])
            paths.append(its_paths)
    path_start = numpy.zeros(len(position) + 1, dtype=numpy.int64)
    (position + numpy.int32(1) - base).cumsum(out=path_start[1:])
    return cells, base, path_start, paths[0] if len(paths) == 1 else numpy.concatenate(paths)


def _paths(tree: TreeRows, position: numpy.ndarray, own: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Returns the base of each row and the cells on the paths, row by row. `own`: the cell of each row.

    The base is the longest run of cells 0, 1, ... at positions 0, 1, ... that a row sees.
    """
    visible, cell_count = tree.visible, tree.visible.shape[1]
    positions, every_row = tree.cell_positions[:cell_count], numpy.arange(len(position))
    is_in_place = visible & (positions == numpy.arange(cell_count))
    base = is_in_place.argmin(1)  # the first that is not
    base[is_in_place[every_row, base]] = cell_count
    first = int(base.min())
    rows, cells = visible[:, first:].nonzero()
    cells += first
    if (base > first).any():
        is_beyond = cells >= base[rows]
        rows, cells = rows[is_beyond], cells[is_beyond]
    # What a row must see beyond its base: one key at each position up to its own, which is the last.
    counts = position + 1 - base
    ends = counts.cumsum()
    is_whole = counts.min() >= 0 and ends[-1] == len(cells) and (rows == every_row.repeat(counts)).all()
    if is_whole:
        depths = positions[cells] - base.repeat(counts)
        is_whole = ((depths >= 0) & (depths < counts.repeat(counts))).all()
    if is_whole:
        path = numpy.full(len(cells), -1)
        path[(ends - counts).repeat(counts) + depths] = cells
        last = numpy.where(counts > 0, numpy.append(path, -1)[ends - 1], base - 1)
        is_whole = (path >= 0).all() and (last == own).all()
    if not is_whole:
        raise ValueError("a node of a tree does not see exactly one key at each position up to its own, which is last")
    return base, path
