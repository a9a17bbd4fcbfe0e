"""Attention by our own kernels over the work items of a step (`items`): in a whole step of them (`step`), or by itself
in place of what a model's modules call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.attention import AttentionShape, ScoreRule
from specdec.engine.cuda.items import GROUP_ROWS, ItemLayout
from specdec.engine.cuda.kernels.attention import (
    Partials,
    attend,
    attend_blocks,
    attend_config,
    combine,
    make_partials,
)
from specdec.engine.cuda.kernels.qkv import rope_write
from specdec.engine.cuda.step_plan import ItemTensors
from specdec.engine.cuda.storage import DeviceStorage

Cache = tuple[Tensor, Tensor]  # a layer's keys and values, each [slots, kv heads, head size]


class ItemAttention:
    """The attention of a model's layers. One memory serves all layers: one thread at a time."""

    def __init__(self, shape: AttentionShape, device: torch.device):
        """Raises ValueError for sizes that the kernels do not have."""
        self._shape = shape
        self._device = device
        self._tile_rows = attend_config(shape.head_count, shape.kv_head_count, shape.head_size).tile_rows
        self._partials: Partials | None = None

    def layout(self, storage: DeviceStorage) -> ItemLayout:
        """Returns how a step's words lie for a storage, whatever the number of rows."""
        windows = self._shape.windows
        return ItemLayout(GROUP_ROWS, storage.block_size, self._tile_rows, windows, storage.scratch_slot)

    def reserve(self, positions_max: int) -> None:
        """Makes the memory for sequences of at most `positions_max` positions, before any step."""
        shape = self._shape
        self._partials = make_partials(GROUP_ROWS, shape.head_count, shape.head_size, positions_max, self._device)

    def run(self, queries: Tensor, cache: Cache, step: ItemTensors, rule: ScoreRule, out: Tensor) -> None:
        """Writes what each row gets from a layer's cache: queries and out [rows, heads, head size], 0 for padding."""
        assert self._partials is not None
        blocks = attend_blocks(step.shape.row_count, step.shape.key_max, self._shape.kv_head_count)
        words, layout, partials = step.words, step.layout, self._partials
        for group in range(layout.group_count):
            attend(
                queries,
                *cache,
                words,
                layout,
                partials,
                blocks,
                scaling=rule.scaling,
                window=rule.window,
                softcap=rule.softcap,
                group=group,
            )
            combine(partials, words, layout, out, window=rule.window, group=group)


@dataclass(frozen=True, slots=True)
class ItemMetadata:
    """The attention plan of one step for a model's modules: an `AttentionMetadata`."""

    attention: ItemAttention
    storage: DeviceStorage
    step: ItemTensors

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, layer: int, rule: ScoreRule) -> Tensor:
        """See `AttentionMetadata.attend`."""
        cache, step = self.storage.slots[layer], self.step
        heads = torch.cat((queries, keys, values), 1).to(cache[0].dtype)
        own, out = (heads.new_empty(queries.shape) for _ in range(2))
        rope_write(heads, None, None, step.positions, step.slots, own, *cache, step.shape.row_count)
        self.attention.run(own, cache, step, rule, out)
        return out.to(queries.dtype)
