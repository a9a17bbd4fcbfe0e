"""Attention of models with rotary positions, in a third of the calls.

Stands in for the attention modules of Llama and Qwen2: the same computation with queries, keys and values from one
product and the rotation applied to queries and keys together. On a small model most of a step is the cost of calls,
not of arithmetic. Architectures without a stand-in keep their own module and reach the cache through
`attention.paged_attention`.
"""

from __future__ import annotations

import torch
from torch import nn

from specdec.engine.attention import AttentionPlan, attend


class RotaryTable(nn.Module):
    """Cosines and sines of every position, computed once by the model's own module: [positions, 1, head size] each.

    The sines of the first half are negated, so that rotating is x * cosines + (x with its halves swapped) * sines.
    """

    def __init__(self, rotary: nn.Module, positions_max: int, dtype: torch.dtype):
        super().__init__()
        cosines, sines = rotary(torch.empty(0, dtype=dtype), torch.arange(positions_max)[None])
        self.cosines = cosines[0][:, None].contiguous()
        first, second = sines[0][:, None].chunk(2, -1)
        self.sines = torch.cat((-first, second), -1)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [1, rows] int64 -> two of [rows, 1, head size], of the model's type."""
        positions = position_ids[0]
        return self.cosines.index_select(0, positions), self.sines.index_select(0, positions)


class RotaryAttention(nn.Module):
    """qkv product, rotation, paged attention, output product; `qkv` gives all query heads, then keys, then values."""

    def __init__(self, module: nn.Module, qkv: nn.Module, out: nn.Module):
        super().__init__()
        config = module.config
        self.layer_index = int(module.layer_idx)  # type: ignore[arg-type]
        self.scaling = float(module.scaling)  # type: ignore[arg-type]
        self.head_size = int(module.head_dim)  # type: ignore[arg-type]
        self.head_count: int = config.num_attention_heads  # type: ignore
        self.rotated_count: int = self.head_count + config.num_key_value_heads  # type: ignore
        self.qkv = qkv
        self.out = out

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, rows, hidden] -> the same shape."""
        cosines, sines = position_embeddings
        heads = self.qkv(hidden_states).view(hidden_states.shape[1], -1, self.head_size)
        values = heads[:, self.rotated_count :]
        heads = heads[:, : self.rotated_count]  # [rows, query and key heads, head size]
        swapped = heads.roll(self.head_size // 2, -1)
        rotated = (heads * cosines).add_(swapped.mul_(sines))
        keys = rotated[:, self.head_count :]
        queries = rotated[:, : self.head_count]
        output = attend(queries, keys, values, plan, self.layer_index, self.scaling)
        return self.out(output.view(1, hidden_states.shape[1], -1)), None
