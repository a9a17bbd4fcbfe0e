"""Rotary attention in a third of the calls: a replacement for most of `transformers`' attention modules.

One product gives queries, keys and values, and queries and keys are rotated together: on a small model most of a step
is the cost of calls, not of arithmetic. A replacement is used only if, on random rows, it calls attention with the same
arguments as the module. Other modules stay unchanged and reach the cache through `attention.paged_attention`.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import nn

from specdec.engine.attention import AttentionCall, AttentionMetadata, CallRecorder
from specdec.engine.packed import PackedLinear
from specdec.errors import ModelRefused

ROTARY_NAME = "rotary_emb"  # the module that computes cosines and sines, in every architecture with one
LEARNED_NAME = "wpe"  # the embedding of positions, in the one architecture that learns it
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
TRIED_ROW_COUNT = 4
# Sums in another order differ by roundings; a wrong rotation or scale differs by the size of the values.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class RotaryTable(nn.Module):
    """Cosines and sines of every position, computed once by the model's own module, which it replaces.

    Models with several kinds of rotary layers pass `layer_type`. For replacements tables are [positions, 1, size] and
    the sines of the first half are negated, so that a rotation is x * cosines + (x with its halves swapped) * sines.
    """

    def __init__(self, rotary: nn.Module, positions_max: int, dtype: torch.dtype, is_for_stand_ins: bool):
        super().__init__()
        self.is_for_stand_ins = is_for_stand_ins
        self.tables: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer_type in _layer_types(rotary):
            cosines, sines = _angles(rotary, positions_max, dtype, layer_type)
            if not (cosines.is_meta or cosines.isfinite().all() and sines.isfinite().all()):
                raise ModelRefused("config.json: its rotary parameters give angles that are no numbers")
            if is_for_stand_ins:
                first, second = sines.chunk(2, -1)
                cosines, sines = cosines[:, None].contiguous(), torch.cat((-first, second), -1)[:, None]
            self.tables[layer_type] = cosines, sines

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [1, rows] int64 -> two of [1, rows, size], or of [rows, 1, size] for replacements."""
        cosines, sines = self.tables[layer_type]
        positions = position_ids[0]
        found = cosines.index_select(0, positions), sines.index_select(0, positions)
        return found if self.is_for_stand_ins else (found[0][None], found[1][None])


