"""Replacements for the modules of a `transformers` model whose rows would depend on their neighbours.

Matrix products run at stable tile sizes (`tile_sizes`), activations over whole vector registers, and rotary attention
reads its angles from a table computed once. Modules are recognised by their parts or by a test run, never by the
architecture's name. All other modules stay unchanged, and a module type not known to treat rows alone is refused.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable
from types import FunctionType, SimpleNamespace
from typing import TypeAlias

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec.engine.rotary_attention import RotaryAttention, RotaryTable, has_projections, table_angles
from specdec.engine.tile_sizes import (
    ALONE,
    CANDIDATE_WIDTHS,
    PROBE_ROW_COUNT,
    AlignedActivation,
    TileSizes,
    aligned,
    cancelling,
    probe,
    probe_rows,
)
from specdec.errors import ModelRefused

ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")
# Lookups, sums along a row, exact arithmetic: alike for every row.
ROWWISE_TYPES = (nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, RotaryTable)
NORM_TOLERANCE = 1e-4

# A float32 weight below this size is multiplied as it is: setting up a packed product costs 10 to 15 us, which a small
# one does not save. In bfloat16 packed products of every size are faster (1 to 64 rows, AVX-512 BF16).
PACKED_ELEMENTS_MIN = 1 << 18
FEW_ROWS = 8  # up to here a small draft's float32 products are faster than bfloat16 ones, which cost 15 us to set up
PACKED_ROWS = 16  # the library chooses a layout by a number of rows; those for 4 to 64 rows were equally fast

HeldWeight: TypeAlias = Callable[[torch.Tensor], "Weight"]
Layout: TypeAlias = tuple[int, int, torch.dtype, bool]  # in, out, type of a weight; whether it is packed


class Weight:
    """A weight [out, in] in the memory order that the library multiplies fastest; the given tensor is not kept.

    The library's products of few rows rearrange a plain weight in every call, which takes longer than reading it. So a
    weight is packed once, where the library can: 2 times as fast for 1 to 16 rows in bfloat16, 3 times for a large
    float32 output layer. `many_dtype`: of products of more than FEW_ROWS rows, if another type is faster for these.
    """

    def __init__(self, weight: torch.Tensor, many_dtype: torch.dtype | None = None):
        self.out_size, self.in_size = weight.shape
        self.dtype = weight.dtype
        packed = _packed(weight)
        self.is_packed = packed is not None
        self._held = _as_multiplied(weight) if packed is None else packed
        self._many = Weight(weight.to(many_dtype)) if many_dtype not in (None, weight.dtype) else None

    @property
    def has_kernels(self) -> bool:
        """Whether the library makes a kernel for each number of rows."""
        return self.is_packed or self._many is not None

    @property
    def byte_count(self) -> int:
        return self.in_size * self.out_size * self.dtype.itemsize

    @property
    def layout(self) -> Layout:
        """The properties by which the library picks a kernel."""
        return self.in_size, self.out_size, self.dtype, self.is_packed

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [rows, in] in the type of the weight -> [rows, out]."""
        if self._many is not None and rows.shape[0] > FEW_ROWS:
            return self._many.multiply(rows.to(self._many.dtype)).to(rows.dtype)
        if self.is_packed:
            return _multiply_packed(rows, self._held)
        return torch.matmul(rows, self._held)


def _packed(weight: torch.Tensor) -> torch.Tensor | None:
    """A weight [out, in] packed by oneDNN; None if it is small, or the library cannot pack or multiply it here."""
    if weight.dtype != torch.bfloat16 and weight.numel() < PACKED_ELEMENTS_MIN:
        return None
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)
        _multiply_packed(weight.new_zeros(PACKED_ROWS, weight.shape[1]), packed)
    except (AttributeError, RuntimeError):
        return None
    return packed


def _multiply_packed(rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, packed, None, "none", [], "")
    return product


