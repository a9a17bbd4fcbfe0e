"""Time of one forward by sequences, rows and cached tokens.

Shapes take turns, all of them once a round, so that whatever else the machine does falls on all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bench.engine.bandwidth import Reader, limit_ms, step_bytes
from specdec.engine.cache.kv_cache import BlockTable, KVCache
from specdec.engine.interface import CausalModel, Chunk, RaggedBatch
from specdec.engine.transformers_model import TransformersModel

BLOCK_SIZE = 64
CONTEXTS = (64, 256, 1024)
ROWS = (1, 2, 4, 5, 8, 16, 32, 64)
SEQUENCES = (1, 2, 4, 8, 16, 32)
SEQUENCE_ROWS = (1, 5)  # rows of each sequence where the number of sequences is the question
CONTEXT = 256  # where one context stands for all
PREFILL_ROWS = 64


class Shape(NamedTuple):
    """One step: `sequences` sequences, each with `rows` tokens to run after `context` cached ones."""

    sequences: int
    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Medians of one shape. `limit_ms`: in which what the step must read can be read."""

    model: str
    dtype: str
    sequences: int
    rows: int
    context: int
    step_ms: float
    limit_ms: float

    @property
    def limit_share(self) -> float:
        """How much of the step the limit is: 1 is a step that only waits for memory."""
        return self.limit_ms / self.step_ms


def shapes_of(rows: Sequence[int], sequences: Sequence[int], contexts: Sequence[int]) -> list[Shape]:
    """By rows of one sequence, and by sequences of few rows, at every context; none twice."""
    every = [Shape(1, count, context) for context in contexts for count in rows]
    every += [Shape(count, own, context) for context in contexts for own in SEQUENCE_ROWS for count in sequences]
    return list(dict.fromkeys(every))


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
            model.forward(RaggedBatch((Chunk(first.block_ids, start, token_ids, 0),)))
        for table in others:
            slots = [slots_of(each.block_ids) for each in (first, table)]
            storage.copy_slots(*slots)

    def batch(self, shape: Shape) -> RaggedBatch:
        """The step: its tokens are those of the text, so it writes what is there and may be repeated."""
        token_ids = self.token_ids[shape.context : shape.context + shape.rows]
        tables = self._tables[: shape.sequences]
        return RaggedBatch(tuple(Chunk(table.block_ids, shape.context, token_ids, shape.rows) for table in tables))


def slots_of(block_ids: Sequence[int]) -> list[int]:
    return [block * BLOCK_SIZE + offset for block in block_ids for offset in range(BLOCK_SIZE)]


def time_step(model: CausalModel, batch: RaggedBatch) -> float:
    """Milliseconds of one forward."""
    started_s = time.perf_counter()
    model.forward(batch)
    return (time.perf_counter() - started_s) * 1e3


def step_times(model: TransformersModel, shapes: Sequence[Shape], rounds: int) -> Iterator[dict[Shape, float]]:
    """Milliseconds of every shape, once a round."""
    length = max(shape.context + shape.rows for shape in shapes)
    texts = CachedTexts(model, max(shape.sequences for shape in shapes), length)
    batches = {shape: texts.batch(shape) for shape in shapes}
    for _ in range(rounds):
        model.forward(batches[shapes[0]])
        yield {shape: time_step(model, batch) for shape, batch in batches.items()}


def measure_steps(
    model: TransformersModel,
    name: str,
    shapes: Sequence[Shape],
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> list[StepMeasurement]:
    """Returns one measurement per shape. Memory is read in every round; `advance` is called after each."""
    reader = Reader(model.product_bytes)
    found: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    gb_per_s: list[float] = []
    for times_ms in step_times(model, shapes, rounds):
        gb_per_s.append(reader.gb_per_s())
        for shape, ms in times_ms.items():
            found[shape].append(ms)
        advance()
    bandwidth = statistics.median(gb_per_s)
    return [
        StepMeasurement(
            name,
            model.description.dtype,
            *shape,
            statistics.median(times_ms),
            limit_ms(step_bytes(model, shape.sequences, shape.context), bandwidth),
        )
        for shape, times_ms in found.items()
    ]
