"""Times of single steps on a device, beside the time in which it reads the weights: for `bench.gpu`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bench.gpu_checks import parents_of, random_ids
from specdec.decoding.verification import VerificationRequest, verify
from specdec.engine.cuda.backend import DeviceBackend
from specdec.engine.interface import Chunk, RaggedBatch, tree_paths
from specdec.engine.loading.devices import default_block_size
from specdec.engine.transformers_model import TransformersModel
from specdec.protocol.types import ResolvedSamplingParams, Rule


class Step(NamedTuple):
    """Sequences of a step, rows of each, and paths of each one's tree: one is a chain."""

    sequences: int
    rows: int
    paths: int = 1


STEPS = (*(Step(1, rows) for rows in range(1, 9)), Step(1, 8, paths=4), Step(8, 5))
CONTEXT = 480  # positions before the rows, which end within 512
READS = 20
FORWARDS = 8  # in a row, to time the forward alone


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Medians in milliseconds. `step_ms`: from the batch to the tokens on the host, sampler included; `forward_ms`:
    the device's own time for the forward; `limit_ms`: reading weights and cache once; `ratio`: step over limit."""

    model: str
    sequences: int
    rows: int
    paths: int
    with_graphs: bool
    step_ms: float
    forward_ms: float
    limit_ms: float

    @property
    def outside_ms(self) -> float:
        return self.step_ms - self.forward_ms

    @property
    def ratio(self) -> float:
        return self.step_ms / self.limit_ms


def bandwidth_gb_per_s(device: torch.device, byte_count: int) -> float:
    """10^9 bytes a second of the faster of a sum over a large buffer and a copy of it, best of several."""
    buffer = torch.ones(byte_count // 4, device=device)
    other = torch.empty_like(buffer)
    read_s = min(device_s(device, buffer.sum) for _ in range(READS))
    copied_s = min(device_s(device, lambda: other.copy_(buffer)) for _ in range(READS))
    return max(byte_count / read_s, 2 * byte_count / copied_s) / 1e9


def device_s(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds the device takes for some work, by its own clock where it has one."""
    if device.type != "cuda":
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms / 1e3


@torch.inference_mode()
def time_steps(
    model: TransformersModel, name: str, steps: Sequence[Step], gb_per_s: float, rounds: int
) -> list[StepMeasurement]:
    """Every step with graphs, then without."""
    backend = model.backend
    assert isinstance(backend, DeviceBackend)
    measurements = []
    for with_graphs in (True, False):
        backend.with_graphs = with_graphs
        prepare_cache(model, max(step.sequences for step in steps))
        measurements += [time_step(model, name, step, with_graphs, gb_per_s, rounds) for step in steps]
    return measurements


def prepare_cache(model: TransformersModel, sequence_count: int) -> None:
    """Allocates a cache for `sequence_count` sequences, each with CONTEXT positions filled."""
    block_size = default_block_size(model.backend.device)
    per_sequence = blocks_each(block_size)
    model.allocate(1 + sequence_count * per_sequence, block_size)
    prompt = random_ids(context_of(model), model.description.vocabulary_size)
    for index in range(sequence_count):
        model.forward(RaggedBatch((Chunk(blocks_of(index, block_size), 0, prompt, 1),)))


def time_step(
    model: TransformersModel,
    name: str,
    step: Step,
    with_graphs: bool,
    gb_per_s: float,
    rounds: int,
) -> StepMeasurement:
    """One shape of step: the whole, and the forward alone."""
    device = model.backend.device
    start, block_size = context_of(model), default_block_size(device)
    token_ids = random_ids(step.rows, model.description.vocabulary_size)
    parents = tuple(parents_of(step.rows, step.paths))
    paths = tree_paths(parents, start + 1)
    tables = [blocks_of(index, block_size) for index in range(step.sequences)]
    batch = RaggedBatch(tuple(Chunk(table, start, token_ids, step.rows, paths) for table in tables))
    params = ResolvedSamplingParams(Rule.GREEDY, seed=0, prompt_length=1, temperature=0.0)
    request = VerificationRequest(params, 0, [1] * start, tuple(token_ids[1:]), parents=parents)

    def whole() -> None:
        verify([request] * step.sequences, [step.rows] * step.sequences, model.forward(batch).logits)

    # Several in a row: while the device runs one, the host plans the next, so only the device's time is left.
    repeats = FORWARDS if device.type == "cuda" else 1
    step_s, forward_s = [], []
    for _ in range(3 + rounds):
        started_s = time.perf_counter()
        whole()
        step_s.append(time.perf_counter() - started_s)
        forward_s.append(device_s(device, lambda: [model.forward(batch) for _ in range(repeats)]) / repeats)
    byte_count = model.product_bytes + step.sequences * start * model.cache_bytes_per_position
    step_ms, forward_ms = (statistics.median(times[3:]) * 1e3 for times in (step_s, forward_s))
    return StepMeasurement(name, *step, with_graphs, step_ms, forward_ms, byte_count / gb_per_s / 1e6)


def context_of(model: TransformersModel) -> int:
    return min(CONTEXT, model.description.positions_max // 2)


def blocks_each(block_size: int) -> int:
    """Blocks of one sequence of these steps."""
    return -(-(CONTEXT + 64) // block_size)


def blocks_of(index: int, block_size: int) -> range:
    return range(1 + index * blocks_each(block_size), 1 + (index + 1) * blocks_each(block_size))
