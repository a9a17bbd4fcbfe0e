"""From a ragged batch to the index tensors of one step: computed once, used by every layer.

Rows of all chunks are concatenated and padded to a stable tile size. Query tiles are cut, grouped by width and by
context length, and every gather and scatter of the step becomes one list of indices. Written with numpy, whose small
operations cost a third of torch's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy
import torch

from specdec.engine.attention import KEY_SPLIT, AttentionPlan, QueryGroup
from specdec.engine.backend import StepInput
from specdec.engine.interface import RaggedBatch, SequenceChunk
from specdec.engine.storage import PagedStorage
from specdec.engine.tile_sizes import TileSizes

GATHER_BYTES_MAX = 8 << 20  # of a group; from 32 MiB on glibc maps every buffer anew, zeroed page by page
SHORT_TILE = 8  # tiles up to this size share a group: a few more rows cost less than more kernel calls


@dataclass(frozen=True, slots=True)
class TileTree:
    """The rows of a tile on several paths, and the keys they see: those of the positions that all paths share, then the
    last splits of each path. To a row the splits of other paths are masked ones between its own."""

    positions: numpy.ndarray  # [rows] int64
    paths: numpy.ndarray  # [rows] int64
    key_positions: numpy.ndarray  # [splits * KEY_SPLIT] int64
    key_paths: numpy.ndarray  # [splits * KEY_SPLIT] int64, -1 for all paths
    shared_split_count: int

    def mask(self, first: int, split_count: int, width: int, window: int | None) -> torch.Tensor:
        """Returns 0 where a row may attend, from the split `first` on, minus infinity elsewhere; rows beyond the tile's
        own repeat its first.  # [split_count, width, KEY_SPLIT] float32"""
        rows = numpy.zeros(width, dtype=numpy.int64)
        rows[: len(self.positions)] = numpy.arange(len(self.positions))
        positions, paths = self.positions[rows][:, None], self.paths[rows][:, None]
        keys, key_paths = self.key_positions[first * KEY_SPLIT :], self.key_paths[first * KEY_SPLIT :]
        is_hidden = (keys > positions) | ((key_paths >= 0) & (key_paths != paths))
        if window is not None:
            is_hidden |= keys <= positions - window
        mask = torch.full((split_count, width, KEY_SPLIT), -torch.inf)
        shown = torch.from_numpy(is_hidden.reshape(width, -1, KEY_SPLIT).swapaxes(0, 1).copy())
        mask[: len(shown)] = torch.zeros(shown.shape).masked_fill_(shown, -torch.inf)
        return mask


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Up to one tile of query rows of one chunk: batch rows [first_row, first_row + row_count) from `position` on; or
    the rows of all paths of a `tree`."""

    blocks: numpy.ndarray  # [blocks of the chunk, or of the splits of a tree] int64
    first_row: int
    row_count: int
    position: int
    tree: TileTree | None = None

    @property
    def split_count(self) -> int:
        """Number of key splits up to the last one visible to the tile's last row."""
        if self.tree is not None:
            return len(self.tree.key_positions) // KEY_SPLIT
        return -(-(self.position + self.row_count) // KEY_SPLIT)

    def first_split(self, window: int | None) -> int:
        """Returns the first key split visible to the tile's first row."""
        first = 0 if window is None else max(0, self.position - window + 1) // KEY_SPLIT
        return first if self.tree is None else min(first, self.tree.shared_split_count)


class StepPlanner:
    """Plans steps for one model, one storage and the windows of its layers. Holds no state between steps."""

    def __init__(
        self,
        storage: PagedStorage,
        head_count: int,
        query_tiles: Sequence[int],
        tile_sizes: TileSizes,
        windows: Sequence[int | None] = (None,),
    ):
        self._storage = storage
        self._windows = windows
        self._head_count = head_count
        self._query_tiles = query_tiles
        self._tile_sizes = tile_sizes
        split_bytes = 2 * storage.kv_head_count * KEY_SPLIT * storage.head_size * 4  # keys and values in float32
        self._splits_max = GATHER_BYTES_MAX // split_bytes

    def plan(self, batch: RaggedBatch) -> StepInput:
        """Returns the index tensors of a step, its attention an `AttentionPlan`. Pure."""
        row_count = batch.row_count
        padded = self._tile_sizes.padded(row_count)
        ids = numpy.zeros(padded, dtype=numpy.int64)
        positions = numpy.zeros(padded, dtype=numpy.int64)
        row_blocks = numpy.empty(row_count, dtype=numpy.int64)
        logit_rows: list[int] = []
        tiles: list[QueryTile] = []
        row = 0
        for index, chunk in enumerate(batch.chunks):
            count = len(chunk.token_ids)
            blocks = numpy.array(chunk.block_ids, dtype=numpy.int64)
            ids[row : row + count] = chunk.token_ids
            positions[row : row + count] = its_positions = numpy.arange(chunk.start, chunk.end)
            row_blocks[row : row + count] = blocks[its_positions // self._storage.block_size]
            logit_rows += range(row + count - chunk.logit_count, row + count)
            paths = self._paths(batch, index)
            if len(paths) > 1:
                tiles.append(self._tree_tile(paths, row))
            elif paths:
                for offset in range(0, count, self._query_tiles[-1]):
                    tile_rows = min(count - offset, self._query_tiles[-1])
                    tiles.append(QueryTile(blocks, row + offset, tile_rows, chunk.start + offset))
            row += count
        written, sources = self._written(batch, row_blocks, positions[:row_count])
        groups, output_rows = self._groups(tiles, padded)
        return StepInput(
            input_ids=torch.from_numpy(ids)[None],
            position_ids=torch.from_numpy(positions)[None],
            logit_rows=self._padded_logit_rows(logit_rows),
            attention=AttentionPlan(self._storage, row_count, written, groups, output_rows, sources),
        )

    def _paths(self, batch: RaggedBatch, index: int) -> Sequence[SequenceChunk]:
        """Returns the chunks whose rows one tile, or one series of tiles, contains: a chunk and the further paths of
        its sequence if they fit one tile, else the chunk alone; none for a path in the tile of a chunk before."""
        chunks = batch.chunks
        first = index
        while chunks[first].copied_count:
            first -= 1
        end = index + 1
        while end < len(chunks) and chunks[end].copied_count:
            end += 1
        if end - first == 1 or sum(len(chunk.token_ids) for chunk in chunks[first:end]) > self._query_tiles[-1]:
            return chunks[index : index + 1]
        return chunks[first:end] if first == index else ()

    def _tree_tile(self, paths: Sequence[SequenceChunk], first_row: int) -> QueryTile:
        """Returns the tile of all rows of a sequence's paths."""
        split_blocks = KEY_SPLIT // self._storage.block_size
        shared = min(chunk.start - chunk.copied_count for chunk in paths[1:]) // KEY_SPLIT
        blocks = [numpy.asarray(paths[0].block_ids[: shared * split_blocks], dtype=numpy.int64)]
        keys, key_paths = [numpy.arange(shared * KEY_SPLIT)], [numpy.full(shared * KEY_SPLIT, -1)]
        for path, chunk in enumerate(paths):
            split_count = -(-chunk.end // KEY_SPLIT) - shared
            own = numpy.zeros(split_count * split_blocks, dtype=numpy.int64)  # the zero block where the path has ended
            tail = chunk.block_ids[shared * split_blocks :][: len(own)]
            own[: len(tail)] = tail
            blocks.append(own)
            keys.append(shared * KEY_SPLIT + numpy.arange(split_count * KEY_SPLIT))
            key_paths.append(numpy.full(split_count * KEY_SPLIT, path))
        counts = [len(chunk.token_ids) for chunk in paths]
        positions = numpy.concatenate([numpy.arange(chunk.start, chunk.end) for chunk in paths])
        rows = numpy.repeat(numpy.arange(len(paths)), counts)
        tree = TileTree(positions, rows, numpy.concatenate(keys), numpy.concatenate(key_paths), shared)
        return QueryTile(numpy.concatenate(blocks), first_row, sum(counts), int(positions[0]), tree)

    def _padded_logit_rows(self, logit_rows: list[int]) -> torch.Tensor:
        if not logit_rows:
            return torch.empty(0, dtype=torch.int64)
        padding = [logit_rows[0]] * (self._tile_sizes.padded(len(logit_rows)) - len(logit_rows))
        return torch.tensor(logit_rows + padding)

    def _written(
        self, batch: RaggedBatch, blocks: numpy.ndarray, positions: numpy.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns cache positions of every (keys or values, row, kv head) and the rows they come from: see
        `AttentionPlan`. `blocks`, `positions` [rows]: those of the rows themselves; copies follow."""
        storage = self._storage
        copied = list(batch.copied_rows())
        for chunk, rows in copied:
            its_positions = numpy.arange(chunk.start - len(rows), chunk.start)
            positions = numpy.concatenate((positions, its_positions))
            blocks = numpy.concatenate((blocks, numpy.asarray(chunk.block_ids)[its_positions // storage.block_size]))
        sources = torch.tensor([*range(batch.row_count), *chain(*(rows for _, rows in copied))]) if copied else None
        halves = numpy.arange(2)[:, None, None] * storage.block_count
        heads = numpy.arange(storage.kv_head_count)
        cells = (halves + blocks[:, None]) * storage.kv_head_count + heads
        places = (cells * storage.block_size + positions[:, None] % storage.block_size).reshape(-1)
        return torch.from_numpy(places), sources

    def _groups(
        self, tiles: list[QueryTile], padded: int
    ) -> tuple[dict[int | None, tuple[QueryGroup, ...]], torch.Tensor]:
        """Returns the tiles in groups, by window, and the indices of each padded row's heads in their results."""
        head_count = self._head_count
        output_rows = numpy.zeros((padded, head_count), dtype=numpy.int64)
        heads = numpy.arange(head_count)
        groups: list[list[QueryGroup]] = []
        place = 0
        for members in group_tiles(tiles, self._query_tiles, self._splits_max):
            width = self._width(max(tile.row_count for tile in members))
            groups.append(self._group_by_window(members, width))
            for tile in members:
                rows = numpy.arange(tile.row_count)[:, None]
                output_rows[tile.first_row : tile.first_row + tile.row_count] = place + heads * width + rows
                place += head_count * width
        return dict(zip(self._windows, zip(*groups))), torch.from_numpy(output_rows.reshape(-1))

    def _group_by_window(self, members: list[QueryTile], width: int) -> list[QueryGroup]:
        """Returns one group for each window; windows that hide nothing from these tiles share one."""
        end = max(tile.position + tile.row_count for tile in members)  # at least that of the longest path
        made: dict[int | None, QueryGroup] = {}
        groups = []
        for window in self._windows:
            reach = None if window is None or window >= end else window
            if reach not in made:
                made[reach] = self._group(members, width, reach)
            groups.append(made[reach])
        return groups

    def _group(self, members: list[QueryTile], width: int, window: int | None) -> QueryGroup:
        storage = self._storage
        split_blocks = KEY_SPLIT // storage.block_size
        firsts = [tile.first_split(window) for tile in members]
        split_count = max(tile.split_count - first for tile, first in zip(members, firsts))
        tables = numpy.zeros((len(members), split_count * split_blocks), dtype=numpy.int64)  # 0 where a table ends
        offsets = numpy.zeros((len(members), width), dtype=numpy.int64)  # rows beyond a tile's own repeat its first
        for index, (tile, first) in enumerate(zip(members, firsts)):
            used = tile.blocks[first * split_blocks :][: split_count * split_blocks]
            tables[index, : len(used)] = used
            offsets[index, : tile.row_count] = range(tile.row_count)
        rows = numpy.array([tile.first_row for tile in members])[:, None] + offsets  # [tiles, width]
        # [tiles, kv heads, 1, group size, width], then repeated for every split
        query_rows = (rows[:, None, :] * self._head_count + numpy.arange(self._head_count)[:, None]).reshape(
            len(members), storage.kv_head_count, 1, -1
        )
        halves = numpy.arange(2)[:, None, None, None] * storage.block_count
        cells = (halves + tables[:, None, :]) * storage.kv_head_count + numpy.arange(storage.kv_head_count)[:, None]
        starts = [tile.position - first * KEY_SPLIT for tile, first in zip(members, firsts)]
        positions = torch.from_numpy(numpy.array(starts)[:, None] + offsets)  # relative to each tile's first split
        group_size = self._head_count // storage.kv_head_count
        mask = _mask(positions, window, split_count, storage.kv_head_count, group_size)
        sizes = (len(members), storage.kv_head_count, split_count, group_size, width, KEY_SPLIT)
        for index, (tile, first) in enumerate(zip(members, firsts)):
            if tile.tree is not None:
                mask.view(sizes)[index] = tile.tree.mask(first, split_count, width, window)[None, :, None]
        return QueryGroup(
            split_count=split_count,
            query_rows=torch.from_numpy(query_rows.repeat(split_count, axis=2).reshape(-1)),
            cells=torch.from_numpy(cells.reshape(-1)),
            mask=mask,
        )

    def _width(self, row_count: int) -> int:
        return self._query_tiles[bisect_left(self._query_tiles, row_count)]


def group_tiles(tiles: list[QueryTile], widths: Sequence[int], splits_max: int) -> list[list[QueryTile]]:
    """Groups tiles to compute together: of one width, or all short, within a factor of two in length, and at most
    `splits_max` key splits in all, unless one tile has more."""

    def width_class(tile: QueryTile) -> int:
        return max(SHORT_TILE, widths[bisect_left(widths, tile.row_count)])

    groups: list[list[QueryTile]] = []
    for tile in sorted(tiles, key=lambda tile: (width_class(tile), -tile.split_count)):
        longest = groups[-1][0] if groups else tile
        is_near = width_class(longest) == width_class(tile) and 2 * tile.split_count >= longest.split_count
        if groups and is_near and (len(groups[-1]) + 1) * longest.split_count <= splits_max:
            groups[-1].append(tile)
        else:
            groups.append([tile])
    return groups


def _mask(
    positions: torch.Tensor, window: int | None, split_count: int, kv_head_count: int, group_size: int
) -> torch.Tensor:
    """positions [tiles, width] int64 -> `QueryGroup.mask`."""
    tiles, width = positions.shape
    keys = torch.arange(split_count * KEY_SPLIT).view(split_count, 1, KEY_SPLIT)
    rows = positions[:, None, :, None]
    is_hidden = keys > rows  # [tiles, splits, width, KEY_SPLIT]
    if window is not None:
        is_hidden |= keys <= rows - window
    mask = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf)
    mask = mask[:, None, :, None].expand(tiles, kv_head_count, split_count, group_size, width, KEY_SPLIT)
    return mask.reshape(-1, group_size * width, KEY_SPLIT)
