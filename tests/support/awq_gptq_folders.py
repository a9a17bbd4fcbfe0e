"""Folders in the layouts of AWQ and GPTQ, packed one number after the other, as the layouts are described."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.packed_folders import Tensors, write_packed

AWQ_PLACES = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}  # of an output among the eight of a word's four bits
Rows = list[list[int]]


@dataclass(frozen=True)
class Layout:
    """`group`: inputs of a scale, -1: all of them; `version`: of GPTQ, the format."""

    method: str
    bits: int
    group: int
    dtype: torch.dtype
    version: str = "gemm"
    has_order: bool = False
    kind: str = "llama"  # of the model


LAYOUTS = {
    "awq-groups": Layout("awq", 4, 32, torch.float16),
    "awq-rows-biases": Layout("awq", 4, -1, torch.bfloat16, kind="qwen2"),
    "gptq4-groups": Layout("gptq", 4, 32, torch.float16, "gptq", has_order=True),
    "gptq4-rows-v2": Layout("gptq", 4, -1, torch.bfloat16, "gptq_v2"),
    "gptq8-groups": Layout("gptq", 8, 16, torch.float16, "gptq"),
    "gptq8-groups-v2": Layout("gptq", 8, 32, torch.float32, "gptq_v2", has_order=True),
}


def entry_of(layout: Layout) -> dict[str, Any]:
    """The quantization_config that such a folder has."""
    entry: dict[str, Any] = {"quant_method": layout.method, "bits": layout.bits, "group_size": layout.group}
    if layout.method == "awq":
        return entry | {"version": layout.version, "zero_point": True, "modules_to_not_convert": ["lm_head"]}
    return entry | {
        "checkpoint_format": layout.version,
        "desc_act": layout.has_order,
        "sym": False,
        "damp_percent": 0.1,
        "true_sequential": True,
        "lm_head": False,
        "meta": {"quantizer": "a-program:1.0"},
    }


def words(rows: Rows, bits: int, is_awq: bool) -> torch.Tensor:
    """Words of 32 bits along each row: the first number in the lowest bits, or by AWQ_PLACES."""
    per_word = 32 // bits
    found = []
    for row in rows:
        made = [0] * (len(row) // per_word)
        for index, number in enumerate(row):
            place = AWQ_PLACES[index % 8] if is_awq else index % per_word
            made[index // per_word] |= number << (bits * place)
        found.append([word - (1 << 32) if word >= 1 << 31 else word for word in made])
    return torch.tensor(found, dtype=torch.int32)


def stored(layout: Layout, name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Returns the tensors of a weight, and what they mean in float64: each its scale times (number - zero point)."""
    out_size, in_size = weight.shape
    group = in_size if layout.group == -1 else layout.group
    largest = 2**layout.bits - 1
    grouped = weight.view(out_size, -1, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / largest).to(layout.dtype)
    least = 1 if layout.version == "gptq" else 0
    zero = (-low / scale.double()).round().clamp(least, largest)
    number = (grouped / scale.double()[:, :, None] + zero[:, :, None]).round().clamp(0, largest)
    meaning = (number - zero[:, :, None]) * scale.double()[:, :, None]
    numbers: Rows = number.view(out_size, in_size).T.long().tolist()  # [in][out]
    zeros: Rows = (zero.T - least).long().tolist()  # [groups][out]
    module = name.removesuffix(".weight")
    if layout.method == "awq":
        packed = words(numbers, 4, is_awq=True)
    else:
        packed = words([list(column) for column in zip(*numbers)], layout.bits, is_awq=False).T.contiguous()
    parts = {
        f"{module}.qweight": packed,
        f"{module}.qzeros": words(zeros, layout.bits, layout.method == "awq"),
        f"{module}.scales": scale.T.contiguous(),
    }
    if layout.has_order:
        parts[f"{module}.g_idx"] = torch.tensor([index // group for index in range(in_size)], dtype=torch.int32)
    return parts, meaning.view(out_size, in_size)


def pack_folder(source: Path, folder: Path, layout: Layout) -> Tensors:
    """Writes the packed copy of a folder and returns all of its weights as they are meant, in float64."""
    return write_packed(source, folder, entry_of(layout), partial(stored, layout))


def changed(name: str, **fields: Any) -> dict[str, Any]:
    """The quantization_config of a layout with other fields."""
    return entry_of(LAYOUTS[name]) | fields
