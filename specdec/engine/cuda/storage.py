"""Cached keys and values of every layer on a GPU, in blocks, in the page layout of varlen attention. Block 0 is always
zero; it stands in block tables where a sequence has no block."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DeviceStorage:
    """Storage in a model's own type.

    One block more than the cache has lies at the end: the scratch block, to which the padding rows of a step write. It
    is never read.
    """

    def __init__(
        self,
        layer_count: int,
        block_count: int,
        block_size: int,
        kv_head_count: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.block_count = block_count
        self.block_size = block_size
        self.kv_head_count = kv_head_count
        self.head_size = head_size
        self.scratch_slot = block_count * block_size  # a slot is one position of the storage, block by block
        shape = (2, block_count + 1, block_size, kv_head_count, head_size)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_count)]
        # Two views of the same memory: single positions to write and to gather, whole blocks for block tables.
        self.slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self.layers]
        self.blocks = [(keys, values) for keys, values in self.layers]

    @torch.inference_mode()
    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        places, to_places = torch.tensor([sources, destinations]).to(self.layers[0].device, non_blocking=True)
        for keys, values in self.slots:
            keys[to_places] = keys[places]
            values[to_places] = values[places]

    @torch.inference_mode()
    def scrub(self, block_id: int, start: int, end: int) -> None:
        for layer in self.layers:
            layer[:, block_id, start:end] = 0

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values [rows, kv heads, head size] to slots [rows] int64 of a layer."""
        key_slots, value_slots = self.slots[layer]
        key_slots.index_copy_(0, slots, keys.to(key_slots.dtype))
        value_slots.index_copy_(0, slots, values.to(value_slots.dtype))
