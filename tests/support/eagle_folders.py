"""Folders of EAGLE-3 heads as their layouts are described, and what such a head computes, in numpy and float64.

Written from the descriptions of the layouts, not with the code under test: names, offsets and configuration entries
stand here as they are on the hub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

Floats = NDArray[np.float64]

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, WIDE = 64, 4, 2, 16, 96
VOCABULARY, LAYERS = 60, 9
DRAFT_IDS = (0, 3, 4, 9, 17, 18, 30, 41, 59)  # of the target
THETA, EPSILON = 5000.0, 1e-5

LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": EPSILON,
    "max_position_embeddings": 512,
    "rope_theta": THETA,
    "vocab_size": VOCABULARY,
    "attention_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "use_cache": True,
}
HUB_CONFIG = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": len(DRAFT_IDS),
    "torch_dtype": "float32",
}
OWN_LLAMA: dict[str, Any] = LLAMA | {"architectures": ["LlamaForCausalLM"], "head_dim": HEAD_SIZE}
SPECULATORS_CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/target"}},
    "transformer_layer_config": OWN_LLAMA,
    "draft_vocab_size": len(DRAFT_IDS),
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [1, 4, 9],
    "norm_before_fc": False,
}


def head_tensors(seed: int = 0, features: int = 3, hidden: int = HIDDEN, target_hidden: int = HIDDEN) -> dict[str, Any]:
    """Returns random tensors of a head by their names on the hub, without embeddings."""
    generator = torch.Generator().manual_seed(seed)

    def weight(out: int, width: int) -> torch.Tensor:
        return torch.randn(out, width, generator=generator) * width**-0.5

    def gain() -> torch.Tensor:
        return 1 + 0.3 * torch.randn(hidden, generator=generator)

    members = torch.zeros(VOCABULARY, dtype=torch.bool)
    members[list(DRAFT_IDS)] = True
    return {
        "fc.weight": weight(hidden, features * target_hidden),
        "midlayer.input_layernorm.weight": gain(),
        "midlayer.hidden_norm.weight": gain(),
        "midlayer.self_attn.q_proj.weight": weight(HEADS * HEAD_SIZE, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": weight(KV_HEADS * HEAD_SIZE, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": weight(KV_HEADS * HEAD_SIZE, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": weight(hidden, HEADS * HEAD_SIZE),
        "midlayer.post_attention_layernorm.weight": gain(),
        "midlayer.mlp.gate_proj.weight": weight(WIDE, hidden),
        "midlayer.mlp.up_proj.weight": weight(WIDE, hidden),
        "midlayer.mlp.down_proj.weight": weight(hidden, WIDE),
        "norm.weight": gain(),
        "lm_head.weight": 4 * weight(len(DRAFT_IDS), hidden),
        "d2t": torch.tensor([own - index for index, own in enumerate(DRAFT_IDS)]),
        "t2d": members,
    }


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Writes a folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def renamed(tensors: Mapping[str, torch.Tensor], **names: str) -> dict[str, torch.Tensor]:
    """Returns tensors with each key at the beginning of a name replaced by its value, and the rest kept."""
    found = {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        found[f"{names.get(first, first)}.{rest}" if rest else names.get(first, first)] = tensor
    return found


class PlainHead:
    """What a head computes, pair after pair, from its tensors by their hub names: the paper's section 3.1 in loops."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], norm_before_residual: bool) -> None:
        self._at = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        self._norm_before_residual = norm_before_residual
        self._keys: list[Floats] = []
        self._values: list[Floats] = []

    def feature(self, states: Floats) -> Floats:
        """states [features * hidden] -> f [hidden]"""
        return self._at["fc.weight"] @ states

    def pair(self, feature: Floats, embedding: Floats, position: int) -> Floats:
        """Returns x [hidden] of the next pair, which attends to those before and itself."""
        normed = self._norm(feature, "midlayer.hidden_norm")
        both = np.concatenate([self._norm(embedding, "midlayer.input_layernorm"), normed])
        queries, keys, values = (
            (self._at[f"midlayer.self_attn.{name}_proj.weight"] @ both).reshape(-1, HEAD_SIZE) for name in "qkv"
        )
        self._keys.append(turned(keys, position))
        self._values.append(values)
        results = []
        for head, query in enumerate(turned(queries, position)):
            own = head * KV_HEADS // HEADS
            scores = np.array([key[own] @ query for key in self._keys]) / np.sqrt(HEAD_SIZE)
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            results.append(sum(share * value[own] for share, value in zip(shares, self._values)))
        x = (normed if self._norm_before_residual else feature) + self._at[
            "midlayer.self_attn.o_proj.weight"
        ] @ np.concatenate(results)
        inner = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up = (self._at[f"midlayer.mlp.{name}_proj.weight"] @ inner for name in ("gate", "up"))
        return x + self._at["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def logits(self, x: Floats) -> Floats:
        """x [hidden] -> [draft vocabulary]"""
        return self._at["lm_head.weight"] @ self._norm(x, "norm")

    def _norm(self, row: Floats, name: str) -> Floats:
        return row / np.sqrt((row**2).mean() + EPSILON) * self._at[f"{name}.weight"]


def turned(rows: Floats, position: int) -> Floats:
    """Rotates dimension i with i + half, as complex numbers, by position * theta^(-2 i / size).  # [heads, size]"""
    half = HEAD_SIZE // 2
    numbers = rows[:, :half] + 1j * rows[:, half:]
    numbers = numbers * np.exp(1j * position * THETA ** (-np.arange(half) / half))
    return np.concatenate([numbers.real, numbers.imag], 1)
