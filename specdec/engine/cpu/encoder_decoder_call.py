"""An encoder-decoder model as one native call for each of its stacks (native/step.h), made from the modules that run on
kernels.

As in `llama.py` the calls use the packed weights and norms of the modules, and serve only where modules and calls give
the same bits for a few tokens at loading.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from ctypes import c_int32
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from specdec.engine.attention import AttentionShape, ScoreRule
from specdec.engine.backend import Asked, StepResult
from specdec.engine.cpu import kernels as native
from specdec.engine.cpu.arguments import LayerCache
from specdec.engine.cpu.encoder_decoder import KernelEncoder, KernelStacks, rows_on
from specdec.engine.cpu.kernels import Kernels, Rows
from specdec.engine.cpu.llama import PROBED_BLOCK, LlamaModel, LlamaStep, are_same, new_caches
from specdec.engine.cpu.llama_parts import (
    ModelParts,
    UnknownPart,
    children_of,
    empty_parts,
    expect_children,
    fill_output,
    norm_struct,
    set_sizes,
    set_table,
    table_of,
    weight_struct,
)
from specdec.engine.cpu.plan import StackRows, divide_rows, plan_step
from specdec.engine.encoder_decoder import Decoder, EncoderDecoder, Layer, Stack
from specdec.engine.interface import Chunk, RaggedBatch, StepFlag

logger = logging.getLogger("specdec.engine")

PROBED_TOKENS = 8  # half of them the encoder's input
Rules = Mapping[ScoreRule, native.ScoreRule]


@dataclass(frozen=True, slots=True)
class StackCalls:
    """A call for each stack of a model. One thread at a time."""

    base: EncoderDecoder
    encoder: LlamaModel
    decoder: LlamaModel
    logits_width: int

    def attach(self, caches: Sequence[LayerCache]) -> None:
        """Sets the caches of the decoder's layers, for all later steps; the encoder's share the first."""
        self.decoder.attach(caches)
        self.encoder.attach([caches[0]] * len(self.base.encoder.layers))

    def encode(self, ids: Tensor, own: KernelEncoder, flag: c_int32 | None) -> LlamaStep:
        """Runs the encoders' rows, ids [rows] int64, and writes the keys and values of cross attention. The result has
        the hidden states of all rows. Raises StepAbandoned."""
        step = self.encoder.step(own.rows, ids, torch.arange(len(ids)), flag, keeps_hidden=True)
        assert step.hidden is not None
        self.base.write_input(step.hidden, own)
        return step


@dataclass(frozen=True, slots=True)
class NativeStacks:
    """A step in a call for each of its stacks: see `WholeStep`. The calls compute the output layer too."""

    calls: StackCalls
    encoder: KernelEncoder | None
    decoder: Rows | None
    decoder_index: Tensor  # [rows] int64
    flag: StepFlag | None

    def run(self, input_ids: Tensor, logit_rows: Tensor, output: nn.Module, asked: Asked) -> StepResult:
        ids, word = input_ids[0], self.flag.word if self.flag else None
        encoder, calls = self.encoder, self.calls
        if encoder is None:
            assert self.decoder is not None
            step = calls.decoder.step(self.decoder, ids, logit_rows, word, asked.hidden)
            return StepResult(step.logits, step.is_finite, step.hidden)
        encoded = calls.encode(ids[encoder.index], encoder, word)
        if self.decoder is None:
            return StepResult(torch.empty(0, calls.logits_width), encoded.is_finite)
        own_rows = torch.searchsorted(self.decoder_index, logit_rows)
        step = calls.decoder.step(self.decoder, ids[self.decoder_index], own_rows, word, asked.hidden)
        is_finite = torch.empty(len(ids), dtype=torch.bool)
        is_finite[encoder.index], is_finite[self.decoder_index] = encoded.is_finite, step.is_finite
        return StepResult(step.logits, is_finite, step.hidden)


def native_stacks(
    calls: StackCalls, kernels: Kernels, caches: Sequence[LayerCache], stacks: StackRows, flag: StepFlag | None
) -> NativeStacks:
    """Returns a planned step. Raises ValueError for rows that do not fit the caches."""
    encoder = decoder = None
    if stacks.encoder is not None:
        rows = rows_on(kernels, caches[0], stacks.encoder)
        encoder = KernelEncoder(kernels, caches, {}, flag, stacks.encoder_index, rows)
    if stacks.decoder is not None:
        decoder = rows_on(kernels, caches[0], stacks.decoder)
    return NativeStacks(calls, encoder, decoder, stacks.decoder_index, flag)


def stack_calls(
    kernels: Kernels,
    base: EncoderDecoder,
    output: nn.Module,
    shape: AttentionShape,
    dtype: torch.dtype,
    positions_max: int,
    ids_end: int,
    rules: Rules,
) -> StackCalls | None:
    """Returns the calls for a base model whose modules run on kernels; None if it has a part that is not known. See
    `llama_model`."""
    try:
        sizes = shape, dtype, positions_max, ids_end, rules
        encoder, decoder = (stack_parts(stack, *sizes) for stack in (base.encoder, base.decoder))
        fill_output(decoder.struct, output)
        decoder.kept.append(output)
        width = decoder.struct.output.out_size
        calls = StackCalls(base, LlamaModel(kernels, encoder), LlamaModel(kernels, decoder), width)
        if not agrees(kernels, calls, shape, dtype, min(PROBED_TOKENS, positions_max), ids_end, rules):
            raise UnknownPart("its hidden states differ from those of the modules")
    except UnknownPart as unknown:
        logger.info("a step of %s runs module by module: %s", type(base).__name__, unknown)
        return None
    return calls


@torch.inference_mode()
def agrees(
    kernels: Kernels,
    calls: StackCalls,
    shape: AttentionShape,
    dtype: torch.dtype,
    count: int,
    ids_end: int,
    rules: Rules,
) -> bool:
    """Whether modules and calls give the same bits for `count` tokens of one sequence, in hidden states and caches.
    Leaves the calls without caches of use."""
    chunk = Chunk((0,), 0, (torch.arange(count) % ids_end).tolist(), 0, encoder_length=count // 2)
    batch = RaggedBatch((chunk,))
    plan = plan_step(batch, PROBED_BLOCK)
    rows = divide_rows(batch, plan.rows)
    caches, module_caches = new_caches(shape, dtype), new_caches(shape, dtype)
    attention = KernelStacks(kernels, module_caches, rules, rows, None)
    expected = calls.base(plan.input_ids, attention).last_hidden_state[0]
    calls.attach(caches)
    step = native_stacks(calls, kernels, caches, rows, None)
    assert step.encoder is not None and step.decoder is not None
    ids, others = plan.input_ids[0].split((count // 2, count - count // 2))
    encoded = calls.encode(ids, step.encoder, None).hidden
    decoded = calls.decoder.step(step.decoder, others, torch.arange(len(others)), keeps_hidden=True).hidden
    pairs = [(encoded, expected[: count // 2]), (decoded, expected[count // 2 :])]
    for mine, theirs in zip(caches, module_caches):
        pairs += [(mine.keys, theirs.keys), (mine.values, theirs.values)]
    return all(ours is not None and are_same(ours, theirs) for ours, theirs in pairs)


def stack_parts(
    stack: Stack, shape: AttentionShape, dtype: torch.dtype, positions_max: int, ids_end: int, rules: Rules
) -> ModelParts:
    """Returns the structures of a stack but for an output layer. Raises UnknownPart."""
    modules = cast("list[Layer]", list(stack.layers))
    parts = empty_parts(len(modules), stack.norm, shape, dtype, positions_max, ids_end)
    parts.struct.embedding_scale = parts.struct.logit_scale = 1.0
    parts.kept += [stack, rules]
    if isinstance(stack, Decoder):
        set_table(parts, table_of(stack.embedding, parts.struct, dtype))
    else:
        parts.embed = stack.embedding  # a lookup is nothing beside the layers of an input
    for index, module in enumerate(modules):
        fill_layer(parts, index, module, isinstance(stack, Decoder), rules)
    return parts


def fill_layer(parts: ModelParts, index: int, module: Layer, has_cross: bool, rules: Rules) -> None:
    """Fills the structure of a layer from its module, and the sizes of the model."""
    layer = parts.layers[index]
    names = {"attention_norm", "attention", "feed_forward"}
    expect_children(module, names | {"cross_norm", "cross"} if has_cross else names)
    layer.before_attention = norm_struct(module.attention_norm)
    layer.qkv, layer.out = weight_struct(module.attention.qkv), weight_struct(module.attention.o)
    layer.rule = rules[module.attention.rule].struct
    if has_cross:
        layer.before_cross = norm_struct(module.cross_norm)
        layer.cross_queries, layer.cross_out = weight_struct(module.cross.q), weight_struct(module.cross.o)
        layer.cross_rule = rules[module.cross.rule].struct
    feed_forward: Any = module.feed_forward
    expect_children(feed_forward, {"layer_norm", "DenseReluDense"})
    layer.before_mlp = norm_struct(feed_forward.layer_norm)
    mlp = feed_forward.DenseReluDense
    names = children_of(mlp)
    if names == {"wi_0", "wi_1", "wo", "act"}:
        layer.gate, layer.up = weight_struct(mlp.wi_0), weight_struct(mlp.wi_1)
    elif names == {"wi", "wo", "act"}:
        layer.gate = weight_struct(mlp.wi)
    else:
        raise UnknownPart(f"its feed-forward layer has the parts {', '.join(sorted(names))}")
    layer.down = weight_struct(mlp.wo)
    set_sizes(parts, index, mlp, 1.0)
