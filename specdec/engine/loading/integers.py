"""Integers of a stored weight, in groups along the input, as they are after their words are taken apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.engine.loading.stored import StoredTensor
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

    def packed(self) -> PackedWeight:
        """Returns the weight with minima of -scale * zero point, if `is_packable`."""
        group = self.values.shape[1] // self.scales.shape[1]
        if self.zeros is None:
            return PackedWeight(self.bits, group, self.values, self.scales)
        low = 1 << (self.bits - 1)
        minima = -self.scales.to(torch.float32) * (self.zeros + low)
        shifted = (self.values.to(torch.int16) + low).to(torch.uint8)
        return PackedWeight(self.bits, group, shifted, self.scales, minima)


def is_packable(group: int, scales: StoredTensor, has_zeros: bool) -> bool:
    """Whether `PackedWeight` holds integers with these scales, one for `group` inputs: those with zero points need
    scales of 16 bits."""
    return group % GROUP_STEP == 0 and not (has_zeros and scales.dtype == "F32")


def unpacked_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Returns the `count` integers of each row of 32-bit words, the first in the lowest bits, less 2^(bits - 1).
    # [rows, count] int8"""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return (values.view(len(words), -1)[:, :count] - (1 << (bits - 1))).to(torch.int8)
