"""The steps of an encoder-decoder model: the encoder by the length of its input, the decoder by its rows, in turns."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from bench.deepened import load
from bench.engine.steps import BLOCK_SIZE, time_step
from specdec.engine.interface import Chunk, RaggedBatch, tree_paths

LENGTHS = (16, 64, 192, 512)  # of an input
OUTPUT = 32  # tokens of the output before the rows
ROWS = (1, 2, 4, 8)
TREE_PARENTS = (0, 1, 2, 3, 0, 5, 0)  # of seven nodes below the first row: 8 rows, 3 paths
TURNS = 20


@dataclass(frozen=True, slots=True)
class StackSteps:
    """Medians in milliseconds, one thread: `encoder_ms` by the tokens of an input, with the keys and values of cross
    attention; `decoder_ms` by rows after `input_length` tokens of input and OUTPUT of output."""

    model: str
    dtype: str
    input_length: int
    encoder_ms: dict[int, float]
    decoder_ms: dict[int, float]
    tree_ms: float


def measure_stacks(folder: Path, dtype: str, turns: int = TURNS) -> StackSteps:
    """Times every shape once a turn; the first turn warms up. Raises ModelRefused."""
    torch.set_num_threads(1)
    model = load(folder, dtype)
    lengths = [length for length in LENGTHS if length <= model.description.encoder_positions_max]
    length = lengths[-1]
    base = length + OUTPUT
    blocks = range(1, 2 + (base + len(TREE_PARENTS) + max(ROWS)) // BLOCK_SIZE)
    model.allocate(1 + len(blocks), BLOCK_SIZE)

    def step(start: int, rows: int, logit_count: int, encoder_length: int = length) -> RaggedBatch:
        return RaggedBatch((Chunk(blocks, start, [5] * rows, logit_count, encoder_length=encoder_length),))

    paths = tree_paths(TREE_PARENTS, base + 1)
    tree = RaggedBatch((Chunk(blocks, base, [5] * (1 + len(paths)), 1 + len(paths), paths, length),))
    batches = {("encoder", own): step(0, own, 0, own) for own in lengths}  # the longest is last: the decoder's
    batches |= {("decoder", rows): step(base, rows, rows) for rows in ROWS} | {("tree", 0): tree}
    model.forward(step(0, base, 0))
    times_ms: dict[tuple[str, int], list[float]] = {shape: [] for shape in batches}
    for turn in range(turns + 1):
        for shape, batch in batches.items():
            times_ms[shape] += [time_step(model, batch)] * (turn > 0)
    medians = {shape: statistics.median(own) for shape, own in times_ms.items()}
    encoder_ms, decoder_ms = (
        {size: ms for (stack, size), ms in medians.items() if stack == name} for name in ("encoder", "decoder")
    )
    own_dtype = model.description.dtype
    return StackSteps(folder.name, own_dtype, length, encoder_ms, decoder_ms, medians["tree", 0])


def stack_table(found: list[StackSteps]) -> Table:
    """A line for each model."""
    table = Table(title="steps, ms: the encoder by tokens of its input, the decoder by rows")
    lengths = sorted({length for own in found for length in own.encoder_ms})
    names = [*(f"{length} tokens" for length in lengths), *(f"{rows} row{'s' * (rows > 1)}" for rows in ROWS)]
    for name in ("model", *names, f"{1 + len(TREE_PARENTS)} in a tree"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for own in found:
        encoder = [f"{own.encoder_ms[length]:.2f}" if length in own.encoder_ms else "" for length in lengths]
        decoder = [f"{ms:.2f}" for ms in (*own.decoder_ms.values(), own.tree_ms)]
        table.add_row(f"{own.model}, {own.dtype}", *encoder, *decoder)
    return table
