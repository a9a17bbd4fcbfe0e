"""A tree of draft tokens on the target: each row has the bits that its path would have as a chain.

Exactness on = off needs it (docs/exactness.md): the keys of a path are added in the order of its positions, from blocks
of its own, and a row that several paths share is computed once and written to each. Every comparison is by torch.equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from specdec.engine.attention import TREE_KEYS, AttentionShape, ScoreRule, TreeGroup, probe_query_tiles
from specdec.engine.interface import RaggedBatch, SequenceChunk
from specdec.engine.kv_cache import BlockTable, BranchBlocks
from specdec.engine.runner import BranchRows, Piece
from specdec.engine.step_plan import StepPlanner
from specdec.engine.tree_probe import probe_tree_tiles
from specdec.protocol.shape import branches, path_tokens
from tests.support.engine_models import Driver, random_tokens

NAMES = ("target", "llama", "gpt2", "odd", "gemma3-wide")
MODELS = [(name, dtype) for name in NAMES for dtype in ("float32", "bfloat16")]
# Committed lengths around block and key split borders.
BASES = (1, 15, 16, 17, 126, 127, 128, 129, 160, 257, 382, 384)
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


@pytest.mark.parametrize("rows_max", [64, 8, 0], ids=["one-tile", "too-large", "tiles"])
@pytest.mark.parametrize("name, dtype", MODELS)
def test_each_row_has_the_bits_of_its_path(
    name: str, dtype: str, rows_max: int, driver_of: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: shape, siblings and committed length change no bit of a row, alone and beside a long neighbour; after
    the table continues on a branch, the text goes on with the bits of that path; in one tile with all paths, and where
    no tile holds as many rows, or any, in tiles of their own. Source: design section 10.
    Conclusive: ten nodes on six paths, at committed lengths on both sides of block and split borders, with other tokens
    each time."""
    driver = driver_of(name, dtype)
    size = driver.model.description.vocabulary_size
    longest = driver.open(300)
    driver.feed(longest, random_tokens(280, 13, size), 1)
    found = watch_trees(monkeypatch, rows_max)
    for base in BASES:
        text, tokens = random_tokens(base, base, size), random_tokens(NODE_COUNT, 1000 + base, size)
        table = driver.open(base + 40)
        if base > 1:
            driver.feed(table, text[:-1], 1)
        piece, blocks = tree_piece(driver, table, text[-1], tokens)
        neighbour = [Piece(longest, 280, [1, 2, 3], 3, None)] if base % 2 else []
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
    if rows_max > NODE_COUNT:
        skip_without_tile(found)


@pytest.mark.parametrize("block_size", [8, 32, 64])
@pytest.mark.parametrize("name", ["target", "gemma2"])
def test_block_sizes_and_windows_change_no_bits(
    name: str, block_size: int, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: whatever the block size, also where branches begin at a block border and where a window hides keys of the
    past, rows have the bits of their paths, in a step with another tree and a chain behind it. Conclusive: at the
    lengths at which a path begins in a split, and crosses into the next."""
    found = watch_trees(monkeypatch, 64)
    driver = Driver.load(folder_of(name), "float32", 1 + 8000 // block_size, block_size)
    size = driver.model.description.vocabulary_size
    longest = driver.open(300)
    driver.feed(longest, random_tokens(280, 13, size), 1)
    for base in (128, 129, 256, 257, 383, 384, 385):
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
    skip_without_tile(found)


def watch_trees(monkeypatch: pytest.MonkeyPatch, rows_max: int) -> list[int]:
    """The rows of each tree that later steps compute in one tile, as if none held more than `rows_max`; 0 for a chain
    and for other trees."""
    found: list[int] = []
    real = StepPlanner._paths_of_tree

    def watched(self: StepPlanner, chunks: Sequence[SequenceChunk], index: int) -> numpy.ndarray | None:
        paths = real(self, chunks, index)
        if paths is not None and len(paths) > rows_max:
            paths = None
        found.append(0 if paths is None else len(paths))
        return paths

    monkeypatch.setattr(StepPlanner, "_paths_of_tree", watched)
    return found


def skip_without_tile(found: list[int]) -> None:
    """Skips the test, its comparisons made, if this processor's library has no tile in which trees agree."""
    if NODE_COUNT + 1 not in found:
        pytest.skip("no tile in which trees agree: they were computed path by path")


@pytest.mark.parametrize("head_count, kv_head_count", [(4, 2), (8, 1), (3, 3)])
def test_the_probe_refuses_sums_in_another_order(
    head_count: int, kv_head_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a tile is taken for trees only where its sums have the order of a chain's, and a window of 4 tokens hides
    keys of a tree as it hides those of a chain. Conclusive: with the keys of a tree in the reverse order, by which
    results are the same but for rounding, no tile is left, where some were."""
    rules = ScoreRule(0.3), ScoreRule(0.3, window=4), ScoreRule(0.3, window=40), ScoreRule(0.3, softcap=20.0)
    shape = AttentionShape(2, head_count, kv_head_count, 64, rules)
    tiles = probe_query_tiles(shape.head_count // shape.kv_head_count, 64, rules)
    found = probe_tree_tiles(shape, tiles)
    if not found:
        pytest.skip("no tile in which trees agree")
    real = StepPlanner._tree_group

    def reversed_keys(self: StepPlanner, *given: Any) -> TreeGroup:
        group = real(self, *given)
        cells = group.own.cells.view(-1, TREE_KEYS).flip(1).flatten()
        own = replace(group.own, cells=cells, mask=group.own.mask.flip(2).contiguous())
        keys = group.keys.view(len(group.keys), -1, TREE_KEYS).flip(2).flatten(1)
        return replace(group, own=own, places=TREE_KEYS - 1 - group.places, keys=keys)

    monkeypatch.setattr(StepPlanner, "_tree_group", reversed_keys)
    assert probe_tree_tiles(shape, tiles) == ()


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
