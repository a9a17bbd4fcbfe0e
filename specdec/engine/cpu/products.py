"""The modules of a `transformers` model that run on native kernels: products, norms, activations.

A module is recognised by its parts or by a test run, never by the architecture's name. Modules that only look up or
compute exactly stay as they are; a module of another kind is refused, since it may mix rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from specdec.engine.cpu.kernels import Kernels, Norm
from specdec.engine.loading.architectures import SUPPORTED_ACTIVATIONS
from specdec.engine.norms import norm_like
from specdec.engine.packed import PackedLinear, PackedWeight
from specdec.engine.rotary_attention import RotaryAttention, RotaryTable, has_projections, table_angles
from specdec.errors import ModelRefused


class KernelProduct(nn.Module):
    """A `Product`, x @ weight + bias; each output one running sum. weight [out, in], dense or packed, bias [out]."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None):
        super().__init__()
        weight = weight if isinstance(weight, PackedWeight) else weight.detach()
        self.weight = kernels.pack(weight, None if bias is None else bias.detach().float())
        self.kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], of the same type."""
        return self.kernels.product(self.weight, x)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.out_size, self.weight.in_size

    @property
    def byte_count(self) -> int:
        dtype, (rows, columns) = self.weight.dtype, self.shape
        return self.weight.panels.numel() if dtype is None else dtype.itemsize * rows * columns

    def take_bias(self) -> torch.Tensor | None:
        bias = self.weight.bias
        self.weight = replace(self.weight, bias=None)
        return bias

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.product(self.weight, x, torch.float32)


class OutputLayer(KernelProduct):
    """The output layer, softcap * tanh(scale * x @ weight / softcap). weight [vocab, in]."""

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor | PackedWeight,
        bias: torch.Tensor | None,
        scale: float,
        softcap: float | None,
    ):
        super().__init__(kernels, weight, bias)
        self.scale = scale
        self.softcap = softcap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, vocab] float32."""
        logits = self.product(x)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits = self.kernels.tanh(logits.div_(self.softcap)).mul_(self.softcap)
        return logits


class Normalized(nn.Module):
    """A norm of any kind of the kernels', over the last dimension."""

    def __init__(self, kernels: Kernels, norm: Norm):
        super().__init__()
        self.norm = norm
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.normalize(self.norm, x)


class Activation(nn.Module):
    """An activation by its name in `transformers`."""

    def __init__(self, kernels: Kernels, name: str):
        super().__init__()
        self.name = name
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.activate(self.name, x)


OWN_TYPES = (KernelProduct, Normalized, Activation, RotaryTable)
EXACT_TYPES = (nn.Embedding, nn.Dropout, nn.Identity)


def replace_modules(kernels: Kernels, base: nn.Module, dtype: torch.dtype, positions_max: int) -> None:
    """Replaces modules in place. Raises ModelRefused for a module not known to treat rows alone."""
    _replace_children(kernels, base, table_angles(base, positions_max, dtype))
    for name, module in base.named_modules():
        if not any(module.children()) and not isinstance(module, (*OWN_TYPES, *EXACT_TYPES)):
            raise ModelRefused(f"module {name} of type {type(module).__name__} is not supported: it may mix rows")


def _replace_children(kernels: Kernels, module: nn.Module, is_fused: bool) -> None:
    """Replaces one module after another, so that the memory of each is free before the next is read."""
    for name, child in list(module.named_children()):
        if is_fused and has_projections(child):
            child = RotaryAttention(child)
            setattr(module, name, child)
        stand_in = _stand_in(kernels, child)
        if stand_in is not None:
            setattr(module, name, stand_in)
        else:
            _replace_children(kernels, child, is_fused)


def _stand_in(kernels: Kernels, module: nn.Module) -> nn.Module | None:
    if isinstance(module, PackedLinear):
        return KernelProduct(kernels, module.read(), module.bias)
    if isinstance(module, nn.Linear):
        return KernelProduct(kernels, module.weight, module.bias)
    if isinstance(module, Conv1D):
        return KernelProduct(kernels, module.weight.t(), module.bias)
    for name in SUPPORTED_ACTIVATIONS:
        if type(module) is type(ACT2FN[name]):
            return Activation(kernels, name)
    return norm_like(module, [partial(_norm, kernels, *kind) for kind in NORM_KINDS])


NORM_KINDS = [(rounds_first, is_centered) for rounds_first in (False, True) for is_centered in (False, True)]


def _norm(
    kernels: Kernels,
    rounds_first: bool,
    is_centered: bool,
    gain: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
) -> Normalized:
    return Normalized(
        kernels, Norm(gain.float(), None if bias is None else bias.float(), epsilon, rounds_first, is_centered)
    )