class RotaryAttention(nn.Module):
    """The qkv product, norms of heads, rotation, paged attention, output product.

    `qkv` returns all query heads, then keys, then values. Head counts are computed from the widths of the projections,
    which may be one rank's share, and the output projection keeps its name in `transformers`.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        parts = [cast(nn.Linear, module.get_submodule(name)) for name in ("q_proj", "k_proj", "v_proj")]
        its: Any = module  # the attributes are of the architecture's class
        self.layer_index, self.head_size = int(its.layer_idx), int(its.head_dim)
        self.head_count = len(parts[0].weight) // self.head_size
        self.rotated_count = self.head_count + len(parts[1].weight) // self.head_size
        self.qkv = joined(parts)
        self.has_head_norms = HEAD_NORMS <= _child_names(module)
        if self.has_head_norms:
            self.q_norm, self.k_norm = module.get_submodule("q_norm"), module.get_submodule("k_norm")
        self.o_proj = module.get_submodule("o_proj")
        self.rule = _call(module, self.head_size)[0].rule

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionMetadata,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, rows, hidden] -> the same shape."""
        cosines, sines = position_embeddings
        heads = self.qkv(hidden_states).view(hidden_states.shape[1], -1, self.head_size)
        values = heads[:, self.rotated_count :]
        heads = heads[:, : self.rotated_count]  # [rows, query and key heads, head size]
        if self.has_head_norms:
            queries, keys = heads[:, : self.head_count].contiguous(), heads[:, self.head_count :].contiguous()
            heads = torch.cat((self.q_norm(queries), self.k_norm(keys)), 1)
        swapped = heads.roll(self.head_size // 2, -1)
        rotated = (heads * cosines).add_(swapped.mul_(sines))
        keys = rotated[:, self.head_count :]
        queries = rotated[:, : self.head_count]
        output = plan.attend(queries, keys, values, self.layer_index, self.rule)
        return self.o_proj(output.view(1, hidden_states.shape[1], -1)), None


def table_angles(base: nn.Module, positions_max: int, dtype: torch.dtype, with_stand_ins: bool = True) -> bool:
    """Replaces a base model's rotary module, if any, by a table of `positions_max` positions; of a learned table keeps
    as many. Returns whether to replace its attention modules: all or none, because tables have one layout; none without
    `with_stand_ins`. Raises ModelRefused for angles that are no numbers."""
    learned = getattr(base, LEARNED_NAME, None)
    if isinstance(learned, nn.Embedding) and learned.num_embeddings > positions_max:
        learned.num_embeddings = positions_max
        learned.weight = nn.Parameter(learned.weight.detach()[:positions_max].clone(), requires_grad=False)
    rotary = getattr(base, ROTARY_NAME, None)
    if rotary is None:
        return False
    size = rotary_size(rotary)
    attentions = [module for module in base.modules() if has_projections(module)]
    is_fused = with_stand_ins and bool(attentions) and all(fits(module, size) for module in attentions)
    setattr(base, ROTARY_NAME, RotaryTable(rotary, positions_max, dtype, is_fused))
    return is_fused


def has_projections(module: nn.Module) -> bool:
    """Whether a module has the four projections of a replaceable attention module."""
    return _child_names(module) >= PROJECTIONS


def fits(module: nn.Module, rotated_size: int) -> bool:
    """Whether a replacement agrees with an attention module on random rows with random angles.

    `rotated_size` elements of a head are rotated; a replacement rotates all.
    """
    names = _child_names(module)
    head_size = getattr(module, "head_dim", None)
    if head_size != rotated_size or names not in (PROJECTIONS, PROJECTIONS | HEAD_NORMS):
        return False
    if any(isinstance(module.get_submodule(name), PackedLinear) for name in PROJECTIONS):
        return False  # joined as panels, if at all
    if names >= HEAD_NORMS and module.get_submodule("q_norm").get_parameter("weight").shape != (head_size,):
        return False  # a norm over all heads together
    expected, its_output = _call(module, head_size)
    call, output = _call(RotaryAttention(module), head_size)
    pairs = [(getattr(call, name), getattr(expected, name)) for name in ("queries", "keys", "values")]
    tolerance = TOLERANCES[output.dtype]
    return all(_is_near(ours, theirs, tolerance) for ours, theirs in [*pairs, (output, its_output)])


@torch.inference_mode()
def _call(module: nn.Module, head_size: int) -> tuple[AttentionCall, torch.Tensor]:
    """Returns the attention call of a module, or of its replacement, for random rows, and the module's output."""
    weight = module.get_submodule("o_proj").get_parameter("weight")
    generator = torch.Generator().manual_seed(head_size)
    angles = torch.randn(TRIED_ROW_COUNT, head_size // 2, generator=generator).repeat(1, 2)
    rows = torch.randn(1, TRIED_ROW_COUNT, len(weight), generator=generator).to(weight)
    cosines, sines = (each.to(weight) for each in (angles.cos(), angles.sin()))
    if isinstance(module, RotaryAttention):
        sines = torch.cat((-sines[:, : head_size // 2], sines[:, head_size // 2 :]), -1)[:, None]
        embeddings = cosines[:, None], sines
    else:
        embeddings = cosines[None], sines[None]
    recorder = CallRecorder()
    output, _ = module(hidden_states=rows, position_embeddings=embeddings, attention_mask=None, plan=recorder)
    return recorder.calls[0], output


def joined(parts: list[nn.Linear]) -> nn.Linear:
    """Returns one product whose output is the concatenation of all parts' outputs."""
    weight = torch.cat([part.weight.detach() for part in parts])
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=parts[0].bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if parts[0].bias is not None:
        linear.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), requires_grad=False)
    return linear


def _is_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    return bool((ours.float() - theirs.float()).abs().max() <= tolerance * theirs.float().abs().max())


def _child_names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def rotary_size(rotary: nn.Module) -> int:
    """The number of elements of a head that a model's rotary module rotates."""
    return _angles(rotary, 1, torch.float32, _layer_types(rotary)[0])[0].shape[-1]


def _angles(
    rotary: nn.Module, positions_max: int, dtype: torch.dtype, layer_type: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines and sines of every position, each [positions, size]."""
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    device = next((buffer.device for buffer in rotary.buffers()), None)
    like = torch.empty(0, dtype=dtype, device=device)
    cosines, sines = rotary(like, torch.arange(positions_max, device=device)[None], **arguments)
    return cosines[0], sines[0]


def _layer_types(rotary: nn.Module) -> list[str | None]:
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        types: Any = rotary.layer_types
        return list(types)
    return [None]
