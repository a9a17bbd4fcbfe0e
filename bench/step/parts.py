"""The step by part: plan, products, attention, norms and the rest of the forward, sampler, and the engine around them.

Plan, products and attention have the share of the forward that torch's profiler gives them; the many small operations
between products cost more under it, so it understates products. The plan is what passes before the embedding.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from specdec.bench.deepened import load
from specdec.bench.engine.steps import BLOCK_SIZE, time_step
from specdec.bench.engine.streams import measure_streams
from specdec.bench.proposers.steps import verification
from specdec.bench.step.rows import CONTEXT
from specdec.engine.interface import RaggedBatch, SequenceChunk
from specdec.engine.transformers_model import TransformersModel

PRODUCTS = ("linear", "addmm", "aten::mm", "aten::mv", "onednn", "product")
ATTENTION = ("bmm", "softmax", "scaled_dot_product", "index_copy", "index_select", "attend")
PROFILED_STEPS = 5
STEP, EMBEDDING = "step", "aten::embedding"


@dataclass(frozen=True, slots=True)
class PartMeasurement:
    """Milliseconds of a step of one row by part; the engine's, around the forward, are of decoding by it alone."""

    model: str
    threads: int
    planning_ms: float
    products_ms: float
    attention_ms: float
    rest_ms: float
    sampling_ms: float
    outside_ms: float

    @property
    def forward_ms(self) -> float:
        """All of the forward."""
        return self.planning_ms + self.products_ms + self.attention_ms + self.rest_ms


def measure_parts(folder: Path, name: str, threads: int, turns: int, tokens: int) -> PartMeasurement:
    """Of one model. Raises ModelRefused."""
    torch.set_num_threads(threads)
    model = load(folder, "bfloat16")
    (stream,) = measure_streams(model, name, (1,), tokens, max(1, turns // 5))
    model.allocate(2 + CONTEXT // BLOCK_SIZE + 1, BLOCK_SIZE)
    batch = verification(1, 1, CONTEXT)
    model.forward(RaggedBatch((SequenceChunk(batch.chunks[0].block_ids, 0, [5] * CONTEXT, 0),)))
    forward_ms = statistics.median(time_step(model, batch) for _ in range(turns))
    planning, products, attention = profiled_shares(model, batch)
    return PartMeasurement(
        name,
        threads,
        planning * forward_ms,
        products * forward_ms,
        attention * forward_ms,
        (1 - planning - products - attention) * forward_ms,
        stream.sampling_ms,
        stream.outside_ms,
    )


def profiled_shares(model: TransformersModel, batch: RaggedBatch) -> tuple[float, float, float]:
    """The shares of plan, products and attention in the time of a forward."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its lines are of no use here
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED_STEPS):
            with record_function(STEP):
                model.forward(batch)
    events = profiled.events()
    steps = [event for event in events if event.name == STEP]
    embeddings = [event for event in events if event.name == EMBEDDING]
    total_us = sum(event.time_range.elapsed_us() for event in steps)
    planning_us = sum(first.time_range.start - step.time_range.start for step, first in zip(steps, embeddings))

    def share(names: Sequence[str]) -> float:
        own = [event for event in events if any(part in event.name for part in names)]
        return float(sum(event.self_cpu_time_total for event in own) / total_us)

    return float(planning_us / total_us), share(PRODUCTS), share(ATTENTION)
