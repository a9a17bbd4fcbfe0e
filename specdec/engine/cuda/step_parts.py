"""The parts of a model of the Llama family that a step of our own kernels takes, read from its modules.

A model is known by the parts of its modules as `modules.replace_modules` leaves them, never by its architecture's name.
Weights are used as they are, but for two of a layer whose rows kernels take in pairs: `alternate` exchanges them in the
modules themselves, so that they are in memory once, and `restore` brings them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec.engine.attention import AttentionShape, ScoreRule
from specdec.engine.cuda.kernels.configs import ROWS
from specdec.engine.cuda.kernels.products import Activation, alternated
from specdec.engine.cuda.modules import DeviceOutput, DeviceRMSNorm, JoinedMLP
from specdec.engine.linears import LinearProduct
from specdec.engine.rotary_attention import ROTARY_NAME, RotaryAttention, RotaryTable

# The norms of a layer: by the names of its children, those before and after attention, before and after the MLP.
LAYER_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class UnknownPart(Exception):
    """A model has a part that a step of our own kernels does not know."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer. `qkv` returns all query heads, then keys, then values; `gate_up` the gates, then as many ups.

    `cosines` and `sines` [positions, head size / 2]. `head_norms`: of queries and of keys, of one epsilon. Norms after
    a product are None where there are none.
    """

    rule: ScoreRule
    cosines: Tensor
    sines: Tensor
    before_attention: DeviceRMSNorm
    after_attention: DeviceRMSNorm | None
    before_mlp: DeviceRMSNorm
    after_mlp: DeviceRMSNorm | None
    head_norms: tuple[DeviceRMSNorm, DeviceRMSNorm] | None
    qkv: LinearProduct
    out: LinearProduct
    gate_up: LinearProduct
    down: LinearProduct
    activation: Activation


@dataclass(slots=True)
class ModelParts:
    """A model: `table` [ids, hidden], its rows times `scale`; `head` [vocab, hidden], of the same 16-bit type."""

    shape: AttentionShape
    table: Tensor
    scale: float
    layers: Sequence[LayerParts]
    norm: DeviceRMSNorm
    head: Tensor
    output: DeviceOutput

    @property
    def is_rotated_in_product(self) -> bool:
        """Whether one kernel rotates in the product: a tile of it lies in one head, and no head is normalized."""
        return self.shape.head_size % ROWS == 0 and all(layer.head_norms is None for layer in self.layers)

    def alternate(self) -> None:
        """Exchanges the rows of gates and ups, and those of the halves of heads, in place: modules no longer work."""
        self._exchange(alternated)

    def restore(self) -> None:
        """Undoes `alternate`."""
        self._exchange(restored)

    def _exchange(self, order: Callable[[Tensor, int], Tensor]) -> None:
        for layer in self.layers:
            pairs = [(layer.gate_up, len(layer.gate_up.weight))]
            if self.is_rotated_in_product:
                pairs.append((layer.qkv, self.shape.head_size))
            for product, size in pairs:
                product.weight = order(product.weight, size)
                product.bias = None if product.bias is None else order(product.bias, size)


def restored(weight: Tensor, size: int) -> Tensor:
    """Returns the rows of an `alternated` weight or bias in their own order."""
    groups: Tensor = weight.unflatten(0, (-1, size // 2, 2))
    return groups.transpose(1, 2).reshape(weight.shape).contiguous()


def model_parts(base: nn.Module, output: nn.Module, shape: AttentionShape, dtype: torch.dtype) -> ModelParts:
    """Returns the parts of a model whose modules are replaced. Raises UnknownPart."""
    expect(children_of(base) == {"embed_tokens", "layers", "norm", ROTARY_NAME}, "it", base)
    its: Any = base
    rotary, output = its.rotary_emb, whole_output(output)
    if not (isinstance(rotary, RotaryTable) and rotary.is_for_stand_ins):
        raise UnknownPart("its attention runs as transformers has it")
    layers = []
    for index, module in enumerate(its.layers):
        kind = None if None in rotary.tables else its.config.layer_types[index]
        layers.append(layer_parts(module, rotary.tables[kind], dtype))
    table, scale = embedding_of(base, dtype)
    head = output.weight.t().to(dtype).contiguous()
    return ModelParts(shape, table, scale, layers, norm_of(its.norm), head, output)


def layer_parts(module: Any, angles: tuple[Tensor, Tensor], dtype: torch.dtype) -> LayerParts:
    """Returns the parts of a layer; `angles`: as in `RotaryTable`. Raises UnknownPart."""
    names = children_of(module)
    places = next((each for each in LAYER_NORMS if {*each, "self_attn", "mlp"} - {None} == names), None)
    if places is None:
        raise UnknownPart(f"a layer has the parts {', '.join(sorted(names))}")
    if getattr(module, "residual_multiplier", 1.0) != 1.0:
        raise UnknownPart("what a layer adds is scaled")
    attention, mlp = module.self_attn, module.mlp
    expect(isinstance(attention, RotaryAttention), "its attention", attention)
    expect(isinstance(mlp, JoinedMLP), "its MLP", mlp)
    head_norms = None
    if attention.has_head_norms:
        head_norms = norm_of(attention.q_norm), norm_of(attention.k_norm)
        if head_norms[0].epsilon != head_norms[1].epsilon:
            raise UnknownPart("its norms of heads have two epsilons")
    norms = [None if name is None else norm_of(module.get_submodule(name)) for name in places]
    before, after, before_mlp, after_mlp = norms
    assert before is not None and before_mlp is not None
    half = attention.head_size // 2
    cosines, sines = angles  # the sines of the first half are negated
    qkv, out, gate_up, down = (
        product_of(each, dtype) for each in (attention.qkv, attention.o_proj, mlp.gate_up, mlp.down_proj)
    )
    return LayerParts(
        rule=attention.rule,
        cosines=cosines[:, 0, :half].contiguous(),
        sines=sines[:, 0, half:].contiguous(),
        before_attention=before,
        after_attention=after,
        before_mlp=before_mlp,
        after_mlp=after_mlp,
        head_norms=head_norms,
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
        activation=activation_of(mlp.act_fn),
    )


def embedding_of(base: Any, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Returns the table of embeddings and what its rows are multiplied by. Raises UnknownPart."""
    embedding = base.embed_tokens
    expect(isinstance(embedding, nn.Embedding) and embedding.weight.dtype == dtype, "its embedding", embedding)
    if getattr(base, "embedding_multiplier", 1.0) != 1.0:
        raise UnknownPart("its embeddings are scaled behind their module")
    scale = getattr(embedding, "embed_scale", None)
    return embedding.weight.detach(), 1.0 if scale is None else float(scale.to(dtype))


