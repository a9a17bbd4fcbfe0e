"""Packed weights in safetensors files: compressed-tensors of 4 and 8 bits, and FP8 per tensor, channel or block.

Source: the layouts that the package compressed-tensors writes, and `transformers`' `FineGrainedFP8Config`. A weight's
own tensors say what it is: `weight_packed` (32-bit words, the first value in the lowest bits), or `weight` of int8 or
float8, with `weight_scale` or `weight_scale_inv`, both of which multiply. Only weights are packed here: the scales of
activations that such a folder may name are not used, so a product has the activations' own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open

from specdec.engine.loading.stored import StoredTensor
from specdec.engine.packed import GROUP_STEP, PackedWeight
from specdec.errors import ModelRefused, refusing
from specdec.folders import refuse, shown

ENTRY = "quantization_config"
COMPRESSED, FP8 = "compressed-tensors", "fp8"
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
PLAIN_TYPES = ("F64", "F32", "BF16", "F16")  # in the letters of safetensors
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
FLOAT8 = "F8_E4M3"
WEIGHT_PARTS = ("weight", "weight_packed")
SCALE_PARTS = ("weight_scale", "weight_scale_inv")
OTHER_PARTS = ("weight_shape", "weight_zero_point", "bias")
UNUSED_PARTS = ("input_scale", "input_zero_point", "activation_scale", "output_scale", "k_scale", "v_scale")
BLOCK_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Scheme:
    """What config.json says of packed weights. `blocks`: rows and inputs of a scale of FP8, if it names them."""

    method: str
    blocks: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Layout:
    """One packed weight: its tensors by part, its shape, and bits of an integer (0: FP8)."""

    parts: Mapping[str, str]
    shape: tuple[int, int]
    bits: int


def read_scheme(file: Path, config: Mapping[str, Any]) -> Scheme | None:
    """Returns the scheme of a config.json, None if its weights are dense. Raises ModelRefused for another one."""
    entry = config.get(ENTRY)
    if not entry:
        return None
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    if method == FP8:
        return Scheme(FP8, _blocks(file, f"{ENTRY}.weight_block_size", entry.get("weight_block_size")))
    if method != COMPRESSED:
        named = f"{ENTRY}.quant_method"
        raise refuse(file, named, method, f"{COMPRESSED} or {FP8}: weights that are quantized otherwise are not read")
    _check_entry(file, f"{ENTRY}.format", entry.get("format"))
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if entry.get(name) and entry[name] != {"format": "dense"}:
            raise refuse(file, f"{ENTRY}.{name}", entry[name], "absent: it is not supported")
    groups = entry.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise refuse(file, f"{ENTRY}.config_groups", groups, "an object of objects")
    found = None
    for name, group in groups.items():
        place, weights = f"{ENTRY}.config_groups.{name}", group.get("weights")
        if group.get("format") is not None:
            _check_entry(file, f"{place}.format", group["format"])
        if not isinstance(weights, dict) or weights.get("num_bits") not in (4, 8):
            bits = weights.get("num_bits") if isinstance(weights, dict) else weights
            raise refuse(file, f"{place}.weights.num_bits", bits, "4 or 8")
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise refuse(file, f"{place}.weights.actorder", weights["actorder"], "absent, weight or static")
        found = _blocks(file, f"{place}.weights.block_structure", weights.get("block_structure")) or found
    return Scheme(COMPRESSED, found)


def _check_entry(file: Path, name: str, value: object) -> None:
    if value not in FORMATS:
        raise refuse(file, name, value, f"one of {', '.join(FORMATS)}")


def _blocks(file: Path, name: str, value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, str):  # as "128x128"
        value = [int(part) if part.isdecimal() and len(part) < 9 else 0 for part in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int for one in value):
        raise refuse(file, name, value, "two integers")
    if not all(1 <= one <= BLOCK_MAX for one in value):
        raise refuse(file, name, value, f"two integers from 1 to {BLOCK_MAX}")
    return value[0], value[1]


class CompressedWeights:
    """The weights of a folder with a scheme: a `PackedFolder`. `stored`: the tensors of its files."""

    def __init__(self, scheme: Scheme, stored: Mapping[str, StoredTensor]):
        self._scheme, self._stored = scheme, stored
        self._layouts: dict[str, _Layout] = {}
        packed = {name.rpartition(".")[0] for name in stored if name.rpartition(".")[2] in SCALE_PARTS}
        self.tensors: dict[str, StoredTensor] = {}
        for name, tensor in stored.items():
            module, _, part = name.rpartition(".")
            if module not in packed:
                if part in UNUSED_PARTS:
                    continue
                if tensor.dtype not in PLAIN_TYPES:
                    self._refuse(name, "type", tensor.dtype, f"one of {', '.join(PLAIN_TYPES)}, or have a scale")
                self.tensors[name] = tensor
            elif part == "bias":
                self.tensors[name] = tensor
            elif part in WEIGHT_PARTS:
                layout = self._layout(module, part)
                label = f"I{layout.bits}" if layout.bits else FLOAT8
                self._layouts[f"{module}.weight"] = layout
                self.tensors[f"{module}.weight"] = StoredTensor(tensor.file, label, layout.shape)
            elif part not in SCALE_PARTS + OTHER_PARTS + UNUSED_PARTS:
                raise ModelRefused(f"{tensor.file}: {name} belongs to no supported layout of a packed weight")

    @property
    def format(self) -> str:
        return " ".join([self._scheme.method, *sorted({self.tensors[name].dtype for name in self._layouts})])

    def dense(self, name: str) -> torch.Tensor:
        layout = self._layouts.get(name)
        if layout is None:
            return self._read(name)
        rows, width = layout.shape
        if layout.bits:
            values, scales, zeros = self._integers(layout)
            shifted = values.to(torch.float32).view(rows, scales.shape[1], -1)
            if zeros is not None:
                shifted -= zeros[:, :, None]
            return (shifted * scales.to(torch.float32)[:, :, None]).view(rows, width)
        found = self._read(layout.parts["weight"]).to(torch.float32)
        scales = self._scales(layout).to(torch.float32)
        blocks = (rows // len(scales), width)
        if self._scheme.blocks and self._is_by_block(layout.shape, scales.shape):
            blocks = self._scheme.blocks
        by_row = scales.repeat_interleave(blocks[0], 0)[:rows]
        return found.mul_(by_row.repeat_interleave(blocks[1], 1)[:, :width])

    def is_packed(self, name: str) -> bool:
        layout = self._layouts.get(name)
        if layout is None or not layout.bits:
            return False
        scales = self._stored[next(layout.parts[part] for part in SCALE_PARTS if part in layout.parts)]
        groups = scales.shape[1] if len(scales.shape) == 2 else 1
        has_zeros = "weight_zero_point" in layout.parts
        return (layout.shape[1] // groups) % GROUP_STEP == 0 and not (has_zeros and scales.dtype == "F32")

    def packed(self, name: str) -> PackedWeight:
        layout = self._layouts[name]
        values, scales, zeros = self._integers(layout)
        group = layout.shape[1] // scales.shape[1]
        if zeros is None:
            return PackedWeight(layout.bits, group, values, scales)
        low = 1 << (layout.bits - 1)
        minima = -scales.to(torch.float32) * (zeros + low)
        return PackedWeight(layout.bits, group, (values.to(torch.int16) + low).to(torch.uint8), scales, minima)

    def _layout(self, module: str, part: str) -> _Layout:
        """Returns the layout of a weight after checking its tensors against each other."""
        parts = {each: f"{module}.{each}" for each in (*SCALE_PARTS, *WEIGHT_PARTS, *OTHER_PARTS)}
        parts = {each: name for each, name in parts.items() if name in self._stored}
        own = self._stored[parts[part]]
        if len(parts.keys() & set(WEIGHT_PARTS)) > 1 or len(parts.keys() & set(SCALE_PARTS)) > 1:
            raise ModelRefused(f"{own.file}: {module} has two weights or scales")
        if len(own.shape) != 2 or 0 in own.shape:
            self._refuse(parts[part], "shape", list(own.shape), "two sizes from 1 on")
        shape, bits = (own.shape[0], own.shape[1]), {"I8": 8, FLOAT8: 0}.get(own.dtype, -1)
        if part == "weight_packed":
            shape, bits = self._packed_shape(parts, own)
        elif bits < 0:
            self._refuse(parts[part], "type", own.dtype, f"I8 or {FLOAT8}")
        layout = _Layout(parts, shape, bits)
        self._check_scales(layout)
        return layout

    def _packed_shape(self, parts: Mapping[str, str], own: StoredTensor) -> tuple[tuple[int, int], int]:
        """Returns shape and bits of integers in words, of which the size of a row says which it is."""
        if own.dtype != "I32":
            self._refuse(parts["weight_packed"], "type", own.dtype, "I32")
        if "weight_shape" not in parts or self._stored[parts["weight_shape"]].shape != (2,):
            raise ModelRefused(f"{own.file}: {parts['weight_packed']} has no weight_shape of two sizes beside it")
        rows, width = (int(size) for size in self._read(parts["weight_shape"]).tolist())
        bits = next((bits for bits in (4, 8) if own.shape == (rows, math.ceil(width * bits / 32))), 0)
        if not bits or width < 1:
            limit = f"the shape that {list(own.shape)} words of 4 or 8 bits have"
            self._refuse(parts["weight_shape"], "value", [rows, width], limit)
        return (rows, width), bits

    def _check_scales(self, layout: _Layout) -> None:
        rows, width = layout.shape
        name = next(layout.parts[part] for part in SCALE_PARTS if part in layout.parts)
        scale = self._stored[name]
        if scale.dtype not in SCALE_TYPES or (layout.bits and scale.dtype == SCALE_TYPES[-1]):
            self._refuse(name, "type", scale.dtype, f"one of {', '.join(SCALE_TYPES)}")
        count = math.prod(scale.shape)
        is_whole = count == 1 or scale.shape in ((rows,), (rows, 1))
        if layout.bits:
            is_by_group = len(scale.shape) == 2 and scale.shape[0] == rows and width % max(scale.shape[1], 1) == 0
            if not (is_whole or (is_by_group and scale.shape[1])):
                self._refuse(name, "shape", list(scale.shape), f"[{rows}, a divisor of {width}]")
        elif not is_whole and not self._is_by_block(layout.shape, scale.shape):
            limit = f"one, [{rows}, 1], or one for each block of {self._scheme.blocks} of {list(layout.shape)}"
            self._refuse(name, "shape", list(scale.shape), limit)
        if "weight_zero_point" in layout.parts:
            self._check_zeros(layout, (rows if count > 1 else 1, 1 if is_whole else scale.shape[1]))

    def _check_zeros(self, layout: _Layout, groups: tuple[int, int]) -> None:
        """Checks that there is a zero point for each scale, in words of as many rows where the weight is in words."""
        name = layout.parts["weight_zero_point"]
        zero = self._stored[name]
        is_packed = "weight_packed" in layout.parts
        shape = (math.ceil(layout.shape[0] * layout.bits / 32), groups[1]) if is_packed else groups
        if zero.dtype != ("I32" if is_packed else "I8") or not layout.bits:
            self._refuse(name, "type", zero.dtype, "I32 of weight_packed or I8 of int8")
        if zero.shape != shape and (is_packed or math.prod(zero.shape) != math.prod(shape)):
            self._refuse(name, "shape", list(zero.shape), f"{list(shape)}, one for each scale")

    def _is_by_block(self, shape: tuple[int, int], scales: tuple[int, ...] | torch.Size) -> bool:
        blocks = self._scheme.blocks
        return blocks is not None and tuple(scales) == tuple(-(-size // block) for size, block in zip(shape, blocks))

    def _integers(self, layout: _Layout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns values [out, in] int8, scales and zero points [out, groups] of their own types and float32."""
        rows, width = layout.shape
        scales = self._scales(layout).expand(rows, -1)
        zeros = None
        if "weight_packed" in layout.parts:
            values = unpacked_words(self._read(layout.parts["weight_packed"]), layout.bits, width)
            if "weight_zero_point" in layout.parts:
                zero = self._read(layout.parts["weight_zero_point"])
                zeros = unpacked_words(zero.T.contiguous(), layout.bits, rows).T.contiguous()
        else:
            values = self._read(layout.parts["weight"])
            if "weight_zero_point" in layout.parts:
                zeros = self._read(layout.parts["weight_zero_point"])
        if zeros is not None:
            zeros = zeros.to(torch.float32).reshape(-1, scales.shape[1]).expand(rows, -1)
        return values, scales.contiguous(), zeros

    def _scales(self, layout: _Layout) -> torch.Tensor:
        """The scales with a size for rows and one for inputs."""
        found = self._read(next(layout.parts[part] for part in SCALE_PARTS if part in layout.parts))
        return found if found.dim() == 2 else found.reshape(-1, 1)

    def _read(self, name: str) -> torch.Tensor:
        file = self._stored[name].file
        with refusing(str(file)), safe_open(file, "pt") as stored:
            found: torch.Tensor = stored.get_tensor(name)
        return found

    def _refuse(self, name: str, what: str, value: object, limit: str) -> NoReturn:
        raise ModelRefused(f"{self._stored[name].file}: {name} has the {what} {shown(value)}; it must be {limit}")


def unpacked_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Returns the `count` integers of each row of 32-bit words, from -2^(bits - 1) on.  # [rows, count] int8"""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return (values.view(len(words), -1)[:, :count] - (1 << (bits - 1))).to(torch.int8)
