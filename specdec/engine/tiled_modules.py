"""Stand-ins for the modules of a `transformers` model whose rows would depend on their neighbours.

Matrix products run at measured widths (`row_widths`), activations over whole vector registers, and rotary attention
takes its angles from a table computed once. Everything else of the model is left as it is, and a kind of module not
known to treat rows alone is refused.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec.engine.rotary_attention import RotaryAttention, RotaryTable
from specdec.engine.row_widths import ALONE, CANDIDATE_WIDTHS, RowWidths, probe
from specdec.errors import ModelRefused

# Elementwise kernels round the elements left over at the end of a run in scalar code, which differs from vector code
# for exp and tanh; torch gives runs of up to 32768 elements to one thread whole, and 64 float32 fill any register pair.
RUN_ELEMENTS = 32768
REGISTER_ELEMENTS = 64

ACTIVATION_NAMES = ("act_fn", "act")
# Modules that treat each row alone, whatever the row count: lookups, sums along a row, exact arithmetic.
RMS_NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm")
ROTARY_ATTENTIONS = ("LlamaAttention", "Qwen2Attention")
ROWWISE_MODULES = ("Embedding", "LayerNorm", "Dropout", "RotaryTable", "FusedRMSNorm", *RMS_NORMS)


class TiledLinear(nn.Module):
    """x @ weight + bias at the widths of a family; `widths` is set once all weights of the model were probed.

    `weight` [in, out] in the type the product is computed in. The result has the type of x, or float32 where
    `is_output` says that it is the model's output layer.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, is_output: bool = False):
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else bias.detach().to(weight.dtype)
        self.is_output = is_output
        self.set_widths(RowWidths(ALONE))

    def set_widths(self, widths: RowWidths) -> None:
        """Sets the family to run at; see `probe_widths`."""
        self.widths = widths
        self._width_max = widths.widths[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., rows, in] with a row count that `widths.padded` gave."""
        rows = x if x.dtype == self.weight.dtype else x.to(self.weight.dtype)
        product = self.tile(rows) if x.shape[-2] <= self._width_max else self._tiled(rows)
        return product if product.dtype == x.dtype or self.is_output else product.to(x.dtype)

    def _tiled(self, rows: torch.Tensor) -> torch.Tensor:
        product = rows.new_empty(*rows.shape[:-1], self.weight.shape[1])
        for start, end in self.widths.tiles(rows.shape[-2]):
            product[..., start:end, :] = self.tile(rows[..., start:end, :])
        return product

    def tile(self, rows: torch.Tensor) -> torch.Tensor:
        """One tile, at whatever width it has."""
        product = torch.matmul(rows, self.weight)
        return product if self.bias is None else product.add_(self.bias)


class AlignedActivation(nn.Module):
    """An elementwise function applied to runs of whole vector registers, each run small enough for one thread."""

    def __init__(self, function: nn.Module):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.numel()
        if count <= RUN_ELEMENTS and count % REGISTER_ELEMENTS == 0:
            return self.function(x)
        flat = x.reshape(-1)
        padding = -count % REGISTER_ELEMENTS
        if padding:
            flat = nn.functional.pad(flat, (0, padding))
        runs = [self.function(run) for run in flat.split(RUN_ELEMENTS)]
        return torch.cat(runs)[:count].view(x.shape)


class FusedRMSNorm(nn.Module):
    """The float32 root-mean-square norm of `transformers`, x / sqrt(mean(x^2) + epsilon) * weight, in fewer calls."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        weight = norm.get_parameter("weight").detach()
        # The mean's division moves out of the root: x / sqrt(sum + n * epsilon) * (weight * sqrt(n)).
        self.weight = weight * math.sqrt(len(weight))
        self.epsilon = len(weight) * float(norm.variance_epsilon)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., rows, 1]
        return torch.mul(x, length.square_().add_(self.epsilon).rsqrt_()).mul_(self.weight)


def replace_modules(model: nn.Module, dtype: torch.dtype, product_dtype: torch.dtype, positions_max: int) -> None:
    """Puts the stand-ins in place, in place. Raises ModelRefused for a module not known to treat rows alone."""
    for module in list(model.modules()):
        for child_name, child in list(module.named_children()):
            if type(child).__name__ in ROTARY_ATTENTIONS:
                qkv, out = fused_projections(child, product_dtype)
                setattr(module, child_name, RotaryAttention(child, qkv, out))
            elif child_name == "rotary_emb":
                setattr(module, child_name, RotaryTable(child, positions_max, dtype))
            elif child_name in ACTIVATION_NAMES:
                setattr(module, child_name, AlignedActivation(child))
            elif type(child).__name__ in RMS_NORMS and dtype == torch.float32:
                setattr(module, child_name, FusedRMSNorm(child))
            elif isinstance(child, nn.Linear):
                weight = child.weight.detach().t().to(product_dtype)
                setattr(module, child_name, TiledLinear(weight.contiguous(), child.bias))
            elif isinstance(child, Conv1D):
                setattr(module, child_name, TiledLinear(child.weight.detach().to(product_dtype), child.bias))
    for name, module in model.named_modules():
        is_ours = isinstance(module, (TiledLinear, AlignedActivation)) or ".function" in f".{name}"
        if not is_ours and not any(module.children()) and type(module).__name__ not in ROWWISE_MODULES:
            raise ModelRefused(f"module {name} of type {type(module).__name__} is not proven to treat rows alone")


def fused_projections(attention: nn.Module, product_dtype: torch.dtype) -> tuple[TiledLinear, TiledLinear]:
    """Queries, keys and values as one product, and the output projection, of a rotary attention module."""
    parts: list[nn.Linear] = [attention.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj")]  # type: ignore
    weight = torch.cat([part.weight.detach() for part in parts]).t().to(product_dtype).contiguous()
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    out: nn.Linear = attention.get_submodule("o_proj")  # type: ignore[assignment]
    return TiledLinear(weight, bias), TiledLinear(out.weight.detach().t().to(product_dtype).contiguous(), out.bias)


def shorten_calls(model: nn.Module) -> None:
    """Makes calling and finding the modules of a finished model cheap; hooks registered on them no longer run.

    A module call passes through two Python functions that look for hooks, and finding a child through a Python
    fallback: together about a tenth of a small model's step. Each module gets a subclass of its class that is called
    directly, and its children as plain attributes.
    """
    direct: dict[type, type] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in direct:
            members = {"__call__": kind.forward, "__module__": kind.__module__}
            if kind is nn.ModuleList:  # a slice of one registers every module again
                members["__getitem__"] = lambda layers, index: list(layers)[index]
            direct[kind] = type(kind.__name__, (kind,), members)
        module.__class__ = direct[kind]
        module.__dict__.update(module._modules)
        module.__dict__.update(module._parameters)


def probe_widths(linears: list[TiledLinear]) -> RowWidths:
    """The widths all of them agree on, each distinct shape probed; width 1 alone where there are none."""
    agreed = set(CANDIDATE_WIDTHS)
    distinct = {(tuple(linear.weight.shape), linear.weight.stride()): linear for linear in linears}
    for linear in distinct.values():
        agreed &= set(probe(linear.tile, linear.weight.shape[0], linear.weight.dtype, sorted(agreed)))
    return RowWidths(tuple(sorted(agreed)) or ALONE)
