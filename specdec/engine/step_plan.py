"""From a ragged batch to the index tensors of one step: computed once, used by every layer.

Rows of all chunks are concatenated and padded to a stable tile size. Query tiles are cut, grouped by width and by
context length, and every gather and scatter of the step becomes one list of indices. Written with numpy, whose small
operations cost a third of torch's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile

import numpy
import torch

from specdec.engine.attention import KEY_SPLIT, AttentionPlan, QueryGroup, SharedSplits
from specdec.engine.backend import StepInput
from specdec.engine.interface import RaggedBatch, SequenceChunk
from specdec.engine.storage import PagedStorage
from specdec.engine.tile_sizes import TileSizes

GATHER_BYTES_MAX = 2 << 20  # of a group: its keys, values, scores and weights stay in a processor's cache
READ_ROWS = 8  # query rows of a head that take as long to attend to a split of keys as the split takes to read
SHARED_READS_MIN = 2  # reads of a key split that sharing must save: it takes more kernel calls
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
class TileTree:
    """A tile for each path of a sequence, in the order of their rows. Their first `shared_split_count` key splits are
    the same, and are read once."""

    tiles: list[QueryTile]
    shared_split_count: int

    def whole(self) -> QueryTile:
        """The rows of all paths as one tile."""
        positions = numpy.concatenate([tile.row_positions() for tile in self.tiles])
        first = self.tiles[0]
        return QueryTile(first.blocks, first.first_row, len(positions), int(positions.min()), positions)


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
        trees: list[TileTree] = []
        into, rows_max, row = tiles, 0, 0
        for index, chunk in enumerate(batch.chunks):
            count = len(chunk.token_ids)
            blocks = numpy.array(chunk.block_ids, dtype=numpy.int64)
            ids[row : row + count] = chunk.token_ids
            positions[row : row + count] = its_positions = numpy.arange(chunk.start, chunk.end)
            row_blocks[row : row + count] = blocks[its_positions // self._storage.block_size]
            logit_rows += range(row + count - chunk.logit_count, row + count)
            if not chunk.copied_count:
                into, rows_max = tiles, self._query_tiles[-1]
                paths = [chunk, *takewhile(lambda later: later.copied_count, batch.chunks[index + 1 :])]
                if shared := self._shared_splits(paths):
                    trees.append(TileTree([], shared))
                    into, rows_max = trees[-1].tiles, self._tree_tile_rows(paths)
            for offset in range(0, count, rows_max):
                into.append(QueryTile(blocks, row + offset, min(count - offset, rows_max), chunk.start + offset))
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

    def _shared_splits(self, paths: Sequence[SequenceChunk]) -> int:
        """Returns the number of key splits that the paths of a sequence share; 0 if it has one path, or reading them
        once saves no time."""
        further = paths[1:]
        if not further or sum(len(path.token_ids) for path in paths) > self._query_tiles[-1]:
            return 0
        shared = min(path.start - path.copied_count for path in further) // KEY_SPLIT
        return shared if shared * len(further) >= SHARED_READS_MIN else 0

    def _tree_tile_rows(self, paths: Sequence[SequenceChunk]) -> int:
        """Returns the number of rows at which the paths of a sequence are cut into tiles of one width, by the time of
        all: wide tiles are mostly padding where most paths are short, narrow ones read the keys more often."""
        group_size = self._head_count // self._storage.kv_head_count

        def cost(width: int) -> int:
            return sum(-(-len(path.token_ids) // width) for path in paths) * (group_size * width + READ_ROWS)

        return min(self._query_tiles, key=cost)

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
        self, tiles: list[QueryTile], trees: list[TileTree], padded: int
    ) -> tuple[dict[int | None, tuple[QueryGroup, ...]], torch.Tensor]:
        """Returns the tiles in groups, by window, each tree a group of its own, and the indices of each padded row's
        heads in their results."""
        head_count = self._head_count
        output_rows = numpy.zeros((padded, head_count), dtype=numpy.int64)
        heads = numpy.arange(head_count)
        groups: list[list[QueryGroup]] = []
        place = 0
        alone = [TileTree(members, 0) for members in group_tiles(tiles, self._query_tiles, self._splits_max)]
        for tree in (*alone, *trees):
            width = self._width(max(tile.row_count for tile in tree.tiles))
            groups.append(self._group_by_window(tree, width))
            for tile in tree.tiles:
                rows = numpy.arange(tile.row_count)[:, None]
                output_rows[tile.first_row : tile.first_row + tile.row_count] = place + heads * width + rows
                place += head_count * width
        return dict(zip(self._windows, zip(*groups))), torch.from_numpy(output_rows.reshape(-1))

    def _group_by_window(self, tree: TileTree, width: int) -> list[QueryGroup]:
        """Returns one group for each window; windows that hide nothing from these tiles share one."""
        end = max(tile.position + tile.row_count for tile in tree.tiles)
        made: dict[int | None, QueryGroup] = {}
        groups = []
        for window in self._windows:
            reach = None if window is None or window >= end else window
            if reach not in made:
                made[reach] = self._group(tree.tiles, width, reach, tree.shared_split_count)
                whole = tree.whole() if tree.shared_split_count else None
                if whole and whole.first_split(reach) < tree.shared_split_count:
                    made[reach] = replace(made[reach], shared=self._shared(tree, whole, width, reach))
            groups.append(made[reach])
        return groups

    def _shared(self, tree: TileTree, whole: QueryTile, width: int, window: int | None) -> SharedSplits:
        whole_width = self._width(whole.row_count)
        group = self._group([whole], whole_width, window, 0, tree.shared_split_count)
        tile_count, counts = len(tree.tiles), [tile.row_count for tile in tree.tiles]
        places = numpy.zeros((tile_count, width), dtype=numpy.int64)  # rows beyond a tile's own repeat its first
        for index, tile in enumerate(tree.tiles):
            places[index] = tile.first_row - whole.first_row
            places[index, : tile.row_count] += numpy.arange(tile.row_count)
        tile_of, row_of = numpy.zeros(whole_width, dtype=numpy.int64), numpy.zeros(whole_width, dtype=numpy.int64)
        tile_of[: whole.row_count] = numpy.repeat(numpy.arange(tile_count), counts)
        row_of[: whole.row_count] = numpy.concatenate([numpy.arange(count) for count in counts])
        kv_heads, group_size = self._storage.kv_head_count, self._head_count // self._storage.kv_head_count
        heads, splits, queries = numpy.ogrid[:kv_heads, : group.split_count, :group_size]
        of_head = ((heads * group.split_count + splits) * group_size + queries)[
            ..., None
        ]  # [kv heads, splits, group, 1]
        size = kv_heads * group.split_count * group_size
        results = numpy.arange(self._head_count).reshape(kv_heads, group_size, 1) * whole_width
        return SharedSplits(
            group,
            to_tiles=torch.from_numpy((of_head * whole_width + places[:, None, None, None]).reshape(-1)),
            from_tiles=torch.from_numpy(((tile_of * size + of_head) * width + row_of).reshape(-1)),
            results=torch.from_numpy((results + places[:, None, None]).reshape(-1)),
        )

    def _group(
        self, members: list[QueryTile], width: int, window: int | None, first: int = 0, end: int | None = None
    ) -> QueryGroup:
        """Returns the group of tiles whose rows attend to the key splits [first, end), or from `first` on."""
        storage = self._storage
        split_blocks = KEY_SPLIT // storage.block_size
        firsts = [max(tile.first_split(window), first) for tile in members]
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
