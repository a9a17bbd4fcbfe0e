"""The tensors of one step of our own kernels: rows and work items (`items`) in one buffer, sent in one copy.

A captured step has a number of rows and of logits; everything else is data. Its padding rows are in no item and write
to the scratch block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specdec.engine.cuda import items
from specdec.engine.cuda.items import GROUP_ROWS, ItemLayout
from specdec.engine.cuda.plan import VIEWS_MAX, PinnedWords, StepShape, seen_end
from specdec.engine.interface import RaggedBatch

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, GROUP_ROWS)  # of captured steps
FEW_LOGITS = 4  # captured beside steps whose rows all have logits, from WIDE_ROWS on: parts of prompts
WIDE_ROWS = 32
PATH_WORDS = 64 * GROUP_ROWS  # room for cells of paths in a captured step


@dataclass(frozen=True, slots=True)
class ItemTensors:
    """Views of one buffer on the device: `input_ids`, `positions`, `slots` [rows] and `logit_rows` [logits] int64;
    `words` int32, of the layout (`items.fill`)."""

    shape: StepShape
    layout: ItemLayout
    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    words: torch.Tensor


def shape_of(batch: RaggedBatch) -> StepShape:
    """Returns the shape of a batch without padding; rows alone count, whatever sequences they belong to."""
    rows, key_max = batch.row_count, max(seen_end(chunk) for chunk in batch.chunks)
    path_words = sum(len(path) for chunk in batch.chunks for path in chunk.paths)
    return StepShape(rows, rows, batch.logit_count, rows, key_max, path_words=path_words)


def captured_shapes(key_max: int, sequences_max: int) -> list[StepShape]:
    """Returns the shapes to capture, in order: of two rows for each of `sequences_max` sequences. They hold any step of
    as many rows: keys have no cost of their own."""
    counts = [(rows, rows) for rows in ROW_COUNTS if rows <= 2 * sequences_max]
    counts += [(rows, FEW_LOGITS) for rows, _ in counts if rows >= WIDE_ROWS]
    return [StepShape(rows, rows, logits, rows, key_max, path_words=PATH_WORDS) for rows, logits in sorted(counts)]


class ItemBuffer:
    """The buffer of one step, in pinned memory and on the device: `reserve` sizes it, `fill` writes, `send` copies.

    `layout`: of any number of rows.
    """

    def __init__(self, layout: ItemLayout, device: torch.device):
        self._layout = layout
        self._words = PinnedWords(device)
        self._views: dict[StepShape, tuple[ItemTensors, ItemTensors]] = {}
        self._used = 0

    def reserve(self, shape: StepShape) -> None:
        """Enlarges the buffer for a shape. Earlier views belong to the old buffer."""
        words = self._layout_of(shape).word_count(shape.sequence_count, shape.key_max, shape.path_words)
        if self._words.grow(self._words_at(shape) + -(-words // 2)):
            self._views.clear()

    def fill(self, batch: RaggedBatch, shape: StepShape) -> None:
        """Writes a batch, padded to `shape`, to the host's side. Raises ValueError for rows beyond their blocks."""
        self._words.wait()
        tensors = self._views_of(shape)[0]
        words, layout = tensors.words.numpy(), tensors.layout
        self._used = self._words_at(shape) + -(-items.fill(words, batch, layout) // 2)
        rows, live = layout.row_count, batch.row_count
        ids = tensors.input_ids.numpy()
        ids[:live] = [token for chunk in batch.chunks for token in chunk.token_ids]
        ids[live:] = 0
        tensors.positions.numpy()[:] = words[layout.positions_at : layout.positions_at + rows]
        tensors.slots.numpy()[:] = words[layout.slots_at : layout.slots_at + rows]
        found: list[int] = []
        end = 0
        for chunk in batch.chunks:
            end += len(chunk.token_ids)
            found += range(end - chunk.logit_count, end)
        logit_rows = tensors.logit_rows.numpy()
        logit_rows[: len(found)] = found
        logit_rows[len(found) :] = 0

    def send(self, shape: StepShape) -> ItemTensors:
        """Copies the filled part to the device without waiting."""
        self._words.send(self._words.host[: self._used], self._words.on_device[: self._used])
        return self.views(shape)

    def views(self, shape: StepShape) -> ItemTensors:
        """Returns the device's views of a reserved shape, the same as `send` of that shape."""
        return self._views_of(shape)[1]

    def _layout_of(self, shape: StepShape) -> ItemLayout:
        return replace(self._layout, row_count=shape.row_count)

    @staticmethod
    def _counts(shape: StepShape) -> tuple[int, ...]:
        """The words of the int64 fields: each begins at a multiple of 16 bytes."""
        rows, logits = shape.row_count + shape.row_count % 2, shape.logit_count + shape.logit_count % 2
        return rows, rows, rows, logits

    def _words_at(self, shape: StepShape) -> int:
        return sum(self._counts(shape))

    def _views_of(self, shape: StepShape) -> tuple[ItemTensors, ItemTensors]:
        """Returns the views of a shape in the host's memory and on the device."""
        views = self._views.get(shape)
        if views is None:
            if len(self._views) >= VIEWS_MAX:
                self._views.clear()
            sides = self._words.host, self._words.on_device
            views = self._views[shape] = self._make_views(sides[0], shape), self._make_views(sides[1], shape)
        return views

    def _make_views(self, buffer: torch.Tensor, shape: StepShape) -> ItemTensors:
        at = self._words_at(shape)
        wide = buffer[:at].split(self._counts(shape))
        ids, positions, slots = (each[: shape.row_count] for each in wide[:3])
        words = buffer[at:].view(torch.int32)
        layout = self._layout_of(shape)
        return ItemTensors(shape, layout, ids, positions, slots, wide[3][: shape.logit_count], words)
