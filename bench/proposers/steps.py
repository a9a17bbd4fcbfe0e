"""T(rows, paths): the step of a verification by its rows and the paths of its tree, on the deepened target."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.bars import Bar
from bench.deepened import write_deepened
from bench.engine.steps import BLOCK_SIZE, time_step
from specdec.engine.interface import Chunk, RaggedBatch, tree_paths
from specdec.engine.loading.model import load_model
from specdec.engine.transformers_model import TransformersModel

ROW_COUNTS, PATH_COUNTS, CONTEXTS = (1, 2, 3, 5, 9, 17), (1, 2, 4, 8, 16), (100, 900)
TURNS = 15
FIRST_BLOCK = 1  # block 0 is always zero


def verification(rows: int, paths: int, context: int) -> RaggedBatch:
    """A step of `rows` rows for one sequence: a chain, and siblings of its first token as the further paths."""
    table = list(range(FIRST_BLOCK, FIRST_BLOCK + (context + rows) // BLOCK_SIZE + 1))
    token_ids = [7] * (rows - paths + 1) + [7 + path for path in range(1, paths)]
    parents = [*range(rows - paths), *[0] * (paths - 1)] if paths > 1 else []
    return RaggedBatch((Chunk(table, context - 1, token_ids, rows, tree_paths(parents, context)),))


def measure_steps(asked: argparse.Namespace, console: Console) -> tuple[list[Table], list[Bar], dict[str, Any]]:
    """Medians of forwards of every shape in turns, one thread, bfloat16."""
    torch.set_num_threads(1)
    tables, written = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        model = load_model(str(write_deepened(Path(scratch))), "bfloat16")
        assert isinstance(model, TransformersModel)
        for context in CONTEXTS:
            model.allocate(FIRST_BLOCK + (context + max(ROW_COUNTS)) // BLOCK_SIZE + 1, BLOCK_SIZE)
            model.forward(RaggedBatch((Chunk(verification(1, 1, context).chunks[0].block_ids, 0, [5] * context, 0),)))
            shapes = [
                (rows, paths) for rows in ROW_COUNTS for paths in PATH_COUNTS if paths < rows or rows == paths == 1
            ]
            batches = {shape: verification(*shape, context) for shape in shapes}
            times_ms: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
            for turn in track(range(TURNS + 1), f"steps, {context} tokens", console=Console(stderr=True)):
                for shape, batch in batches.items():
                    times_ms[shape] += [time_step(model, batch)] * (turn > 0)
            medians = {shape: statistics.median(own) for shape, own in times_ms.items()}
            tables.append(step_table(context, medians))
            written[str(context)] = {f"{rows} rows, {paths} paths": ms for (rows, paths), ms in medians.items()}
    return tables, [], written


def step_table(context: int, medians: dict[tuple[int, int], float]) -> Table:
    table = Table(title=f"T(rows, paths) in ms after {context} tokens")
    for name in ("rows", *(f"{paths} path{'s' * (paths > 1)}" for paths in PATH_COUNTS)):
        table.add_column(name, justify="right")
    for rows in ROW_COUNTS:
        own = [medians.get((rows, paths)) for paths in PATH_COUNTS]
        table.add_row(str(rows), *("" if ms is None else f"{ms:.1f}" for ms in own))
    return table
