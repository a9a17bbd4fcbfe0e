"""GGUF files written by hand, after the format's own page, so that they need no package and may be wrong on purpose."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20)}
BLOCKS |= {"Q4_K": (256, 144), "Q6_K": (256, 210), "Q5_0": (32, 22)}
SCALE_PLACES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}  # of float16 numbers


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(entry: object) -> bytes:
    """A value with its type: bool, int (uint32), float (float32), string, or a list of one of them (ints: int32)."""
    if isinstance(entry, list):
        kind, letter = (8, "") if isinstance(entry[0], str) else (6, "f") if isinstance(entry[0], float) else (5, "i")
        parts = [string(one) if kind == 8 else struct.pack(f"<{letter}", one) for one in entry]
        return struct.pack("<IIQ", 9, kind, len(entry)) + b"".join(parts)
    if isinstance(entry, str):
        return struct.pack("<I", 8) + string(entry)
    if isinstance(entry, bool):
        return struct.pack("<I?", 7, entry)
    return struct.pack("<II", 4, entry) if isinstance(entry, int) else struct.pack("<If", 6, entry)


def place(name: str | bytes, sizes: Sequence[int], kind: int, offset: int) -> bytes:
    """The entry of a tensor; `sizes`: in the file's order, the inputs of a weight first."""
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def header(tensor_count: int, field_count: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, field_count)


def write_gguf(
    file: Path, metadata: Mapping[str, object], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]
) -> Path:
    """Writes a file of tensors: name -> format, shape in torch's order, bytes."""
    fields = b"".join(string(key) + value(entry) for key, entry in metadata.items())
    places, data = b"", b""
    for name, (kind, shape, stored) in tensors.items():
        places += place(name, shape[::-1], TYPES[kind], len(data))
        data += stored + bytes(-len(stored) % 32)
    start = header(len(tensors), len(metadata)) + fields + places
    file.write_bytes(start + bytes(-len(start) % 32) + data)
    return file


def random_stored(kind: str, shape: tuple[int, int], seed: int, size: float = 1.0) -> bytes:
    """Random bytes of a packed format: every value of every field occurs; scales and minima are about `size`."""
    generator = np.random.default_rng(seed)
    block, byte_count = BLOCKS[kind]
    blocks = generator.integers(0, 256, (shape[0], shape[1] // block, byte_count), dtype=np.uint8)
    for at in SCALE_PLACES[kind]:
        drawn = (size * generator.standard_normal((*blocks.shape[:2], 1))).astype(np.float16)
        blocks[..., at : at + 2] = drawn.view(np.uint8)
    return blocks.tobytes()


def plain_stored(weight: torch.Tensor) -> bytes:
    return weight.contiguous().view(torch.uint8).numpy().tobytes()
