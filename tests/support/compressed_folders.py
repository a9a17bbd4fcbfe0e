"""Folders of packed weights, written by hand after the layouts of compressed-tensors, MXFP4 and FP8."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.packed_folders import Tensors, write_packed

# By name: the method, the format, and how a weight is stored: kind of number, bits, inputs of a scale (0: a row; -1:
# all weights), whether it has zero points, type of scales.
LAYOUTS: dict[str, tuple[str, str, str, int, int, bool, torch.dtype]] = {
    "w4-groups": ("compressed-tensors", "pack-quantized", "words", 4, 32, False, torch.bfloat16),
    "w4-groups-zeros": ("compressed-tensors", "pack-quantized", "words", 4, 16, True, torch.float16),
    "w4-rows": ("compressed-tensors", "pack-quantized", "words", 4, 0, False, torch.float32),
    "w4-rows-zeros": ("compressed-tensors", "pack-quantized", "words", 4, 0, True, torch.bfloat16),
    "w8-groups": ("compressed-tensors", "pack-quantized", "words", 8, 32, False, torch.bfloat16),
    "w8-groups-zeros": ("compressed-tensors", "pack-quantized", "words", 8, 16, True, torch.float32),
    "int8-rows": ("compressed-tensors", "int-quantized", "int8", 8, 0, False, torch.bfloat16),
    "int8-rows-zeros": ("compressed-tensors", "naive-quantized", "int8", 8, 0, True, torch.bfloat16),
    "int8-tensor": ("compressed-tensors", "int-quantized", "int8", 8, -1, False, torch.float32),
    "mxfp4": ("compressed-tensors", "mxfp4-pack-quantized", "mxfp4", 4, 32, False, torch.uint8),
    "fp8-tensor": ("compressed-tensors", "float-quantized", "float8", 8, -1, False, torch.bfloat16),
    "fp8-rows": ("compressed-tensors", "float-quantized", "float8", 8, 0, False, torch.bfloat16),
    "fp8-blocks": ("fp8", "", "float8", 8, 48, False, torch.float32),
    "fp8-even-blocks": ("fp8", "", "float8", 8, 32, False, torch.float32),
    "fp8-exponents": ("fp8", "", "float8", 8, 32, False, torch.float8_e8m0fnu),
    "fp8-odd-blocks": ("fp8", "", "float8", 8, 12, False, torch.float32),
}
# By inputs: the first ones do not divide the sizes of a tiny model; of the last ones no groups of 8 inputs can be made.
BLOCKS = {48: (40, 48), 32: (32, 32), 12: (16, 12)}

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three lower bits; the fourth is the sign


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs the integers of a row, from 0 on, into 32-bit words, the first in the lowest bits."""
    per_word = 32 // bits
    rows, count = values.shape
    padded = torch.zeros(rows, -(-count // per_word) * per_word, dtype=torch.int64)
    padded[:, :count] = values
    found = sum(padded[:, index::per_word] << (bits * index) for index in range(per_word))
    assert isinstance(found, torch.Tensor)
    return found.to(torch.int32)  # wraps around, as the layout does


def stored(layout: str, name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns the tensors of a weight, and what they mean in float64."""
    _, form, kind, bits, group, has_zeros, dtype = LAYOUTS[layout]
    rows, width = weight.shape
    module = name.removesuffix(".weight")
    if kind == "float8":
        return stored_float8(layout, module, weight)
    if kind == "mxfp4":
        return stored_mxfp4(module, weight)
    if group == -1:
        scale = (weight.abs().max() / 127).reshape(1).to(dtype)
        grouped, spread = weight.view(rows, 1, width), scale.double().view(1, 1)
    else:
        grouped = weight.view(rows, -1, group or width)
        span = grouped.amax(-1) - grouped.amin(-1) if has_zeros else 2 * grouped.abs().amax(-1)
        scale = (span / (2**bits - 1)).to(dtype)
        spread = scale.double()
    low = -(1 << (bits - 1))
    zero = (-grouped.amin(-1) / spread).round().clamp(0, 2**bits - 1) if has_zeros else torch.full_like(spread, -low)
    integers = (grouped / spread[:, :, None] + zero[:, :, None]).round().clamp(0, 2**bits - 1)  # from 0 on
    meaning = ((integers - zero[:, :, None]) * spread[:, :, None]).view(rows, width)
    whole = integers.view(rows, width).to(torch.int64)
    parts = {f"{module}.weight_scale": scale}
    if kind == "words":
        parts |= {f"{module}.weight_packed": words(whole, bits), f"{module}.weight_shape": torch.tensor([rows, width])}
        if has_zeros:
            parts[f"{module}.weight_zero_point"] = words(zero.long().T, bits).T.contiguous()
    else:
        parts[f"{module}.weight"] = (whole + low).to(torch.int8)
        if has_zeros:
            parts[f"{module}.weight_zero_point"] = (zero.long() + low).to(torch.int8)
    return parts, meaning


def stored_float8(layout: str, module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    _, _, _, _, group, _, dtype = LAYOUTS[layout]
    rows, width = weight.shape
    blocks = {-1: (rows, width), 0: (1, width)}.get(group) or BLOCKS[group]
    scale = torch.zeros(-(-rows // blocks[0]), -(-width // blocks[1]))
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            part = weight[row * blocks[0] : (row + 1) * blocks[0], column * blocks[1] : (column + 1) * blocks[1]]
            scale[row, column] = part.abs().max() / 448
    scale = (scale.log2().ceil().exp2() if dtype is torch.float8_e8m0fnu else scale).to(dtype)
    spread = scale.to(torch.float64).repeat_interleave(blocks[0], 0)[:rows].repeat_interleave(blocks[1], 1)[:, :width]
    numbers = (weight / spread).to(torch.float32).to(torch.float8_e4m3fn)
    name = "weight_scale_inv" if LAYOUTS[layout][0] == "fp8" else "weight_scale"
    own = scale.reshape(1) if group == -1 else scale
    return {f"{module}.weight": numbers, f"{module}.{name}": own}, numbers.double() * spread


def stored_mxfp4(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Packs one number after the other; a zero keeps the sign of what it was."""
    rows, width = weight.shape
    codes = torch.zeros(rows, width // 2, dtype=torch.uint8)
    exponents = torch.zeros(rows, width // 32, dtype=torch.uint8)
    meaning = torch.zeros(rows, width, dtype=torch.float64)
    for row, numbers in enumerate(weight.tolist()):
        for first in range(0, width, 32):
            exponent = math.ceil(math.log2(max(abs(number) for number in numbers[first : first + 32]) / 6))
            exponents[row, first // 32] = 127 + exponent
            made = []
            for number in numbers[first : first + 32]:
                size = min(range(8), key=lambda code: abs(E2M1[code] - abs(number) / 2**exponent))
                made.append(size + 8 * (number < 0))
            pairs = [made[index] + 16 * made[index + 1] for index in range(0, 32, 2)]
            codes[row, first // 2 : first // 2 + 16] = torch.tensor(pairs, dtype=torch.uint8)
            values = [E2M1[code % 8] * (-1 if code >= 8 else 1) * 2.0**exponent for code in made]
            meaning[row, first : first + 32] = torch.tensor(values, dtype=torch.float64)
    return {f"{module}.weight_packed": codes, f"{module}.weight_scale": exponents}, meaning


def scheme(layout: str) -> dict[str, Any]:
    method, form, kind, bits, group, has_zeros, _ = LAYOUTS[layout]
    if method == "fp8":
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCKS[group])}
    strategy = {-1: "tensor", 0: "channel"}.get(group, "group")
    weights = {"num_bits": bits, "type": "float" if kind in ("float8", "mxfp4") else "int", "symmetric": not has_zeros}
    weights |= {"strategy": strategy, "group_size": group if group > 0 else None}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": method, "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def pack_folder(source: Path, folder: Path, layout: str) -> Tensors:
    """Writes the packed copy of a folder and returns all of its weights as they are meant, in float64."""
    return write_packed(source, folder, scheme(layout), partial(stored, layout))
