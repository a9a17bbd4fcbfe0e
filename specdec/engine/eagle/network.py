"""The network of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840, section 3.1), in plain torch: what training and the
tests compute, and what a head's weights are called.

The features of position t are hidden states of the target's residual stream as they enter some of its layers, reduced
by `fc` to f_t. The pair of position t >= 1 is (f_(t-1), token t); its rotary position is t - 1. One decoder layer reads
the embedding of the token beside the feature and gives x, from which the output layer predicts token t + 1 among the
tokens of the draft vocabulary, and which is the feature of the next pair where the target has not been yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

FEATURE_LAYERS = 3  # whose inputs are the features, by default
LAYERS_SPREAD_MIN = 7  # layers of a target from which on the default ones are different and ascending


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The sizes of a head.

    hidden_size: of the head; target_hidden_size: of the target.
    aux_layer_ids: ascending; i: the states that enter layer i of the target; its number of layers: those that leave the
    last one, before the final norm.
    activation: the name in `transformers`.
    rope_scaling: rotary parameters beside rope_theta, as `transformers` has them; None: none.
    vocabulary_size: rows of the target's embeddings; draft_vocabulary_size: tokens the head proposes.
    norm_before_residual: the residual is the normed feature, not the feature.
    positions_max: those the head was made for; later ones are computed alike.
    """

    hidden_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    head_count: int
    kv_head_count: int
    head_size: int
    intermediate_size: int
    activation: str
    norm_epsilon: float
    rope_theta: float
    vocabulary_size: int
    draft_vocabulary_size: int
    norm_before_residual: bool
    positions_max: int
    rope_scaling: Mapping[str, Any] | None = None


class Projections(NamedTuple):
    """What the layer makes of pairs before attention; queries and keys are rotated."""

    residual: Tensor  # [b, n, hidden]
    queries: Tensor  # [b, heads, n, head size]
    keys: Tensor  # [b, kv heads, n, head size]
    values: Tensor  # [b, kv heads, n, head size]


def default_layers(layer_count: int) -> tuple[int, ...]:
    """Returns the layers that vLLM, SGLang and the paper's code read where a configuration names none; of a target of
    fewer than LAYERS_SPREAD_MIN the last ones."""
    if layer_count < LAYERS_SPREAD_MIN:
        return tuple(range(max(0, layer_count + 1 - FEATURE_LAYERS), layer_count + 1))
    return 2, layer_count // 2, layer_count - 3


class Attention(nn.Module):
    """The products around attention; the first three take [embedding, feature]."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        width, kv_width = config.head_count * config.head_size, config.kv_head_count * config.head_size
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)


class Mlp(nn.Module):
    """The gated network of Llama."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[.., hidden] -> [.., hidden]"""
        result: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """The only layer of a head."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.input_layernorm = norm_of(config)  # of the embedding
        self.hidden_norm = norm_of(config)  # of the feature
        self.self_attn = Attention(config)
        self.post_attention_layernorm = norm_of(config)
        self.mlp = Mlp(config)


def norm_of(config: EagleConfig) -> nn.RMSNorm:
    """Returns a new norm of the head's hidden size."""
    return nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)


class EagleHead(nn.Module):
    """A head. `embed_tokens`: None if it reads the target's embeddings, as its table has them, without the factor of
    some architectures. `target_ids` [draft vocabulary] int64: the target's id of each token it proposes."""

    target_ids: Tensor

    def __init__(self, config: EagleConfig, target_ids: Tensor, has_embeddings: bool = False) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.aux_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocabulary_size, config.hidden_size) if has_embeddings else None
        self.layer = Layer(config)
        self.norm = norm_of(config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocabulary_size, bias=False)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self._frequencies, self._rotary_factor = rotary_frequencies(config)

    def forward(self, features: Tensor, embeddings: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns x of pairs that attend to each other.  # [b, n, hidden]

        features, embeddings: [b, n, hidden], of the pairs: f_(t-1), and the embedding of token t
        positions: [n] or [b, n] int64, rotary positions: t - 1
        mask: [.., n, n] bool, which keys a row attends to; None: those up to its own
        """
        own = self.project(features, embeddings, positions)
        attended = scaled_dot_product_attention(
            own.queries, own.keys, own.values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.finish(own.residual, attended)

    def project(self, features: Tensor, embeddings: Tensor, positions: Tensor) -> Projections:
        """Returns what attention needs of pairs; arguments as in `forward`."""
        config, layer = self.config, self.layer
        normed = layer.hidden_norm(features)
        residual = normed if config.norm_before_residual else features
        both = torch.cat([layer.input_layernorm(embeddings), normed], -1)
        attention = layer.self_attn
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        counts = (config.head_count, config.kv_head_count, config.kv_head_count)
        queries, keys, values = (
            part(both).unflatten(-1, (count, config.head_size)).transpose(-3, -2) for part, count in zip(parts, counts)
        )
        cosines, sines = self.rotary(positions, queries.dtype)
        return Projections(residual, rotated(queries, cosines, sines), rotated(keys, cosines, sines), values)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Returns x from the results of attention.  # [b, n, hidden]

        residual: of `project`; attended: [b, heads, n, head size]
        """
        layer = self.layer
        x = residual + layer.self_attn.o_proj(attended.transpose(-3, -2).flatten(-2))
        result: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return result

    def logits(self, x: Tensor) -> Tensor:
        """[.., hidden] -> [.., draft vocabulary]"""
        result: Tensor = self.lm_head(self.norm(x))
        return result

    def rotary(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of rotary positions, in both halves alike.  # [.., 1, n, head size] each

        positions: [.., n] int64
        """
        frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None, :, None].float() * torch.cat([frequencies, frequencies])
        return (angles.cos() * self._rotary_factor).to(dtype), (angles.sin() * self._rotary_factor).to(dtype)


def rotated(rows: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Returns queries or keys turned by their positions, halves paired as Llama's.  # [b, heads, n, head size]"""
    first, second = rows.chunk(2, -1)
    return rows * cosines + torch.cat([-second, first], -1) * sines


def rotary_frequencies(config: EagleConfig) -> tuple[Tensor, float]:
    """Returns the angle of each pair of dimensions per position, [head size / 2] float32, and the factor of cosines and
    sines."""
    parameters = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    module = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.head_count,
            head_dim=config.head_size,
            max_position_embeddings=config.positions_max,
            rope_parameters=parameters,
        )
    )
    frequencies: Tensor = module.inv_freq.float()
    return frequencies, float(module.attention_scaling)
