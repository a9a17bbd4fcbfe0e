"""A tree of draft tokens on the target: each row has the bits that its path would have as a chain.

Exactness on = off needs it (docs/exactness.md): the keys of a path are added in the order of its positions, whatever
cells hold them, and rows that are accepted are moved to their positions. Every comparison is by torch.equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.interface import Chunk, RaggedBatch, tree_paths
from specdec.protocol.tree_shape import branches, path_tokens
from tests.support.engine_models import Driver, random_tokens

NAMES = ("target", "llama", "gpt2", "odd", "gemma3-wide")
# Committed lengths around the borders of blocks, and of splits of 512 positions.
BASES, LONG_BASES, FEW_BASES = (1, 15, 16, 17, 126, 127, 128, 129, 160, 384), (505, 511, 512, 513), (1, 15, 16, 17, 45)
MODELS = [(name, dtype, BASES, True) for name in NAMES for dtype in ("float32", "bfloat16")]
MODELS += [
    (name, dtype, LONG_BASES, True) for name in ("llama-long", "gemma2-long") for dtype in ("float32", "float16")
]
MODELS += [("gemma2", "float32", FEW_BASES, False), ("gpt2", "bfloat16", FEW_BASES, False)]
MODELS += [
    pytest.param(*own, FEW_BASES, False, marks=pytest.mark.more)
    for own in (("llama", "float32"), ("llama", "bfloat16"), ("gpt2", "float32"), ("gemma2", "bfloat16"))
]
# Two branches at the root, one below the first token, one below the last of a branch.
PARENTS = (0, 1, 2, 2, 1, 0, 6, 7, 6, 0)
NODE_COUNT = len(PARENTS)
COMMITTED = [5, 6, 7]  # the nodes of a path, in order, none in the cell of its position


def tree_chunk(driver: Driver, table: BlockTable, root: int, tokens: Sequence[int]) -> Chunk:
    """The step of a tree: the last committed token, whose row is the root's, and all draft tokens."""
    base = table.length + 1
    driver.cache.prepare_write(table, base + len(tokens))
    return Chunk(table.block_ids, table.length, [root, *tokens], len(tokens) + 1, tree_paths(PARENTS, base))


def run_tree(driver: Driver, table: BlockTable, chunk: Chunk, beside: Sequence[Chunk] = ()) -> torch.Tensor:
    """Logits of the rows of `chunk`, first or behind others in the step.  # [rows, vocab] float32"""
    logits = driver.model.forward(RaggedBatch((*beside, chunk))).logits
    driver.cache.advance(table, chunk.base)
    return logits[-chunk.logit_count :].clone()


def go_on(driver: Driver, table: BlockTable, nodes: Sequence[int]) -> None:
    """Continues the text with these nodes of the tree that was run."""
    base = table.length
    driver.cache.move(table, [base + node for node in nodes], range(base, base + len(nodes)))
    driver.cache.advance(table, base + len(nodes))


class Chains:
    """Logits of paths fed as chains below one text."""

    def __init__(self, driver: Driver, text: Sequence[int]) -> None:
        self.driver, self.text = driver, text
        self._table = driver.open(len(text) + NODE_COUNT + 8)
        if len(text) > 1:
            driver.feed(self._table, text[:-1], 1)

    def rows(self, path: Sequence[int]) -> torch.Tensor:
        """Logits after the text and after each token of a path.  # [len(path) + 1, vocab] float32"""
        self.driver.cache.truncate(self._table, len(self.text) - 1)
        return self.driver.feed(self._table, [self.text[-1], *path])

    def close(self) -> None:
        self.driver.cache.release(self._table)

    def check(self, rows: torch.Tensor, tokens: Sequence[int]) -> None:
        """Raises AssertionError unless each row of a tree has the bits of its own path as a chain."""
        parts = branches(PARENTS, NODE_COUNT)
        for part, path in zip(parts, path_tokens(parts, tokens)):
            first, chain = part.start + 1 if part.start else 0, self.rows(path)
            assert torch.equal(rows[first : part.end + 1], chain[part.depth + (part.start > 0) :]), part


