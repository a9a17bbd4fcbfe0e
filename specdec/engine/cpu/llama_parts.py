"""The structures of a model of the Llama family (native/kernels.h), filled from modules that run on kernels.

A model is known by the parts of its modules, never by its architecture's name. Weights, norms and tables are used as
they are: a structure holds addresses, and its holder keeps the modules. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from specdec.engine.attention import AttentionShape, ScoreRule
from specdec.engine.cpu import structs
from specdec.engine.cpu.arguments import TYPES, WeightPanels
from specdec.engine.cpu.kernels import ACTIVATIONS, Kernels
from specdec.engine.cpu.products import Activation, KernelProduct, Normalized, OutputLayer
from specdec.engine.rotary_attention import ROTARY_NAME, RotaryTable

PANEL = 16  # outputs of a packed weight that lie together

# The norms of a layer: by the names of its children, those before and after attention, before and after the MLP.
LAYER_NORMS: dict[frozenset[str], tuple[str | None, str | None, str | None, str | None]] = {
    frozenset(name for name in names if name): names
    for names in (
        ("input_layernorm", None, "post_attention_layernorm", None),
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    )
}
ACTIVATION_NAMES = ("act_fn", "activation_fn", "act")
SPLIT_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class UnknownPart(Exception):
    """A model has a part that the native call does not know."""


@dataclass(slots=True)
class ModelParts:
    """The structures of a model, and what they point to. `embed`: ids -> inputs of the first layer, where the call
    cannot look them up itself."""

    struct: structs.ModelStruct
    layers: Any  # an array of LayerStruct
    kept: list[object] = field(default_factory=list)
    embed: Callable[[Tensor], Tensor] | None = None


def empty_parts(
    layer_count: int, norm: nn.Module, shape: AttentionShape, dtype: torch.dtype, positions_max: int, ids_end: int
) -> ModelParts:
    """Returns the structures of a model whose layers are to be filled. `norm`: the last. Raises UnknownPart."""
    layers = (structs.LayerStruct * layer_count)()
    struct = structs.ModelStruct(
        layers=layers,
        layer_count=layer_count,
        heads=shape.head_count,
        kv_heads=shape.kv_head_count,
        head_size=shape.head_size,
        type=TYPES[dtype],
        last=norm_struct(norm),
        positions_max=positions_max,
        vocabulary_size=ids_end,
    )
    return ModelParts(struct, layers)


class PackedEmbedding(nn.Module):
    """A lookup in the weight of a tied output layer, which is then in memory once."""

    def __init__(self, kernels: Kernels, weight: WeightPanels, dtype: torch.dtype, scale: Tensor | None):
        """`scale`: of the result, of `dtype`, the model's."""
        super().__init__()
        self.packed, self.dtype, self._scale = weight, dtype, scale
        self._kernels = kernels

    def rows(self, token_ids: Tensor) -> Tensor:
        """Returns rows of the weight: token_ids [..., rows] -> [..., rows, hidden]."""
        return self._kernels.unpack(self.packed, token_ids, self.dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [..., rows] -> [..., rows, hidden]"""
        return self.rows(token_ids) if self._scale is None else self.rows(token_ids) * self._scale


def model_parts(
    base: nn.Module,
    output: nn.Module | None,
    shape: AttentionShape,
    dtype: torch.dtype,
    positions_max: int,
    ids_end: int,
    rules: Sequence[ScoreRule],
) -> ModelParts:
    """Returns the structures of a model. Raises UnknownPart."""
    expect_children(base, {"embed_tokens", "layers", "norm", ROTARY_NAME})
    its: Any = base
    modules = list(its.layers)
    if len(rules) != len(modules) or any(type(rule) is not ScoreRule for rule in rules):
        raise UnknownPart(f"{len(modules)} layers attend {len(rules)} times")
    parts = empty_parts(len(modules), its.norm, shape, dtype, positions_max, ids_end)
    struct, layers = parts.struct, parts.layers
    angles = angles_of(its.rotary_emb, struct)
    parts.kept += [base, output, angles]
    for index, (module, rule) in enumerate(zip(modules, rules)):
        fill_layer(parts, index, module, rule)
        if getattr(module.self_attn, "use_rope", True):
            pair = angles[None if None in angles else its.config.layer_types[index]]
            layers[index].cosines, layers[index].sines = (each.data_ptr() for each in pair)
    fill_output(struct, output)
    fill_embedding(parts, base, output, dtype)
    return parts


def fill_layer(parts: ModelParts, index: int, module: Any, rule: ScoreRule) -> None:
    """Fills the structure of a layer from its module, and the sizes of the model."""
    layer = parts.layers[index]
    names = children_of(module)
    norms = LAYER_NORMS.get(frozenset(names - {"self_attn", "mlp"}))
    if norms is None:
        raise UnknownPart(f"a layer has the parts {', '.join(sorted(names))}")
    places = ("before_attention", "after_attention", "before_mlp", "after_mlp")
    for place, name in zip(places, norms):
        if name is not None:
            setattr(layer, place, norm_struct(module.get_submodule(name)))
    fill_attention(parts, layer, module.self_attn)
    fill_mlp(parts, layer, module.mlp)
    layer.rule = structs.RuleStruct(rule.scaling, rule.softcap or 0.0, rule.window or 0)
    set_sizes(parts, index, module.mlp, float(getattr(module, "residual_multiplier", 1.0)))


def set_sizes(parts: ModelParts, index: int, mlp: nn.Module, residual_scale: float) -> None:
    """Sets the model's sizes from a layer whose products are set. Raises UnknownPart if an earlier one has others."""
    struct, layer = parts.struct, parts.layers[index]
    sizes = {
        "hidden_size": layer.qkv.in_size,
        "intermediate_size": layer.down.in_size,
        "activation": activation_of(mlp),
        "residual_scale": residual_scale,
    }
    for name, value in sizes.items():
        before = getattr(struct, name)
        setattr(struct, name, value)
        if index and getattr(struct, name) != before:
            raise UnknownPart(f"layer {index} has another {name}")


def fill_attention(parts: ModelParts, layer: structs.LayerStruct, attention: Any) -> None:
    """Fills the products of attention, and the norms of its heads."""
    names = children_of(attention)
    if {"q_norm", "k_norm"} <= names:
        layer.query, layer.key = norm_struct(attention.q_norm), norm_struct(attention.k_norm)
        if {attention.q_norm.norm.size, attention.k_norm.norm.size} != {parts.struct.head_size}:
            raise UnknownPart("its queries are normalized over all heads together")
        names -= {"q_norm", "k_norm"}
    if names == {"qkv", "o_proj"}:
        layer.qkv = weight_struct(attention.qkv)
    elif names == {"qkv_proj", "o_proj"}:
        layer.qkv = weight_struct(attention.qkv_proj)
    elif names == {*SPLIT_PROJECTIONS, "o_proj"}:
        joined = join([attention.get_submodule(name) for name in SPLIT_PROJECTIONS])
        parts.kept.append(joined)
        layer.qkv = joined.struct
    else:
        raise UnknownPart(f"its attention has the parts {', '.join(sorted(names))}")
    layer.out = weight_struct(attention.o_proj)


def join(products: Sequence[nn.Module]) -> WeightPanels:
    """Returns one weight with the outputs of several, which become views of it."""
    parts = [product for product in products if isinstance(product, KernelProduct)]
    weights = [part.weight for part in parts]
    sizes = [weight.out_size for weight in weights]
    if len(parts) < len(products) or any(size % PANEL for size in sizes[:-1]):
        raise UnknownPart(f"its projections have {sizes} outputs, which are no multiples of {PANEL}")
    if len({weight.format for weight in weights}) > 1:
        raise UnknownPart("its projections have different types")
    biases = [weight.bias for weight in weights]
    if len({bias is None for bias in biases}) > 1:
        raise UnknownPart("some of its projections have a bias")
    panels = torch.cat([weight.panels for weight in weights])
    bias = None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])
    start = 0
    for part, weight in zip(parts, weights):
        end = start + weight.panels.numel()
        part.weight = replace(weight, panels=panels[start:end])
        start = end
    return WeightPanels(sum(sizes), weights[0].in_size, weights[0].format, panels, bias)


