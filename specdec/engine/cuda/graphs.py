"""Captured steps: a step of few rows replayed as one launch, so that the device and not Python sets its time.

Shapes are fixed: decodes and draft steps of 1 to 64 sequences, and verifications of a few rows for each of 1 to 32. All
are captured at the first forward, smallest first, up to a bound on their number and one on their memory; a step without
a fitting shape runs uncaptured, as does a target's with a tree. The results of all graphs lie in shared buffers, valid
until the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, Protocol

import torch

from specdec.engine.cuda.plan import StepShape

logger = logging.getLogger("specdec.engine")

GRAPHS_MAX = 64
GRAPH_BYTES_MAX = 2 << 30  # of device memory for captured kernel nodes and the pool of temporaries
SEQUENCE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
# Rows of verifications for each number of sequences: up to 32 for one, 16 each for a few, 4 where there are many.
VERIFIED_ROWS = {
    1: (2, 4, 8, 16, 32),
    2: (4, 8, 16, 32),
    4: (8, 16, 32, 64),
    8: (16, 32, 64),
    16: (32, 64),
    32: (64, 128),
}
QUERY_MAX = 64  # most rows of one sequence in a graph of several: one tile of the attention kernel


class Captured(Protocol):
    """A captured step that can run again on the same memory."""

    def replay(self) -> None:
        """Runs the step again."""


class RepeatedCall:
    """Replaces a graph without a GPU: calls the function again, with the context (dependent launch) of its making."""

    def __init__(self, function: Callable[[], None]):
        self._function = function
        self._context = copy_context()

    def replay(self) -> None:
        self._context.run(self._function)


def capture(function: Callable[[], None], device: torch.device, pool: Any) -> Captured:
    """Runs a function and captures it. It must not wait for the device, nor read or write memory of its own making."""
    function()  # libraries choose and load their kernels here, which a capture forbids
    if device.type != "cuda":
        return RepeatedCall(function)
    torch.cuda.synchronize(device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        # Other threads may use the device meanwhile: only this thread's calls are captured.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            function()
    finally:
        torch.cuda.set_stream(stream)  # a failed capture may leave its own stream
    return graph


def graph_shapes(
    key_maxes: Sequence[int], cells_max: int | None, sequences_max: int, has_trees: bool = False
) -> list[StepShape]:
    """Returns the shapes to capture, in order.

    `key_maxes`: most positions of a sequence, ascending. `cells_max`: most positions of all sequences together, if a
    step's cost grows with its key capacity. `sequences_max`: most sequences in one. `has_trees`: see `StepShape`.
    """
    sizes = [(count, count, 1) for count in SEQUENCE_COUNTS]
    sizes += [(rows, count, min(rows, QUERY_MAX)) for count, widths in VERIFIED_ROWS.items() for rows in widths]
    shapes = [
        StepShape(rows, count, rows, most, keys, has_trees)
        for keys in key_maxes
        for rows, count, most in sizes
        if count <= sequences_max and (cells_max is None or count * keys <= cells_max)
    ]
    shapes.sort(key=lambda s: (s.key_max, s.row_count, s.sequence_count))
    return shapes[:GRAPHS_MAX]


def capture_steps(
    shapes: Sequence[StepShape],
    prepare: Callable[[StepShape], Callable[[], None]],
    device: torch.device,
    agree: Callable[[bool], bool] = bool,
) -> dict[StepShape, Captured]:
    """Captures the shapes in order, up to the bounds; `prepare(shape)` returns the function to capture.

    A failed capture is the last one: steps of the remaining shapes run uncaptured. Ranks `agree`: all capture the same.
    """
    graphs: dict[StepShape, Captured] = {}
    is_cuda = device.type == "cuda"
    pool = torch.cuda.graph_pool_handle() if is_cuda else None
    free_bytes = torch.cuda.mem_get_info(device)[0] if is_cuda else 0
    for shape in shapes:
        graph: Captured | None = None
        try:
            graph = capture(prepare(shape), device, pool)
        except RuntimeError as error:
            logger.warning("a step of %s is not captured: %s", shape, str(error).strip().splitlines()[0])
        if not agree(graph is not None) or graph is None:
            break
        graphs[shape] = graph
        if not agree(not is_cuda or free_bytes - torch.cuda.mem_get_info(device)[0] <= GRAPH_BYTES_MAX):
            break
    return graphs