@pytest.mark.parametrize("name, dtype, bases, with_kernels", MODELS, ids=lambda own: str(own).replace(" ", ""))
def test_each_row_has_the_bits_of_its_path(
    name: str, dtype: str, bases: Sequence[int], with_kernels: bool, driver_of: Callable[..., Driver]
) -> None:
    """Claim: shape, siblings and committed length change no bit of a row, alone and beside a long neighbour; after
    accepted rows are moved, the text goes on with the bits of their path. Source: design section 10.
    Conclusive: ten nodes on six paths, at committed lengths on both sides of block and split borders, with other tokens
    each time, with kernels and without."""
    driver = driver_of(name, dtype, with_kernels)
    size = driver.model.description.vocabulary_size
    longest = driver.open(300)
    driver.feed(longest, random_tokens(280 if with_kernels else 40, 13, size), 1)
    for base in bases:
        text, tokens = random_tokens(base, base, size), random_tokens(NODE_COUNT, 1000 + base, size)
        table = driver.open(base + 40)
        if base > 1:
            driver.feed(table, text[:-1], 1)
        chunk = tree_chunk(driver, table, text[-1], tokens)
        neighbour = [Chunk(longest.block_ids, longest.length, [1, 2, 3], 3)] if base % 2 else []
        chains = Chains(driver, text)
        chains.check(run_tree(driver, table, chunk, neighbour), tokens)
        go_on(driver, table, COMMITTED)
        path, after = [tokens[node] for node in COMMITTED], random_tokens(3, 7, size)
        assert torch.equal(driver.feed(table, after), chains.rows([*path, *after])[len(path) + 1 :])
        chains.close()
        driver.cache.release(table)
        driver.cache.check_integrity()
    driver.cache.release(longest)


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        *(("gemma2", size) for size in (8, 32, 64)),
        ("target", 32),
        *(pytest.param("target", size, marks=pytest.mark.more) for size in (8, 64)),
    ],
)
def test_block_sizes_and_windows_change_no_bits(name: str, block_size: int, folder_of: Callable[[str], Path]) -> None:
    """Claim: whatever the block size, also where branches begin at a block border and where a window hides keys of the
    past, rows have the bits of their paths, in a step with another tree and a chain behind it. Conclusive: at the
    lengths at which a path begins in a split, and crosses into the next."""
    driver = Driver.load(folder_of(name), "float32", 1 + 8000 // block_size, block_size)
    size = driver.model.description.vocabulary_size
    longest = driver.open(300)
    driver.feed(longest, random_tokens(280, 13, size), 1)
    for base in (128, 129, 256, 257, 383, 384):
        chunks, checked = [], []
        for number in range(2):
            text, tokens = random_tokens(base, base + number, size), random_tokens(NODE_COUNT, number, size)
            table = driver.open(base + 40)
            driver.feed(table, text[:-1], 1)
            chunks.append(tree_chunk(driver, table, text[-1], tokens))
            checked.append((text, tokens, table))
        behind = Chunk(longest.block_ids, 280, [1, 2, 3], 3)
        logits = driver.model.forward(RaggedBatch((*chunks, behind))).logits
        for number, (text, tokens, table) in enumerate(checked):
            rows = logits[number * (NODE_COUNT + 1) : (number + 1) * (NODE_COUNT + 1)]
            chains = Chains(driver, text)
            chains.check(rows, tokens)
            chains.close()
            driver.cache.release(table)


def test_accepted_rows_must_be_moved_to_their_positions(driver_of: Callable[..., Driver], monkeypatch) -> None:
    """The checks above can fail: where accepted rows stay in their cells, or are moved in another order, a text that
    goes on with them differs."""
    for nodes in (COMMITTED, None, COMMITTED[::-1]):
        driver = driver_of("target", "float32")
        text, tokens = random_tokens(20, 3), random_tokens(NODE_COUNT, 2)
        table = driver.open(60)
        driver.feed(table, text[:-1], 1)
        run_tree(driver, table, tree_chunk(driver, table, text[-1], tokens))
        if nodes is None:
            driver.cache.advance(table, table.length + len(COMMITTED))
        else:
            go_on(driver, table, nodes)
        chains = Chains(driver, text)
        rows, path = driver.feed(table, [1, 2, 3]), [tokens[node] for node in COMMITTED]
        assert torch.equal(rows, chains.rows([*path, 1, 2, 3])[len(path) + 1 :]) == (nodes == COMMITTED)
        chains.close()
        driver.cache.release(table)


def test_cells_move_all_at_once(driver_of: Callable[..., Driver]) -> None:
    """Claim: cells that change places do not overwrite each other, and no cell of a valid position moves. Source: a
    draft's nodes are in each other's way. Conclusive: two nodes change places, and then have each other's logits; a
    move below the length of the table raises."""
    for with_kernels in (True, False):
        driver = driver_of("llama", "float32", with_kernels)
        text, table = random_tokens(20, 3), driver.open(60)
        driver.feed(table, text, 1)
        first, second = [[20], [21]], [[20, 22], [21, 23]]
        driver.cache.prepare_write(table, 24)

        steps = [([5, 6], first), ([7, 7], second)]
        batches = [RaggedBatch((Chunk(table.block_ids, 20, ids, 2, paths),)) for ids, paths in steps]
        driver.model.forward(batches[0])
        before = driver.model.forward(batches[1]).logits
        driver.cache.move(table, [20, 21], [21, 20])
        after = driver.model.forward(batches[1]).logits
        assert torch.equal(before, after.flip(0)) and not torch.equal(before, after)
        with pytest.raises(ValueError, match="cannot move"):
            driver.cache.move(table, [20], [19])
        driver.cache.release(table)