def angles_of(table: nn.Module, struct: structs.ModelStruct) -> dict[str | None, list[Tensor]]:
    """Returns cosines and sines by type of layer, each [positions, size], and sets the size. Raises UnknownPart."""
    if not isinstance(table, RotaryTable):
        raise UnknownPart("its angles are in no table")
    found = {}
    for layer_type, pair in table.tables.items():
        size = pair[0].shape[-1]
        cosines, sines = (angles.view(-1, size) for angles in pair)
        halves = [(angles[:, : size // 2], angles[:, size // 2 :]) for angles in (cosines, sines)]
        if not torch.equal(*halves[0]) or not torch.equal(*(half.abs() for half in halves[1])):
            raise UnknownPart("its angles do not repeat in the second half")
        if TYPES[cosines.dtype] != struct.type or len(cosines) < struct.positions_max:
            raise UnknownPart(f"its angles are {cosines.dtype}, of {len(cosines)} positions")
        if struct.rotated_size not in (0, size):
            raise UnknownPart("its layers rotate different numbers of elements")
        struct.rotated_size = size
        found[layer_type] = [cosines, sines]
    return found


def fill_mlp(parts: ModelParts, layer: structs.LayerStruct, mlp: Any) -> None:
    """Fills the products of an MLP; one of gate and up together is seen as two."""
    names = children_of(mlp) - {*ACTIVATION_NAMES}
    layer.down = weight_struct(mlp.down_proj) if "down_proj" in names else structs.WeightStruct()
    if names == {"gate_proj", "up_proj", "down_proj"}:
        layer.gate, layer.up = weight_struct(mlp.gate_proj), weight_struct(mlp.up_proj)
    elif names == {"gate_up_proj", "down_proj"}:
        both = mlp.gate_up_proj.weight
        size = both.out_size // 2
        if size % PANEL:
            raise UnknownPart(f"its gate has {size} outputs, no multiple of {PANEL}")
        for place, number in (("gate", 0), ("up", 1)):
            bias = None if both.bias is None else both.bias.data_ptr() + 4 * size * number
            panels = both.panels.data_ptr() + both.panels.numel() // 2 * number
            setattr(layer, place, structs.WeightStruct(panels, bias, size, both.in_size, *both.format))
    else:
        raise UnknownPart(f"its MLP has the parts {', '.join(sorted(names))}")


def fill_output(struct: structs.ModelStruct, output: nn.Module | None) -> None:
    """Sets the output layer, if there is one, and what is done with its logits."""
    struct.logit_scale, struct.logit_softcap = 1.0, 0.0
    if output is None:
        return
    if not isinstance(output, OutputLayer):
        raise UnknownPart(f"its output layer is a {type(output).__name__}")
    struct.output = output.weight.struct
    struct.logit_scale, struct.logit_softcap = output.scale, output.softcap or 0.0


def fill_embedding(parts: ModelParts, base: Any, output: nn.Module | None, dtype: torch.dtype) -> None:
    """Sets the table of embeddings and their scale. A table that the output layer has too is given up for it."""
    embedding, struct = base.embed_tokens, parts.struct
    later = float(getattr(base, "embedding_multiplier", 1.0))  # not rounded to the type
    struct.embedding_scale = later
    if not isinstance(embedding, nn.Embedding):  # split over ranks
        parts.embed = lambda ids: embedding(ids) * later if later != 1 else embedding(ids)
        return
    scale = getattr(embedding, "embed_scale", None)
    if scale is not None:
        if later != 1:
            raise UnknownPart("its embeddings are scaled twice")
        scale = scale.to(embedding.weight.dtype)
        struct.embedding_scale = float(scale)
    table = table_of(embedding, struct, dtype)
    tied = PackedEmbedding(output.kernels, output.weight, dtype, scale) if isinstance(output, OutputLayer) else None
    if tied and struct.vocabulary_size <= tied.packed.out_size and holds(tied, table):
        base.embed_tokens = tied
        return
    set_table(parts, table)


def table_of(embedding: nn.Embedding, struct: structs.ModelStruct, dtype: torch.dtype) -> Tensor:
    """Returns the table of embeddings, as the call reads it. Raises UnknownPart."""
    table = embedding.weight.detach()
    if table.dtype != dtype or not table.is_contiguous() or struct.vocabulary_size > len(table):
        raise UnknownPart("its embeddings are of another type than the model")
    return table


def set_table(parts: ModelParts, table: Tensor) -> None:
    """Sets the table of embeddings."""
    parts.kept.append(table)
    parts.struct.embedding = table.data_ptr()


@torch.inference_mode()
def holds(tied: PackedEmbedding, table: Tensor) -> bool:
    """Whether the packed weight has the rows of a table, type and bits; of integers in groups, rounded to the type."""
    if tied.packed.dtype not in (table.dtype, None) or tied.packed.in_size != table.shape[1]:
        return False
    if tied.packed.out_size > len(table):
        return False
    ids = torch.arange(tied.packed.out_size)
    return all(torch.equal(tied.rows(some), table[some]) for some in ids.split(1 << 12))


def norm_struct(module: nn.Module) -> structs.NormStruct:
    """Returns the structure of a norm. Raises UnknownPart."""
    if not isinstance(module, Normalized):
        raise UnknownPart(f"it has a norm of type {type(module).__name__}")
    return module.norm.struct


def weight_struct(module: Any) -> structs.WeightStruct:
    """Returns the structure of a product's weight; of a sum over ranks that of the rank's part."""
    product = getattr(module, "linear", module)
    if not isinstance(product, KernelProduct) or isinstance(product, OutputLayer):
        raise UnknownPart(f"it has a product of type {type(product).__name__}")
    struct = structs.WeightStruct.from_buffer_copy(product.weight.struct)
    if product is not module and module.bias is not None:
        struct.bias = module.bias.data_ptr()
    return struct


def activation_of(mlp: Any) -> int:
    """Returns the number of an MLP's activation."""
    activation = next((getattr(mlp, name) for name in ACTIVATION_NAMES if hasattr(mlp, name)), None)
    if not isinstance(activation, Activation):
        raise UnknownPart(f"its activation is a {type(activation).__name__}")
    return ACTIVATIONS[activation.name]


def children_of(module: nn.Module) -> set[str]:
    """The names of a module's children, but for those that do nothing when a model serves."""
    return {name for name, child in module.named_children() if not isinstance(child, (nn.Dropout, nn.Identity))}


def expect_children(module: nn.Module, names: set[str]) -> None:
    """Raises UnknownPart unless a module has exactly these children."""
    found = children_of(module)
    if found != names:
        raise UnknownPart(f"it has the parts {', '.join(sorted(found))}")
