"""An encoder-decoder model of `transformers` as one base model for the engine: T5 (Raffel et al. 2020, 1910.10683).

Weights, norms and feed-forward layers are the modules of `transformers`; attention reaches a step's plan, as with
models of one stack. Rows of a sequence's input run through the encoder, which leaves nothing but the keys and values of
every decoder layer's cross attention; its other rows run through the decoder. Positions are relative in both: a bias of
scores by distance, from a table of the first layer, and none in cross attention. Scores are not scaled.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import nn

from specdec.engine.attention import (
    AttentionShape,
    DecoderAttention,
    EncoderAttention,
    EncoderDecoderMetadata,
    PositionBias,
    ScoreRule,
)
from specdec.engine.rotary_attention import joined


class BaseOutput(NamedTuple):
    """The final hidden states of all rows of a step, [1, rows, hidden]."""

    last_hidden_state: torch.Tensor


class SelfAttention(nn.Module):
    """The attention of a layer to its own stack: one product for queries, keys and values, and the output product."""

    def __init__(self, module: nn.Module, bias: PositionBias):
        super().__init__()
        self.head_count, self.head_size = _heads(module)
        self.qkv = joined([_take(module, name) for name in ("q", "k", "v")])
        self.o = _take(module, "o")
        self.rule = ScoreRule(1.0, bias=bias)

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """hidden [rows, hidden] -> queries, keys, values [rows, heads, head size]."""
        heads: torch.Tensor = self.qkv(hidden).view(len(hidden), 3, self.head_count, self.head_size)
        return heads.unbind(1)


class CrossAttention(nn.Module):
    """The attention of a decoder layer to the encoder's input."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.head_count, self.head_size = _heads(module)
        self.q = _take(module, "q")
        self.kv = joined([_take(module, name) for name in ("k", "v")])
        self.o = _take(module, "o")
        self.rule = ScoreRule(1.0)

    def forward(self, hidden: torch.Tensor, attention: DecoderAttention, layer: int) -> torch.Tensor:
        queries = self.q(hidden).view(len(hidden), self.head_count, self.head_size)
        sums: torch.Tensor = self.o(attention.attend_to_input(queries, layer, self.rule).view(len(hidden), -1))
        return sums

    def write(self, encoded: torch.Tensor, attention: EncoderAttention, layer: int) -> None:
        """Writes the keys and values of the final hidden states of an encoder's rows."""
        keys, values = self.kv(encoded).view(len(encoded), 2, self.head_count, self.head_size).unbind(1)
        attention.write(keys, values, layer)


class Layer(nn.Module):
    """A layer of either stack; `cross` and its norm are the decoder's."""

    def __init__(self, block: nn.Module, bias: PositionBias):
        super().__init__()
        parts: Any = block.get_submodule("layer")
        self.attention_norm = parts[0].layer_norm
        self.attention = SelfAttention(parts[0].SelfAttention, bias)
        if len(parts) == 3:
            self.cross_norm = parts[1].layer_norm
            self.cross = CrossAttention(parts[1].EncDecAttention)
        self.feed_forward = parts[-1]  # with its norm, and the sum


class Stack(nn.Module):
    """The encoder or the decoder. `rule`: of its self attention."""

    def __init__(self, stack: nn.Module, positions_max: int):
        super().__init__()
        its: Any = stack
        self.embedding = its.embed_tokens
        bias = position_bias(its.block[0].layer[0].SelfAttention, its.is_decoder, positions_max)
        self.layers = nn.ModuleList(Layer(block, bias) for block in its.block)
        self.norm = its.final_layer_norm


class Encoder(Stack):
    """Rows of whole inputs."""

    def forward(self, ids: torch.Tensor, attention: EncoderAttention) -> torch.Tensor:
        """ids [rows] int64 -> final hidden states [rows, hidden]."""
        hidden: torch.Tensor = self.embedding(ids)
        for layer in cast("list[Layer]", self.layers):
            own = layer.attention
            queries, keys, values = own.heads(layer.attention_norm(hidden))
            hidden = hidden + own.o(attention.attend(queries, keys, values, own.rule).view(len(ids), -1))
            hidden = layer.feed_forward(hidden)
        last: torch.Tensor = self.norm(hidden)
        return last


