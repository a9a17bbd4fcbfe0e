"""Work items of attention: each row gets each key that it sees once, in the order of positions, in splits that depend
on positions alone; counted where paths of a tree share what they read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy
import pytest

from specdec.engine.cuda import items
from specdec.engine.cuda.items import GROUP_ROWS, TILE_SHIFT, TILE_WORDS, ItemLayout, fill, split_of, split_start
from specdec.engine.interface import Chunk, RaggedBatch, tree_paths

SIZE = 16
SCRATCH = 7777
POISON = -(2**31)
WINDOWS = (None, 100)
STARTS = (0, 1, 125, 127, 128, 2047, 2048)


def blocks(sequence: int, end: int) -> list[int]:
    """Blocks of a sequence, neither adjacent nor ascending, of no other sequence."""
    return [1 + sequence + 100 * ((7 * index) % 1001) for index in range(-(-end // SIZE))]


def chain(sequence: int, start: int, count: int) -> Chunk:
    return Chunk(blocks(sequence, start + count), start, [0] * count, 1)


def tree(sequence: int, start: int, count: int, parents: Sequence[int], cells: Sequence[int]) -> Chunk:
    """A chain of `count` rows and nodes below it; node i is `cells[i]` cells behind the chain."""
    base = start + count
    paths = [[base + cells[cell - base] for cell in path] for path in tree_paths(parents, base)]
    end = base + max(cells) + 1
    return Chunk(blocks(sequence, end), start, [0] * (count + len(parents)), 1, paths)


def seen_cells(chunk: Chunk) -> list[list[int]]:
    """What each row of a chunk sees, by the definition of `Chunk`: cells in the order of their positions."""
    rows = [[*range(position + 1)] for position in range(chunk.start, chunk.base)]
    return rows + [[*range(chunk.base), *path] for path in chunk.paths]


def written(batch: RaggedBatch, padding: int = 0, tile_rows: int = 4) -> tuple[numpy.ndarray, ItemLayout]:
    layout = ItemLayout(batch.row_count + padding, SIZE, tile_rows, WINDOWS, SCRATCH)
    words = numpy.full(layout.word_count(len(batch.chunks), 5000, 100), POISON, dtype=numpy.int32)
    end = fill(words, batch, layout)
    assert (words[:end] != POISON).all() and (words[end:] == POISON).all()
    return words, layout


def items_of(words: numpy.ndarray, layout: ItemLayout, window: int | None, group: int = 0) -> list[tuple]:
    """(rows, split, positions, slots) of every item of a list, as a kernel reads them."""
    place = 2 + 2 * layout.list_of(window, group)
    found = []
    for item in words[words[place + 1] :][: words[place]].tolist():
        at = words[1] + (item >> TILE_SHIFT) * TILE_WORDS
        first, count, table, lowest, _, end, base, path = words[at : at + TILE_WORDS].tolist()
        assert first // GROUP_ROWS == (first + count - 1) // GROUP_ROWS == group
        split = item & ((1 << TILE_SHIFT) - 1)
        start = split_start(split) if window is None else max(split_start(split), (lowest - window + 1) // 64 * 64)
        positions = numpy.arange(start, min(split_start(split + 1), end))
        is_below = positions < base
        slots = words[path + positions - numpy.where(is_below, positions, base)]
        slots[is_below] = words[table + positions[is_below] // SIZE] * SIZE + positions[is_below] % SIZE
        found.append((words[layout.order_at :][first : first + count].tolist(), split, positions, slots))
    return found


def check(batch: RaggedBatch, padding: int = 0, tile_rows: int = 4) -> None:
    """The words say what the batch says, by a plain loop over its rows."""
    words, layout = written(batch, padding, tile_rows)
    cells = [(chunk, seen) for chunk in batch.chunks for seen in seen_cells(chunk)]
    slots = [numpy.array([c.block_ids[cell // SIZE] * SIZE + cell % SIZE for cell in seen]) for c, seen in cells]
    live = len(cells)
    assert words[0] == live
    fields = words[layout.positions_at : layout.data_at].reshape(3, -1)
    assert fields[0].tolist() == [*(len(seen) - 1 for _, seen in cells), *[0] * padding]
    assert fields[1].tolist() == [*(int(its[-1]) for its in slots), *[SCRATCH] * padding]
    assert sorted(fields[2][:live].tolist()) == [*range(live)]
    for window, group in itertools.product(WINDOWS, range(layout.group_count)):
        found: dict[tuple[int, int], numpy.ndarray] = {}
        for rows, split, positions, its_slots in items_of(words, layout, window, group):
            assert 0 < len(rows) <= tile_rows and len(positions)
            for row in rows:
                assert (row, split) not in found
                last = len(slots[row]) - 1
                sees = (positions <= last) & (positions > last - (window or last + 1))
                found[row, split] = its_slots[sees]
        for row in fields[2][group * GROUP_ROWS : min(live, (group + 1) * GROUP_ROWS)].tolist():
            last = len(slots[row]) - 1
            first = 0 if window is None else max(0, last - window + 1)
            for split in range(split_of(first), split_of(last) + 1):
                expected = slots[row][max(first, split_start(split)) : split_start(split + 1)]
                assert numpy.array_equal(found.pop((row, split)), expected), (row, split)
        assert not any(len(its) for its in found.values())


def test_splits_are_cut_where_the_position_says() -> None:
    """Claim: boundaries are every 128 positions to 2,048, every 1,024 to 32,768, then every 4,096, and both functions
    know them. Conclusive: every boundary and its neighbours, from the sentence itself."""
    boundaries = [*range(0, 2048, 128), *range(2048, 32768, 1024), *range(32768, 200_000, 4096)]
    for split, boundary in enumerate(boundaries):
        assert split_start(split) == boundary and split_of(boundary) == split == items.split_count(boundary + 1) - 1
        assert boundary == 0 or split_of(boundary - 1) == split - 1
        assert items.SPLIT_OF[boundary // 128] == split
    assert items.POSITIONS_LIMIT > items.split_start(items.split_of(1 << 24) - 1)
    assert split_of(items.POSITIONS_LIMIT) < 1 << TILE_SHIFT


@pytest.mark.parametrize("tile_rows", [1, 3, 4])
def test_a_chain_reads_its_past(tile_rows: int) -> None:
    """Claim: rows of chains alone and together, over boundaries of splits, blocks and windows, see their past once.

    Conclusive: all starts around boundaries, all counts around those of a tile, by a plain loop (`check`); few chunks
    and many are written by two functions, and both are tried."""
    for start, count in itertools.product(STARTS, (1, 2, tile_rows, tile_rows + 1, 9)):
        check(RaggedBatch((chain(0, start, count),)), padding=start % 3, tile_rows=tile_rows)
    for sequence_count in (2, 3, 4, 5, 7):
        starts = itertools.islice(itertools.cycle(STARTS), sequence_count)
        chunks = [chain(index, start, 1 + index % 5) for index, start in enumerate(starts)]
        check(RaggedBatch(tuple(chunks)), padding=2, tile_rows=tile_rows)
        check(RaggedBatch(tuple(chain(index, 300, 1) for index in range(sequence_count))), tile_rows=tile_rows)


def all_parents(node_count: int) -> Iterable[tuple[int, ...]]:
    """Every tree of `node_count` nodes: the parent of each is an earlier one or 0."""
    return itertools.product(*(range(index + 1) for index in range(node_count)))


@pytest.mark.parametrize("node_count", [1, 2, 3, 4])
def test_a_node_reads_its_path(node_count: int) -> None:
    """Claim: nodes of every tree of up to four nodes, in cells of their positions and in others, see what is before
    their branch and then their path, in the order of positions, beside chains and other trees.

    Conclusive: all trees, with bases before, at and after a boundary, by a plain loop (`check`)."""
    for parents in all_parents(node_count):
        for base, cells in itertools.product((126, 127, 128, 300), (range(4), (5, 3, 0, 2))):
            one = tree(1, base - 2, 2, parents, cells)
            alone = tree(2, base, 0, parents, cells)  # as a draft's, whose chain was run before
            check(RaggedBatch((chain(0, 60, 3), one, alone)), padding=1)


def test_paths_share_what_is_before_their_branch() -> None:
    """Claim: a tree's splits before its branch are in one item for all of its rows, or as many as its rows fill; those
    after it in one for each path. Conclusive: counted by hand, for a tree that branches at 480 and for its chains."""
    parents = (0, 1, 0, 3, 0, 5, 0, 7)  # four paths of two nodes
    as_tree = tree(0, 479, 1, parents, range(8))
    words, layout = written(RaggedBatch((as_tree,)), tile_rows=16)
    found = items_of(words, layout, None)
    assert [(len(rows), split) for rows, split, *_ in found] == [(9, 0), (9, 1), (9, 2), (3, 3), (2, 3), (2, 3), (2, 3)]
    within = items_of(words, layout, 100)  # position 480 sees those from 381 on: a key of split 2, and from 384 on
    assert [split for _, split, *_ in within] == [2, 3, 3, 3, 3] and within[0][2].tolist() == [*range(320, 384)]
    assert len(items_of(*written(RaggedBatch((chain(0, 479, 9),)), tile_rows=16), None)) == 4


def test_a_chain_sent_as_a_tree_is_a_chain() -> None:
    """Claim: nodes in the cells of their positions, one below the other, have the items of a chain."""
    words, layout = written(RaggedBatch((chain(0, 479, 6),)))
    nodes, node_layout = written(RaggedBatch((tree(0, 479, 1, range(5), range(5)),)))
    for window in WINDOWS:
        ours, theirs = items_of(words, layout, window), items_of(nodes, node_layout, window)
        assert [each[:2] for each in ours] == [each[:2] for each in theirs]
        assert all(numpy.array_equal(a[3], b[3]) for a, b in zip(ours, theirs))


def test_rows_of_a_prompt_are_in_groups() -> None:
    """Claim: a step of more than GROUP_ROWS rows has lists for each group, also where a tree lies in two of them."""
    chunks = (chain(0, 100, 130), chain(1, 0, 120), tree(2, 130, 3, (0, 1, 0, 3, 2, 1), (0, 1, 2, 7, 8, 9)))
    check(RaggedBatch(chunks), padding=5)
    check(RaggedBatch((chain(0, 0, 300),)))


def test_what_does_not_fit_is_refused_before_it_is_written() -> None:
    """Claim: rows beyond a chunk's blocks, more rows than the step has, and words that are too few are errors that
    name them; nothing is written. For few chunks and many."""
    layout = ItemLayout(8, SIZE, 4, WINDOWS, SCRATCH)
    words = numpy.full(1000, POISON, dtype=numpy.int32)
    short = Chunk([1], 15, [0, 0], 1)
    nodes = Chunk([1], 14, [0, 0], 1, [[16]])
    for chunks in ((short,), (nodes,), (short,) * 5):
        with pytest.raises(ValueError, match="to 16 lie beyond 1 blocks of 16"):
            fill(words, RaggedBatch(chunks), layout)
    for count in (1, 5):
        with pytest.raises(ValueError, match=f"the batch has {9 * count} rows; row_count is 8"):
            fill(words, RaggedBatch(tuple(chain(index, 0, 9) for index in range(count))), layout)
        fitting = RaggedBatch(tuple(chain(index, 0, 1) for index in range(count)))
        needed = fill(words.copy(), fitting, layout)
        with pytest.raises(ValueError, match=f"words has {needed - 1} words; this step needs {needed}"):
            fill(words[: needed - 1], fitting, layout)
    assert (words == POISON).all()


def test_the_bound_on_words_holds() -> None:
    """Claim: `word_count` is enough for the steps that need most: as many items as rows and splits, paths of their
    own. Conclusive: the words of such steps fit, one by one."""
    for tile_rows, batch in (
        (1, RaggedBatch((chain(0, 4000, 60),))),
        (4, RaggedBatch((tree(0, 4000, 1, [0] * 60, range(1, 61)),))),
        (4, RaggedBatch(tuple(chain(index, 4000, 1) for index in range(60)))),
    ):
        layout = ItemLayout(batch.row_count, SIZE, tile_rows, WINDOWS, SCRATCH)
        words = numpy.zeros(layout.word_count(len(batch.chunks), 4064, 60), dtype=numpy.int32)
        assert 0 < fill(words, batch, layout) <= len(words)
