"""The rows of one step and their work items of attention, as int32 words that kernels read.

A work item is some rows of one sequence and the keys of one split. The boundaries of splits are a function of a key's
position alone: every 128 positions up to 2,048, every 1,024 up to 32,768, then every 4,096. So a row's sums are cut at
the same places in every step, whatever stands beside it. Rows of a tree read the splits wholly before its branch once,
together; those after it once for each leaf's path, its keys in the order of their positions wherever they are stored.

Counts are data: a captured graph reads any step from the same words. Pure numpy; knows nothing of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy

from specdec.engine.interface import Chunk, RaggedBatch

GROUP_ROWS = 128  # rows of one launch of attention; a step of more has several groups of them
KEYS = 64  # keys of a turn of the kernel's loop; every boundary is a multiple of it
ITEM_WORDS = 8
POSITIONS_LIMIT = 1 << 24
SIZES = ((2048, 128), (32768, 1024), (POSITIONS_LIMIT, 4096))  # (end, size) of splits


def _starts() -> numpy.ndarray:
    ranges = [range(before, end, size) for before, (end, size) in zip((0, *(end for end, _ in SIZES)), SIZES)]
    return numpy.array([*chain(*ranges), POSITIONS_LIMIT], dtype=numpy.int32)


STARTS = _starts()  # of every split, and the end of the last
# Rows of (split, start, end), as they stand in an item.
SPLITS = numpy.stack((numpy.arange(len(STARTS) - 1, dtype=numpy.int32), STARTS[:-1], STARTS[1:]), 1)
# The split of position p is SPLIT_OF[p // 128].
SPLIT_OF = SPLITS[:, 0].repeat((SPLITS[:, 2] - SPLITS[:, 1]) // SIZES[0][1])


def split_of(position: int) -> int:
    """Returns the index of the split that holds a position."""
    if position < 2048:
        return position // 128
    return 14 + position // 1024 if position < 32768 else 38 + position // 4096


def split_count(positions_max: int) -> int:
    """Returns the number of splits of `positions_max` >= 1 positions."""
    return split_of(positions_max - 1) + 1


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """Where things stand among the words of a step of at most `rows_max` rows.

    Word 0 is the number of rows, without padding; word 1 the number of words in use. From word 2 on there are two words
    for each list of items: their count, and the word at which the first begins. There is one list for each window and
    group of GROUP_ROWS rows (`list_of`). Then come, each [rows_max], the rows' `positions`, `slots` and `order`, and
    from `data_at` on block tables, slots of paths and items, packed.

    An item has ITEM_WORDS words: first, count, table, split, start, end, base, path. Its rows are
    order[first : first + count], `count` of them at most `tile_rows`, with positions that never fall. Its keys are at
    the positions [start, end) of the split: those before `base` in slot words[table + position // block size] * block
    size + position % block size, the others in slot words[path + position - base]. Each row sees those up to its own
    position, and within its window.

    `block_size`: a power of two. `windows`: distinct windows of a model's layers, None for all of the past.
    `scratch_slot`: the slot to which padding rows write.
    """

    rows_max: int
    block_size: int
    tile_rows: int
    windows: tuple[int | None, ...]
    scratch_slot: int

    @property
    def group_count(self) -> int:
        return -(-self.rows_max // GROUP_ROWS)

    @property
    def positions_at(self) -> int:
        return -(-(2 + 2 * len(self.windows) * self.group_count) // ITEM_WORDS) * ITEM_WORDS

    @property
    def slots_at(self) -> int:
        return self.positions_at + self.rows_max

    @property
    def order_at(self) -> int:
        return self.slots_at + self.rows_max

    @property
    def data_at(self) -> int:
        return self.order_at + self.rows_max

    def list_of(self, window: int | None, group: int = 0) -> int:
        """Returns the index of the list of items of a window, for rows from `group` * GROUP_ROWS on."""
        return self.windows.index(window) * self.group_count + group

    def word_count(self, sequence_count: int, positions_max: int, path_words: int) -> int:
        """Returns the words of any step of `sequence_count` sequences of at most `positions_max` positions, whose nodes'
        paths have at most `path_words` cells together."""
        tables = sequence_count * -(-positions_max // self.block_size)
        # Every row is in one item of each of its splits at most.
        items = ITEM_WORDS * self.rows_max * split_count(positions_max) * len(self.windows)
        return self.data_at + tables + path_words + ITEM_WORDS + items


def fill(words: numpy.ndarray, batch: RaggedBatch, layout: ItemLayout, row_count: int) -> int:
    """Writes a batch, padded to `row_count` rows, to int32 words; returns how many are in use, from the first on.

    Padding rows are at position 0, write to the scratch slot and are in no item. Mutates `words` only. Raises ValueError
    for rows beyond their blocks and for more rows or words than there are; what it wrote before has no meaning then.
    """
    raise NotImplementedError
