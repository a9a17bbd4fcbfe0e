"""The rows of a step on a CPU: where each is written, and which slots it sees, in which order.

The reference lists the slots of every row one by one, by the sentences of `Chunk`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.cpu.fallback import seen_slots
from specdec.engine.cpu.plan import plan_step
from specdec.engine.interface import Chunk, RaggedBatch

BLOCK_SIZE = 8
BLOCKS = 6  # of a sequence


def slot(block_ids: list[int], cell: int) -> int:
    return block_ids[cell // BLOCK_SIZE] * BLOCK_SIZE + cell % BLOCK_SIZE


@st.composite
def chains(draw: st.DrawFn, block_ids: list[int]) -> tuple[Chunk, list[list[int]]]:
    """A chain, and the slots that each of its rows sees."""
    start = draw(st.integers(0, 30))
    count = draw(st.integers(1, BLOCKS * BLOCK_SIZE - start))
    chunk = Chunk(block_ids, start, [7] * count, draw(st.integers(0, count)))
    return chunk, [[slot(block_ids, cell) for cell in range(end)] for end in range(start + 1, start + count + 1)]


@st.composite
def trees(draw: st.DrawFn, block_ids: list[int]) -> tuple[Chunk, list[list[int]]]:
    """A chain, or none, and nodes below it in any cells, some of which ran in earlier steps; the slots that each row
    sees."""
    start = draw(st.integers(0, 20))
    base = start + draw(st.integers(0, 4))
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 8)))]
    cells = draw(st.permutations(range(base, BLOCKS * BLOCK_SIZE)))
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), cells[node]])
    paths = paths[draw(st.integers(0, len(paths) - 1)) :]
    token_ids = [7] * (base - start + len(paths))
    seen = [list(range(end)) for end in range(start + 1, base + 1)] + [[*range(base), *path] for path in paths]
    chunk = Chunk(block_ids, start, token_ids, draw(st.integers(0, len(token_ids))), paths)
    return chunk, [[slot(block_ids, cell) for cell in row] for row in seen]


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
    """Claim: what a path has in the cells of its positions is below its row's base, and only the others on its path; a
    chain of nodes in place has none. Source: a base is read in whole vectors, a path slot by slot. Conclusive: bases
    and slots by hand."""
    paths = [[20], [20, 21], [20, 30], [20, 30, 22]]
    chunk = Chunk([5, 2, 9, 4, 1], 20, [1, 2, 3, 4], 4, paths)
    rows = plan_step(RaggedBatch((chunk,)), BLOCK_SIZE).rows
    assert rows.position.tolist() == [20, 21, 21, 22] and rows.base.tolist() == [21, 22, 21, 21]
    assert rows.path_start.tolist() == [0, 0, 0, 1, 3]
    assert rows.path.tolist() == [4 * 8 + 6, 4 * 8 + 6, 9 * 8 + 6]


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (Chunk([3, 4], 15, [1, 1], 1), "rows from 15 to 16 lie beyond 2 blocks of 8"),
        (Chunk([3, 4], -1, [1, 1], 1), "rows from -1 to 0 lie beyond"),
        (Chunk([3, 4], 10, [1], 1, [[16]]), "rows from 10 to 16 lie beyond 2 blocks of 8"),
        (Chunk([3, 4], 10, [1], 1, [[16, 11]]), "rows from 10 to 16 lie beyond 2 blocks of 8"),
        (Chunk([3, 4], 10, [1], 1, [[-1]]), "rows from -1 to 9 lie beyond 2 blocks of 8"),
    ],
)
def test_rows_that_cannot_be_planned_are_refused(chunk: Chunk, said: str) -> None:
    """Claim: rows and keys beyond their blocks raise ValueError before anything is computed. Conclusive: beside another
    sequence, whose blocks follow in the tables."""
    with pytest.raises(ValueError, match=said):
        plan_step(RaggedBatch((chunk, Chunk([1, 2], 0, [1], 1))), BLOCK_SIZE)
