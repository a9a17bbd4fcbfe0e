"""Time of one forward by sequences, rows and cached tokens, and what neighbour-independence costs.

Shapes take turns, all of them once a round, so that whatever else the machine does falls on all alike. Some are run a
second time in each round at the widths the library is given, unpadded, where a row's last bits depend on the others:
the difference is what the promise costs; the code is the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec.bench.engine.bandwidth import Reader, limit_ms, step_bytes
from specdec.engine.cpu_backend import CpuBackend
from specdec.engine.interface import RaggedBatch, SequenceChunk
from specdec.engine.kv_cache import BlockTable, KVCache
from specdec.engine.tile_sizes import TileSizes
from specdec.engine.transformers_model import TransformersModel

BLOCK_SIZE = 64
CONTEXTS = (64, 256, 1024)
ROWS = (1, 2, 4, 5, 8, 16, 32, 64)
SEQUENCES = (1, 2, 4, 8, 16, 32)
SEQUENCE_ROWS = (1, 5)  # rows of each sequence where the number of sequences is the question
INDEPENDENCE = ((1, 1), (1, 5), (1, 8), (8, 5))  # sequences, rows each
CONTEXT = 256  # where one context stands for all
UNPADDED = TileSizes(tuple(range(1, 129)), row_multiple=1)
ANY_TILE = tuple(range(1, 65))
PREFILL_ROWS = 64


class Shape(NamedTuple):
    """One step: `sequences` sequences, each with `rows` tokens to run after `context` cached ones."""

    sequences: int
    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Medians of one shape. `limit_ms`: in which what the step must read can be read; `unpadded_ms`: None where the
    step was not run unpadded."""

    model: str
    dtype: str
    sequences: int
    rows: int
    context: int
    step_ms: float
    limit_ms: float
    unpadded_ms: float | None

    @property
    def limit_share(self) -> float:
        """How much of the step the limit is: 1 is a step that only waits for memory."""
        return self.limit_ms / self.step_ms


def shapes_of(rows: Sequence[int], sequences: Sequence[int], contexts: Sequence[int]) -> list[Shape]:
    """By rows of one sequence, and by sequences of few rows, at every context; none twice."""
    every = [Shape(1, count, context) for context in contexts for count in rows]
    every += [Shape(count, own, context) for context in contexts for own in SEQUENCE_ROWS for count in sequences]
    return list(dict.fromkeys(every))


def independence_shapes(contexts: Sequence[int]) -> list[Shape]:
    """The shapes that are run unpadded too."""
    context = CONTEXT if CONTEXT in contexts else max(contexts)
    return [Shape(sequences, rows, context) for sequences, rows in INDEPENDENCE]


class CachedTexts:
    """Cached sequences of one text, each in blocks of its own; steps of any shape run on the first of them."""

    def __init__(self, model: TransformersModel, sequence_count: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        vocabulary_size = model.description.vocabulary_size
        self.token_ids = torch.randint(1, vocabulary_size, (length,), generator=generator).tolist()
        block_count = 1 + sequence_count * -(-length // BLOCK_SIZE)
        storage = model.allocate(block_count, BLOCK_SIZE)
        cache = KVCache(block_count, BLOCK_SIZE, storage)
        self._tables: list[BlockTable] = [cache.reserve(length) for _ in range(sequence_count)]
        first, *others = self._tables
        for start in range(0, length, PREFILL_ROWS):
            token_ids = self.token_ids[start : start + PREFILL_ROWS]
            model.forward(RaggedBatch((SequenceChunk(first.block_ids, start, token_ids, 0),)))
        for table in others:
            for source, destination in zip(first.block_ids, table.block_ids):
                storage.copy_block(source, [destination])

    def batch(self, shape: Shape) -> RaggedBatch:
        """The step: its tokens are those of the text, so it writes what is there and may be repeated."""
        token_ids = self.token_ids[shape.context : shape.context + shape.rows]
        tables = self._tables[: shape.sequences]
        return RaggedBatch(
            tuple(SequenceChunk(table.block_ids, shape.context, token_ids, shape.rows) for table in tables)
        )


def time_step(model: TransformersModel, batch: RaggedBatch) -> float:
    """Milliseconds of one forward."""
    started_s = time.perf_counter()
    model.forward(batch)
    return (time.perf_counter() - started_s) * 1e3


def step_times(
    model: TransformersModel, shapes: Sequence[Shape], unpadded: Sequence[Shape], rounds: int
) -> Iterator[tuple[dict[Shape, float], dict[Shape, float]]]:
    """Milliseconds of every shape once a round, and of `unpadded` ones at the library's own widths too."""
    every = [*shapes, *unpadded]
    length = max(shape.context + shape.rows for shape in every)
    texts = CachedTexts(model, max(shape.sequences for shape in every), length)
    batches = {shape: texts.batch(shape) for shape in every}
    backend = model.backend
    assert isinstance(backend, CpuBackend), "widths are measured on a CPU"
    measured = backend.stable_tiles
    for _ in range(rounds):
        backend.use_stable_tiles(*measured)
        model.forward(batches[every[0]])
        padded_ms = {shape: time_step(model, batches[shape]) for shape in dict.fromkeys(every)}
        backend.use_stable_tiles(UNPADDED, ANY_TILE)
        model.forward(batches[every[0]])
        yield padded_ms, {shape: time_step(model, batches[shape]) for shape in unpadded}
    backend.use_stable_tiles(*measured)


def measure_steps(
    model: TransformersModel,
    name: str,
    shapes: Sequence[Shape],
    unpadded: Sequence[Shape],
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> list[StepMeasurement]:
    """Returns one measurement per shape. Memory is read in every round; `advance` is called after each."""
    reader = Reader(model.product_bytes)
    padded_ms: dict[Shape, list[float]] = {}
    unpadded_ms: dict[Shape, list[float]] = {}
    gb_per_s: list[float] = []
    for of_padded, of_unpadded in step_times(model, shapes, unpadded, rounds):
        gb_per_s.append(reader.gb_per_s())
        for found, into in ((of_padded, padded_ms), (of_unpadded, unpadded_ms)):
            for shape, ms in found.items():
                into.setdefault(shape, []).append(ms)
        advance()
    bandwidth = statistics.median(gb_per_s)
    return [
        StepMeasurement(
            name,
            model.description.dtype,
            *shape,
            statistics.median(times_ms),
            limit_ms(step_bytes(model, shape.sequences, shape.context), bandwidth),
            statistics.median(unpadded_ms[shape]) if shape in unpadded_ms else None,
        )
        for shape, times_ms in padded_ms.items()
    ]
