"""The rows of a step on a CPU: where each is written, and which slots it sees, in which order.

The reference lists the slots of every row one by one, by the sentences of `Chunk` and `TreeRows`.
"""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.cpu.fallback import seen_slots
from specdec.engine.cpu.plan import plan_step
from specdec.engine.interface import Chunk, RaggedBatch, TreeRows

BLOCK_SIZE = 8
BLOCKS = 6  # of a sequence


def slot(block_ids: list[int], cell: int) -> int:
    return block_ids[cell // BLOCK_SIZE] * BLOCK_SIZE + cell % BLOCK_SIZE


@st.composite
def chains(draw: st.DrawFn, block_ids: list[int]) -> tuple[Chunk, list[list[int]]]:
    """A chunk without a tree, and the slots that each of its rows sees."""
    start = draw(st.integers(0, 30))
    count = draw(st.integers(1, BLOCKS * BLOCK_SIZE - start))
    chunk = Chunk(block_ids, start, [7] * count, draw(st.integers(0, count)))
    return chunk, [[slot(block_ids, cell) for cell in range(end)] for end in range(start + 1, start + count + 1)]


@st.composite
def trees(draw: st.DrawFn, block_ids: list[int]) -> tuple[Chunk, list[list[int]]]:
    """Nodes below a text, whose first cells lie in place and the others anywhere, and the slots that each sees."""
    text_length = draw(st.integers(0, 20))
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 8)))]
    in_place = draw(st.integers(0, text_length))
    others = draw(st.permutations(range(in_place, BLOCKS * BLOCK_SIZE)))
    text_cells = [*range(in_place), *others[: text_length - in_place]]
    cells = others[text_length - in_place :][: len(parents)]
    positions = numpy.array(draw(st.permutations(range(BLOCKS * BLOCK_SIZE))))  # of free cells: anything
    positions[text_cells] = range(text_length)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else text_cells), cells[node]])
        positions[cells[node]] = len(paths[-1]) - 1
    visible = numpy.zeros((len(parents), len(positions)), dtype=bool)
    for row, path in zip(visible, paths):
        row[path] = True
    rows = TreeRows(cells, positions[cells].tolist(), visible, positions)
    chunk = Chunk(block_ids, 0, [7] * len(cells), len(cells), rows)
    return chunk, [[slot(block_ids, cell) for cell in path] for path in paths]


@st.composite
def batches(draw: st.DrawFn) -> tuple[RaggedBatch, list[list[int]]]:
    kinds = draw(st.lists(st.sampled_from([chains, trees]), min_size=1, max_size=4))
    ids = draw(st.permutations(range(1, 1 + BLOCKS * len(kinds))))
    parts = [draw(kind(list(ids[index * BLOCKS :][:BLOCKS]))) for index, kind in enumerate(kinds)]
    return RaggedBatch(tuple(chunk for chunk, _ in parts)), [slots for _, rows in parts for slots in rows]


@given(batches())
def test_every_row_sees_its_own_keys_in_the_order_of_their_positions(case: tuple[RaggedBatch, list[list[int]]]) -> None:
    """Claim: a row is written to the last slot that it sees, and sees the keys of its past by position, whatever cells
    and blocks hold them. Conclusive: any mix of chains and trees, against lists made cell by cell."""
    batch, expected = case
    plan = plan_step(batch, BLOCK_SIZE)
    found = [seen_slots(plan.rows, row, None, BLOCK_SIZE).tolist() for row in range(batch.row_count)]
    assert found == expected
    assert plan.rows.slot.tolist() == [slots[-1] for slots in expected]
    assert plan.position_ids.tolist() == [[len(slots) - 1 for slots in expected]]
    assert plan.rows.position.tolist() == plan.position_ids[0].tolist()
    rows, logit_rows = 0, []
    for chunk in batch.chunks:
        rows += len(chunk.token_ids)
        logit_rows += range(rows - chunk.logit_count, rows)
    assert plan.logit_rows.tolist() == logit_rows and plan.input_ids.shape == (1, rows)


def test_cells_in_place_are_read_through_the_block_table() -> None:
    """Claim: of a node, cells that hold the positions of their own numbers are below its base, and only the others on
    its path. Source: a base is read in whole vectors, a path slot by slot. Conclusive: a text of 20 in place, a gap,
    a chain of two nodes."""
    visible = numpy.zeros((2, 40), dtype=bool)
    visible[:, :20] = True
    visible[0, 30] = visible[1, [30, 22]] = True
    positions = numpy.arange(40)
    positions[[30, 22]] = 20, 21
    chunk = Chunk([5, 2, 9, 4, 1], 0, [1, 2], 2, TreeRows([30, 22], [20, 21], visible, positions))
    rows = plan_step(RaggedBatch((chunk,)), BLOCK_SIZE).rows
    assert rows.base.tolist() == [20, 20] and rows.path_start.tolist() == [0, 1, 3]
    assert rows.path.tolist() == [4 * 8 + 6, 4 * 8 + 6, 9 * 8 + 6]


def test_rows_of_paths_are_copied_to_each() -> None:
    """Claim: the rows that a further path shares with the one before it are written to its blocks too, in order.
    Conclusive: a path that leaves after two rows, and one of that path that leaves after three, slots by hand."""
    chunks = (
        Chunk([1, 2], 6, [1, 2, 3, 4], 4),
        Chunk([1, 3], 9, [5], 1, copied_count=1),
        Chunk([1, 4], 10, [6], 1, copied_count=2),
    )
    rows = plan_step(RaggedBatch(chunks), BLOCK_SIZE).rows
    assert rows.slot.tolist() == [14, 15, 16, 17, 25, 34]
    assert rows.copy_row.tolist() == [2, 2, 4] and rows.copy_slot.tolist() == [24, 32, 33]


def tree(cells: list[int], positions: list[int], seen: list[list[int]], cell_positions: list[int]) -> Chunk:
    visible = numpy.zeros((len(cells), len(cell_positions)), dtype=bool)
    for row, own in zip(visible, seen):
        row[own] = True
    rows = TreeRows(cells, positions, visible, numpy.array(cell_positions))
    return Chunk([3, 4], 0, [1] * len(cells), 1, rows)


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (Chunk([3, 4], 15, [1, 1], 1), "rows from 15 to 16 lie beyond 2 blocks of 8"),
        (Chunk([3, 4], -1, [1, 1], 1), "rows from -1 to 0 lie beyond"),
        (tree([16], [0], [[16]], [0] * 17), "rows from 16 to 16 lie beyond 2 blocks of 8"),
        (tree([2], [3], [[0, 1, 2]], [0, 1, 3]), "exactly one key at each position"),  # a position is missing
        (tree([2], [1], [[0, 1, 2]], [0, 1, 1]), "exactly one key at each position"),  # one is there twice
        (tree([1], [2], [[0, 1, 2]], [0, 1, 2]), "exactly one key at each position"),  # the last is another's
        (tree([2], [1], [[0, 1, 2]], [0, 1, 2]), "exactly one key at each position"),  # a later one is seen
    ],
)
def test_rows_that_cannot_be_planned_are_refused(chunk: Chunk, said: str) -> None:
    """Claim: rows beyond their blocks, and nodes whose keys are no chain of positions, raise ValueError before anything
    is computed. Conclusive: beside another sequence, whose blocks follow in the tables."""
    with pytest.raises(ValueError, match=said):
        plan_step(RaggedBatch((chunk, Chunk([1, 2], 0, [1], 1))), BLOCK_SIZE)
