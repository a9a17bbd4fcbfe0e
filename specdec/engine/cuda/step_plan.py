"""The tensors of one step of our own kernels: rows and work items (`items`) in one buffer, sent in one copy.

A captured step has a number of rows and of logits; everything else is data. Its padding rows are in no item and write
to the scratch block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy
import torch

from specdec.engine.cuda import items
from specdec.engine.cuda.items import GROUP_ROWS, ItemLayout
from specdec.engine.cuda.plan import VIEWS_MAX, PinnedWords, StepShape, seen_end
from specdec.engine.interface import RaggedBatch

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, GROUP_ROWS)  # of captured steps
FEW_LOGITS = 4  # captured beside steps whose rows all have logits, from WIDE_ROWS on: parts of prompts
WIDE_ROWS = 32
PATH_WORDS = 64 * GROUP_ROWS  # words for cells of paths in a captured step


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
    rows = logits = key_max = path_words = 0
    for chunk in batch.chunks:
        rows += len(chunk.token_ids)
        logits += chunk.logit_count
        key_max = max(key_max, seen_end(chunk))
        if chunk.paths:
            path_words += sum(map(len, chunk.paths))
    return StepShape(rows, rows, logits, rows, key_max, path_words=path_words)


def captured_shapes(key_max: int, sequences_max: int) -> list[StepShape]:
    """Returns the shapes to capture, in order: of two rows for each of `sequences_max` sequences. They hold any step of
    as many rows: keys have no cost of their own."""
    counts = [(rows, rows) for rows in ROW_COUNTS if rows <= 2 * sequences_max]
    counts += [(rows, FEW_LOGITS) for rows, _ in counts if rows >= WIDE_ROWS]
    return [StepShape(rows, rows, logits, rows, key_max, path_words=PATH_WORDS) for rows, logits in sorted(counts)]


class Views(NamedTuple):
    """What one shape has of a buffer: the place of its words, its fields in the host's memory, and on the device."""

    words_at: int
    arrays: tuple[numpy.ndarray, ...]
    tensors: ItemTensors


class ItemBuffer:
    """The buffer of one step, in pinned memory and on the device: `reserve` sizes it, `fill` writes, `send` copies.

    `layout`: of any number of rows.
    """

    def __init__(self, layout: ItemLayout, device: torch.device):
        self._layout = layout
        self._words = PinnedWords(device)
        self._views: dict[StepShape, Views] = {}
        self._used = 0

    def reserve(self, shape: StepShape) -> None:
        """Enlarges the buffer for a shape. Earlier views belong to the old buffer."""
        words = self._layout_of(shape).word_count(shape.sequence_count, shape.key_max, shape.path_words)
        if self._words.grow(self._words_at(shape) + -(-words // 2)):
            self._views.clear()

    def fill(self, batch: RaggedBatch, shape: StepShape) -> None:
        """Writes a batch, padded to `shape`, to the host's side. Raises ValueError for rows beyond their blocks."""
        self._words.wait()
        views = self._views_of(shape)
        ids, positions, slots, logit_rows, words = views.arrays
        layout = views.tensors.layout
        self._used = views.words_at + -(-items.fill(words, batch, layout) // 2)
        tokens: list[int] = []
        chosen: list[int] = []
        for chunk in batch.chunks:
            tokens += chunk.token_ids
            end = len(tokens)
            chosen += range(end - chunk.logit_count, end)
        ids[: len(tokens)] = tokens
        ids[len(tokens) :] = 0
        positions[:] = words[layout.positions_at : layout.slots_at]
        slots[:] = words[layout.slots_at : layout.order_at]
        logit_rows[: len(chosen)] = chosen
        logit_rows[len(chosen) :] = 0

    def send(self, shape: StepShape) -> ItemTensors:
        """Copies the filled part to the device without waiting."""
        self._words.send(self._words.host[: self._used], self._words.on_device[: self._used])
        return self.views(shape)

    def views(self, shape: StepShape) -> ItemTensors:
        """Returns the device's views of a reserved shape, the same as `send` of that shape."""
        return self._views_of(shape).tensors

    def _layout_of(self, shape: StepShape) -> ItemLayout:
        return replace(self._layout, row_count=shape.row_count)

    @staticmethod
    def _counts(shape: StepShape) -> tuple[int, ...]:
        """The words of the int64 fields: each begins at a multiple of 16 bytes."""
        rows, logits = shape.row_count + shape.row_count % 2, shape.logit_count + shape.logit_count % 2
        return rows, rows, rows, logits

    def _words_at(self, shape: StepShape) -> int:
        return sum(self._counts(shape))

    def _views_of(self, shape: StepShape) -> Views:
        views = self._views.get(shape)
        if views is None:
            if len(self._views) >= VIEWS_MAX:
                self._views.clear()
            arrays = tuple(field.numpy() for field in self._fields(self._words.host, shape))
            tensors = ItemTensors(shape, self._layout_of(shape), *self._fields(self._words.on_device, shape))
            views = self._views[shape] = Views(self._words_at(shape), arrays, tensors)
        return views

    def _fields(self, buffer: torch.Tensor, shape: StepShape) -> tuple[torch.Tensor, ...]:
        """Returns the fields of a shape, in the order of `ItemTensors`."""
        at = self._words_at(shape)
        ids, positions, slots, logit_rows = buffer[:at].split(self._counts(shape))
        rows = (each[: shape.row_count] for each in (ids, positions, slots))
        return *rows, logit_rows[: shape.logit_count], buffer[at:].view(torch.int32)
