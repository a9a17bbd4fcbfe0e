"""The rows of a draft's tree give the answers of `transformers` on each path, in every architecture, on both devices'
code; on a CPU with the bits of the path as a chain.

As in tests/engine, logits have standard deviation 3, and sums in another order differ by about 1e-5.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.loading.model import load_model
from specdec.engine.transformers_model import TransformersModel
from tests.support.device_models import load_on_device
from tests.support.engine_models import (
    ARCHITECTURES,
    make_tiny_model,
    model_class,
    random_tokens,
    with_each,
    without_kernels,
)

TOLERANCE = 2e-4
BLOCK_SIZE = 16
PROMPT_LENGTHS = (5, 40)  # the second lies beyond the tiny models' windows, over block borders
# Parents of the nodes of each tree, by index; -1 is the prompt's last token.
TREES = ((-1, -1, 0, 0, 1, 2, 5), (-1, 0, 1, 2, 3, -1))


def load(folder: Path, place: str) -> TransformersModel:
    if place in ("cpu", "no kernels"):
        with without_kernels() if place == "no kernels" else nullcontext():
            model = load_model(str(folder), "float32", has_stable_rows=False)
        assert isinstance(model, TransformersModel)
        return model
    return load_on_device(folder, with_graphs=place == "graphs", has_stable_rows=False)


class Tree:
    """A prompt and nodes below it, in cells behind the prompt's drawn at random from a sequence's blocks."""

    def __init__(self, blocks: list[int], prompt: list[int], parents: tuple[int, ...], rng: random.Random) -> None:
        self.blocks, self.prompt, self.parents = blocks, prompt, parents
        self.tokens = random_tokens(len(parents), len(prompt))
        self.cells = rng.sample(range(len(prompt), len(blocks) * BLOCK_SIZE), len(parents))

    def path(self, node: int) -> list[int]:
        """The nodes down to one, itself the last."""
        return [*(self.path(self.parents[node]) if self.parents[node] >= 0 else []), node]

    def chunk_of_prompt(self) -> Chunk:
        return Chunk(self.blocks, 0, self.prompt, 1)

    def chunk_of(self, nodes: list[int]) -> Chunk:
        paths = [[self.cells[own] for own in self.path(node)] for node in nodes]
        return Chunk(self.blocks, len(self.prompt), [self.tokens[node] for node in nodes], len(nodes), paths)

    def text(self, node: int) -> list[int]:
        return [*self.prompt, *(self.tokens[own] for own in self.path(node))]


@pytest.mark.parametrize(
    ("architecture", "place"), [*with_each(["cpu"], ARCHITECTURES), *with_each(["no kernels", "device", "graphs"])]
)
def test_every_row_of_a_tree_is_the_model_on_its_path(architecture: str, place: str, tmp_path: Path) -> None:
    """Claim: rows in any cells, level by level, of two sequences in one step, see their ancestors and nothing else:
    their logits are those of `transformers` on the whole path. A window hides by position, not by cell. Blocks lie one
    after another in one sequence and scattered in the other. Conclusive: every node of both trees, against the library
    run from nothing."""
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


@pytest.mark.parametrize("place", ["cpu", "no kernels"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_nodes_have_the_bits_of_their_paths_as_chains(architecture: str, place: str, tmp_path: Path) -> None:
    """Claim: on a CPU a node's logits are bit for bit those of its text fed as a chain on a block table, whatever cells
    its ancestors lie in, also where the first of them lie in place.

    Source: `plan_step`, keys are read in the order of their positions. Conclusive: every node of two trees, one with
    some of its nodes in the cells of their positions, beside each other, against the text alone, in one chunk.
    """
    folder, rng = make_tiny_model(tmp_path / "model", architecture), random.Random(3)
    model = load(folder, place)
    model.allocate(40, BLOCK_SIZE)
    trees = [Tree([7, 3, 9, 12], random_tokens(length, 4), TREES[0], rng) for length in (9, 41)]
    first = len(trees[0].prompt)
    trees[0].cells = [first, first + 5, first + 1, first + 7, first + 4, first + 3, first + 6]
    trees[1].blocks = [30, 4, 18, 6]
    model.forward(RaggedBatch(tuple(tree.chunk_of_prompt() for tree in trees)))
    nodes = list(range(len(TREES[0])))
    found = model.forward(RaggedBatch(tuple(tree.chunk_of(nodes) for tree in trees))).logits
    for index, (tree, node) in enumerate((tree, node) for tree in trees for node in nodes):
        text = tree.text(node)
        chain = Chunk([20, 21, 22, 23], 0, text, 1)
        assert torch.equal(model.forward(RaggedBatch((chain,))).logits[0], found[index]), (index, node)


def test_a_prompt_in_pieces_has_the_logits_of_the_library(tmp_path: Path) -> None:
    """Claim: a model whose rows need not be stable takes chains of any length. Conclusive: against the library at
    every position."""
    folder = make_tiny_model(tmp_path / "model", "llama")
    model, token_ids = load(folder, "cpu"), random_tokens(30, 3)
    model.allocate(4, BLOCK_SIZE)
    expected_by = model_class("llama").from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for start, end in ((0, 1), (1, 18), (18, 30)):
        chunk = Chunk([2, 1], start, token_ids[start:end], end - start)
        found.append(model.forward(RaggedBatch((chunk,))).logits)
    with torch.inference_mode():
        expected = expected_by(torch.tensor([token_ids])).logits[0, :, : model.description.vocabulary_size]
    assert (torch.cat(found) - expected).abs().max() < TOLERANCE
