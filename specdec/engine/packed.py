"""Packed weights: integers of 4 or 8 bits, or FP8, in groups along the input, each with a scale and perhaps a minimum.

What a number means is `PackedWeight.dense`, and nothing else: a product of a packed weight is that of its dense one in
float32. Readers of formats make these, one weight at a time; a backend multiplies them packed, or unpacks them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn
GROUP_STEP = 8  # groups are multiples of it: no 32-bit word of 4 bits belongs to two


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [out, in] = scales * values, or scales * values + minima, each of its group, rounded once to float32.

    bits: 4 or 8; of FP8 8.
    group: inputs of one scale, a multiple of 8 that divides `in`: 32 of Q4_0, Q4_1 and Q8_0; 64, 128 or `in` of
        compressed-tensors.
    values: [out, in], one integer an element, whatever it is stored as: int8 in [-2^(bits - 1), 2^(bits - 1)) without
        minima, uint8 in [0, 2^bits) with them. They take twice the bytes of 4 bits: make one weight, give it away. Or
        float8_e4m3fn without minima, numbers all.
    scales: [out, in / group], of the type that the format stores: float32, bfloat16 or float16.
    minima: [out, in / group] of such a type, of its own; those of an integer zero point are -scale * zero in float32.
        With them scales have 16 bits, or those of 4 bits 20 significant ones in float32, so that scale * value is
        exact and their sum has one rounding.

    Raises ValueError that names field, value and limit.
    """

    bits: int
    group: int
    values: Tensor = field(repr=False)
    scales: Tensor = field(repr=False)
    minima: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits}; it must be 4 or 8")
        if self.values.dim() != 2 or not self.values.numel():
            raise ValueError(f"values.shape is {list(self.values.shape)}; it must be [out, in], each of at least one")
        if self.group < 1 or self.group % GROUP_STEP or self.in_size % self.group:
            limit = f"a multiple of {GROUP_STEP} that divides {self.in_size}, the inputs"
            raise ValueError(f"group is {self.group}; it must be {limit}")
        self._check_values()
        takes_float32 = self.minima is None or self.bits == 4
        self._check_groups("scales", self.scales, SCALE_TYPES if takes_float32 else SCALE_TYPES[1:])
        if self.minima is not None:
            self._check_groups("minima", self.minima, SCALE_TYPES)
            if self.scales.dtype is torch.float32 and (self.scales.contiguous().view(torch.int32) & 15).any():
                raise ValueError("scales have more than 20 significant bits; with minima they must have 20 at most")

    def _check_values(self) -> None:
        if self.is_float:
            if self.bits != 8:
                raise ValueError(f"bits is {self.bits}; it must be 8 of {FLOAT8}")
            if self.minima is not None:
                raise ValueError(f"minima is a tensor; it must be None beside values of {FLOAT8}")
            if self.values.isnan().any():
                raise ValueError("values are nan at some places; they must be numbers")
            return
        dtype = torch.int8 if self.minima is None else torch.uint8
        if self.values.dtype is not dtype:
            raise ValueError(f"values.dtype is {self.values.dtype}; it must be {dtype}")
        low, high = (int(limit) for limit in self.values.aminmax())
        least = -(2 ** (self.bits - 1)) if self.minima is None else 0
        if low < least or high >= least + 2**self.bits:
            limit = f"in [{least}, {least + 2**self.bits})"
            raise ValueError(f"values are from {low} to {high}; they must be {limit}")

    def _check_groups(self, name: str, numbers: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        shape = [self.out_size, self.in_size // self.group]
        if numbers.dtype not in dtypes:
            limit = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(f"{name}.dtype is {numbers.dtype}; it must be {limit}")
        if list(numbers.shape) != shape:
            raise ValueError(f"{name}.shape is {list(numbers.shape)}; it must be {shape}")

    @property
    def is_float(self) -> bool:
        """Whether its values are FP8."""
        return self.values.dtype is FLOAT8

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def out_size(self) -> int:
        return self.values.shape[0]

    @property
    def in_size(self) -> int:
        return self.values.shape[1]

    def dense(self) -> Tensor:
        """Returns the weight itself.  # [out, in] float32"""
        groups = self.values.reshape(self.out_size, -1, self.group).to(torch.float32)
        found = groups.mul_(self.scales.to(torch.float32)[:, :, None])
        if self.minima is not None:
            found.add_(self.minima.to(torch.float32)[:, :, None])
        return found.view(self.out_size, self.in_size)

    def chosen(self, outputs: Tensor | slice) -> PackedWeight:
        """Returns the weight of some outputs: their indices, or the slice of them."""
        minima = None if self.minima is None else self.minima[outputs]
        return replace(self, values=self.values[outputs], scales=self.scales[outputs], minima=minima)


class PackedLinear(nn.Module):
    """A linear layer in place of nn.Linear until a backend takes it: x @ weight.T + bias, bias [out]. `read` returns
    the weight, anew each time: a weight as it is read takes more memory than one that is laid out for products."""

    def __init__(self, shape: tuple[int, int], read: Callable[[], PackedWeight], bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = shape
        self.read = read
        self.bias = bias
