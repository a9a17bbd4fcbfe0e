"""Attention for a draft by the library's kernels: every row attends to its own set of visible cells.

A draft's numbers decide no text, so a row may depend on its neighbours: one product for all rows, one fused attention
for each sequence, over the cached keys in place. The nodes of a tree are rows of one sequence that see their own
ancestors. All is float32, whatever the model's type: in bfloat16 the library makes a kernel for every length of a
sequence, which takes milliseconds and memory that it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from torch.nn import functional

from specdec.engine.attention import ScoreRule
from specdec.engine.backend import StepInput
from specdec.engine.interface import RaggedBatch, SequenceChunk, TreeRows
from specdec.engine.storage import DeviceStorage


@dataclass(frozen=True, slots=True)
class TreeChunk:
    """The rows [start, end) of one sequence and the cached keys they may see.

    `first_slot`: slot of the first cell, if its cells are contiguous in the storage; else `slots` [cells] int64 lists
    them. `visible`: by window, [rows, cells] bool; None if every row sees every cell.
    """

    start: int
    end: int
    cell_count: int
    first_slot: int
    slots: torch.Tensor | None
    visible: dict[int | None, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class TreePlan:
    """One step's sequences, and the slots `written` [rows] int64 of its rows; used in place of an `AttentionPlan`."""

    storage: DeviceStorage
    written: torch.Tensor
    chunks: tuple[TreeChunk, ...]

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, rule: ScoreRule
    ) -> torch.Tensor:
        """Writes the step's keys and values [rows, kv heads, head size] to the cache of a layer, then attends to it.

        queries [rows, heads, head size]; returns the same shape and type.
        """
        self.storage.write(layer, self.written, keys, values)
        cached = self.storage.slots[layer]
        rows = queries if queries.dtype == torch.float32 else queries.float()
        parts = [self._attend(rows[own.start : own.end], cached, own, rule) for own in self.chunks]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended if queries.dtype == torch.float32 else attended.to(queries.dtype)

    @staticmethod
    def _attend(
        queries: torch.Tensor, cached: tuple[torch.Tensor, ...], own: TreeChunk, rule: ScoreRule
    ) -> torch.Tensor:
        """queries [rows, heads, size], cached keys and values [slots, kv heads, size] -> the queries' shape."""
        if own.slots is None:
            keys, values = (part[own.first_slot : own.first_slot + own.cell_count] for part in cached)
        else:
            keys, values = (part.index_select(0, own.slots) for part in cached)
        # [1, heads, rows or cells, size]
        rows, keys, values = (each.transpose(0, 1)[None] for each in (queries, keys, values))
        return masked_attention(rows, keys, values, own.visible[rule.window], rule)[0].transpose(0, 1)


def masked_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None, rule: ScoreRule
) -> torch.Tensor:
    """queries [sequences, heads, rows, size], keys and values [.., kv heads, keys, size] -> the queries' shape.

    `visible` [.., rows, keys] bool is broadcast over the heads; None if every row sees every key.
    """
    group = queries.shape[1] // keys.shape[1]
    if rule.softcap is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, visible, scale=rule.scaling, enable_gqa=group > 1
        )
    if group > 1:
        keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
    return product_attention(queries, keys, values, visible, rule)


def product_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None, rule: ScoreRule
) -> torch.Tensor:
    """The same as `masked_attention` by plain products, for as many kv heads as heads."""
    scores = queries @ keys.transpose(-1, -2) * rule.scaling
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ values


class TreePlanner:
    """Plans steps for one model, one storage and the windows of its layers. Holds no state between steps."""

    def __init__(self, storage: DeviceStorage, windows: tuple[int | None, ...]):
        self._storage = storage
        self._windows = windows

    def plan(self, batch: RaggedBatch) -> StepInput:
        """Returns the index tensors of a step, its attention a `TreePlan`. Raises for cells beyond the blocks."""
        ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        written: list[numpy.ndarray] = []
        chunks: list[TreeChunk] = []
        for chunk in batch.chunks:
            start, end = len(ids), len(ids) + len(chunk.token_ids)
            ids += chunk.token_ids
            logit_rows += range(end - chunk.logit_count, end)
            positions += chunk.rows_of_tree().positions
            own, its_slots = self._chunk(chunk, start, end)
            chunks.append(own)
            written.append(its_slots)
        slots = torch.from_numpy(written[0] if len(written) == 1 else numpy.concatenate(written))
        attention = TreePlan(self._storage, slots, tuple(chunks))
        logits = torch.tensor(logit_rows, dtype=torch.int64)
        return StepInput(torch.tensor([ids]), torch.tensor([positions]), logits, attention)

    def _chunk(self, chunk: SequenceChunk, start: int, end: int) -> tuple[TreeChunk, numpy.ndarray]:
        """Returns the chunk for `TreePlan`, and the slots of its rows."""
        rows, size = chunk.rows_of_tree(), self._storage.block_size
        blocks = numpy.asarray(chunk.block_ids)
        cell_count = rows.visible.shape[1]
        is_run = bool((blocks[1:] - blocks[:-1] == 1).all())
        cells = numpy.asarray(rows.cells)
        slots = None
        if not is_run:
            every = numpy.arange(cell_count)
            slots = torch.from_numpy(blocks[every // size] * size + every % size)
        visible = {window: self._visible(rows.visible, rows, window) for window in self._windows}
        own = TreeChunk(start, end, cell_count, int(blocks[0]) * size, slots, visible)
        return own, blocks[cells // size] * size + cells % size

    @staticmethod
    def _visible(visible: numpy.ndarray, rows: TreeRows, window: int | None) -> torch.Tensor | None:
        if window is not None:
            distances = numpy.asarray(rows.positions)[:, None] - rows.cell_positions[None, : visible.shape[1]]
            visible = visible & (distances < window)
        return None if visible.all() else torch.from_numpy(visible)
