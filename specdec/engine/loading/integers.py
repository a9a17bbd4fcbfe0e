"""Integers of a stored weight, in groups along the input, as they are after their words are taken apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.packed import GROUP_STEP, PackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class Integers:
    """A weight [out, in] = scale * (value - zero point), the product rounded once to float32.

    bits: 4 or 8.
    values: [out, in] int8 in [-2^(bits - 1), 2^(bits - 1)).
    scales: [out, groups], of the type that the format stores.
    zeros: [out, groups] float32, whole numbers counted as the values are; None: all are 0.
    """

    bits: int
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def dense(self) -> Tensor:
        """Returns the weight.  # [out, in] float32"""
        rows, width = self.values.shape
        found = self.values.to(torch.float32).view(rows, self.scales.shape[1], -1)
        if self.zeros is not None:
            found -= self.zeros[:, :, None]
        found *= self.scales.to(torch.float32)[:, :, None]
        return found.view(rows, width)

    def packed(self) -> PackedWeight | None:
        """Returns the weight with minima of -scale * zero point; None if no `PackedWeight` holds it."""
        group = self.values.shape[1] // self.scales.shape[1]
        if group % GROUP_STEP or (self.zeros is not None and self.scales.dtype is torch.float32):
            return None
        if self.zeros is None:
            return PackedWeight(self.bits, group, self.values, self.scales)
        low = 1 << (self.bits - 1)
        minima = -self.scales.to(torch.float32) * (self.zeros + low)
        return PackedWeight(self.bits, group, (self.values.to(torch.int16) + low).to(torch.uint8), self.scales, minima)


def unpacked_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Returns the `count` integers of each row of 32-bit words, the first in the lowest bits, less 2^(bits - 1).
    # [rows, count] int8"""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return (values.view(len(words), -1)[:, :count] - (1 << (bits - 1))).to(torch.int8)
