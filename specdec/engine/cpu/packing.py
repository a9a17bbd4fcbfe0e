"""Weights into the layout of the native products: see native/packing.h."""

from __future__ import annotations

import ctypes
import math

import numpy
import torch
from torch import Tensor

from specdec.engine.cpu import structs
from specdec.engine.cpu.arguments import PanelFormat, WeightPanels, check_tensor, refuse, type_of
from specdec.engine.packed import PackedWeight

SLAB_BYTES = 64 << 20
GROUP_MAX = 512  # of sd_weight


class Packer:
    """Packs weights for the products of a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._slab = _Slab()

    def pack(self, weight: Tensor, bias: Tensor | None) -> WeightPanels:
        """weight [out, in] of any strides, bias [out]. Raises ValueError."""
        number = type_of("weight", weight)
        if weight.dim() != 2 or not weight.numel():
            refuse("weight.shape", list(weight.shape), "[out, in], each of at least one")
        found = self._new_panels(weight.shape, PanelFormat(number), bias)
        sizes = number, *weight.shape, *weight.stride()
        self._library.sd_pack(weight.data_ptr(), *sizes, found.panels.data_ptr())
        return found

    def pack_groups(self, weight: PackedWeight, bias: Tensor | None) -> WeightPanels:
        """Groups that end inside a block of the kernels' sums are cut: their parts have the same scale."""
        values, minima = weight.values, weight.minima
        if minima is not None and weight.bits == 8:  # the kernels' bytes are signed
            values = values.to(torch.int16).sub_(128).to(torch.int8)
            minima = minima.float().add(weight.scales.float(), alpha=128)
        group = math.gcd(weight.group, GROUP_MAX)
        parts = weight.group // group
        values, scales = values.contiguous(), weight.scales.repeat_interleave(parts, 1)
        minima = None if minima is None else minima.repeat_interleave(parts, 1)
        form = PanelFormat(
            structs.FLOAT8 if weight.is_float else structs.INT4 if weight.bits == 4 else structs.INT8,
            type_of("weight.scales", scales),
            structs.NONE if minima is None else type_of("weight.minima", minima),
            group,
        )
        found = self._new_panels(weight.shape, form, bias)
        addresses = values.data_ptr(), scales.data_ptr(), None if minima is None else minima.data_ptr()
        self._library.sd_pack_groups(found.struct, *addresses, found.panels.data_ptr())
        return found

    def _new_panels(self, shape: torch.Size, form: PanelFormat, bias: Tensor | None) -> WeightPanels:
        """Returns panels that are not filled, and the bias in float32."""
        out_size, in_size = shape
        if bias is not None:
            type_of("bias", bias)
            bias = bias.detach().to(torch.float32, copy=True).contiguous()
            check_tensor("bias", bias, torch.float32, (out_size,))
        sizes = structs.WeightStruct(None, None, out_size, in_size, *form)
        panels = self._slab.take(self._library.sd_packed_bytes(sizes))
        return WeightPanels(out_size, in_size, form, panels, bias)


class _Slab:
    """Memory for weights, cut from large pieces, which numpy asks the system to place on huge pages: small
    weights in pages of 4 KiB are read a fifth slower. A piece is free again when all its weights are."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int) -> Tensor:
        """Returns bytes at a multiple of 64, a line of a cache and a register of AVX-512."""
        if len(self._rest) < count + 64:
            self._rest = torch.from_numpy(numpy.empty(max(count + 64, SLAB_BYTES), dtype=numpy.uint8))
        first = -self._rest.data_ptr() % 64
        found, self._rest = self._rest[first : first + count], self._rest[first + count :]
        return found
