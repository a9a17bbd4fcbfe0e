"""Margins between the two best logits, on devices where a row's bits may depend on its neighbours.

Kernels are chosen by the shape of a step, so a row's logits drift with the step's shape. The drift is measured when a
model is warmed up: the same rows alone, in verifications of several widths, as a tree and beside other sequences. At a
position with a smaller margin between its two best logits, another step might have chosen the other token; such
positions are counted, in a sample of steps to save time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec.engine.interface import Chunk, RaggedBatch, StepOutput

PREFIX_COUNT = 40  # tokens before the rows that are compared
ROW_COUNT = 8
NEIGHBOUR_COUNT = 3  # sequences beside the one compared
WIDTHS = (1, 2, 4)
TOKENS_END = 64  # ids below this exist in every vocabulary
SAMPLED_STEPS = 16  # one step in SAMPLED_STEPS is counted

Forward = Callable[[RaggedBatch], StepOutput]


def blocks_of_drift(block_size: int) -> int:
    """Returns the number of blocks that `measure_drift` writes to, the first of its argument."""
    return (1 + NEIGHBOUR_COUNT) * -(-(PREFIX_COUNT + ROW_COUNT) // block_size)


def measure_drift(forward: Forward, block_ids: Sequence[int], block_size: int, position_count: int) -> float:
    """Returns the largest difference of any logit of the same rows in steps of different shapes.

    Writes to `block_ids`. 0 with too few blocks or positions.
    """
    count = PREFIX_COUNT + ROW_COUNT
    if len(block_ids) < blocks_of_drift(block_size) or position_count < count:
        return 0.0
    block_count = -(-count // block_size)
    tables = [block_ids[index * block_count : (index + 1) * block_count] for index in range(1 + NEIGHBOUR_COUNT)]
    token_ids = torch.randint(1, TOKENS_END, (count,), generator=torch.Generator().manual_seed(0)).tolist()

    def logits(table: Sequence[int], start: int, end: int, others: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        chunks = [Chunk(each, start, token_ids[start:end], end - start) for each in (table, *others)]
        return forward(RaggedBatch(tuple(chunks))).logits[: end - start].clone()

    for table in tables:
        logits(table, 0, PREFIX_COUNT)
    together = logits(tables[0], PREFIX_COUNT, count)
    others = [logits(tables[0], PREFIX_COUNT, count, tables[1:])]
    for width in WIDTHS:
        starts = range(PREFIX_COUNT, count, width)
        others.append(torch.cat([logits(tables[0], start, start + width) for start in starts]))
    paths = [range(PREFIX_COUNT, end) for end in range(PREFIX_COUNT + 1, count + 1)]
    as_tree = Chunk(tables[0], PREFIX_COUNT, token_ids[PREFIX_COUNT:], ROW_COUNT, paths)
    others.append(forward(RaggedBatch((as_tree,))).logits.clone())
    return max(float((other - together).abs().max()) for other in others)


class MarginCounter:
    """Counts on the device the rows whose two best logits differ by less than the drift; only `report` waits for it."""

    def __init__(self, drift: float, device: torch.device):
        self.drift = drift
        self._close = torch.zeros((), dtype=torch.int64, device=device)
        self._row_count = 0
        self._step_count = 0

    def look_at(self, logits: torch.Tensor) -> None:
        """Counts the rows of one step in SAMPLED_STEPS.  # [rows, vocab] float32"""
        self._step_count += 1
        if self._step_count % SAMPLED_STEPS or not len(logits):
            return
        best = logits.topk(2, dim=1).values
        self._close += (best[:, 0] - best[:, 1] < self.drift).sum()
        self._row_count += len(logits)

    def report(self) -> dict[str, float]:
        """Returns the drift, the number of sampled rows, and of those within it."""
        return {"margin_drift": self.drift, "margin_rows": self._row_count, "margin_rows_close": int(self._close)}
