"""Stand-ins for the modules of a `transformers` model whose rows would depend on their neighbours.

Matrix products run at measured widths (`row_widths`), activations over whole vector registers, and rotary attention
takes its angles from a table computed once. Modules are known by what they are built from, or tried, never by the
architecture's name. Everything else of the model is left as it is, and a kind of module not known to treat rows alone
is refused.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec.engine.rotary_attention import RotaryAttention, RotaryTable, has_projections, table_angles
from specdec.engine.row_widths import ALONE, CANDIDATE_WIDTHS, AlignedActivation, RowWidths, aligned, cancelling, probe
from specdec.errors import ModelRefused

ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")
# Lookups, sums along a row, exact arithmetic: alike for every row.
ROWWISE_TYPES = (nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, RotaryTable)
NORM_TOLERANCE = 1e-4


class TiledLinear(nn.Module):
    """x @ weight + bias at the widths of a family; `widths` is set once all weights of the model were probed.

    `weight` [in, out] in the type the product is computed in. The result has the type of x.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else bias.detach().to(weight.dtype)
        self.set_widths(RowWidths(ALONE))

    def set_widths(self, widths: RowWidths) -> None:
        """Sets the family to run at; see `probe_widths`."""
        self.widths = widths
        self._width_max = widths.widths[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., rows, in] with a row count that `widths.padded` gave."""
        product = self.product(x)
        return product if product.dtype == x.dtype else product.to(x.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The result in the type of the weight."""
        rows = x if x.dtype == self.weight.dtype else x.to(self.weight.dtype)
        rows = rows.reshape(-1, rows.shape[-1])  # the library multiplies more dimensions slowly by strided weights
        if len(rows) <= self._width_max:
            return self.tile(rows).view(*x.shape[:-1], -1)
        product = rows.new_empty(len(rows), self.weight.shape[1])
        for start, end in self.widths.tiles(len(rows)):
            product[start:end] = self.tile(rows[start:end])
        return product.view(*x.shape[:-1], -1)

    def tile(self, rows: torch.Tensor) -> torch.Tensor:
        """One tile, at whatever width it has."""
        product = torch.matmul(rows, self.weight)
        return product if self.bias is None else product.add_(self.bias)


class OutputLayer(TiledLinear):
    """The last product and what a model makes of it, in float32: softcap * tanh(scale * x @ weight / softcap)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float | None):
        super().__init__(weight, bias)
        self.scale = scale
        self.softcap = softcap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, vocab] float32."""
        logits = self.product(x)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits = aligned(torch.tanh, logits.div_(self.softcap)).mul_(self.softcap)
        return logits


class FusedRMSNorm(nn.Module):
    """A float32 root-mean-square norm, x / sqrt(mean(x^2) + epsilon) * gain, in fewer calls."""

    def __init__(self, gain: torch.Tensor, epsilon: float):
        super().__init__()
        # The mean's division moves out of the root: x / sqrt(sum + n * epsilon) * (gain * sqrt(n)).
        self.weight = gain * math.sqrt(len(gain))
        self.epsilon = len(gain) * epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., rows, 1]
        return torch.mul(x, length.square_().add_(self.epsilon).rsqrt_()).mul_(self.weight)


def replace_modules(base: nn.Module, dtype: torch.dtype, product_dtype: torch.dtype, positions_max: int) -> None:
    """Puts the stand-ins in place, in place. Raises ModelRefused for a module not known to treat rows alone."""
    is_fused = table_angles(base, positions_max, dtype)
    _replace_children(base, is_fused, dtype, product_dtype)
    for name, module in base.named_modules():
        is_ours = isinstance(module, (TiledLinear, FusedRMSNorm, AlignedActivation)) or ".function" in f".{name}"
        if not is_ours and not any(module.children()) and not treats_rows_alone(module):
            raise ModelRefused(f"module {name} of type {type(module).__name__} is not proven to treat rows alone")


def _replace_children(module: nn.Module, is_fused: bool, dtype: torch.dtype, product_dtype: torch.dtype) -> None:
    """Replaces one module after another, so that what a replaced one held is free before the next is read."""
    for name, child in list(module.named_children()):
        if is_fused and has_projections(child):
            child = RotaryAttention(child)
            setattr(module, name, child)
        stand_in = _stand_in(child, dtype, product_dtype)
        if stand_in is not None:
            setattr(module, name, stand_in)
        else:
            _replace_children(child, is_fused, dtype, product_dtype)


