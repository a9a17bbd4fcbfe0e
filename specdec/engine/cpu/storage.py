"""Cached keys and values of every layer on a CPU, in blocks, in the order in which the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.errors import ConfigError

BLOCK_SIZE_MIN, BLOCK_SIZE_MULTIPLE = 8, 16  # of a CPU's blocks: half a group of sixteen positions, or whole ones


class CpuStorage:
    """Storage on a CPU, in a model's own type: per layer the `keys` [blocks, kv heads, head size, block size], so that
    positions of one element lie side by side, and the `values` [blocks, kv heads, block size, head size]."""

    def __init__(
        self,
        layer_count: int,
        block_count: int,
        kv_head_count: int,
        block_size: int,
        head_size: int,
        dtype: torch.dtype,
    ):
        if block_size != BLOCK_SIZE_MIN and block_size % BLOCK_SIZE_MULTIPLE:
            limits = f"{BLOCK_SIZE_MIN}, or a multiple of {BLOCK_SIZE_MULTIPLE}"
            raise ConfigError(f"block size is {block_size}; on a CPU it must be {limits}")
        self.block_count = block_count
        self.block_size = block_size
        of_values = block_count, kv_head_count, block_size, head_size
        of_keys = block_count, kv_head_count, head_size, block_size
        self.keys = [torch.zeros(of_keys, dtype=dtype) for _ in range(layer_count)]
        self.values = [torch.zeros(of_values, dtype=dtype) for _ in range(layer_count)]

    @torch.inference_mode()
    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        (blocks, offsets), (to_blocks, to_offsets) = (
            (slots // self.block_size, slots % self.block_size) for slots in map(torch.tensor, (sources, destinations))
        )
        for keys, values in zip(self.keys, self.values):
            keys[to_blocks, :, :, to_offsets] = keys[blocks, :, :, offsets]
            values[to_blocks, :, to_offsets] = values[blocks, :, offsets]

    @torch.inference_mode()
    def scrub(self, block_id: int, start: int, end: int) -> None:
        for keys, values in zip(self.keys, self.values):
            keys[block_id, :, :, start:end] = 0
            values[block_id, :, start:end] = 0
