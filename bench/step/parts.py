"""The step by part: plan, products, attention, norms and the rest of the forward, sampler, and the engine around them.

Kernels are timed where Python calls them, module by module; the one call of a step is divided among its parts by the
times that the same kernels take so. Without kernels products and attention have the share of the forward that torch's
profiler gives their operations; the many small ones between them cost more under it. The plan is what passes before the
first kernel, or the embedding.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.deepened import load
from bench.engine.steps import BLOCK_SIZE, time_step
from bench.engine.streams import measure_streams
from bench.step.rows import CONTEXT
from bench.verification import verification
from specdec.engine.cpu.kernels import Kernels, kernels
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.transformers_model import TransformersModel

PRODUCTS = ("linear", "addmm", "aten::mm", "aten::mv")
ATTENTION = ("bmm", "softmax", "scaled_dot_product", "index_copy", "index_select")
PROFILED_STEPS = 5
STEP, EMBEDDING = "step", "aten::embedding"
KERNEL_PARTS = {"product": PRODUCTS, "write": ATTENTION, "attend": ATTENTION}
FORWARD, BEFORE = "forward", "before"
KERNELS = (*KERNEL_PARTS, "normalize", "activate", "tanh", STEP)


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


class Shares(NamedTuple):
    """Of plan, products and attention in the time of a forward."""

    planning: float
    products: float
    attention: float


def measure_parts(folder: Path, name: str, threads: int, turns: int, tokens: int) -> PartMeasurement:
    """Of one model. Raises ModelRefused."""
    torch.set_num_threads(threads)
    model = load(folder, "bfloat16")
    (stream,) = measure_streams(model, name, (1,), tokens, max(1, turns // 5))
    model.allocate(2 + CONTEXT // BLOCK_SIZE + 1, BLOCK_SIZE)
    batch = verification(1, 1, CONTEXT)
    model.forward(RaggedBatch((Chunk(batch.chunks[0].block_ids, 0, [5] * CONTEXT, 0),)))
    forward_ms = statistics.median(time_step(model, batch) for _ in range(turns))
    shares = kernel_shares(model, batch, turns) if kernels() else profiled_shares(model, batch)
    planning_ms, products_ms, attention_ms = (share * forward_ms for share in shares)
    rest_ms = (1 - sum(shares)) * forward_ms
    inside_ms = planning_ms, products_ms, attention_ms, rest_ms
    return PartMeasurement(name, threads, *inside_ms, stream.sampling_ms, stream.outside_ms)


def kernel_shares(model: TransformersModel, batch: RaggedBatch, turns: int) -> Shares:
    """Of a forward on the kernels, the fastest of `turns`."""
    by_modules = RaggedBatch(batch.chunks, lambda: False)  # a question between layers: not in one call
    with kernel_calls() as calls:
        modules = min((seconds_of(model, by_modules, calls) for _ in range(turns)), key=lambda own: own[FORWARD])
        whole = min((seconds_of(model, batch, calls) for _ in range(turns)), key=lambda own: own[FORWARD])
    scale = whole[STEP] / sum(modules[name] for name in KERNELS) if whole[STEP] else 1.0

    def share(part: Sequence[str]) -> float:
        return scale * sum(modules[name] for name, own in KERNEL_PARTS.items() if own is part) / whole[FORWARD]

    return Shares(whole[BEFORE] / whole[FORWARD], share(PRODUCTS), share(ATTENTION))


@contextlib.contextmanager
def kernel_calls() -> Iterator[list[tuple[str, float, float]]]:
    """Meanwhile each call of a kernel is added to the list: name, beginning and end in seconds."""
    calls: list[tuple[str, float, float]] = []
    original: dict[str, Callable[..., Any]] = {name: getattr(Kernels, name) for name in KERNELS}

    def timed(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began_s = time.perf_counter()
            result = kernel(*arguments, **named)
            calls.append((name, began_s, time.perf_counter()))
            return result

        return call

    try:
        for name, kernel in original.items():
            setattr(Kernels, name, timed(name, kernel))
        yield calls
    finally:
        for name, kernel in original.items():
            setattr(Kernels, name, kernel)


def seconds_of(model: TransformersModel, batch: RaggedBatch, calls: list[tuple[str, float, float]]) -> dict[str, float]:
    """Of one forward: the whole, before its first kernel, and each kernel's."""
    calls.clear()
    began_s = time.perf_counter()
    model.forward(batch)
    found = dict.fromkeys(KERNELS, 0.0) | {FORWARD: time.perf_counter() - began_s, BEFORE: calls[0][1] - began_s}
    for name, call_s, end_s in calls:
        found[name] += end_s - call_s
    return found


def profiled_shares(model: TransformersModel, batch: RaggedBatch) -> Shares:
    """Of a forward without kernels."""
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

    return Shares(float(planning_us / total_us), share(PRODUCTS), share(ATTENTION))
