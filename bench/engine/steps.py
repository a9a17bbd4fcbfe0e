"""One timed step of a model after cached tokens."""

from __future__ import annotations

import time
from pathlib import Path

from specdec.engine.interface import CausalModel, Chunk, RaggedBatch, tree_paths
from specdec.engine.loading.model import load_model
from specdec.engine.transformers_model import TransformersModel

BLOCK_SIZE = 64
FIRST_BLOCK = 1  # block 0 is always zero


def load(folder: Path | str, dtype: str) -> TransformersModel:
    """A target of `transformers`. Raises ModelRefused for a folder that cannot be used, TypeError for a table model."""
    model = load_model(str(folder), dtype)
    if not isinstance(model, TransformersModel):
        raise TypeError(f"{folder} is no transformers model")
    return model


def time_step(model: CausalModel, batch: RaggedBatch) -> float:
    """Milliseconds of one forward."""
    started_s = time.perf_counter()
    model.forward(batch)
    return (time.perf_counter() - started_s) * 1e3


def verification(rows: int, paths: int, context: int) -> RaggedBatch:
    """A step of `rows` rows for one sequence: a chain, and siblings of its first token as the further paths."""
    table = range(FIRST_BLOCK, FIRST_BLOCK + (context + rows) // BLOCK_SIZE + 1)
    token_ids = [7] * (rows - paths + 1) + [7 + path for path in range(1, paths)]
    parents = [*range(rows - paths), *[0] * (paths - 1)] if paths > 1 else []
    return RaggedBatch((Chunk(table, context - 1, token_ids, rows, tree_paths(parents, context)),))


def cache_text(model: CausalModel, context: int, rows_max: int) -> None:
    """Makes the cache of a model and runs `context` tokens, after which `verification` steps."""
    batch = verification(rows_max, 1, context)
    (table,) = (chunk.block_ids for chunk in batch.chunks)
    model.allocate(FIRST_BLOCK + len(table), BLOCK_SIZE)
    model.forward(RaggedBatch((Chunk(table, 0, [5] * context, 0),)))
