"""Attention for a draft by the library's kernels: every row attends to its own set of visible cells.

A draft's numbers decide no text, so a row may depend on its neighbours: one product for all rows, one fused attention
for each long sequence, over the cached keys in place, and one for all short ones, over copies of their keys: these
cost less than a call for each. The nodes of a tree are rows of one sequence that see their own ancestors. All is
float32, whatever the model's type: in bfloat16 the library makes a kernel for every length of a sequence, which takes
milliseconds and memory that it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from torch.nn import functional

from specdec.engine.attention import ScoreRule
from specdec.engine.backend import StepInput
from specdec.engine.interface import RaggedBatch, TreeRows
from specdec.engine.storage import DeviceStorage

GROUP_MIN = 2
SHORT_ROWS_MAX, SHORT_CELLS_MAX = 16, 256  # beyond, the copies and the filling cost more than the calls


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
class SequenceGroup:
    """Sequences that are computed together, each filled up to `width` rows and to the most cells of them.

    `rows` [sequences x width] int64: rows of the step, a sequence's first where it is filled up; `own_rows` [n] int64:
    those that are not filled up, and `places` [n] int64, their places among `rows`. `slots` [sequences x cells] int64;
    `visible` by window, [sequences, 1, width, cells] bool.
    """

    width: int
    rows: torch.Tensor
    own_rows: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    visible: dict[int | None, torch.Tensor]

    def attend(self, queries: torch.Tensor, cached: tuple[torch.Tensor, ...], rule: ScoreRule) -> torch.Tensor:
        """queries [rows, heads, size], cached keys and values [slots, kv heads, size] -> [own rows, heads, size]."""
        count, visible = len(self.rows) // self.width, self.visible[rule.window]
        keys, values = (
            part.index_select(0, self.slots).view(count, -1, *part.shape[1:]).transpose(1, 2) for part in cached
        )
        chosen = queries.index_select(0, self.rows)
        rows = chosen.view(count, self.width, *chosen.shape[1:]).transpose(1, 2)
        found = masked_attention(rows, keys, values, visible, rule).transpose(1, 2).reshape(chosen.shape)
        return found if len(self.places) == len(found) else found.index_select(0, self.places)


@dataclass(frozen=True, slots=True)
class TreePlan:
    """One step's sequences, and the slots `written` [rows] int64 of its rows; used in place of an `AttentionPlan`."""

    storage: DeviceStorage
    written: torch.Tensor
    chunks: tuple[TreeChunk, ...]
    group: SequenceGroup | None = None  # those that are not among the chunks

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, rule: ScoreRule
    ) -> torch.Tensor:
        """Writes the step's keys and values [rows, kv heads, head size] to the cache of a layer, then attends to it.

        queries [rows, heads, head size]; returns the same shape and type.
        """
        self.storage.write(layer, self.written, keys, values)
        cached = self.storage.slots[layer]
        rows = queries.float()
        parts = [self._attend(rows[own.start : own.end], cached, own, rule) for own in self.chunks]
        if self.group is None:
            attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        elif not parts:  # its rows are all rows, in order
            attended = self.group.attend(rows, cached, rule)
        else:
            attended = torch.empty_like(rows)
            attended[self.group.own_rows] = self.group.attend(rows, cached, rule)
            for own, part in zip(self.chunks, parts):
                attended[own.start : own.end] = part
        return attended.to(queries.dtype)

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
    scores = torch.tanh(queries @ keys.transpose(-1, -2) * rule.scaling / rule.softcap) * rule.softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ values


class Place(NamedTuple):
    """The rows [start, end) of a step that belong to one sequence, and its blocks."""

    start: int
    end: int
    rows: TreeRows
    blocks: numpy.ndarray


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
        places: list[Place] = []
        size = self._storage.block_size
        for chunk in batch.chunks:
            rows, start = chunk.rows_of_tree(), len(ids)
            ids += chunk.token_ids
            logit_rows += range(len(ids) - chunk.logit_count, len(ids))
            positions += rows.positions
            blocks, cells = numpy.asarray(chunk.block_ids), numpy.asarray(rows.cells)
            written.append(blocks[cells // size] * size + cells % size)
            places.append(Place(start, len(ids), rows, blocks))
        grouped = [place for place in places if self._fits(place)]
        if len(grouped) < GROUP_MIN:
            grouped = []
        chunks = tuple(self._chunk(place) for place in places if not grouped or not self._fits(place))
        slots = torch.from_numpy(written[0] if len(written) == 1 else numpy.concatenate(written))
        attention = TreePlan(self._storage, slots, chunks, self._group(grouped) if grouped else None)
        logits = torch.tensor(logit_rows, dtype=torch.int64)
        return StepInput(torch.tensor([ids]), torch.tensor([positions]), logits, attention)

    @staticmethod
    def _fits(place: Place) -> bool:
        """Whether a sequence is computed together with others."""
        row_count, cell_count = map(int, place.rows.visible.shape)
        return row_count <= SHORT_ROWS_MAX and cell_count <= SHORT_CELLS_MAX

    def _group(self, places: list[Place]) -> SequenceGroup:
        """Returns the group of these sequences."""
        count, width = len(places), max(place.end - place.start for place in places)
        most = max(place.rows.visible.shape[1] for place in places)
        slots = numpy.zeros((count, most), dtype=numpy.int64)
        visible = {window: numpy.zeros((count, 1, width, most), dtype=bool) for window in self._windows}
        rows: list[int] = []
        own_places: list[int] = []
        for index, place in enumerate(places):
            row_count, cell_count = place.rows.visible.shape
            slots[index, :cell_count] = self._slots(place.blocks, cell_count)
            for window, masks in visible.items():
                masks[index, 0, :row_count, :cell_count] = within(place.rows, window)
                masks[index, 0, row_count:, 0] = True  # a row that sees nothing would be not-a-number
            rows += [*range(place.start, place.end), *[place.start] * (width - row_count)]
            own_places += range(index * width, index * width + row_count)
        return SequenceGroup(
            width,
            torch.tensor(rows),
            torch.tensor([rows[place] for place in own_places]),
            torch.tensor(own_places),
            torch.from_numpy(slots).flatten(),
            {window: torch.from_numpy(masks) for window, masks in visible.items()},
        )

    def _slots(self, blocks: numpy.ndarray, cell_count: int) -> numpy.ndarray:
        """Returns the slots of the first cells of a sequence."""
        size = self._storage.block_size
        used = blocks[: -(-cell_count // size)]
        return (used[:, None] * size + numpy.arange(size)).reshape(-1)[:cell_count]

    def _chunk(self, place: Place) -> TreeChunk:
        """Returns a sequence that is computed alone."""
        blocks, cell_count = place.blocks, place.rows.visible.shape[1]
        is_run = bool((blocks[1:] - blocks[:-1] == 1).all())
        slots = None if is_run else torch.from_numpy(self._slots(blocks, cell_count))
        seen = {window: within(place.rows, window) for window in self._windows}
        visible = {window: None if mask.all() else torch.from_numpy(mask) for window, mask in seen.items()}
        return TreeChunk(place.start, place.end, cell_count, int(blocks[0]) * self._storage.block_size, slots, visible)


def within(rows: TreeRows, window: int | None) -> numpy.ndarray:
    """Returns the cells that each row sees within a window.  # [rows, cells] bool"""
    if window is None:
        return rows.visible
    distances = numpy.asarray(rows.positions)[:, None] - rows.cell_positions[None, : rows.visible.shape[1]]
    seen: numpy.ndarray = rows.visible & (distances < window)
    return seen
