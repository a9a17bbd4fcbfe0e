"""Plans of steps of our own kernels: rows and work items in one buffer, and the shapes that are captured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec.engine.cuda.items import ItemLayout, fill
from specdec.engine.cuda.kernels.products import alternated
from specdec.engine.cuda.plan import StepShape
from specdec.engine.cuda.step_parts import restored
from specdec.engine.cuda.step_plan import PATH_WORDS, ItemBuffer, ItemTensors, captured_shapes, shape_of
from specdec.engine.interface import Chunk, RaggedBatch

CPU = torch.device("cpu")
SCRATCH = 9 * 16
LAYOUT = ItemLayout(128, block_size=16, tile_rows=4, windows=(None, 40), scratch_slot=SCRATCH)
BATCH = RaggedBatch((Chunk([3, 1], 14, [7, 8, 9], 2), Chunk([5], 0, [4], 1)))
EARLIER = RaggedBatch((Chunk([8] * 9, 130, [1] * 9, 9),))  # its values must not show in the next step


def planned(batch: RaggedBatch, shape: StepShape) -> ItemTensors:
    buffer = ItemBuffer(LAYOUT, CPU)
    for each in (shape, shape_of(EARLIER)):
        buffer.reserve(each)
    for each, its in ((EARLIER, shape_of(EARLIER)), (batch, shape)):
        buffer.fill(each, its)
        step = buffer.send(its)
    return step


def test_a_plan_is_the_batch_and_its_padding() -> None:
    """Claim: tokens, positions, slots and rows with logits are those of the chunks, by hand; padding rows write to the
    scratch block; the words are those of `items.fill`; and each field begins where kernels want it, of odd counts too.
    """
    exact = shape_of(BATCH)
    assert exact == StepShape(4, 4, 3, query_max=4, key_max=17)
    for shape in (exact, replace(exact, row_count=7, sequence_count=7, query_max=7, logit_count=5)):
        step, padding = planned(BATCH, shape), shape.row_count - 4
        assert step.input_ids.tolist() == [7, 8, 9, 4] + [0] * padding
        assert step.positions.tolist() == [14, 15, 16, 0] + [0] * padding
        assert step.slots.tolist() == [3 * 16 + 14, 3 * 16 + 15, 16, 5 * 16] + [SCRATCH] * padding
        assert step.logit_rows.tolist() == [1, 2, 3] + [0] * (shape.logit_count - 3)
        words = torch.zeros(4096, dtype=torch.int32)
        count = fill(words.numpy(), BATCH, replace(LAYOUT, row_count=shape.row_count))
        assert torch.equal(step.words[:count], words[:count]) and step.layout.row_count == shape.row_count
        fields = (step.input_ids, step.positions, step.slots, step.logit_rows, step.words)
        assert all(field.data_ptr() % 16 == 0 for field in fields)


def test_every_step_of_few_rows_has_a_captured_shape() -> None:
    """Claim: any step of up to 128 rows, of one sequence or as many as rows, chains or trees, with any logits and at
    any length of the cache, is held by a captured shape of less than twice its rows; one with more cells in paths than
    a captured step has words for, or with more rows, is not. A prompt's part computes few logits."""
    shapes = captured_shapes(5000, 64)
    for rows in range(1, 129):
        for count, logits in ((1, 1), (1, rows), (rows, rows), (1, 0)):
            each = rows // count
            chunks = [Chunk([1] * 320, 4990 - each, [5] * each, logits // count) for _ in range(count)]
            found = next(shape for shape in shapes if shape.holds(shape_of(RaggedBatch(tuple(chunks)))))
            assert found.row_count < 2 * rows or rows == 1
            assert found.logit_count <= max(16, 2 * logits)
    tree = Chunk([1] * 320, 100, [5] * 3, 3, [[101], [101, 102]])
    assert any(shape.holds(shape_of(RaggedBatch((tree,)))) for shape in shapes)
    deep = replace(tree, paths=[[*range(101, 200)] for _ in range(2)], token_ids=[5] * 3)
    wide = Chunk([1] * 320, 100, [5] * 129, 1)
    too_deep = replace(shape_of(RaggedBatch((deep,))), path_words=PATH_WORDS + 1)
    for needed in (too_deep, shape_of(RaggedBatch((wide,))), replace(shape_of(BATCH), key_max=5001)):
        assert not any(shape.holds(needed) for shape in shapes)
    assert max(shape.row_count for shape in captured_shapes(5000, 4)) == 8


def test_rows_beyond_their_blocks_are_found_by_planning() -> None:
    """Claim: a batch whose table is too short raises when it is planned."""
    batch = RaggedBatch((Chunk([1], 15, [1, 2, 3], 1),))
    buffer = ItemBuffer(LAYOUT, CPU)
    buffer.reserve(shape_of(batch))
    with pytest.raises(ValueError, match="beyond"):
        buffer.fill(batch, shape_of(batch))


@pytest.mark.parametrize("size", [8, 24])
def test_alternated_rows_come_back(size: int) -> None:
    """Claim: rows that kernels take in pairs are brought back to their own order, of weights and of biases."""
    weight, bias = torch.randn(48, 5), torch.randn(48)
    for each in (weight, bias):
        assert torch.equal(restored(alternated(each, size), size), each)
        assert not torch.equal(alternated(each, size), each)
