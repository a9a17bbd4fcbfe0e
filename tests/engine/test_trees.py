"""The rows of a tree give the answers of `transformers` on each path, in every architecture, on both devices' code.

A draft's numbers need not be stable, so logits are compared within a tolerance: as in tests/engine, logits have
standard deviation 3, and sums in another order differ by about 1e-5.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy
import pytest
import torch

from specdec.engine.attention import ScoreRule
from specdec.engine.interface import RaggedBatch, SequenceChunk, TreeRows
from specdec.engine.model import load_model
from specdec.engine.storage import DeviceStorage
from specdec.engine.tiled_modules import FEW_ROWS, FREE_WIDTHS, TiledLinear, Weight
from specdec.engine.transformers_model import TransformersModel
from specdec.engine.tree_attention import SHORT_CELLS_MAX, TreeChunk, TreePlanner
from tests.support.device_models import load_on_device
from tests.support.engine_models import ARCHITECTURES, make_tiny_model, model_class, random_tokens

TOLERANCE = 2e-4
BLOCK_SIZE = 16
PROMPT_LENGTHS = (5, 40)  # the second lies beyond the tiny models' windows, over block borders
# Parents of the nodes of each tree, by index; -1 is the prompt's last token.
TREES = ((-1, -1, 0, 0, 1, 2, 5), (-1, 0, 1, 2, 3, -1))


def load(folder: Path, place: str) -> TransformersModel:
    if place == "cpu":
        model = load_model(str(folder), "float32", has_stable_rows=False)
        assert isinstance(model, TransformersModel)
        return model
    return load_on_device(folder, with_graphs=place == "graphs", has_stable_rows=False)


class Tree:
    """A prompt and nodes below it, in cells drawn at random from a sequence's blocks."""

    def __init__(self, blocks: list[int], prompt: list[int], parents: tuple[int, ...], rng: random.Random) -> None:
        self.blocks, self.prompt, self.parents = blocks, prompt, parents
        self.tokens = random_tokens(len(parents), len(prompt))
        cells = rng.sample(range(len(blocks) * BLOCK_SIZE), len(prompt) + len(parents))
        self.cells, self.node_cells = cells[: len(prompt)], cells[len(prompt) :]
        self.positions = numpy.zeros(len(blocks) * BLOCK_SIZE, dtype=numpy.int64)
        self.positions[self.cells] = range(len(prompt))
        self.positions[self.node_cells] = [len(prompt) + len(self.path(node)) - 1 for node in range(len(parents))]

    def path(self, node: int) -> list[int]:
        """The nodes down to one, itself the last."""
        return [*(self.path(self.parents[node]) if self.parents[node] >= 0 else []), node]

    def chunk_of_prompt(self) -> SequenceChunk:
        visible = numpy.zeros((len(self.prompt), len(self.positions)), dtype=bool)
        for row in range(len(self.prompt)):
            visible[row, self.cells[: row + 1]] = True
        rows = TreeRows(self.cells, list(range(len(self.prompt))), visible, self.positions)
        return SequenceChunk(self.blocks, 0, self.prompt, 1, rows)

    def chunk_of(self, nodes: list[int]) -> SequenceChunk:
        visible = numpy.zeros((len(nodes), len(self.positions)), dtype=bool)
        for row, node in enumerate(nodes):
            visible[row, self.cells + [self.node_cells[own] for own in self.path(node)]] = True
        cells = [self.node_cells[node] for node in nodes]
        rows = TreeRows(cells, self.positions[cells].tolist(), visible, self.positions)
        return SequenceChunk(self.blocks, 0, [self.tokens[node] for node in nodes], len(nodes), rows)

    def text(self, node: int) -> list[int]:
        return [*self.prompt, *(self.tokens[own] for own in self.path(node))]


