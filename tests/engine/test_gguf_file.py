"""The reader of GGUF files: what it reads equals the format's reference, and what it must not read is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.engine.loading.gguf import read_gguf
from specdec.engine.loading.gguf_formats import FORMATS, dense_weight, packed_weight
from specdec.errors import ModelRefused
from tests.support.gguf_files import TYPES, header, place, plain_stored, random_stored, string, value, write_gguf

PACKED = [name for name, kind in FORMATS.items() if kind.unpack]
METADATA = {"general.architecture": "llama", "a.flag": True, "a.float": 0.5, "a.list": ["x", "é"], "a.ints": [1, -2]}


def test_metadata_and_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Claim: keys, values of each kind, shapes and numbers come back as they were written.

    Source: the format's page. Conclusive: a file of each kind of value is compared as a whole; a tensor has another
    size along each axis.
    """
    plain = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    weights = {kind: torch.randn(3, 5).to(dtype) for dtype, kind in plain.items()}
    file = write_gguf(
        tmp_path / "a.gguf", METADATA, {kind: (kind, (3, 5), plain_stored(one)) for kind, one in weights.items()}
    )
    read = read_gguf(file)
    assert read.metadata == METADATA
    for kind, weight in weights.items():
        tensor = read.tensors[kind]
        assert tensor.shape == (3, 5)
        found = dense_weight(kind, read.stored(tensor), tensor.shape)
        assert found.dtype is weight.dtype and torch.equal(found, weight)


@pytest.mark.parametrize("kind", PACKED)
def test_each_packed_format_means_what_its_reference_says(kind: str, tmp_path: Path) -> None:
    """Claim: a weight of each packed format has the bits that the `gguf` package unpacks, also as a `PackedWeight`.

    Source: ggml's own Python package. Conclusive: random bytes of every field, so that a wrong shift, half or order
    changes a number; compared bit by bit.
    """
    reference = pytest.importorskip("gguf", reason="the package gguf is the reference")
    shape = (6, 1024)
    file = write_gguf(tmp_path / "a.gguf", METADATA, {"w": (kind, shape, random_stored(kind, shape, 1))})
    read = read_gguf(file)
    tensor = read.tensors["w"]
    entry = reference.GGUFReader(file).tensors[0]
    expected = torch.from_numpy(reference.dequantize(entry.data, entry.tensor_type).copy())
    assert expected.shape == shape and expected.unique().numel() > 200
    assert torch.equal(dense_weight(kind, read.stored(tensor), shape), expected)
    assert (FORMATS[kind].bits == 0) == (kind == "Q4_K")
    if FORMATS[kind].bits:
        assert torch.equal(packed_weight(kind, read.stored(tensor), shape).dense(), expected)


def test_a_small_weight_unpacks_to_the_numbers_of_the_page(tmp_path: Path) -> None:
    """Claim: a block of Q4_1 holds its first 16 weights in low halves of bytes, the others in high halves.

    Source: ggml-common.h. Conclusive: the bytes are written out here and need no package.
    """
    stored = np.array([0.5, -3.0], np.float16).tobytes() + bytes(16 * (15 - n) + n for n in range(16))
    file = write_gguf(tmp_path / "a.gguf", METADATA, {"w": ("Q4_1", (1, 32), stored)})
    read = read_gguf(file)
    numbers = [*range(16), *range(15, -1, -1)]
    found = dense_weight("Q4_1", read.stored(read.tensors["w"]), (1, 32))
    assert found.tolist() == [[0.5 * number - 3 for number in numbers]]


def with_fields(*fields: bytes, tensors: bytes = place("w", (4,), 0, 0), count: int = 1, left: int = 64) -> bytes:
    start = header(count, len(fields)) + b"".join(fields) + tensors
    return start + bytes(-len(start) % 32 + left)


def with_tensor(sizes: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0, name: str = "w") -> bytes:
    return with_fields(tensors=place(name, sizes, kind, offset))


