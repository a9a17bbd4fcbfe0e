"""Plans of steps: exact and padded tensors of a batch, and the shapes worth capturing."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from specdec.engine.cuda.graphs import GRAPHS_MAX, capture_steps, graph_shapes
from specdec.engine.cuda.plan import StepBuffer, StepShape, exact_shape
from specdec.engine.interface import Chunk, RaggedBatch
from tests.support.dispatched import Dispatched

CPU = torch.device("cpu")
SCRATCH = 9 * 16
BATCH = RaggedBatch((Chunk([3, 1], 14, [7, 8, 9], 2), Chunk([5], 0, [4], 1)))
EARLIER = RaggedBatch((Chunk([8] * 9, 130, [1] * 9, 9),))  # its values must not show in the next step
DECODES = RaggedBatch((Chunk([2, 6, 4], 40, [7], 1), Chunk([5], 0, [4], 1)))


def planned(batch: RaggedBatch, shape: StepShape) -> dict[str, list]:
    buffer = StepBuffer(16, SCRATCH, CPU)
    buffer.reserve(shape)
    buffer.reserve(exact_shape(EARLIER))
    buffer.fill(EARLIER, exact_shape(EARLIER))
    buffer.fill(batch, shape)
    step = buffer.send(shape)
    return {name: getattr(step, name).tolist() for name in step.__dataclass_fields__ if name != "shape"}


def test_an_exact_plan_is_the_batch() -> None:
    """Claim: tokens, positions, slots, tables and counts of a step are those of its chunks, by hand."""
    assert exact_shape(BATCH) == StepShape(4, 2, 3, query_max=3, key_max=17)
    assert planned(BATCH, exact_shape(BATCH)) == {
        "input_ids": [7, 8, 9, 4],
        "positions": [14, 15, 16, 0],
        "slots": [3 * 16 + 14, 3 * 16 + 15, 16, 5 * 16],
        "logit_rows": [1, 2, 3],
        "query_starts": [0, 3, 4],
        "key_starts": [0, 17, 18],
        "key_counts": [17, 1],
        "tables": [[3, 1], [5, 0]],
        "visible": [[]] * 4,
        "cell_positions": [[]] * 2,
    }


def test_a_plan_of_trees_says_what_each_row_sees() -> None:
    """Claim: nodes of a tree have the slots of their cells, their own positions and the cells they see; beside them a
    chain sees its past; a padding row sees one cell, so that no weights sum to 0. By hand."""
    chunks = (Chunk([3, 1], 4, [6, 7, 8], 3, [[17], [17, 9]]), Chunk([5], 0, [4], 1, [[1]]), Chunk([7], 1, [4], 1))
    shape = exact_shape(RaggedBatch(chunks))
    assert shape == StepShape(5, 3, 5, query_max=3, key_max=18, has_trees=True)
    found = planned(RaggedBatch(chunks), replace(shape, row_count=6))
    assert found["slots"] == [3 * 16 + 4, 16 + 1, 3 * 16 + 9, 5 * 16 + 1, 7 * 16 + 1, SCRATCH]
    assert found["positions"] == [4, 5, 6, 0, 1, 0]
    seen_by = [[cell for cell, seen in enumerate(row) if seen] for row in found["visible"]]
    assert seen_by == [[*range(5)], [*range(5), 17], [*range(5), 9, 17], [1], [0, 1], [0]]
    assert [found["cell_positions"][0][cell] for cell in (*range(5), 17, 9)] == [*range(6), 6]
    assert found["cell_positions"][1][1] == 0 and found["cell_positions"][2][:2] == [0, 1]
    chain = exact_shape(RaggedBatch(chunks[2:]))
    assert not shape.holds(chain) and exact_shape(RaggedBatch(chunks[2:]), has_trees=True).has_trees
    assert not chain.holds(exact_shape(RaggedBatch(chunks[2:]), has_trees=True))


def test_padding_names_no_sequence() -> None:
    """Claim: behind the batch, padding rows write to the scratch block and padding sequences read the zero block: none
    where sequences have several rows, one row and one key each where every sequence has exactly one.
    """
    wide = planned(BATCH, StepShape(6, 4, 6, query_max=4, key_max=40))
    assert wide["slots"][4:] == [SCRATCH] * 2 and wide["tables"] == [[3, 1, 0], [5, 0, 0], [0] * 3, [0] * 3]
    assert wide["query_starts"] == [0, 3, 4, 4, 4] and wide["key_counts"] == [17, 1, 0, 0]
    assert wide["key_starts"] == [0, 17, 18, 18, 18] and wide["logit_rows"] == [1, 2, 3, 0, 0, 0]
    single = planned(DECODES, StepShape(4, 4, 4, query_max=1, key_max=48))
    assert single["query_starts"] == [0, 1, 2, 3, 4] and single["key_counts"] == [41, 1, 1, 1]
    assert single["slots"] == [4 * 16 + 8, 5 * 16, SCRATCH, SCRATCH] and single["positions"] == [40, 0, 0, 0]


def test_a_step_makes_views_once_and_dispatches_one_copy() -> None:
    """Claim: a shape's second step dispatches nothing but the copy of its plan, into the same tensors; a buffer that
    grew has others, with the same numbers. Conclusive: torch's dispatcher lists views as well; the first step, which
    makes them, dispatches more."""
    buffer, shape = StepBuffer(16, SCRATCH, CPU), exact_shape(BATCH)
    buffer.reserve(shape)
    counts = []
    for _ in range(2):
        with Dispatched(has_views=True) as counted:
            buffer.fill(BATCH, shape)
            step = buffer.send(shape)
        counts.append(counted.names)
    assert counts[1] == ["copy_"] and len(counts[0]) > 10 and step is buffer.views(shape)
    buffer.reserve(exact_shape(EARLIER))
    buffer.fill(BATCH, shape)
    again = buffer.send(shape)
    assert again is not step and again.slots.data_ptr() != step.slots.data_ptr()
    assert torch.equal(again.slots, step.slots) and torch.equal(again.tables, step.tables)


def test_a_shape_holds_what_fits_in_every_respect() -> None:
    """Claim: a captured shape takes a step only if rows, sequences, logits, rows of one sequence and keys all fit, and
    both are of single rows or neither: the kernel takes another way for single rows.
    """
    shape = StepShape(8, 4, 8, 8, 512)
    assert shape.holds(StepShape(8, 4, 3, 5, 512)) and shape.holds(StepShape(3, 1, 0, 3, 2))
    for larger in ((9, 4, 8, 8, 512), (8, 5, 8, 8, 512), (8, 4, 9, 8, 512), (8, 4, 8, 8, 513), (4, 4, 4, 1, 9)):
        assert not shape.holds(StepShape(*larger))
    assert StepShape(4, 4, 4, 1, 99).holds(StepShape(3, 3, 3, 1, 99))
    assert not StepShape(4, 4, 4, 1, 99).holds(StepShape(3, 2, 3, 2, 99))


@pytest.mark.parametrize("key_maxes, cells_max", [([131072], None), ([512, 2048], 1 << 15)])
def test_the_shapes_cover_decodes_and_verifications_within_bounds(key_maxes: list[int], cells_max: int | None) -> None:
    """Claim: every decode of up to 64 short sequences and every verification of up to 8 rows of up to 8 sequences has
    a shape that wastes at most three of four rows; there are at most GRAPHS_MAX, the smallest first.
    """
    shapes = graph_shapes(key_maxes, cells_max, 64)
    assert 0 < len(shapes) <= GRAPHS_MAX and len(set(shapes)) == len(shapes)
    needs = [StepShape(count, count, count, 1, 400) for count in range(1, 65)]
    needs += [StepShape(count * rows, count, count * rows, rows, 400) for count in range(1, 9) for rows in range(2, 9)]
    for needed in needs:
        found = next(shape for shape in shapes if shape.holds(needed))
        assert found.row_count <= max(4 * needed.row_count, 4)
    assert all(a.key_max < b.key_max or a.row_count <= b.row_count for a, b in itertools.pairwise(shapes))
    assert max(shape.sequence_count for shape in graph_shapes(key_maxes, cells_max, 8)) == 8


def test_what_cannot_be_captured_ends_capturing_and_not_the_engine() -> None:
    """Claim: shapes are captured in order until one fails; those before it stay in use."""
    shapes = graph_shapes([512], None, 4)

    def prepare(shape: StepShape):
        def run() -> None:
            if shape == shapes[3]:
                raise RuntimeError("operation not permitted when stream is capturing")

        return run

    assert list(capture_steps(shapes, prepare, CPU)) == shapes[:3]
