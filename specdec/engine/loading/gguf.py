"""GGUF files: header, metadata and the places of tensors, read without trust.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Every count, length,
offset and size is compared with its limit and with the bytes that are left before anything of that size is made; a
file that breaks one is refused by field, value and limit. What the values mean is known in `gguf_model`, the formats of
weights in `gguf_formats`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from specdec.engine.loading.gguf_formats import FORMATS, format_named, unsupported_name
from specdec.errors import ModelRefused
from specdec.folders import has_file, refuse

MAGIC, VERSIONS = b"GGUF", (2, 3)
TENSORS_MAX, FIELDS_MAX = 1 << 16, 1 << 12
KEY_BYTES_MAX, NAME_BYTES_MAX, STRING_BYTES_MAX = 256, 64, 1 << 22  # a chat template is the longest string
ARRAY_MAX = 1 << 20  # tokens, or merges, of a vocabulary
HEADER_BYTES_MAX = 256 << 20
DIMENSIONS_MAX, SIZE_MAX = 4, 1 << 40
ALIGNMENT, ALIGNMENT_MAX = 32, 1 << 16
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # of `struct`
FIELD_BYTES_MIN, TENSOR_BYTES_MIN = 13, 32  # a length, a type and one byte; a length, a count, a size, a type, a place

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file. `shape`: in the order of torch, rows first; `start`: its first byte in the file."""

    name: str
    format: str
    shape: tuple[int, ...]
    start: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What the header of a GGUF file says, all checked."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    def stored(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """Returns the bytes of a tensor, mapped from the file."""
        return np.memmap(self.path, np.uint8, "r", tensor.start, (tensor.byte_count,))


def read_gguf(file: Path) -> GgufFile:
    """Reads the header of a file. Raises ModelRefused."""
    if not has_file(file):
        raise ModelRefused(f"{file} is missing")
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(file, data).read()
    except OSError as error:
        raise ModelRefused(f"{file} cannot be read: {error.strerror}") from None


class _Reader:
    """Reads forward through the header of one file."""

    def __init__(self, file: Path, data: mmap.mmap):
        self._file, self._data, self._size = file, data, len(data)
        self._end = min(self._size, HEADER_BYTES_MAX)
        self._at = 0

    def read(self) -> GgufFile:
        if self._data[:4] != MAGIC:
            self._refuse("magic", self._data[:4].hex(), f"{MAGIC.hex()}, of a GGUF file")
        self._at = 4
        version = self._number("version", "I")
        if version not in VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            kind = " (a big-endian file)" if swapped in VERSIONS else ""
            self._refuse("version", f"{version}{kind}", "2 or 3, little-endian")
        tensor_count = self._count("tensor_count", TENSORS_MAX, TENSOR_BYTES_MIN, low=1)
        field_count = self._count("metadata_kv_count", FIELDS_MAX, FIELD_BYTES_MIN)
        metadata: dict[str, Value] = {}
        for index in range(field_count):
            key = self._string(f"key {index}", KEY_BYTES_MAX)
            if key in metadata:
                self._refuse(f"key {index}", key, "a key of its own")
            metadata[key] = self._value(key)
        if metadata.get("split.count", 1) != 1:
            self._refuse("split.count", metadata["split.count"], "1: join the files of a split model first")
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
            self._refuse("general.alignment", alignment, f"a power of two from 8 to {ALIGNMENT_MAX}")
        places = [self._place(index, alignment) for index in range(tensor_count)]
        start = -(-self._at // alignment) * alignment
        return GgufFile(self._file, metadata, self._tensors(places, start))

    def _place(self, index: int, alignment: int) -> GgufTensor:
        """Returns a tensor of which `start` counts from the first tensor's byte."""
        name = self._string(f"name of tensor {index}", NAME_BYTES_MAX)
        count = self._number(f"{name}: n_dimensions", "I")
        if not 1 <= count <= DIMENSIONS_MAX:
            self._refuse(f"{name}: n_dimensions", count, f"from 1 to {DIMENSIONS_MAX}")
        sizes = [int(self._number(f"{name}: dimensions", "Q")) for _ in range(int(count))]
        element_count = 1
        for size in sizes:
            element_count *= size
            if not 1 <= size <= SIZE_MAX or element_count > SIZE_MAX:
                self._refuse(f"{name}: dimensions", sizes, f"sizes from 1 and at most {SIZE_MAX} weights")
        number = int(self._number(f"{name}: type", "I"))
        format_name = format_named(number)
        if format_name is None:
            self._refuse(f"{name}: type", unsupported_name(number), f"one of {', '.join(FORMATS)}")
        stored = FORMATS[format_name]
        if sizes[0] % stored.block:
            self._refuse(f"{name}: dimensions", sizes, f"rows of a multiple of {stored.block} weights ({format_name})")
        offset = int(self._number(f"{name}: offset", "Q"))
        if offset % alignment:
            self._refuse(f"{name}: offset", offset, f"a multiple of general.alignment, {alignment}")
        byte_count = element_count // stored.block * stored.block_bytes
        return GgufTensor(name, format_name, tuple(reversed(sizes)), offset, byte_count)

    def _tensors(self, places: list[GgufTensor], start: int) -> dict[str, GgufTensor]:
        """Returns the tensors with their places in the file, none beyond its end or over another."""
        found: dict[str, GgufTensor] = {}
        end = 0
        for place in sorted(places, key=lambda one: one.start):
            if place.name in found:
                self._refuse("tensor", place.name, "a tensor with a name of its own")
            if place.start < end:
                self._refuse(f"{place.name}: offset", place.start, f"at least {end}, where the tensor before it ends")
            end = place.start + place.byte_count
            if start + end > self._size:
                left = max(0, self._size - start)
                self._refuse(f"{place.name}: end", end, f"at most {left}, the bytes of weights in the file")
            found[place.name] = GgufTensor(place.name, place.format, place.shape, start + place.start, place.byte_count)
        return found

    def _value(self, key: str) -> Value:
        kind = int(self._number(f"{key}: type", "I"))
        if kind != ARRAY:
            return self._scalar(key, kind)
        kind = int(self._number(f"{key}: type of its values", "I"))
        if kind == ARRAY:
            self._refuse(f"{key}: type of its values", kind, "of numbers or strings: arrays of arrays are not read")
        if kind == STRING:
            count = self._count(f"{key}: length", ARRAY_MAX, 8)
            return [self._string(key, STRING_BYTES_MAX) for _ in range(count)]
        letter = self._letter(key, kind)
        count = self._count(f"{key}: length", ARRAY_MAX, struct.calcsize(f"<{letter}"))
        values = struct.unpack_from(f"<{count}{letter}", self._data, self._at)
        self._at += struct.calcsize(f"<{count}{letter}")
        return list(values)

    def _scalar(self, key: str, kind: int) -> Scalar:
        if kind == STRING:
            return self._string(key, STRING_BYTES_MAX)
        return self._number(key, self._letter(key, kind))

    def _letter(self, key: str, kind: int) -> str:
        if kind not in SCALARS:
            self._refuse(f"{key}: type", kind, "from 0 to 12")
        return SCALARS[kind]

    def _string(self, field: str, bytes_max: int) -> str:
        count = self._count(f"{field}: length", bytes_max, 1)
        data = self._data[self._at : self._at + count]
        self._at += count
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelRefused(f"{self._file}: {field} is not UTF-8: {error.reason} at byte {error.start}") from None

    def _count(self, field: str, high: int, byte_count: int, low: int = 0) -> int:
        """Reads the number of values that follow, each of at least `byte_count` bytes."""
        count = int(self._number(field, "Q"))
        if not low <= count <= high:
            self._refuse(field, count, f"from {low} to {high}")
        if count * byte_count > self._end - self._at:
            self._refuse(
                field, count, f"at most {(self._end - self._at) // byte_count}, for which the header has bytes"
            )
        return count

    def _number(self, field: str, letter: str) -> int | float | bool:
        size = struct.calcsize(f"<{letter}")
        if self._at + size > self._end:
            cause = f"the header is over after {self._end} bytes"
            raise ModelRefused(f"{self._file}: {field} is missing: {cause}; {size} more are needed")
        value: int | float | bool = struct.unpack_from(f"<{letter}", self._data, self._at)[0]
        self._at += size
        return value

    def _refuse(self, field: str, value: object, limit: str) -> NoReturn:
        raise refuse(self._file, field, value, limit)
