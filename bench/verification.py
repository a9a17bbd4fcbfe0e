"""The step of a verification, by its rows and the paths of its tree."""

from __future__ import annotations

from bench.engine.steps import BLOCK_SIZE
from specdec.engine.interface import Chunk, RaggedBatch, tree_paths

FIRST_BLOCK = 1  # block 0 is always zero


def verification(rows: int, paths: int, context: int) -> RaggedBatch:
    """A step of `rows` rows for one sequence: a chain, and siblings of its first token as the further paths."""
    table = list(range(FIRST_BLOCK, FIRST_BLOCK + (context + rows) // BLOCK_SIZE + 1))
    token_ids = [7] * (rows - paths + 1) + [7 + path for path in range(1, paths)]
    parents = [*range(rows - paths), *[0] * (paths - 1)] if paths > 1 else []
    return RaggedBatch((Chunk(table, context - 1, token_ids, rows, tree_paths(parents, context)),))