class Decoder(Stack):
    """Rows of outputs, whose inputs' cells were written."""

    def forward(self, ids: torch.Tensor, attention: DecoderAttention) -> torch.Tensor:
        """ids [rows] int64 -> final hidden states [rows, hidden]."""
        hidden: torch.Tensor = self.embedding(ids)
        for index, layer in enumerate(cast("list[Layer]", self.layers)):
            own = layer.attention
            queries, keys, values = own.heads(layer.attention_norm(hidden))
            hidden = hidden + own.o(attention.attend(queries, keys, values, index, own.rule).view(len(ids), -1))
            hidden = hidden + layer.cross(layer.cross_norm(hidden), attention, index)
            hidden = layer.feed_forward(hidden)
        last: torch.Tensor = self.norm(hidden)
        return last


class EncoderDecoder(nn.Module):
    """A base model of both stacks. Takes its modules from `model`, of `transformers`, which is of no use afterwards.

    `positions_max`: no two tokens are further apart.
    """

    def __init__(self, model: transformers.PreTrainedModel, positions_max: int):
        super().__init__()
        self.encoder = Encoder(model.get_submodule("encoder"), positions_max)
        self.decoder = Decoder(model.get_submodule("decoder"), positions_max)

    @property
    def shape(self) -> AttentionShape:
        """Of the cache, which holds what the decoder sees."""
        layers = cast("list[Layer]", self.decoder.layers)
        own = layers[0].attention
        encoders = cast("list[Layer]", self.encoder.layers)
        rules = own.rule, layers[0].cross.rule, encoders[0].attention.rule
        heads = own.head_count
        return AttentionShape(len(layers), heads, heads, own.head_size, tuple(dict.fromkeys(rules)), has_encoder=True)

    def forward(self, input_ids: torch.Tensor, plan: EncoderDecoderMetadata, **_: object) -> BaseOutput:
        """input_ids [1, rows] int64."""
        ids = input_ids[0]
        if plan.encoder is None:
            assert plan.decoder is not None
            return BaseOutput(self.decoder(ids, plan.decoder)[None])
        encoded = self.encoder(ids[plan.encoder.index], plan.encoder)
        self.write_input(encoded, plan.encoder)
        if plan.decoder is None:
            return BaseOutput(encoded[None])
        decoded = self.decoder(ids[plan.decoder.index], plan.decoder)
        hidden = encoded.new_empty(len(ids), encoded.shape[1])
        hidden[plan.encoder.index], hidden[plan.decoder.index] = encoded, decoded
        return BaseOutput(hidden[None])

    def write_input(self, encoded: torch.Tensor, attention: EncoderAttention) -> None:
        """Writes the keys and values of all layers' cross attention; encoded [rows, hidden]: the encoder's final hidden
        states."""
        for index, layer in enumerate(cast("list[Layer]", self.decoder.layers)):
            layer.cross.write(encoded, attention, index)


def position_bias(module: nn.Module, is_decoder: bool, positions_max: int) -> PositionBias:
    """Returns the bias of a stack's first attention module: buckets of distances that grow by their logarithm, one for
    all from the greatest distance on."""
    its: Any = module
    reach = max(1, min(its.relative_attention_max_distance, positions_max - 1))
    buckets = its._relative_position_bucket(
        torch.arange(-reach, reach + 1),
        bidirectional=not is_decoder,
        num_buckets=its.relative_attention_num_buckets,
        max_distance=its.relative_attention_max_distance,
    )
    weight = its.relative_attention_bias.weight.detach()  # [buckets, heads]
    return PositionBias(weight[buckets].T.float().contiguous())


def _heads(module: nn.Module) -> tuple[int, int]:
    its: Any = module
    return int(its.n_heads), int(its.key_value_proj_dim)


def _take(module: nn.Module, name: str) -> nn.Linear:
    """Removes a product from a module, so that its memory is free when it is joined with others."""
    found = module.get_submodule(name)
    delattr(module, name)
    return cast(nn.Linear, found)
