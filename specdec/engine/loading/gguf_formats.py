"""The formats of weights in GGUF files, read to what they mean.

Source: the structures of ggml-common.h and the functions dequantize_row_* of ggml-quants.c. A packed format is groups
of integers along the input, each group with a scale and perhaps a minimum (`PackedWeight`): the product of a scale and
an integer is exact in float32, so a weight is rounded once, where a minimum is added, as ggml does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.packed import PackedWeight

NAMES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}

Bytes = npt.NDArray[np.uint8]  # [rows, blocks, bytes of a block]
Parts = tuple[npt.NDArray[Any], ...]  # values; scales; minima, if the format has any


@dataclass(frozen=True, slots=True)
class Format:
    """`block` weights of a row are stored in `block_bytes` bytes. `unpack`, of a packed format: blocks [rows, blocks,
    bytes] -> values [rows, in], scales and minima [rows, in / group]; `bits` of a value as a
    `PackedWeight` has it, 0 where none does."""

    block: int
    block_bytes: int
    bits: int = 0
    group: int = 0
    unpack: Callable[[Bytes], Parts] | None = None


def format_named(number: int) -> str | None:
    """Returns the name of a supported format by its number in a file."""
    name = NAMES.get(number)
    return name if name in FORMATS else None


def unsupported_name(number: int) -> str:
    """Returns what another format is called in a refusal."""
    return NAMES.get(number, str(number))


def packed_weight(name: str, stored: Bytes, shape: tuple[int, ...]) -> PackedWeight:
    """Returns a tensor [out, in] of a packed format with `bits` as it stands."""
    kind = FORMATS[name]
    return PackedWeight(kind.bits, kind.group, *_unpacked(kind, stored, shape))


def dense_weight(name: str, stored: Bytes, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor in float32, or, if its numbers are plain ones, in their own type."""
    kind = FORMATS[name]
    if kind.unpack is None:
        types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return torch.from_numpy(np.array(stored)).view(types[name]).reshape(shape)
    values, scales, *minima = _unpacked(kind, stored, shape)
    groups = values.view(len(values), -1, kind.group).to(torch.float32).mul_(scales.to(torch.float32)[:, :, None])
    if minima:
        groups.add_(minima[0].to(torch.float32)[:, :, None])
    return groups.view(shape)


def _unpacked(kind: Format, stored: Bytes, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns values [out, in], scales [out, in / group] and perhaps minima."""
    assert kind.unpack is not None
    rows, width = math.prod(shape[:-1]), shape[-1]
    parts = kind.unpack(stored.reshape(rows, width // kind.block, kind.block_bytes))
    return [torch.from_numpy(part.reshape(rows, -1)) for part in parts]


def _halves(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """The float16 number of each block that begins at a byte."""
    return np.array(blocks[..., at : at + 2]).view(np.float16)


def _times(blocks: Bytes, at: int, factors: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The float16 number of each block times its groups' factors: exact, of 18 bits at most."""
    found: npt.NDArray[np.float32] = np.multiply(_halves(blocks, at), factors, dtype=np.float32)
    return found


def _nibbles(quants: Bytes) -> Bytes:
    """The low halves of bytes, then their high halves: [..., n] -> [..., 2 n]."""
    return np.concatenate([quants & 15, quants >> 4], axis=-1)


def _q8_0(blocks: Bytes) -> Parts:
    return np.array(blocks[..., 2:]).view(np.int8), _halves(blocks, 0)


def _q4_0(blocks: Bytes) -> Parts:
    return _nibbles(blocks[..., 2:]).astype(np.int8) - np.int8(8), _halves(blocks, 0)


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q4_k(blocks: Bytes) -> Parts:
    """Eight groups of 32; the six bits of a group's scale and minimum lie in twelve bytes: those of groups 0 to 3 in
    the low bits of bytes 0 to 3 and 4 to 7, of groups 4 to 7 in the halves of bytes 8 to 11 and the top bits of others.
    """
    low, middle, high = (blocks[..., 4 + 4 * part : 8 + 4 * part] for part in range(3))
    factors = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=-1)
    offsets = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=-1)
    quants = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    return quants, _times(blocks, 0, factors), -_times(blocks, 2, offsets)


def _q6_k(blocks: Bytes) -> Parts:
    """Two halves of 128 weights: low four bits in 64 bytes, upper two bits in 32, a signed scale for each 16."""
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64))
    upper = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32)
    high = np.concatenate([(upper >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    factors = np.array(blocks[..., 192:208]).view(np.int8)
    return (low | (high << 4)).astype(np.int8) - np.int8(32), _times(blocks, 208, factors)


FORMATS = {
    "F32": Format(1, 4),
    "F16": Format(1, 2),
    "BF16": Format(1, 2),
    "Q8_0": Format(32, 34, 8, 32, _q8_0),
    "Q4_0": Format(32, 18, 4, 32, _q4_0),
    "Q4_1": Format(32, 20, 4, 32, _q4_1),
    "Q4_K": Format(256, 144, 4, 32, _q4_k),
    "Q6_K": Format(256, 210, 8, 16, _q6_k),  # six bits, multiplied as eight
}