KEY = string("k")
HUGE = 1 << 62
HOSTILE: dict[str, tuple[bytes, str]] = {
    "another file": (b"PK\3\4" + bytes(60), "magic is"),
    "version 1": (header(1, 0, 1) + bytes(64), "version is"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + bytes(64), "big-endian"),
    "cut in the counts": (header(1, 0)[:12], "tensor_count is missing"),
    "no tensor": (header(0, 0) + bytes(64), "tensor_count is 0"),
    "tensors beyond the limit": (header(HUGE, 0) + bytes(64), "tensor_count is"),
    "tensors beyond the bytes": (header(1000, 0) + bytes(64), "tensor_count is 1000"),
    "fields beyond the limit": (header(1, HUGE) + bytes(64), "metadata_kv_count is"),
    "fields beyond the bytes": (header(1, 1000) + bytes(64), "metadata_kv_count is 1000"),
    "a key beyond the limit": (with_fields(string("k" * 300) + value(1)), "key 0: length is 300"),
    "a string beyond the bytes": (with_fields(KEY + struct.pack("<IQ", 8, 1 << 20)), "k: length is"),
    "a string of any length": (with_fields(KEY + struct.pack("<IQ", 8, HUGE)), "k: length is"),
    "a string that is not UTF-8": (with_fields(KEY + struct.pack("<I", 8) + string(b"\xff\xff")), "not UTF-8"),
    "an unknown type": (with_fields(KEY + struct.pack("<II", 13, 0)), "k: type is 13"),
    "an array of arrays": (with_fields(KEY + struct.pack("<IIQ", 9, 9, 1)), "arrays of arrays"),
    "an array of any length": (with_fields(KEY + struct.pack("<IIQ", 9, 4, HUGE)), "k: length is"),
    "an array beyond the bytes": (with_fields(KEY + struct.pack("<IIQ", 9, 12, 100)), "k: length is 100"),
    "an array of unknown type": (with_fields(KEY + struct.pack("<IIQ", 9, 99, 1)), "k: type is 99"),
    "a key twice": (with_fields(KEY + value(1), KEY + value(2)), "key 1 is"),
    "alignment 0": (with_fields(string("general.alignment") + value(0)), "general.alignment is 0"),
    "alignment 48": (with_fields(string("general.alignment") + value(48)), "general.alignment is 48"),
    "alignment of text": (with_fields(string("general.alignment") + value("8")), "general.alignment is"),
    "a part of a split model": (with_fields(string("split.count") + value(2)), "split.count is 2"),
    "a long name": (with_tensor(name="w" * 65), "name of tensor 0: length is 65"),
    "no dimensions": (with_tensor(sizes=()), "n_dimensions is 0"),
    "five dimensions": (with_tensor(sizes=(1,) * 5), "n_dimensions is 5"),
    "a size of 0": (with_tensor(sizes=(4, 0)), "w: dimensions is [4, 0]"),
    "sizes that overflow": (with_tensor(sizes=(1 << 32, 1 << 32)), "w: dimensions is"),
    "a format that is not read": (with_tensor((32,), TYPES["Q5_0"]), 'type is "Q5_0"; it must be one of F32'),
    "a format without a name": (with_tensor((32,), 99), 'type is "99"'),
    "a part of a block": (with_tensor((33,), TYPES["Q8_0"]), "a multiple of 32"),
    "a crooked offset": (with_tensor(offset=8), "w: offset is 8"),
    "an offset beyond the end": (with_tensor(offset=HUGE), "w: end is"),
    "weights beyond the end": (with_tensor(sizes=(1000,)), "w: end is 4000"),
    "a name twice": (with_fields(tensors=place("w", (4,), 0, 0) + place("w", (4,), 0, 32), count=2), "tensor is"),
    "one over another": (with_fields(tensors=place("v", (4,), 0, 0) + place("w", (4,), 0, 0), count=2), "offset is 0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_field_value_and_limit(name: str, tmp_path: Path) -> None:
    """Claim: a count, length, type, size or place that cannot be is refused in one line, whatever it asks for.

    Source: the format's page. Conclusive: each fault is planted alone into a file that is read without it; those of
    2^62 would fail with MemoryError or hang if anything of that size were made.
    """
    read_gguf(file_of(tmp_path, with_fields(KEY + value(1))))
    data, named = HOSTILE[name]
    with pytest.raises(ModelRefused) as caught:
        read_gguf(file_of(tmp_path, data))
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """Claim: of a file that is read whole, no beginning is read, nor is one with any byte changed an unnamed error.

    Source: reliability of loading. Conclusive: every length from one byte on and every byte of the header is tried.
    """
    stored = random_stored("Q8_0", (2, 32), 1)
    whole = write_gguf(tmp_path / "whole.gguf", METADATA, {"w": ("Q8_0", (2, 32), stored)}).read_bytes()
    end = whole.index(stored) + len(stored)
    for length in range(1, end):
        with pytest.raises(ModelRefused):
            read_gguf(file_of(tmp_path, whole[:length]))
    for index in range(end - len(stored)):
        for change in (0x01, 0x80, 0xFF):
            changed = bytearray(whole)
            changed[index] ^= change
            accepts(lambda data=bytes(changed): read_gguf(file_of(tmp_path, data)))


def accepts(read: Callable[[], object]) -> None:
    """Lets a call succeed or refuse; any other error fails the test."""
    try:
        read()
    except ModelRefused as error:
        assert "\n" not in str(error)


def file_of(folder: Path, data: bytes) -> Path:
    file = folder / "tried.gguf"
    file.write_bytes(data)
    return file
