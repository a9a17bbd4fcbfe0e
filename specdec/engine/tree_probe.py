"""Query tiles at which the rows of a tree have the bits of their paths as chains: measured on the code that serves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.engine.attention import KEY_SPLIT, AttentionShape, ScoreRule
from specdec.engine.interface import RaggedBatch, SequenceChunk
from specdec.engine.step_plan import StepPlanner, paths_of_rows
from specdec.engine.storage import PagedStorage
from specdec.engine.tile_sizes import ALONE, TileSizes

# Cached tokens: of one split; where paths cross into the third; of two and three.
BASES = (KEY_SPLIT // 3, 2 * KEY_SPLIT - 2, KEY_SPLIT + KEY_SPLIT // 3, 2 * KEY_SPLIT + 5)
ROWS_MIN = 3  # of a tree: its root's row and two siblings
BLOCKS = 4  # of KEY_SPLIT positions, for each path


def probe_tree_tiles(shape: AttentionShape, query_tiles: Sequence[int]) -> tuple[int, ...]:
    """Returns those of `query_tiles` at which the rows of a tree of that size have the bits of their paths as chains.

    A tree's product adds keys in the order of its rows, with those of other paths among them, weighted with exact
    zeros; a chain's adds its own, in the same order. They agree where the library adds one key after the other. Random
    float32 sums do not agree by chance.
    """
    storage = PagedStorage(1, 1 + 3 * BLOCKS, shape.kv_head_count, KEY_SPLIT, shape.head_size)
    tried = [width for width in query_tiles if ROWS_MIN <= width <= KEY_SPLIT]
    planner = StepPlanner(storage, shape.head_count, query_tiles, TileSizes(ALONE, 1), shape.windows, tried)
    return tuple(
        width
        for width in tried
        if all(_agrees(planner, storage, shape, rule, width, base) for rule in shape.rules for base in BASES)
    )


def tree_chunks(row_count: int, base: int) -> list[SequenceChunk]:
    """A tree of `row_count` rows after `base` tokens: a chain, a branch at its middle, a sibling of its first token."""
    above = (row_count - ROWS_MIN) // 2
    lengths = 1 + above, row_count - ROWS_MIN - above, 1  # of the chain, the branch and the sibling
    first = (base + 1) // KEY_SPLIT  # the block from which paths have their own
    table = range(1, 1 + BLOCKS)
    chunks = [SequenceChunk([*table], base, [0] * (1 + lengths[0]), 1 + lengths[0])]
    for path, (start, length) in enumerate(((base + 1 + lengths[0] // 2, lengths[1]), (base + 1, 1)), 1):
        blocks = [*table[:first], *range(1 + path * BLOCKS + first, 1 + (path + 1) * BLOCKS)]
        copied_count = start - max(base, first * KEY_SPLIT)
        if length:
            chunks.append(SequenceChunk(blocks, start, [0] * length, length, copied_count=copied_count))
    return chunks


def _agrees(
    planner: StepPlanner, storage: PagedStorage, shape: AttentionShape, rule: ScoreRule, row_count: int, base: int
) -> bool:
    """Whether every row has the bits of its path, computed after the tree in the same blocks."""
    generator = torch.Generator().manual_seed(row_count)
    storage.layers[0].copy_(torch.randn(storage.layers[0].shape, generator=generator))
    storage.layers[0][:, 0] = 0
    chunks = tree_chunks(row_count, base)
    first = (base + 1) // KEY_SPLIT
    storage.copy_block(chunks[0].block_ids[first], [chunk.block_ids[first] for chunk in chunks[1:]])
    sizes = shape.head_count, shape.kv_head_count, shape.kv_head_count
    rows = [torch.randn(row_count, heads, shape.head_size, generator=generator) for heads in sizes]

    def attend(batch: Sequence[SequenceChunk], order: torch.Tensor) -> torch.Tensor:
        plan = planner.plan(RaggedBatch(tuple(batch))).attention
        queries, keys, values = (each.index_select(0, order) for each in rows)
        result: torch.Tensor = plan.attend(queries, keys, values, 0, rule)
        return result

    row_total = sum(len(chunk.token_ids) for chunk in chunks)
    tree = attend(chunks, torch.arange(row_total))
    paths, end = torch.from_numpy(paths_of_rows(chunks)), 0
    for chunk in chunks:
        end += len(chunk.token_ids)
        path = paths[end - 1][paths[end - 1] >= 0]
        chain = SequenceChunk(chunk.block_ids, base, [0] * len(path), len(path))
        if not torch.equal(attend([chain], path), tree.index_select(0, path)):
            return False
    return True
