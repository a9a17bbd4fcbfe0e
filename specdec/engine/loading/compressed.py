"""Packed weights in safetensors files: compressed-tensors of 4 and 8 bits, MXFP4, and FP8 per tensor, channel or block.

Source: the layouts that the package compressed-tensors writes, and `transformers`' `FineGrainedFP8Config`. A weight's
own tensors say what it is: `weight_packed` (32-bit words, the first value in the lowest bits; bytes of MXFP4), or
`weight` of int8 or float8, with `weight_scale` or `weight_scale_inv`, both of which multiply. Only weights are packed
here: the scales of activations that such a folder may name are not used, so a product has the activations' own numbers.
A scale of FP8 for a block is repeated for each of its rows, and for parts of the block where it does not divide a row.

MXFP4 (OCP Microscaling Formats 1.0): two numbers of E2M1 a byte, the first in the low bits, and a power of two for each
32 of a row, a byte of E8M0. Twice such a number is an integer, so a weight is held as 8 bits with half the scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from specdec.engine.loading.integers import Integers, is_packable, unpacked_words
from specdec.engine.loading.stored import ENTRY, StoredTensor, check_plain, read_tensor, refuse_tensor
from specdec.engine.packed import GROUP_STEP, PackedWeight
from specdec.errors import ModelRefused
from specdec.folders import refuse, shown

COMPRESSED, FP8 = "compressed-tensors", "fp8"
MXFP4_FORMAT = "mxfp4-pack-quantized"
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", MXFP4_FORMAT)
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
FLOAT8, MXFP4 = "F8_E4M3", "MXFP4"
INTEGER_BITS = {"I4": 4, "I8": 8, MXFP4: 8}  # those of the integers that a kind of weight has
MX_GROUP, MX_BIAS, MX_NAN = 32, 127, 255
EXPONENTS = SCALE_TYPES[-1]  # a scale is a power of two, or no number
MX_FIELDS: Mapping[str, tuple[object, ...]] = {  # what weights of MXFP4 may say of themselves
    "num_bits": (4,),
    "type": ("float",),
    "group_size": (MX_GROUP, None),
    "strategy": ("group", None),
    "symmetric": (True, None),
    "scale_dtype": ("torch.uint8", None),
}
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
WEIGHT_PARTS = ("weight", "weight_packed")
SCALE_PARTS = ("weight_scale", "weight_scale_inv")
OTHER_PARTS = ("weight_shape", "weight_zero_point", "bias")
UNUSED_PARTS = ("input_scale", "input_zero_point", "activation_scale", "output_scale", "k_scale", "v_scale")
BLOCK_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Scheme:
    """What config.json says of packed weights. `blocks`: rows and inputs of a scale of FP8, if it names them;
    `formats`: those of compressed-tensors that it names."""

    method: str
    blocks: tuple[int, int] | None = None
    formats: frozenset[str] = frozenset()

    def weights(self, stored: Mapping[str, StoredTensor]) -> CompressedWeights:
        return CompressedWeights(self, stored)


@dataclass(frozen=True, slots=True)
class _Layout:
    """One packed weight: its tensors by part, its shape, and its kind, of INTEGER_BITS or FLOAT8."""

    parts: Mapping[str, str]
    shape: tuple[int, int]
    kind: str

    @property
    def bits(self) -> int:
        """Bits of an integer, 0 of FP8."""
        return INTEGER_BITS.get(self.kind, 0)


def read_fp8(file: Path, entry: Mapping[str, Any]) -> Scheme:
    """Returns the scheme of a configuration of FP8. Raises ModelRefused."""
    return Scheme(FP8, _blocks(file, f"{ENTRY}.weight_block_size", entry.get("weight_block_size")))


def read_compressed(file: Path, entry: Mapping[str, Any]) -> Scheme:
    """Returns the scheme of a configuration of compressed-tensors. Raises ModelRefused."""
    _check_entry(file, f"{ENTRY}.format", entry.get("format"))
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if entry.get(name) and entry[name] != {"format": "dense"}:
            raise refuse(file, f"{ENTRY}.{name}", entry[name], "absent: it is not supported")
    groups = entry.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise refuse(file, f"{ENTRY}.config_groups", groups, "an object of objects")
    found, formats = None, set()
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
        form = group.get("format") or entry["format"]
        formats.add(form)
        if form == MXFP4_FORMAT:
            _check_mxfp4(file, f"{place}.weights", weights)
    return Scheme(COMPRESSED, found, frozenset(formats))


def _check_entry(file: Path, name: str, value: object) -> None:
    if value not in FORMATS:
        raise refuse(file, name, value, f"one of {', '.join(FORMATS)}")


def _check_mxfp4(file: Path, place: str, weights: Mapping[str, Any]) -> None:
    for name, values in MX_FIELDS.items():
        if weights.get(name) not in values:
            raise refuse(file, f"{place}.{name}", weights.get(name), f"{shown(values[0])} of {MXFP4_FORMAT}")


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
                check_plain(stored, name)
                self.tensors[name] = tensor
            elif part == "bias":
                self.tensors[name] = tensor
            elif part in WEIGHT_PARTS:
                layout = self._layout(module, part)
                self._layouts[f"{module}.weight"] = layout
                self.tensors[f"{module}.weight"] = StoredTensor(tensor.file, layout.kind, layout.shape)
            elif part not in SCALE_PARTS + OTHER_PARTS + UNUSED_PARTS:
                raise ModelRefused(f"{tensor.file}: {name} belongs to no supported layout of a packed weight")

    @property
    def format(self) -> str:
        return " ".join([self._scheme.method, *sorted({self.tensors[name].dtype for name in self._layouts})])

    def dense(self, name: str) -> torch.Tensor:
        layout = self._layouts.get(name)
        if layout is None:
            return self._read(name)
        if layout.bits:
            return self._integers(layout).dense()
        scales = self._float8_scales(layout).to(torch.float32)
        spread = scales.repeat_interleave(self._float8_group(layout), 1)[:, : layout.shape[1]]
        return self._float8(layout).to(torch.float32).mul_(spread)

    def is_packed(self, name: str) -> bool:
        layout = self._layouts.get(name)
        if layout is None:
            return False
        if not layout.bits:
            return math.gcd(self._float8_group(layout), layout.shape[1]) % GROUP_STEP == 0
        scales = self._stored[self._scale_name(layout)]
        groups = scales.shape[1] if len(scales.shape) == 2 else 1
        return is_packable(layout.shape[1] // groups, scales, "weight_zero_point" in layout.parts)

    def packed(self, name: str) -> PackedWeight:
        layout = self._layouts[name]
        if layout.bits:
            return self._integers(layout).packed()
        own, width = self._float8_group(layout), layout.shape[1]
        group = math.gcd(own, width)
        scales = self._float8_scales(layout).repeat_interleave(own // group, 1)[:, : width // group]
        return PackedWeight(8, group, self._float8(layout), scales.contiguous())

    def _layout(self, module: str, part: str) -> _Layout:
        """Returns the layout of a weight after checking its tensors against each other."""
        parts = {each: f"{module}.{each}" for each in (*SCALE_PARTS, *WEIGHT_PARTS, *OTHER_PARTS)}
        parts = {each: name for each, name in parts.items() if name in self._stored}
        own = self._stored[parts[part]]
        if len(parts.keys() & set(WEIGHT_PARTS)) > 1 or len(parts.keys() & set(SCALE_PARTS)) > 1:
            raise ModelRefused(f"{own.file}: {module} has two weights or scales")
        if len(own.shape) != 2 or 0 in own.shape:
            self._refuse(parts[part], "shape", list(own.shape), "two sizes from 1 on")
        shape, kind = (own.shape[0], own.shape[1]), own.dtype
        if part == "weight_packed" and kind == "U8" and MXFP4_FORMAT in self._scheme.formats:
            shape, kind = (own.shape[0], 2 * own.shape[1]), MXFP4
        elif part == "weight_packed":
            shape, kind = self._packed_shape(parts, own)
        elif kind not in ("I8", FLOAT8):
            self._refuse(parts[part], "type", kind, f"I8 or {FLOAT8}")
        layout = _Layout(parts, shape, kind)
        self._check_scales(layout)
        return layout

    def _packed_shape(self, parts: Mapping[str, str], own: StoredTensor) -> tuple[tuple[int, int], str]:
        """Returns shape and kind of integers in words, of which the size of a row says which it is."""
        if own.dtype != "I32":
            self._refuse(parts["weight_packed"], "type", own.dtype, "I32")
        if "weight_shape" not in parts or self._stored[parts["weight_shape"]].shape != (2,):
            raise ModelRefused(f"{own.file}: {parts['weight_packed']} has no weight_shape of two sizes beside it")
        rows, width = (int(size) for size in self._read(parts["weight_shape"]).tolist())
        bits = next((bits for bits in (4, 8) if own.shape == (rows, math.ceil(width * bits / 32))), 0)
        if not bits or width < 1:
            limit = f"the shape that {list(own.shape)} words of 4 or 8 bits have"
            self._refuse(parts["weight_shape"], "value", [rows, width], limit)
        return (rows, width), f"I{bits}"

    def _check_scales(self, layout: _Layout) -> None:
        rows, width = layout.shape
        name = self._scale_name(layout)
        scale = self._stored[name]
        if layout.kind == MXFP4:
            self._check_mx_scales(layout, name)
            return
        if scale.dtype not in SCALE_TYPES or (layout.bits and scale.dtype == EXPONENTS):
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

    def _check_mx_scales(self, layout: _Layout, name: str) -> None:
        rows, width = layout.shape
        scale = self._stored[name]
        if scale.dtype != "U8":
            self._refuse(name, "type", scale.dtype, f"U8, of {MXFP4}")
        if width % MX_GROUP or scale.shape != (rows, width // MX_GROUP):
            self._refuse(name, "shape", list(scale.shape), f"[{rows}, {width} / {MX_GROUP}], one for each {MX_GROUP}")
        if "weight_zero_point" in layout.parts:
            raise ModelRefused(f"{scale.file}: {layout.parts['weight_zero_point']} belongs to no weight of {MXFP4}")

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

    def _integers(self, layout: _Layout) -> Integers:
        if layout.kind == MXFP4:
            return self._mx_integers(layout)
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
        return Integers(layout.bits, values, scales.contiguous(), zeros)

    def _mx_integers(self, layout: _Layout) -> Integers:
        name = layout.parts["weight_scale"]
        exponents = self._read(name).to(torch.int32)
        if int(exponents.max()) == MX_NAN:
            self._refuse(name, "value", MX_NAN, f"below {MX_NAN}, which is no number")
        pairs = [(TWICE_E2M1[byte & 15], TWICE_E2M1[byte >> 4]) for byte in range(256)]
        values = torch.tensor(pairs, dtype=torch.int8)[self._read(layout.parts["weight_packed"]).to(torch.int32)]
        halves = torch.tensor([2.0 ** (each - MX_BIAS - 1) for each in range(MX_NAN)], dtype=torch.bfloat16)
        return Integers(layout.bits, values.view(layout.shape), halves[exponents])

    def _float8(self, layout: _Layout) -> torch.Tensor:
        found = self._read(layout.parts["weight"])
        if found.isnan().any():
            self._refuse(layout.parts["weight"], "value", "nan", "a number at every place")
        return found

    def _float8_group(self, layout: _Layout) -> int:
        """Inputs of a scale, of which a row's last may have fewer."""
        blocks = self._scheme.blocks
        is_by_block = self._is_by_block(layout.shape, self._stored[self._scale_name(layout)].shape)
        return blocks[1] if blocks and is_by_block else layout.shape[1]

    def _float8_scales(self, layout: _Layout) -> torch.Tensor:
        """Those of each row.  # [out, groups]"""
        rows, found = layout.shape[0], self._scales(layout)
        blocks = self._scheme.blocks
        by_block = blocks[0] if blocks and self._is_by_block(layout.shape, found.shape) else rows // len(found)
        if self._stored[self._scale_name(layout)].dtype == EXPONENTS:  # bfloat16 has every power of two that it has
            if found.isnan().any():
                self._refuse(self._scale_name(layout), "value", "nan", "a power of two")
            found = found.to(torch.bfloat16)
        return found.repeat_interleave(by_block, 0)[:rows]

    def _scales(self, layout: _Layout) -> torch.Tensor:
        """The scales with a size for rows and one for inputs."""
        found = self._read(self._scale_name(layout))
        return found if found.dim() == 2 else found.reshape(-1, 1)

    def _scale_name(self, layout: _Layout) -> str:
        return next(layout.parts[part] for part in SCALE_PARTS if part in layout.parts)

    def _read(self, name: str) -> torch.Tensor:
        return read_tensor(self._stored, name)

    def _refuse(self, name: str, what: str, value: object, limit: str) -> NoReturn:
        refuse_tensor(self._stored, name, what, value, limit)
