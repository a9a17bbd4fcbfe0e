"""Dependent launch: whether captured steps may begin a kernel before the one before it has ended.

Tried with captured steps at the first forward: replayed with and without, they must have the same bits in every replay.
Knows nothing of kernels: `launch.dependent` tells them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from specdec.engine.cuda.graphs import Captured
from specdec.engine.cuda.kernels import launch
from specdec.engine.cuda.near_ties import TOKENS_END
from specdec.engine.cuda.plan import StepShape
from specdec.engine.interface import Chunk, RaggedBatch

logger = logging.getLogger("specdec.engine")

REPLAYS = 16  # of each of two texts
ROWS_MAX = 24  # of the tried steps: more than one tile of rows


def is_supported(device: torch.device) -> bool:
    """Whether a device can begin a kernel before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= launch.DEPENDENT_CAPABILITY


def tried_shapes(shapes: Sequence[StepShape]) -> list[StepShape]:
    """Returns the captured shapes to try: the smallest, and the first of ROWS_MAX rows or more."""
    return [*shapes[:1], *[shape for shape in shapes[1:] if shape.row_count >= ROWS_MAX][:1]]


def two_texts(shape: StepShape, block_ids: Sequence[int], positions_max: int) -> list[RaggedBatch]:
    """Returns two steps of as many rows as a shape and `positions_max` allow, in the same blocks, of other tokens."""
    count = min(shape.row_count, positions_max, ROWS_MAX)
    tokens = torch.randint(1, TOKENS_END, (2, count), generator=torch.Generator().manual_seed(0))
    return [RaggedBatch((Chunk(block_ids, 0, each, min(count, shape.logit_count)),)) for each in tokens.tolist()]


def replays_agree(
    record: Callable[[bool], Captured],
    feed: Callable[[RaggedBatch], None],
    results: Callable[[], Sequence[torch.Tensor]],
    batches: Sequence[RaggedBatch],
) -> bool:
    """Whether a step captured with dependent launch has the bits of one captured without, in each of REPLAYS replays.

    `record(is_dependent)` captures a step that replays what `feed` sent and leaves `results`. Batches take turns in the
    same memory: what a kernel would read too early is another's.
    """
    plain = record(False)
    wanted = []
    for batch in batches:
        feed(batch)
        plain.replay()
        wanted.append([each.clone() for each in results()])
    early = record(True)
    for _ in range(REPLAYS):
        for batch, expected in zip(batches, wanted):
            feed(batch)
            early.replay()
            if not all(torch.equal(_bits(ours), _bits(theirs)) for ours, theirs in zip(results(), expected)):
                return False
    return True


def tried(agree: Callable[[], bool], device: torch.device) -> bool:
    """Whether steps may launch dependently; if not, one line in the log says why."""
    try:
        if agree():
            return True
        reason = "replays with it have other bits than without"
    except Exception as error:  # of Triton's compiler, of a driver that cannot capture it
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
    logger.warning("dependent launch is off on %s: %s", device, reason)
    return False


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers as integers: a not-a-number is equal to itself."""
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor
