"""Plans of steps: exact and padded tensors of a batch, and the shapes worth capturing."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy
import pytest
import torch

from specdec.engine.cuda.graphs import GRAPHS_MAX, capture_steps, graph_shapes
from specdec.engine.cuda.plan import StepBuffer, StepShape, exact_shape
from specdec.engine.interface import Chunk, RaggedBatch, TreeRows
from specdec.protocol.shape import branches

CPU = torch.device("cpu")
SCRATCH = 9 * 16
BATCH = RaggedBatch((Chunk([3, 1], 14, [7, 8, 9], 2), Chunk([5], 0, [4], 1)))
EARLIER = RaggedBatch((Chunk([8] * 9, 130, [1] * 9, 9),))  # its values must not show in the next step
# Four paths of one tree, and a neighbour: the root and two tokens, a branch below the first of them, one below the
# root, one below the token of that.
PATHS = RaggedBatch(
    (
        Chunk([3, 1], 14, [7, 8, 9], 3),
        Chunk([4, 8], 16, [10], 1, copied_count=2),
        Chunk([2], 15, [11], 1, copied_count=1),
        Chunk([6, 7], 16, [12], 1, copied_count=2),
        Chunk([5], 0, [4], 1),
    )
)
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
    """Claim: tokens, positions, slots, tables and counts of a step are those of its sequence chunks, by hand."""
    assert exact_shape(BATCH) == StepShape(4, 2, 3, query_max=3, key_max=17)
    assert planned(BATCH, exact_shape(BATCH)) == {
        "input_ids": [7, 8, 9, 4],
        "positions": [14, 15, 16, 0],
        "slots": [3 * 16 + 14, 3 * 16 + 15, 16, 5 * 16],
        "sources": [],
        "logit_rows": [1, 2, 3],
        "query_starts": [0, 3, 4],
        "key_starts": [0, 17, 18],
        "key_counts": [17, 1],
        "tables": [[3, 1], [5, 0]],
        "visible": [[]] * 4,
        "cell_positions": [[]] * 2,
    }


def test_a_plan_of_trees_says_what_each_row_sees() -> None:
    """Claim: rows of a tree have the slots of their cells, their own positions and the cells they see; a sequence chunk
    without a tree is a chain; a padding row sees one cell, so that no weights sum to 0. By hand."""
    tree = TreeRows([17, 2], [5, 5], numpy.arange(18)[None] < [[3], [2]], numpy.arange(18) % 7)
    batch = RaggedBatch((Chunk([3, 1], 0, [7, 8], 2, tree), Chunk([5], 1, [4], 1)))
    shape = exact_shape(batch, has_trees=True)
    assert shape == StepShape(3, 2, 3, query_max=2, key_max=18, has_trees=True)
    found = planned(batch, replace(shape, row_count=4))
    assert found["slots"] == [16 + 1, 3 * 16 + 2, 5 * 16 + 1, SCRATCH] and found["positions"] == [5, 5, 1, 0]
    seen_by = [[cell for cell, seen in enumerate(row) if seen] for row in found["visible"]]
    assert seen_by == [[0, 1, 2], [0, 1], [0, 1], [0]]
    assert found["cell_positions"][0][:18] == [place % 7 for place in range(18)]
    assert found["cell_positions"][1][:2] == [0, 1]
    assert not shape.holds(exact_shape(batch)) and not exact_shape(batch).holds(shape)


def test_shared_rows_are_written_for_every_path() -> None:
    """Claim: behind the slots of the rows stand those of the copies, in the blocks of their own paths, each with its
    row; padding rows and copies write to the scratch block. By hand."""
    shape = exact_shape(PATHS)
    assert shape == StepShape(7, 5, 7, query_max=3, key_max=17, copy_count=5)
    own = [3 * 16 + 14, 3 * 16 + 15, 16, 8 * 16, 2 * 16 + 15, 7 * 16, 5 * 16]
    copied = [4 * 16 + 14, 4 * 16 + 15, 2 * 16 + 14, 6 * 16 + 14, 6 * 16 + 15]
    exact = planned(PATHS, shape)
    assert exact["slots"] == own + copied and exact["sources"] == [*range(7), 0, 1, 0, 0, 4]
    assert exact["tables"][:2] == [[3, 1], [4, 8]] and exact["key_counts"] == [17, 17, 16, 17, 1]
    padded = planned(PATHS, StepShape(9, 6, 9, query_max=9, key_max=48, copy_count=7))
    assert padded["slots"] == own + [SCRATCH] * 2 + copied + [SCRATCH] * 2
    assert padded["sources"] == [*range(9), 0, 1, 0, 0, 4, 0, 0]
    assert padded["logit_rows"] == [*range(7), 0, 0]


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


def test_a_shape_holds_what_fits_in_every_respect() -> None:
    """Claim: a captured shape takes a step only if rows, sequences, logits, rows of one sequence and keys all fit, and
    both are of single rows or neither: the kernel takes another way for single rows. And both have copies or neither:
    a step without any does not pay for them.
    """
    shape = StepShape(8, 4, 8, 8, 512)
    assert shape.holds(StepShape(8, 4, 3, 5, 512)) and shape.holds(StepShape(3, 1, 0, 3, 2))
    for larger in ((9, 4, 8, 8, 512), (8, 5, 8, 8, 512), (8, 4, 9, 8, 512), (8, 4, 8, 8, 513), (4, 4, 4, 1, 9)):
        assert not shape.holds(StepShape(*larger))
    assert StepShape(4, 4, 4, 1, 99).holds(StepShape(3, 3, 3, 1, 99))
    assert not StepShape(4, 4, 4, 1, 99).holds(StepShape(3, 2, 3, 2, 99))
    copying = replace(shape, copy_count=3)
    assert copying.holds(StepShape(8, 4, 3, 5, 512, copy_count=2)) and not copying.holds(shape)
    assert not shape.holds(copying) and not copying.holds(replace(copying, copy_count=4))


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
    plain = [shape for shape in shapes if not shape.copy_count]
    assert shapes[: len(plain)] == plain, "bounds leave out trees first"
    assert all(a.key_max < b.key_max or a.row_count <= b.row_count for a, b in itertools.pairwise(plain))
    assert max(shape.sequence_count for shape in graph_shapes(key_maxes, cells_max, 8)) == 8


@pytest.mark.parametrize("key_maxes, cells_max", [([131072], None), ([512, 2048], 1 << 15)])
def test_the_shapes_cover_trees(key_maxes: list[int], cells_max: int | None) -> None:
    """Claim: every tree of up to 16 rows, whatever its paths, has a shape with space for its copies, as have eight
    trees of 8 rows on 4 paths; it has at most four paths, or twice theirs. Conclusive: for each depth the trees tried
    have most copies, as all tokens beyond the first path are siblings of its last; copies are counted path by path.
    """
    shapes = graph_shapes(key_maxes, cells_max, 64)
    assert not any(shape.copy_count for shape in graph_shapes(key_maxes, cells_max, 64, has_trees=True))
    for token_count, depth in ((n, d) for n in range(2, 16) for d in range(1, n)):
        parents = [*range(depth), *[depth - 1] * (token_count - depth)]
        parts = branches(parents, token_count)
        copy_count = sum(part.depth + 1 for part in parts[1:])
        assert copy_count == (token_count - depth) * depth
        rows = token_count + 1
        found = next(s for s in shapes if s.holds(StepShape(rows, len(parts), rows, depth + 1, 400, False, copy_count)))
        assert found.sequence_count <= max(4, 2 * len(parts))
    assert any(shape.holds(StepShape(64, 32, 64, 4, 400, copy_count=72)) for shape in shapes)


def test_what_cannot_be_captured_ends_capturing_and_not_the_engine() -> None:
    """Claim: shapes are captured in order until one fails; those before it stay in use."""
    shapes = graph_shapes([512], None, 4)

    def prepare(shape: StepShape):
        def run() -> None:
            if shape == shapes[3]:
                raise RuntimeError("operation not permitted when stream is capturing")

        return run

    assert list(capture_steps(shapes, prepare, CPU)) == shapes[:3]