def _as_multiplied(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight [out, in] as [in, out], in the memory order with fast products and small stable tile sizes.

    Measured with AVX-512 and AMX: float32 is fastest transposed; in bfloat16 the stable tile sizes of transposed
    weights begin at 24 rows for some shapes, those of weights as stored begin at 4 for all.
    """
    return weight.contiguous().t() if weight.dtype == torch.bfloat16 else weight.t().contiguous()


# Of rows whose bits decide no text. For every number of rows oneDNN makes a kernel, in 1 to 16 ms, and keeps some
# 600 kB of it: a draft, whose prompts have any number of rows, multiplies by packed weights at these numbers only.
FREE_WIDTHS = TileSizes((*range(1, 9), 16, 32, 64, 128, 256, 512), row_multiple=1)


class TiledLinear(nn.Module):
    """x @ weight + bias at stable tile sizes; `widths` is set once all weights of the model were probed.

    `weight` in the type of the product. The result has the type of x.
    """

    def __init__(self, weight: Weight, bias: torch.Tensor | None):
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else bias.detach().to(weight.dtype)
        self.set_widths(TileSizes(ALONE))

    def set_widths(self, widths: TileSizes) -> None:
        """Sets the stable tile sizes; see `probe_widths`."""
        self.widths = widths
        self._width_max = widths.widths[-1]
        self._is_padding = widths is FREE_WIDTHS and self.weight.has_kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., rows, in]; the row count is a result of `widths.padded`, or any with FREE_WIDTHS."""
        product = self.product(x)
        return product if product.dtype == x.dtype else product.to(x.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the result in the type of the weight."""
        rows = x if x.dtype == self.weight.dtype else x.to(self.weight.dtype)
        rows = rows.reshape(-1, rows.shape[-1])  # the library multiplies more dimensions slowly by strided weights
        count = rows.shape[0]
        if self._is_padding and (padded := self.widths.padded(count)) > count:
            rows = nn.functional.pad(rows, (0, 0, 0, padded - count))
        row_count = rows.shape[0]
        if row_count <= self._width_max:
            product = self.tile(rows)
        else:
            product = rows.new_empty(row_count, self.weight.out_size)
            for start, end in self.widths.tiles(row_count):
                product[start:end] = self.tile(rows[start:end])
        if row_count > count:
            product = product[:count]
        return product.view(*x.shape[:-1], -1)

    def tile(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the product of one tile, of any width."""
        product = self.weight.multiply(rows)
        return product if self.bias is None else product.add_(self.bias)


class OutputLayer(TiledLinear):
    """The output layer with scale and softcap, returned as float32: softcap * tanh(scale * x @ weight / softcap)."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None, scale: float, softcap: float | None):
        super().__init__(weight, bias)
        self.scale = scale
        self.softcap = softcap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, vocab] float32."""
        logits = self.product(x).float()
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


def replace_modules(
    base: nn.Module,
    dtype: torch.dtype,
    product_dtype: torch.dtype,
    positions_max: int,
    many_dtype: torch.dtype | None = None,
) -> None:
    """Replaces modules in place; `many_dtype` as of `Weight`. Raises ModelRefused for a module not known to treat rows
    alone."""
    is_fused = table_angles(base, positions_max, dtype)
    _replace_children(base, is_fused, dtype, lambda weight: Weight(weight.detach().to(product_dtype), many_dtype))
    alone: set[tuple[object, ...]] = set()  # kinds that passed: a model repeats its norms in every layer
    for name, module in base.named_modules():
        is_ours = isinstance(module, (TiledLinear, FusedRMSNorm, AlignedActivation)) or ".function" in f".{name}"
        if is_ours or any(module.children()) or _kind_of(module) in alone:
            continue
        if treats_rows_alone(module):
            alone.add(_kind_of(module))
        else:
            raise ModelRefused(f"module {name} of type {type(module).__name__} is not supported: it may mix rows")


def _kind_of(module: nn.Module) -> tuple[object, ...]:
    """The class of a module, its settings, and the shapes and types of its parameters."""
    settings = [item for item in vars(module).items() if isinstance(item[1], bool | int | float | str | tuple)]
    parameters = [(name, tuple(own.shape), own.dtype) for name, own in module.named_parameters()]
    return type(module), repr(module), *sorted(settings), *parameters


def _replace_children(module: nn.Module, is_fused: bool, dtype: torch.dtype, held: HeldWeight) -> None:
    """Replaces one module after another, so that the memory of each is free before the next is read."""
    for name, child in list(module.named_children()):
        if is_fused and has_projections(child):
            child = RotaryAttention(child)
            setattr(module, name, child)
        stand_in = _stand_in(child, dtype, held)
        if stand_in is not None:
            setattr(module, name, stand_in)
        else:
            _replace_children(child, is_fused, dtype, held)


def _stand_in(module: nn.Module, dtype: torch.dtype, held: HeldWeight) -> nn.Module | None:
    if isinstance(module, nn.Linear):
        return TiledLinear(held(module.weight), module.bias)
    if isinstance(module, Conv1D):
        return TiledLinear(held(module.weight.t()), module.bias)
    if type(module).__module__ in ACTIVATION_MODULES:
        return AlignedActivation(module)
    if dtype == torch.float32 and not isinstance(module, ROWWISE_TYPES):
        return norm_like(module, FusedRMSNorm, is_near)
    return None


def norm_like(
    module: nn.Module,
    kind: Callable[[torch.Tensor, float], nn.Module],
    agrees: Callable[[torch.Tensor, torch.Tensor], bool],
) -> nn.Module | None:
    """Returns a norm that agrees with a module on random rows, its gain `weight` or 1 + `weight`; or None."""
    weight = module._parameters.get("weight")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or len(module._parameters) != 1 or not isinstance(epsilon, float):
        return None
    rows = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    expected = module(rows)
    for gain in (weight.detach(), 1 + weight.detach().float()):  # in 16 bits the sum would round the weight away
        norm = kind(gain, epsilon)
        if agrees(norm(rows), expected):
            return norm
    return None


def is_near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two results of a float32 norm agree up to roundings."""
    return torch.allclose(ours, theirs, NORM_TOLERANCE, NORM_TOLERANCE)


def treats_rows_alone(module: nn.Module) -> bool:
    """Whether a module without children gives a row the same bits in every batch, at every width.

    Known types do; a norm of an unknown type is tried, in float32 too, where no rounding hides the order of additions.
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
    """Shortens calls and attribute lookups of a finished model's modules; hooks registered on them no longer run.

    A module call passes through two Python functions for hooks and the library's decorators for settings that are
    unused here, and a child is found through a Python fallback: together a quarter of a small model's step. Each module
    gets a subclass of its class that is called directly, and its children as plain attributes.
    """
    direct: dict[type, type] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in direct:
            members = {"__call__": without_masks(inspect.unwrap(kind.forward)), "__module__": kind.__module__}
            if kind is nn.ModuleList:  # a slice of one registers every module again
                members["__getitem__"] = lambda layers, index: list(layers)[index]
            direct[kind] = type(kind.__name__, (kind,), members)
        module.__class__ = direct[kind]
        module.__dict__.update(module._modules)
        module.__dict__.update(module._parameters)


def without_masks(forward: FunctionType) -> FunctionType:
    """Returns a forward whose masks are None, as they are for every registered attention, and whose result is plain.

    The library finds out in every call that it makes none: 20 us, with the class of its result.
    """
    names = forward.__code__.co_names
    own: dict[str, object] = {name: _no_mask for name in names if name.startswith("create_") and name.endswith("_mask")}
    own |= {name: SimpleNamespace for name in names if own and name.startswith("BaseModelOutput")}
    if not own:
        return forward
    parts = forward.__name__, forward.__defaults__, forward.__closure__
    made = FunctionType(forward.__code__, forward.__globals__ | own, *parts)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _no_mask(**_: object) -> None:
    """In place of the library's functions that create masks."""


def distinct_shapes(linears: Iterable[TiledLinear]) -> dict[Layout, TiledLinear]:
    """One linear of every layout among them: the library picks kernels by it."""
    distinct: dict[Layout, TiledLinear] = {}
    for linear in linears:
        distinct.setdefault(linear.weight.layout, linear)
    return distinct


def probe_widths(
    linears: Iterable[TiledLinear], widths: Iterable[int] = CANDIDATE_WIDTHS, row_count: int = PROBE_ROW_COUNT
) -> TileSizes:
    """Returns those of `widths` that are stable for all linears, each distinct layout probed with `row_count` rows, at
    most 3; width 1 if there are none."""
    agreed = set(widths)
    for (in_size, out_size, dtype, _), linear in distinct_shapes(linears).items():
        if dtype == torch.float32:
            rows = probe_rows(in_size, dtype)
        else:
            weight, rows = cancelling(in_size, out_size, dtype)
            linear = TiledLinear(Weight(weight), None)
        agreed &= set(probe(linear.tile, in_size, dtype, sorted(agreed), rows[:row_count]))
    return TileSizes(tuple(sorted(agreed)) or ALONE)
