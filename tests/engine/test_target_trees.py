"""A tree of draft tokens on the target: each row has the bits that its path would have as a chain.

Exactness on = off needs it (docs/exactness.md): the keys of a path are added in the order of its positions, from blocks
of its own, and a row that several paths share is computed once and written to each. Every comparison is by torch.equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from specdec.engine.interface import RaggedBatch
from specdec.engine.kv_cache import BlockTable, BranchBlocks
from specdec.engine.runner import BranchRows, Piece
from specdec.protocol.shape import branches, path_tokens
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


def tree_piece(
    driver: Driver, table: BlockTable, root: int, tokens: Sequence[int], parents: Sequence[int] = PARENTS
) -> tuple[Piece[None], list[BranchBlocks]]:
    """The step of a tree: the last committed token, whose row is the root's, and all draft tokens."""
    base, (first, *others) = table.length + 1, branches(parents, len(tokens))
    rows = [
        BranchRows(
            driver.cache.take_branch(base, base + part.depth + part.end - part.start),
            base + part.depth,
            tokens[part.start : part.end],
        )
        for part in others
    ]
    driver.cache.prepare_write(table, base + first.end)
    driver.cache.begin_branches(table, [row.blocks for row in rows])
    fed = [root, *tokens[: first.end]]
    return Piece(table, table.length, fed, len(tokens) + 1, None, branches=rows), [row.blocks for row in rows]


def run_tree(driver: Driver, piece: Piece[None], beside: Sequence[Piece[None]] = ()) -> torch.Tensor:
    """Logits of the rows of `piece`, first or behind others in the step.  # [rows, vocab] float32"""
    pieces = [*beside, piece]
    chunks = [chunk for one in pieces for chunk in one.chunks(driver.cache.block_size)]
    logits = driver.model.forward(RaggedBatch(tuple(chunks))).logits
    driver.cache.advance(piece.table, piece.end)
    for branch in piece.branches:
        branch.blocks.length = branch.end
    return logits[-piece.logit_count :]


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
    the table continues on a branch, the text goes on with the bits of that path. Source: design section 10.
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
        piece, blocks = tree_piece(driver, table, text[-1], tokens)
        neighbour = [Piece(longest, longest.length, [1, 2, 3], 3, None)] if base % 2 else []
        chains = Chains(driver, text)
        chains.check(run_tree(driver, piece, neighbour), tokens)
        path = path_tokens(branches(PARENTS, NODE_COUNT), tokens)[4]
        driver.cache.continue_on(table, blocks[3], base + len(path))
        after = random_tokens(3, 7, size)
        assert torch.equal(driver.feed(table, after), chains.rows([*path, *after])[len(path) + 1 :])
        chains.close()
        for branch in blocks:
            driver.cache.drop_branch(branch)
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
        pieces, checked = [], []
        for number in range(2):
            text, tokens = random_tokens(base, base + number, size), random_tokens(NODE_COUNT, number, size)
            table = driver.open(base + 40)
            driver.feed(table, text[:-1], 1)
            piece, blocks = tree_piece(driver, table, text[-1], tokens)
            pieces.append(piece)
            checked.append((text, tokens, table, blocks))
        chunks = [chunk for piece in pieces for chunk in piece.chunks(block_size)]
        behind = Piece(longest, 280, [1, 2, 3], 3, None).chunks(block_size)
        logits = driver.model.forward(RaggedBatch((*chunks, *behind))).logits
        for number, (text, tokens, table, blocks) in enumerate(checked):
            rows = logits[number * (NODE_COUNT + 1) : (number + 1) * (NODE_COUNT + 1)]
            chains = Chains(driver, text)
            chains.check(rows, tokens)
            chains.close()
            for branch in blocks:
                driver.cache.drop_branch(branch)
            driver.cache.release(table)


def test_a_shared_row_must_be_written_for_every_path(driver_of: Callable[..., Driver], monkeypatch) -> None:
    """The checks above can fail: without the copies of shared rows, or of the committed positions in the block where
    branches begin, a text that goes on in a branch's blocks differs."""
    for broken in (None, RaggedBatch, type(driver_of("target", "float32").cache)):
        with monkeypatch.context() as patch:
            driver = driver_of("target", "float32")
            if broken is RaggedBatch:
                patch.setattr(RaggedBatch, "copied_rows", lambda self: iter(()))
            elif broken is not None:
                patch.setattr(broken, "begin_branches", lambda self, table, branches: None)
            text, tokens = random_tokens(20, 1 if broken is RaggedBatch else 3), random_tokens(NODE_COUNT, 2)
            table = driver.open(60)
            driver.feed(table, text[:-1], 1)
            piece, blocks = tree_piece(driver, table, text[-1], tokens)
            run_tree(driver, piece)
            path = path_tokens(branches(PARENTS, NODE_COUNT), tokens)[4]
            driver.cache.continue_on(table, blocks[3], len(text) + len(path))
            chains = Chains(driver, text)
            rows = driver.feed(table, [1, 2, 3])
            assert torch.equal(rows, chains.rows([*path, 1, 2, 3])[len(path) + 1 :]) == (broken is None)
            chains.close()
            for branch in blocks:
                driver.cache.drop_branch(branch)
            driver.cache.release(table)