@pytest.mark.parametrize("place", ["cpu", "device", "graphs"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_row_of_a_tree_is_the_model_on_its_path(architecture: str, place: str, tmp_path: Path) -> None:
    """Claim: rows in any cells, level by level, of two sequences in one step, see their ancestors and nothing else:
    their logits are those of `transformers` on the whole path. Prompts go through the same rows; a window hides by
    position, not by cell. Blocks lie one after another in one sequence and scattered in the other. Conclusive: every
    node of both trees, against the library run from nothing."""
    folder = make_tiny_model(tmp_path / "model", architecture)
    model, rng = load(folder, place), random.Random(7)
    model.allocate(40, BLOCK_SIZE)
    blocks = [list(range(1, 6)), rng.sample(range(6, 40), 5)]
    trees = [
        Tree(own, random_tokens(length, length), parents, rng)
        for own, length, parents in zip(blocks, PROMPT_LENGTHS, TREES)
    ]
    expected_by = model_class(architecture).from_pretrained(folder, dtype=torch.float32).eval()

    def expected(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return expected_by(torch.tensor([token_ids])).logits[0, -1, : model.description.vocabulary_size]

    output = model.forward(RaggedBatch(tuple(tree.chunk_of_prompt() for tree in trees)))
    for tree, logits in zip(trees, output.logits):
        assert (logits - expected(tree.prompt)).abs().max() < TOLERANCE
    for level in range(1, 6):
        due = [[n for n in range(len(t.parents)) if len(t.path(n)) == level] for t in trees]
        chosen = [(tree, nodes) for tree, nodes in zip(trees, due) if nodes]
        if not chosen:
            break
        output = model.forward(RaggedBatch(tuple(tree.chunk_of(nodes) for tree, nodes in chosen)))
        assert all(output.is_finite)
        found = iter(output.logits)
        for tree, nodes in chosen:
            for node in nodes:
                assert (next(found) - expected(tree.text(node))).abs().max() < TOLERANCE, (level, node)


def test_a_sequence_chunk_without_a_tree_is_a_chain(tmp_path: Path) -> None:
    """Claim: a model without stable rows takes sequence chunks without a tree too. Conclusive: against the library at
    every position."""
    folder = make_tiny_model(tmp_path / "model", "llama")
    model, token_ids = load(folder, "cpu"), random_tokens(30, 3)
    model.allocate(4, BLOCK_SIZE)
    expected_by = model_class("llama").from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for start, end in ((0, 1), (1, 18), (18, 30)):
        chunk = SequenceChunk([2, 1], start, token_ids[start:end], end - start)
        found.append(model.forward(RaggedBatch((chunk,))).logits)
    with torch.inference_mode():
        expected = expected_by(torch.tensor([token_ids])).logits[0, :, : model.description.vocabulary_size]
    assert (torch.cat(found) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_sequences_attend_together_as_each_alone(softcap: float | None) -> None:
    """Claim: rows of a bfloat16 model attend in float32, several sequences in a step with the result of each alone: of
    other lengths, in blocks that do not follow each other, nodes of trees that do not see every cell, with a window and
    without; short sequences in one call, a long one in its own. The reference is the plain formula for each."""
    rng, generator = random.Random(5), torch.Generator().manual_seed(3)
    heads, kv_heads, size, windows = 6, 2, 32, (None, 7)
    long_blocks = list(range(40, 42 + SHORT_CELLS_MAX // BLOCK_SIZE))
    storage = DeviceStorage(1, long_blocks[-1] + 1, BLOCK_SIZE, kv_heads, size, torch.float32, torch.device("cpu"))
    storage.layers[0].copy_(torch.randn(storage.layers[0].shape, generator=generator))
    trees = [Tree([9, 3, 20], random_tokens(30, 1), TREES[0], rng), Tree([1, 2], random_tokens(5, 2), TREES[1], rng)]
    chunks = [SequenceChunk([block, block + 1], length, [7], 1) for block, length in ((4, 1), (22, 17), (30, 29))]
    chunks.append(SequenceChunk(long_blocks, SHORT_CELLS_MAX, [5, 8], 1))
    chunks += [trees[0].chunk_of([2, 5]), trees[0].chunk_of([6]), trees[1].chunk_of([4])]
    rng.shuffle(chunks)
    plan = TreePlanner(storage, windows).plan(RaggedBatch(tuple(chunks))).attention
    assert plan.group is not None and len(plan.group.own_rows) == 7 and len(plan.chunks) == 1
    rows = torch.randn(len(plan.written), heads + 2 * kv_heads, size, generator=generator).bfloat16()
    queries, keys, values = rows.split([heads, kv_heads, kv_heads], 1)
    alone = [TreePlanner(storage, windows).plan(RaggedBatch((chunk,))).attention for chunk in chunks]
    for window in windows:
        rule = ScoreRule(size**-0.5, window, softcap)
        found = plan.attend(queries, keys, values, 0, rule)
        assert found.shape == queries.shape and found.dtype == queries.dtype
        start = 0
        for own in alone:
            (chunk,) = own.chunks
            expected = plain_attention(queries[start : start + chunk.end].float(), storage, chunk, rule)
            assert (found[start : start + chunk.end].float() - expected).abs().max() < 0.02
            start += chunk.end


def plain_attention(queries: torch.Tensor, storage: DeviceStorage, chunk: TreeChunk, rule: ScoreRule) -> torch.Tensor:
    """The formula, one row and head after the other."""
    slots = (
        range(chunk.first_slot, chunk.first_slot + chunk.cell_count) if chunk.slots is None else chunk.slots.tolist()
    )
    keys, values = (part[list(slots)] for part in storage.slots[0])
    seen, group = chunk.visible[rule.window], queries.shape[1] // keys.shape[1]
    found = torch.empty_like(queries)
    for row, head in itertools.product(range(queries.shape[0]), range(queries.shape[1])):
        scores = keys[:, head // group] @ queries[row, head] * rule.scaling
        if rule.softcap is not None:
            scores = torch.tanh(scores / rule.softcap) * rule.softcap
        if seen is not None:
            scores = scores.masked_fill(~seen[row], -torch.inf)
        found[row, head] = scores.softmax(0) @ values[:, head // group]
    return found


def test_products_of_a_draft_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: rows whose bits decide no text are multiplied by a packed weight in at most 14 numbers of rows, whatever
    their number, with the result of the plain product.

    Source: the library makes and keeps a kernel for every number of rows, and a draft's prompts have any.
    Conclusive: the library's own product is watched; without padding every number of rows reaches it.
    """
    if not torch.backends.mkldnn.is_available():
        pytest.skip("products are not packed here")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(512, 512, generator=generator)
    linear = TiledLinear(Weight(weight.clone()), None)
    assert linear.weight.is_packed
    linear.set_widths(FREE_WIDTHS)
    seen: set[int] = set()
    multiply = linear.weight.multiply

    def watched(rows: torch.Tensor) -> torch.Tensor:
        seen.add(len(rows))
        return multiply(rows)

    monkeypatch.setattr(Weight, "multiply", lambda _, rows: watched(rows))
    for count in range(1, 700, 7):
        rows = torch.randn(1, count, 512, generator=generator)
        assert (linear(rows) - rows @ weight.t()).abs().max() < 1e-3
    assert len(seen) <= 14, sorted(seen)


@pytest.mark.parametrize("row_count", [1, FEW_ROWS, FEW_ROWS + 1, 70])
def test_products_of_many_rows_have_their_own_type(row_count: int) -> None:
    """Claim: a draft's weight of two types multiplies few rows in float32 and more in bfloat16, and returns float32.

    Source: which type is faster depends on the number of rows. Conclusive: bit for bit the product of a weight of that
    type alone, in the same numbers of rows.
    """
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    rows = torch.randn(1, row_count, 128, generator=torch.Generator().manual_seed(2))
    both, alone = (
        TiledLinear(own, None)
        for own in (
            Weight(weight, torch.bfloat16),
            Weight(weight if row_count <= FEW_ROWS else weight.to(torch.bfloat16)),
        )
    )
    both.set_widths(FREE_WIDTHS)
    alone.set_widths(FREE_WIDTHS)
    assert both(rows).dtype == torch.float32
    assert torch.equal(both(rows), alone(rows))
