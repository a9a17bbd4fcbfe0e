"""Matrix products that a library computes: of devices and processors without kernels of their own.

The library multiplies dense weights, so packed ones are unpacked here, to the model's type.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from specdec.engine.packed import PackedLinear


class LinearProduct(nn.Module):
    """A `Product` of torch's, rounded to the type of x. weight [out, in], bias [out]. `compute`: what computes it in
    torch's place."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    compute: Callable[[LinearProduct, torch.Tensor], torch.Tensor] | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.weight.shape
        return rows, columns

    @property
    def byte_count(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], of the same type."""
        return self.by_library(x) if self.compute is None else self.compute(self, x)

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        """See `forward`."""
        return functional.linear(x, self.weight, self.bias)

    def take_bias(self) -> torch.Tensor | None:
        bias, self.bias = self.bias, None
        return None if bias is None else bias.float()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self(x)
        return found


def replace_linears(module: nn.Module, dtype: torch.dtype) -> None:
    """Replaces every library's layer of a product within a module, one after the other, so that the memory of each is
    free before the next is unpacked to this type."""
    for name, child in list(module.named_children()):
        stand_in = _stand_in(child, dtype)
        if stand_in is not None:
            setattr(module, name, stand_in)
        else:
            replace_linears(child, dtype)


def _stand_in(module: nn.Module, dtype: torch.dtype) -> LinearProduct | None:
    if isinstance(module, PackedLinear):
        return LinearProduct(module.read().dense().to(dtype), None if module.bias is None else module.bias.to(dtype))
    if isinstance(module, nn.Linear):
        return LinearProduct(module.weight, module.bias)
    if isinstance(module, Conv1D):
        return LinearProduct(module.weight.t(), module.bias)
    return None
