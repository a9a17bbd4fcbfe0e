"""Which way of attending a device gets: the first that was seen to agree with the plain one on it.

Kernels differ between versions of torch and chips in what they take and, at times, in what they get right. So a way
is not trusted for its name: it is tried when storage is allocated, on sequences of several lengths, row counts and
windows, and one that raises or disagrees is passed over with a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.engine.attention import AttentionShape, ScoreRule
from specdec.engine.cuda.attention import (
    PLAIN,
    TABLE_BLOCK_MULTIPLE,
    BlockTables,
    DevicePlan,
    Gathered,
    Way,
    varlen_parameters,
)
from specdec.engine.cuda.plan import StepBuffer, exact_shape
from specdec.engine.interface import RaggedBatch, Segment
from specdec.engine.storage import DeviceStorage

logger = logging.getLogger("specdec.engine")

# Results are weighted means of values of standard deviation 1, up to 5 where there are few: two roundings of those in
# bfloat16. A wrong key among few moves one by more.
TOLERANCE = 2.0**-4
# (start, rows) of the sequences of each tried step: decodes, verifications at all lengths, a prompt's chunk.
TRIED_STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 1), (299, 1), (1200, 1)),
    ((17, 3), (700, 8), (1500, 5), (0, 1)),
    ((0, 64), (511, 2)),
)


@dataclass(frozen=True, slots=True)
class Trial:
    """A small storage filled at random, one layer, and the sizes of a model."""

    storage: DeviceStorage
    shape: AttentionShape
    dtype: torch.dtype
    device: torch.device


def choose_way(shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device) -> Way:
    """The fastest way that agrees with the plain one here."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return PLAIN
    return first_that_agrees(make_trial(shape, block_size, dtype, device), candidates(block_size))


def first_that_agrees(trial: Trial, ways: Sequence[Way]) -> Way:
    """The first way that runs and agrees with the plain one, which is taken where none does."""
    for way in ways:
        try:
            difference = largest_difference(trial, way)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            logger.warning("attention by %s is not used: %s", way.name, str(error).strip().splitlines()[0])
            continue
        if difference <= TOLERANCE:
            return way
        logger.warning("attention by %s is not used: it is %.3g off on this device", way.name, difference)
    return PLAIN


def candidates(block_size: int) -> Sequence[Way]:
    """The ways this torch has, best first."""
    parameters = varlen_parameters()
    ways: list[Way] = []
    if {"block_table", "seqused_k", "num_splits"} <= parameters and block_size % TABLE_BLOCK_MULTIPLE == 0:
        ways.append(BlockTables())
    if {"scale", "window_size"} <= parameters:
        ways.append(Gathered())
    return ways


def make_trial(shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device) -> Trial:
    """Storage with room for every tried sequence in its own blocks."""
    block_count = 1 + max(sum(blocks_for(start + count, block_size) for start, count in step) for step in TRIED_STEPS)
    storage = DeviceStorage(1, block_count, block_size, shape.kv_head_count, shape.head_size, dtype, device)
    generator = torch.Generator().manual_seed(block_size)
    # The zero block stays zero; what lies beyond a sequence's end is as arbitrary as in a cache.
    for half in storage.layers[0]:
        half[1:] = torch.randn(half[1:].shape, generator=generator).to(dtype).to(device)
    return Trial(storage, shape, dtype, device)


@torch.inference_mode()
def largest_difference(trial: Trial, way: Way) -> float:
    """How far a way is from the plain one, over all tried steps and the model's windows; NaN counts as infinity."""
    worst = 0.0
    windows = {rule.window for rule in trial.shape.rules} | {None}
    rules = [ScoreRule(trial.shape.head_size**-0.5, window) for window in windows]
    for index, lengths in enumerate(TRIED_STEPS):
        batch = tried_batch(lengths, trial.storage.block_size)
        buffer = StepBuffer(trial.storage.block_size, trial.storage.scratch_slot, trial.device)
        step_shape = exact_shape(batch)
        buffer.reserve(step_shape)
        buffer.fill(batch, step_shape)
        step = buffer.send(step_shape)
        generator = torch.Generator().manual_seed(index)
        sizes = (batch.row_count, trial.shape.head_count + 2 * trial.shape.kv_head_count, trial.shape.head_size)
        rows = torch.randn(sizes, generator=generator).to(trial.dtype).to(trial.device)
        counts = [trial.shape.head_count, trial.shape.kv_head_count, trial.shape.kv_head_count]
        queries, keys, values = rows.split(counts, dim=1)
        for rule in rules:
            plans = [DevicePlan(trial.storage, step, each) for each in (way, PLAIN)]
            ours, plain = (plan.attend(queries, keys, values, 0, rule).float() for plan in plans)
            difference = float((ours - plain).abs().max())
            worst = max(worst, difference) if difference == difference else float("inf")
    return worst


def tried_batch(lengths: Sequence[tuple[int, int]], block_size: int) -> RaggedBatch:
    """Sequences of (start, rows), each in blocks of its own, from block 1 on."""
    segments: list[Segment] = []
    block = 1
    for start, count in lengths:
        block_count = blocks_for(start + count, block_size)
        segments.append(Segment(range(block, block + block_count), start, [0] * count, 0))
        block += block_count
    return RaggedBatch(tuple(segments))


def blocks_for(length: int, block_size: int) -> int:
    """Blocks that so many positions need."""
    return -(-length // block_size)
