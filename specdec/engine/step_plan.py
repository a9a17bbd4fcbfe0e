"""From a ragged batch to the index tensors of one step: computed once, used by every layer.

Rows of all chunks are concatenated and padded to a stable tile size. Query tiles are cut, grouped by width and by
context length, and every gather and scatter of the step becomes one list of indices. Written with numpy, whose small
operations cost a third of torch's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, takewhile

import numpy
import torch

from specdec.engine.attention import KEY_SPLIT, TREE_KEYS, AttentionPlan, QueryGroup, TreeGroup
from specdec.engine.backend import StepInput
from specdec.engine.interface import RaggedBatch, SequenceChunk
from specdec.engine.storage import PagedStorage
from specdec.engine.tile_sizes import TileSizes

GATHER_BYTES_MAX = 2 << 20  # of a group: its keys, values, scores and weights stay in a processor's cache
SHORT_TILE = 8  # tiles up to this size share a group: a few more rows cost less than more kernel calls


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Up to one tile of query rows: batch rows [first_row, first_row + row_count), of one chunk from `position` on; or
    of all paths of a sequence, at `positions`, the least of which is `position`."""

    blocks: numpy.ndarray  # [blocks of the chunk] int64
    first_row: int
    row_count: int
    position: int
    positions: numpy.ndarray | None = None  # [row_count] int64

    @property
    def split_count(self) -> int:
        """Number of key splits up to the last one visible to the tile's last row."""
        return -(-(self.position + self.row_count) // KEY_SPLIT)

    def first_split(self, window: int | None) -> int:
        """Returns the first key split visible to the tile's first row."""
        return 0 if window is None else max(0, self.position - window + 1) // KEY_SPLIT

    def row_positions(self) -> numpy.ndarray:
        """The position of each row.  # [row_count] int64"""
        if self.positions is not None:
            return self.positions
        return numpy.arange(self.position, self.position + self.row_count)


@dataclass(frozen=True, slots=True)
class TreeTile:
    """The rows of a sequence with several paths, the first at `position`, as one tile.

    `blocks`: those of the first path; `row_blocks` [rows]: the block that each row is written to. `paths` [rows,
    longest]: the rows on a row's path, counted from `first_row`, its own the last; -1 beyond.
    """

    blocks: numpy.ndarray
    first_row: int
    position: int
    row_blocks: numpy.ndarray
    paths: numpy.ndarray

    @property
    def positions(self) -> numpy.ndarray:
        """The position of each row.  # [rows] int64"""
        positions: numpy.ndarray = self.position + (self.paths >= 0).sum(1) - 1
        return positions

    def on_the_past(self) -> QueryTile:
        """Its rows as a tile that reads what all paths have before the first row."""
        return QueryTile(self.blocks, self.first_row, len(self.paths), self.position, self.positions)


def paths_of_rows(chunks: Sequence[SequenceChunk]) -> numpy.ndarray:
    """Returns `TreeTile.paths` of the chunks of one sequence: the rows above a chunk are on the path before it."""
    path: list[int] = []
    paths: list[list[int]] = []
    for chunk in chunks:
        del path[chunk.start - chunks[0].start :]
        for _ in chunk.token_ids:
            path.append(len(paths))
            paths.append(path.copy())
    found = numpy.full((len(paths), max(map(len, paths))), -1, dtype=numpy.int64)
    for row, own in enumerate(paths):
        found[row, : len(own)] = own
    return found


class StepPlanner:
    """Plans steps for one model, one storage and the windows of its layers. Holds no state between steps.

    `tree_tiles`: those of `query_tiles` at which a row of a tree has the bits of its path as a chain (`tree_probe`).
    Other trees have tiles of their own for each path.
    """

    def __init__(
        self,
        storage: PagedStorage,
        head_count: int,
        query_tiles: Sequence[int],
        tile_sizes: TileSizes,
        windows: Sequence[int | None] = (None,),
        tree_tiles: Sequence[int] = (),
    ):
        self._storage = storage
        self._windows = windows
        self._head_count = head_count
        self._query_tiles = query_tiles
        self._tree_tiles = tree_tiles
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
        trees: list[TreeTile] = []
        rows_max, row, tree_end = self._query_tiles[-1], 0, 0
        for index, chunk in enumerate(batch.chunks):
            count = len(chunk.token_ids)
            blocks = numpy.array(chunk.block_ids, dtype=numpy.int64)
            ids[row : row + count] = chunk.token_ids
            positions[row : row + count] = its_positions = numpy.arange(chunk.start, chunk.end)
            row_blocks[row : row + count] = blocks[its_positions // self._storage.block_size]
            logit_rows += range(row + count - chunk.logit_count, row + count)
            if not chunk.copied_count and (paths := self._paths_of_tree(batch.chunks, index)) is not None:
                tree_end = row + len(paths)
                own_blocks = row_blocks[row:tree_end]  # a view, which its further chunks fill
                trees.append(TreeTile(blocks, row, chunk.start, own_blocks, paths))
            if row >= tree_end:
                for offset in range(0, count, rows_max):
                    tiles.append(QueryTile(blocks, row + offset, min(count - offset, rows_max), chunk.start + offset))
            row += count
        written, sources = self._written(batch, row_blocks, positions[:row_count])
        groups, output_rows = self._groups(tiles, trees, padded)
        return StepInput(
            input_ids=torch.from_numpy(ids)[None],
            position_ids=torch.from_numpy(positions)[None],
            logit_rows=self._padded_logit_rows(logit_rows),
            attention=AttentionPlan(
                self._storage, row_count, written, groups, output_rows, sources, batch.should_abandon
            ),
        )

    def _paths_of_tree(self, chunks: Sequence[SequenceChunk], index: int) -> numpy.ndarray | None:
        """Returns the paths of the sequence that begins with a chunk; None if it has one, or no tile can hold all."""
        if index + 1 == len(chunks) or not chunks[index + 1].copied_count:
            return None
        own = [chunks[index], *takewhile(lambda later: later.copied_count, chunks[index + 1 :])]
        row_count = sum(len(chunk.token_ids) for chunk in own)
        return paths_of_rows(own) if row_count <= max(self._tree_tiles, default=0) else None

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
        self, tiles: list[QueryTile], trees: list[TreeTile], padded: int
    ) -> tuple[dict[int | None, tuple[QueryGroup | TreeGroup, ...]], torch.Tensor]:
        """Returns the tiles in groups, by window, each tree a group of its own, and the indices of each padded row's
        heads in their results."""
        head_count = self._head_count
        output_rows = numpy.zeros((padded, head_count), dtype=numpy.int64)
        heads = numpy.arange(head_count)
        groups: list[list[QueryGroup | TreeGroup]] = []
        place = 0
        for members in group_tiles(tiles, self._query_tiles, self._splits_max):
            width = self._width(max(tile.row_count for tile in members))
            end = max(tile.position + tile.row_count for tile in members)
            groups.append(self._by_window(end, partial(self._group, members, width)))
            for tile in members:
                rows = numpy.arange(tile.row_count)[:, None]
                output_rows[tile.first_row : tile.first_row + tile.row_count] = place + heads * width + rows
                place += head_count * width
        for tree in trees:
            width = self._tree_tiles[bisect_left(self._tree_tiles, len(tree.paths))]
            end = int(tree.positions.max()) + 1
            groups.append(self._by_window(end, partial(self._tree_group, tree, width)))
            rows = numpy.arange(len(tree.paths))[:, None]
            output_rows[tree.first_row : tree.first_row + len(tree.paths)] = place + heads * width + rows
            place += head_count * width
        return dict(zip(self._windows, zip(*groups))), torch.from_numpy(output_rows.reshape(-1))

    def _by_window(
        self, end: int, group_of: Callable[[int | None], QueryGroup | TreeGroup]
    ) -> list[QueryGroup | TreeGroup]:
        """Returns one group for each window; windows that hide nothing before `end` share one."""
        reaches = [None if window is None or window >= end else window for window in self._windows]
        made = {reach: group_of(reach) for reach in dict.fromkeys(reaches)}
        return [made[reach] for reach in reaches]

    def _tree_group(self, tree: TreeTile, width: int, window: int | None) -> TreeGroup:
        storage, positions = self._storage, tree.positions
        (count, longest), first = tree.paths.shape, tree.position // KEY_SPLIT
        cached = tree.position - first * KEY_SPLIT  # positions of the first row's split before it
        split_count = (cached + longest) // KEY_SPLIT + 1  # so the last place is beyond every row
        rows, depths = numpy.nonzero(tree.paths >= 0)
        own_keys, own_places = cached + tree.paths[rows, depths], cached + depths
        places = numpy.full((count, split_count * KEY_SPLIT), TREE_KEYS - 1)
        places[:, :cached] = numpy.arange(cached)
        places[rows, own_places] = own_keys
        keys = numpy.full((count, split_count, TREE_KEYS), split_count * KEY_SPLIT - 1)
        keys[:, 0, :cached] = numpy.arange(cached)
        keys[rows, own_places // KEY_SPLIT, own_keys] = own_places
        key_positions = numpy.zeros(TREE_KEYS, dtype=numpy.int64)
        key_positions[:cached] = numpy.arange(first * KEY_SPLIT, tree.position)
        key_positions[cached : cached + count] = positions
        is_visible = numpy.zeros((count, TREE_KEYS), dtype=bool)
        is_visible[:, :cached] = True
        is_visible[rows, own_keys] = True
        if window is not None:
            is_visible &= key_positions > positions[:, None] - window
        blocks = numpy.zeros(TREE_KEYS, dtype=numpy.int64)  # block 0 is always zero
        blocks[:cached] = tree.blocks[key_positions[:cached] // storage.block_size]
        blocks[cached : cached + count] = tree.row_blocks
        heads, halves = numpy.arange(storage.kv_head_count)[:, None], numpy.arange(2)[:, None, None]
        cells = (halves * storage.block_count + blocks) * storage.kv_head_count + heads  # [2, kv heads, TREE_KEYS]
        offsets = numpy.zeros(width, dtype=numpy.int64)  # rows beyond its own repeat the first
        offsets[:count] = range(count)
        queries = (tree.first_row + offsets) * self._head_count + numpy.arange(self._head_count)[:, None]
        order = numpy.tile(offsets, self._head_count // storage.kv_head_count)  # of (query head, row)
        mask = numpy.where(is_visible, numpy.float32(0), numpy.float32(-numpy.inf))[order]
        own = QueryGroup(
            split_count=1,
            query_rows=torch.from_numpy(queries.reshape(-1)),
            cells=torch.from_numpy((cells * storage.block_size + key_positions % storage.block_size).reshape(-1)),
            mask=torch.from_numpy(mask).expand(storage.kv_head_count, -1, -1).contiguous(),
        )
        past = tree.on_the_past()
        before = self._group([past], width, window, first) if past.first_split(window) < first else None
        return TreeGroup(before, own, torch.from_numpy(places[order]), torch.from_numpy(keys[order]).flatten(1))

    def _group(self, members: list[QueryTile], width: int, window: int | None, end: int | None = None) -> QueryGroup:
        """Returns the group of tiles whose rows attend to the key splits before `end`, or to all of their past."""
        storage = self._storage
        split_blocks = KEY_SPLIT // storage.block_size
        firsts = [tile.first_split(window) for tile in members]
        ends = [tile.split_count if end is None else end for tile in members]
        split_count = max(own_end - own_first for own_first, own_end in zip(firsts, ends))
        tables = numpy.zeros((len(members), split_count * split_blocks), dtype=numpy.int64)  # 0 where a table ends
        offsets = numpy.zeros((len(members), width), dtype=numpy.int64)  # rows beyond a tile's own repeat its first
        positions = numpy.zeros((len(members), width), dtype=numpy.int64)  # relative to each tile's first split
        for index, (tile, own_first) in enumerate(zip(members, firsts)):
            used = tile.blocks[own_first * split_blocks :][: split_count * split_blocks]
            tables[index, : len(used)] = used
            offsets[index, : tile.row_count] = range(tile.row_count)
            positions[index] = tile.row_positions()[offsets[index]] - own_first * KEY_SPLIT
        rows = numpy.array([tile.first_row for tile in members])[:, None] + offsets  # [tiles, width]
        # [tiles, kv heads, 1, group size, width], then repeated for every split
        query_rows = (rows[:, None, :] * self._head_count + numpy.arange(self._head_count)[:, None]).reshape(
            len(members), storage.kv_head_count, 1, -1
        )
        halves = numpy.arange(2)[:, None, None, None] * storage.block_count
        cells = (halves + tables[:, None, :]) * storage.kv_head_count + numpy.arange(storage.kv_head_count)[:, None]
        group_size = self._head_count // storage.kv_head_count
        return QueryGroup(
            split_count=split_count,
            query_rows=torch.from_numpy(query_rows.repeat(split_count, axis=2).reshape(-1)),
            cells=torch.from_numpy(cells.reshape(-1)),
            mask=_mask(torch.from_numpy(positions), window, split_count, storage.kv_head_count, group_size),
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
