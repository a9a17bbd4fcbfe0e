"""The choice of a device's way to attend: the first that agrees with `Dense` on the device.

Kernels differ between versions of torch and chips in the arguments they accept and in their correctness. So each way is
tried when storage is allocated, on sequences of several lengths, row counts and windows; a way that raises or disagrees
is skipped with a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.engine.attention import AttentionShape, ScoreRule
from specdec.engine.cuda.attention import (
    DENSE,
    TABLE_BLOCK_MULTIPLE,
    AttentionBackend,
    BlockTables,
    DeviceMetadata,
    Gathered,
    varlen_parameters,
)
from specdec.engine.cuda.plan import StepBuffer, exact_shape
from specdec.engine.cuda.storage import DeviceStorage
from specdec.engine.interface import Chunk, RaggedBatch

logger = logging.getLogger("specdec.engine")

# Results are weighted means of values of standard deviation 1, up to 5 over few keys: two roundings of those in
# bfloat16. A wrong key among few changes a result by more.
TOLERANCE = 2.0**-4
# (start, rows) of the sequences of each tried step: decodes, verifications at all lengths, a prompt's chunk.
TRIED_STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 1), (299, 1), (1200, 1)),
    ((17, 3), (700, 8), (1500, 5), (0, 1)),
    ((0, 64), (511, 2)),
)


@dataclass(frozen=True, slots=True)
class Probe:
    """A small random storage of one layer, and the sizes of a model."""

    storage: DeviceStorage
    shape: AttentionShape
    dtype: torch.dtype
    device: torch.device


def select_backend(
    shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """Returns the fastest way that agrees with `Dense` on the device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return DENSE
    return first_that_agrees(make_probe(shape, block_size, dtype, device), candidates(block_size))


def first_that_agrees(probe: Probe, ways: Sequence[AttentionBackend]) -> AttentionBackend:
    """Returns the first way that runs and agrees with `Dense`, or `Dense`."""
    for way in ways:
        try:
            difference = largest_difference(probe, way)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            logger.warning("attention by %s is not used: %s", way.name, str(error).strip().splitlines()[0])
            continue
        if difference <= TOLERANCE:
            return way
        logger.warning("attention by %s is not used: it is %.3g off on this device", way.name, difference)
    return DENSE


def candidates(block_size: int) -> Sequence[AttentionBackend]:
    """Returns the ways of this torch, best first."""
    parameters = varlen_parameters()
    ways: list[AttentionBackend] = []
    if {"block_table", "seqused_k", "num_splits"} <= parameters and block_size % TABLE_BLOCK_MULTIPLE == 0:
        ways.append(BlockTables())
    if {"scale", "window_size"} <= parameters:
        ways.append(Gathered())
    return ways


def make_probe(shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device) -> Probe:
    """Returns a storage with blocks for every tried sequence."""
    block_count = 1 + max(sum(blocks_for(start + count, block_size) for start, count in step) for step in TRIED_STEPS)
    storage = DeviceStorage(1, block_count, block_size, shape.kv_head_count, shape.head_size, dtype, device)
    generator = torch.Generator().manual_seed(block_size)
    # The zero block stays zero; positions beyond a sequence's end are random, as in a cache.
    for half in storage.layers[0]:
        half[1:] = torch.randn(half[1:].shape, generator=generator).to(dtype).to(device)
    return Probe(storage, shape, dtype, device)


@torch.inference_mode()
def largest_difference(probe: Probe, way: AttentionBackend) -> float:
    """Returns a way's largest difference from `Dense` over the tried steps and the model's windows; NaN is infinity."""
    worst = 0.0
    windows = {rule.window for rule in probe.shape.rules} | {None}
    rules = [ScoreRule(probe.shape.head_size**-0.5, window) for window in windows]
    for index, lengths in enumerate(TRIED_STEPS):
        batch = tried_batch(lengths, probe.storage.block_size)
        buffer = StepBuffer(probe.storage.block_size, probe.storage.scratch_slot, probe.device)
        step_shape = exact_shape(batch)
        buffer.reserve(step_shape)
        buffer.fill(batch, step_shape)
        step = buffer.send(step_shape)
        generator = torch.Generator().manual_seed(index)
        sizes = (batch.row_count, probe.shape.head_count + 2 * probe.shape.kv_head_count, probe.shape.head_size)
        rows = torch.randn(sizes, generator=generator).to(probe.dtype).to(probe.device)
        counts = [probe.shape.head_count, probe.shape.kv_head_count, probe.shape.kv_head_count]
        queries, keys, values = rows.split(counts, dim=1)
        for rule in rules:
            plans = [DeviceMetadata(probe.storage, step, each) for each in (way, DENSE)]
            ours, plain = (plan.attend(queries, keys, values, 0, rule).float() for plan in plans)
            difference = float((ours - plain).abs().max())
            worst = max(worst, difference) if difference == difference else float("inf")
    return worst


def tried_batch(lengths: Sequence[tuple[int, int]], block_size: int) -> RaggedBatch:
    """Returns sequences of (start, rows), each in its own blocks, from block 1 on."""
    chunks: list[Chunk] = []
    block = 1
    for start, count in lengths:
        block_count = blocks_for(start + count, block_size)
        chunks.append(Chunk(range(block, block + block_count), start, [0] * count, 0))
        block += block_count
    return RaggedBatch(tuple(chunks))


def blocks_for(length: int, block_size: int) -> int:
    """Returns the number of blocks for `length` positions."""
    return -(-length // block_size)