def _stand_in(module: nn.Module, dtype: torch.dtype, product_dtype: torch.dtype) -> nn.Module | None:
    if isinstance(module, nn.Linear):
        return TiledLinear(_as_multiplied(module.weight.detach().to(product_dtype)), module.bias)
    if isinstance(module, Conv1D):
        return TiledLinear(module.weight.detach().to(product_dtype), module.bias)
    if type(module).__module__ in ACTIVATION_MODULES:
        return AlignedActivation(module)
    if dtype == torch.float32 and not isinstance(module, ROWWISE_TYPES):
        return norm_like(module, FusedRMSNorm, is_near)
    return None


def _as_multiplied(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] as [in, out], in the memory order whose products are fast and agree at small widths.

    Measured with AVX-512 and AMX: float32 is best turned; in bfloat16 turned weights of some shapes have families that
    begin at 24 rows, and as they are stored all begin at 4.
    """
    return weight.contiguous().t() if weight.dtype == torch.bfloat16 else weight.t().contiguous()


def norm_like(
    module: nn.Module,
    kind: Callable[[torch.Tensor, float], nn.Module],
    agrees: Callable[[torch.Tensor, torch.Tensor], bool],
) -> nn.Module | None:
    """A norm of a kind where a module, tried on random rows, is one with gain `weight` or 1 + `weight`, or None."""
    weight = module._parameters.get("weight")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or len(module._parameters) != 1 or not isinstance(epsilon, float):
        return None
    rows = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    expected = module(rows)
    for gain in (weight.detach(), 1 + weight.detach().float()):  # a sum near 1 would lose its weight in 16 bits
        norm = kind(gain, epsilon)
        if agrees(norm(rows), expected):
            return norm
    return None


def is_near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two results of a float32 norm are one but for roundings."""
    return torch.allclose(ours, theirs, NORM_TOLERANCE, NORM_TOLERANCE)


def treats_rows_alone(module: nn.Module) -> bool:
    """Whether a module without children gives a row the same bits whatever rows are beside it, at every width.

    Kinds that are known do; a norm of a kind that is not known is tried, in float32 too, where no rounding hides in
    which order it added.
    """
    if isinstance(module, ROWWISE_TYPES):
        return True
    weight = module._parameters.get("weight")
    if weight is None or not type(module).__name__.endswith("Norm"):
        return False

    def is_alike(dtype: torch.dtype) -> bool:
        tried = copy.deepcopy(module).to(dtype)

        def norm(rows: torch.Tensor) -> torch.Tensor:
            normed: torch.Tensor = tried(rows.view(-1, *weight.shape))
            return normed.flatten(1)

        return probe(norm, weight.numel(), dtype, CANDIDATE_WIDTHS) == CANDIDATE_WIDTHS

    return all(is_alike(dtype) for dtype in {weight.dtype, torch.float32})


def shorten_calls(model: nn.Module) -> None:
    """Makes calling and finding the modules of a finished model cheap; hooks registered on them no longer run.

    A module call passes through two Python functions that look for hooks, the library's decorators around it, which
    look for settings that are not used here, and finding a child through a Python fallback: together a quarter of a
    small model's step. Each module gets a subclass of its class that is called directly, and its children as plain
    attributes.
    """
    direct: dict[type, type] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in direct:
            members = {"__call__": inspect.unwrap(kind.forward), "__module__": kind.__module__}
            if kind is nn.ModuleList:  # a slice of one registers every module again
                members["__getitem__"] = lambda layers, index: list(layers)[index]
            direct[kind] = type(kind.__name__, (kind,), members)
        module.__class__ = direct[kind]
        module.__dict__.update(module._modules)
        module.__dict__.update(module._parameters)


def probe_widths(linears: list[TiledLinear]) -> RowWidths:
    """The widths all of them agree on, each distinct shape probed; width 1 alone where there are none."""
    agreed = set(CANDIDATE_WIDTHS)
    distinct: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], TiledLinear] = {}
    for linear in linears:
        distinct.setdefault((linear.weight.shape, linear.weight.stride(), linear.weight.dtype), linear)
    for (shape, _, dtype), linear in distinct.items():
        rows = None
        if dtype != torch.float32:
            weight, rows = cancelling(linear.weight)
            linear = TiledLinear(weight, None)
        agreed &= set(probe(linear.tile, shape[0], dtype, sorted(agreed), rows))
    return RowWidths(tuple(sorted(agreed)) or ALONE)
