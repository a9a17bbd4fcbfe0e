"""The rows of one step and their work items of attention, as int32 words that kernels read.

A work item is some rows of one sequence and the keys of one split. The boundaries of splits are a function of a key's
position alone: every 128 positions up to 2,048, every 1,024 up to 32,768, then every 4,096. So a row's sums are cut at
the same places in every step, whatever stands beside it. Rows of a tree read the splits wholly before its branch once,
together; those after it once for each path to a last node, in the order of positions wherever keys are stored.

Counts are data: a captured graph reads any step of its rows from the same words. Knows nothing of the device. Plain
lists: for the steps that must be fast they take less time than arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from specdec.engine.interface import Chunk, RaggedBatch

GROUP_ROWS = 128  # rows of one launch of attention; a step of more has several groups of them
TILE_WORDS = 8
TILE_SHIFT = 16  # of an item: its tile is above these bits, its split is in them
POSITIONS_LIMIT = 1 << 24  # above `protocol.limits.TOKENS_MAX`; its splits have less than TILE_SHIFT bits
TABLE_ONLY = POSITIONS_LIMIT  # the base of a chain: all of its keys are found by its table


def split_of(position: int) -> int:
    """Returns the index of the split that holds a position."""
    if position < 2048:
        return position // 128
    return 14 + position // 1024 if position < 32768 else 38 + position // 4096


def split_start(split: int) -> int:
    """Returns the first position of a split."""
    if split < 16:
        return split * 128
    return (split - 14) * 1024 if split < 46 else (split - 38) * 4096


def split_count(positions_max: int) -> int:
    """Returns the number of splits of `positions_max` >= 1 positions."""
    return split_of(positions_max - 1) + 1


SPLIT_OF = numpy.array([split_of(position) for position in range(0, POSITIONS_LIMIT, 128)])  # of position // 128
FEW_CHUNKS = 4  # up to this number lists are faster than arrays


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """Where things stand among the words of a step of `row_count` rows, padding included.

    Word 0 is the number of rows without padding, word 1 the place of the first tile. From word 2 on there are two words
    for each list of items: their count, and the place of the first. There is one list for each window and group of
    GROUP_ROWS rows, in their order (`list_of`). Then come the rows' positions, slots and order, [row_count] each; then,
    packed, block tables and slots of paths, tiles, and items.

    A tile has TILE_WORDS words: first, count, table, lowest, floor, end, base, path. Its rows are
    order[first : first + count], at most `tile_rows`, at positions from `lowest` to below `end`. Its key at a position
    before `base` is in slot words[table + position // block size] * block size + position % block size, another in slot
    words[path + position - base]. Each row sees keys up to its own position, and within its window.

    An item is one word, tile << TILE_SHIFT | split: the tile's keys of a split, those before `end`, if a row of it sees
    any; no split before `floor`.

    `block_size`: a power of two. `windows`: distinct windows of a model's layers, None for all of the past.
    `scratch_slot`: the slot to which padding rows write.
    """

    row_count: int
    block_size: int
    tile_rows: int
    windows: tuple[int | None, ...]
    scratch_slot: int

    @property
    def group_count(self) -> int:
        return -(-self.row_count // GROUP_ROWS)

    @property
    def positions_at(self) -> int:
        return 2 + 2 * len(self.windows) * self.group_count

    @property
    def slots_at(self) -> int:
        return self.positions_at + self.row_count

    @property
    def order_at(self) -> int:
        return self.slots_at + self.row_count

    @property
    def data_at(self) -> int:
        return self.order_at + self.row_count

    def list_of(self, window: int | None, group: int = 0) -> int:
        """Returns the index of the list of items of a window and group, the rows order[group * GROUP_ROWS :]."""
        return self.windows.index(window) * self.group_count + group

    def word_count(self, sequence_count: int, positions_max: int, path_words: int) -> int:
        """Returns the words of any step of `sequence_count` sequences of at most `positions_max` positions, whose paths
        have at most `path_words` cells together."""
        tables = sequence_count * -(-positions_max // self.block_size)
        # Every row is in one tile of splits before a branch and in one of those after it, and in one item a split.
        each = 2 * TILE_WORDS + split_count(positions_max) * len(self.windows)
        return self.data_at + tables + path_words + self.row_count * each


def fill(words: numpy.ndarray, batch: RaggedBatch, layout: ItemLayout) -> int:
    """Writes a batch to int32 words; returns how many are in use, from the first on.

    Padding rows are at position 0, write to the scratch slot and are in no item. Mutates `words` only. Raises
    ValueError, and writes nothing, for rows beyond their blocks and for more rows or words than there are.
    """
    chunks = batch.chunks
    if len(chunks) > FEW_CHUNKS and layout.group_count == 1 and not any(chunk.paths for chunk in chunks):
        return _fill_chains(words, chunks, layout)
    step = _Step(layout)
    for chunk in chunks:
        step.add(chunk)
    live = len(step.positions)
    padding = layout.row_count - live
    tiles_at = layout.data_at + len(step.data)
    at = tiles_at + len(step.tiles)
    found = [live, tiles_at]
    for items in step.lists:
        found += len(items), at
        at += len(items)
    _check_capacity(live, layout, at, words)
    none = [0] * padding
    found += step.positions + none + step.slots + [layout.scratch_slot] * padding + step.order + none
    found += step.data
    found += step.tiles
    for items in step.lists:
        found += items
    words.data[:at] = array("i", found)
    return at


def _check_capacity(live: int, layout: ItemLayout, end: int, words: numpy.ndarray) -> None:
    if live > layout.row_count:
        raise ValueError(f"the batch has {live} rows; row_count is {layout.row_count}")
    if end > len(words):
        raise ValueError(f"words has {len(words)} words; this step needs {end}")


class _Step:
    """The parts of a step's words. `data` stands from `layout.data_at` on."""

    __slots__ = ("data", "layout", "lists", "order", "positions", "slots", "tiles", "data_at", "windows", "group_count")

    def __init__(self, layout: ItemLayout):
        self.layout, self.data_at = layout, layout.data_at
        self.windows, self.group_count = layout.windows, layout.group_count
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.order: list[int] = []
        self.data: list[int] = []
        self.tiles: list[int] = []
        self.lists: list[list[int]] = [[] for _ in range(len(layout.windows) * self.group_count)]

    def add(self, chunk: Chunk) -> None:
        """Appends the rows of a chunk, and their tiles."""
        first, start, paths = len(self.positions), chunk.start, chunk.paths
        base = start + len(chunk.token_ids) - len(paths)
        table = self.data_at + len(self.data)
        if paths:
            self._add_rows(chunk, base)
            self._add_tree(chunk, table, first, base)
            return
        size, blocks, count = self.layout.block_size, chunk.block_ids, base - start
        check_blocks(start, base, chunk, size)
        self.data += blocks[: -(-base // size)]
        self.positions += range(start, base)
        self.order += range(first, first + count)
        offset = start % size
        if offset + count <= size:
            slot = blocks[start // size] * size + offset
            self.slots += range(slot, slot + count)
        else:
            self.slots += [blocks[cell // size] * size + cell % size for cell in range(start, base)]
        self._cut(first, range(start, base), table, 0, TABLE_ONLY, TABLE_ONLY, 0)

    def _add_rows(self, chunk: Chunk, base: int) -> None:
        """Appends the positions and slots of a chunk with nodes, and its table."""
        size, blocks, paths = self.layout.block_size, chunk.block_ids, chunk.paths
        start, end = min(chunk.start, *map(min, paths)), max(base, 1 + max(map(max, paths)))
        check_blocks(start, end, chunk, size)
        self.data += blocks[: -(-end // size)]
        self.positions += range(chunk.start, base)
        self.positions += [base - 1 + len(path) for path in paths]
        cells = [*range(chunk.start, base), *(path[-1] for path in paths)]
        self.slots += [blocks[cell // size] * size + cell % size for cell in cells]

    def _add_tree(self, chunk: Chunk, table: int, first: int, base: int) -> None:
        """Appends the tiles of a chunk's chain and nodes, from row `first` on.

        The rows of one path follow each other in `order`, the first path behind the chain, which is a part of it.
        """
        size, blocks, paths = self.layout.block_size, chunk.block_ids, chunk.paths
        groups = path_groups(paths)
        whole = [paths[group[-1]] for group in groups]
        in_place = [_in_place_count(path, base) for path in whole]
        first_node = first + base - chunk.start
        rows = [[first_node + node for node in group] for group in groups]
        rows[0] = [*range(first, first_node), *rows[0]]
        floor = split_of(base + min(in_place)) if len(groups) > 1 else 0
        every = [row for its in rows for row in its]
        self.order += every
        if floor:
            self._cut(first, [self.positions[row] for row in every], table, 0, split_start(floor), TABLE_ONLY, 0)
        at = first
        for its, cells, count in zip(rows, whole, in_place):
            path = self.data_at + len(self.data)
            self.data += [blocks[cell // size] * size + cell % size for cell in cells[count:]]
            self._cut(at, [self.positions[row] for row in its], table, floor, TABLE_ONLY, base + count, path)
            at += len(its)

    def _cut(
        self, first: int, positions: Sequence[int], table: int, floor: int, stop: int, base: int, path: int
    ) -> None:
        """Appends tiles of the rows order[first:], at these positions, over the keys from split `floor` to `stop`."""
        done, count, most = 0, len(positions), self.layout.tile_rows
        while done < count:
            row = first + done
            size = min(most, count - done, GROUP_ROWS - row % GROUP_ROWS)
            its = positions[done : done + size]
            lowest, end = min(its), min(stop, max(its) + 1)
            last = split_of(end - 1)
            done += size
            if last < floor:
                continue
            tile = len(self.tiles) // TILE_WORDS << TILE_SHIFT
            self.tiles += row, size, table, lowest, floor, end, base, path
            group = row // GROUP_ROWS
            for index, window in enumerate(self.windows):
                low = floor if window is None else max(floor, split_of(max(0, lowest - window + 1)))
                self.lists[index * self.group_count + group] += range(tile + low, tile + last + 1)


def _fill_chains(words: numpy.ndarray, chunks: Sequence[Chunk], layout: ItemLayout) -> int:
    """As `fill`, of many chunks without trees in one group of rows, all together."""
    size, most = layout.block_size, layout.tile_rows
    starts = numpy.array([chunk.start for chunk in chunks])
    counts = numpy.array([len(chunk.token_ids) for chunk in chunks])
    ends = starts + counts
    widths = -(-ends // size)
    data: list[int] = []
    for chunk, start, end, width in zip(chunks, starts.tolist(), ends.tolist(), widths.tolist()):
        check_blocks(start, end, chunk, size)
        data += chunk.block_ids[:width]
    table = numpy.frombuffer(array("i", data), dtype=numpy.int32)
    table_starts = widths.cumsum() - widths
    firsts = counts.cumsum() - counts
    live = int(firsts[-1] + counts[-1])
    order = numpy.arange(live)
    positions = order + (starts - firsts).repeat(counts)
    slots = table[positions // size + table_starts.repeat(counts)] * size + positions % size
    if counts.max() > most:
        pieces = -(-counts // most)
        sequence = numpy.arange(len(chunks)).repeat(pieces)
        done = (numpy.arange(len(sequence)) - (pieces.cumsum() - pieces)[sequence]) * most
        firsts, starts, table_starts = firsts[sequence] + done, starts[sequence] + done, table_starts[sequence]
        ends = numpy.minimum(ends[sequence], starts + most)
    tiles = numpy.zeros((len(starts), TILE_WORDS), dtype=numpy.int64)
    tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3] = firsts, ends - starts, table_starts + layout.data_at, starts
    tiles[:, 5], tiles[:, 6] = ends, TABLE_ONLY
    lists = [_items(starts, ends, window) for window in layout.windows]
    tiles_at = layout.data_at + len(data)
    at = tiles_at + tiles.size
    header = [live, tiles_at]
    for items in lists:
        header += len(items), at
        at += len(items)
    _check_capacity(live, layout, at, words)
    rows = numpy.zeros((3, layout.row_count), dtype=numpy.int64)
    rows[:, :live], rows[1, live:] = (positions, slots, order), layout.scratch_slot
    parts: list[numpy.ndarray] = [numpy.array(header), rows.ravel(), table, tiles.ravel(), *lists]
    numpy.concatenate(parts, out=words[:at], casting="same_kind")
    return at


def _items(starts: numpy.ndarray, ends: numpy.ndarray, window: int | None) -> numpy.ndarray:
    """The items of tiles at positions from `starts` to `ends`."""
    last = SPLIT_OF[(ends - 1) // 128]
    low = 0 if window is None else SPLIT_OF[numpy.maximum(starts - (window - 1), 0) // 128]
    counts = last - low + 1
    before = (numpy.arange(len(starts)) << TILE_SHIFT) + low + counts - counts.cumsum()
    items: numpy.ndarray = numpy.arange(int(counts.sum())) + before.repeat(counts)
    return items


def check_blocks(start: int, end: int, chunk: Chunk, block_size: int) -> None:
    """Raises ValueError if cells from `start` to `end` are not all in a chunk's blocks."""
    if start < 0 or end > len(chunk.block_ids) * block_size:
        raise ValueError(f"rows from {start} to {end - 1} lie beyond {len(chunk.block_ids)} blocks of {block_size}")


def path_groups(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the nodes with these paths in groups, each along one path, its root first: as few as can be."""
    node_of = {path[-1]: node for node, path in enumerate(paths)}
    left = set(range(len(paths)))
    groups: list[list[int]] = []
    for last in sorted(left, key=lambda node: -len(paths[node])):
        if last not in left:
            continue
        above = (node_of.get(cell) for cell in paths[last])  # None: its row ran in an earlier step
        group = [node for node in above if node in left]
        left.difference_update(group)
        groups.append(group)
    return groups


def _in_place_count(path: Sequence[int], base: int) -> int:
    """Returns how many cells of a path, from its first on, are those of their positions: a table finds them."""
    return next((index for index, cell in enumerate(path) if cell != base + index), len(path))