def whole_output(module: nn.Module) -> DeviceOutput:
    """Returns an output layer. Raises UnknownPart."""
    expect(isinstance(module, DeviceOutput), "its output layer", module)
    return cast(DeviceOutput, module)


def norm_of(module: nn.Module) -> DeviceRMSNorm:
    """Returns a norm. Raises UnknownPart."""
    expect(isinstance(module, DeviceRMSNorm), "a norm", module)
    return cast(DeviceRMSNorm, module)


def product_of(module: nn.Module, dtype: torch.dtype) -> LinearProduct:
    """Returns a product. Raises UnknownPart."""
    expect(isinstance(module, LinearProduct) and module.weight.dtype == dtype, "a product", module)
    return cast(LinearProduct, module)


@torch.inference_mode()
def activation_of(module: nn.Module) -> Activation:
    """Returns the name of an activation, by its values. Raises UnknownPart."""
    x = torch.linspace(-8, 8, 257)
    found = [name for name, known in ACTIVATIONS.items() if torch.allclose(module(x), known(x), atol=1e-5)]
    expect(bool(found), "its activation", module)
    return found[0]


def children_of(module: nn.Module) -> set[str]:
    """The names of a module's children, but for those that do nothing when a model serves."""
    return {name for name, child in module.named_children() if not isinstance(child, (nn.Dropout, nn.Identity))}


def expect(is_known: bool, what: str, module: nn.Module) -> None:
    """Raises UnknownPart, with the module's class and children, unless the part is known."""
    if not is_known:
        parts = ", ".join(sorted(children_of(module)))
        raise UnknownPart(f"{what} is a {type(module).__name__}" + (f" of {parts}" if parts else ""))
