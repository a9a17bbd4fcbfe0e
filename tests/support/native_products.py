"""The native library by `ctypes` alone: several copies beside each other, and builds of altered sources.

A build holds products only, so that it takes a second; it has the interface of the whole library. Numbers are numpy
arrays; a bfloat16 array is float32 whose low 16 bits are zero, beside the name of its type.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.engine.cpu.compile_kernels import SOURCES, UNITS, Compiler, find_compiler
from specdec.engine.cpu.structs import INT4, INT8, NONE, WeightStruct

TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
Array = np.ndarray[Any, Any]

PRODUCTS_ONLY = """
#include "internal.h"
#include "products.h"
#define JOINED(a, b) a##b
#define TABLE_OF(unit) JOINED(sd_kernels_, unit)
#define TEXT(x) #x
#define NAME_OF(unit) TEXT(unit)
const sd_kernels TABLE_OF(UNIT) = {.family = "", .instructions = NAME_OF(UNIT), .packed_bytes = packed_bytes,
                                   .pack = pack, .pack_groups = pack_groups, .unpack = unpack, .product = product};
"""


def as_type(values: Array, name: str) -> Array:
    """Rounded to a type (bfloat16: towards zero); float16 in its own numpy type, the others as float32."""
    if name == "float16":
        return values.astype(np.float16)
    values = values.astype(np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if name == "bfloat16" else values


def stored(values: Array, name: str) -> Array:
    """The array as the library reads it."""
    return (values.view(np.uint32) >> 16).astype(np.uint16) if name == "bfloat16" else values


def bits(values: Array) -> Array:
    """The bits of float32 numbers."""
    return values.view(np.uint32)


class Library:
    """One loaded copy of the library, with a pool of threads of its own."""

    def __init__(self, path: Path, instructions: str | None = None):
        self.functions = ctypes.CDLL(str(path))
        self.functions.sd_packed_bytes.restype = ctypes.c_int64
        self.functions.sd_family.restype = ctypes.c_char_p
        self.is_usable = instructions is None or bool(self.functions.sd_use(instructions.encode()))

    def pack(self, weight: Array, name: str, bias: Array | None = None) -> Weight:
        """weight [out, in], bias float32 [out]."""
        own = Weight(self, weight.shape, (TYPES[name], NONE, NONE, 0), bias)
        given = np.ascontiguousarray(stored(weight, name))
        sizes = [ctypes.c_int64(size) for size in (*weight.shape, weight.shape[1], 1)]
        self.functions.sd_pack(pointer(given), TYPES[name], *sizes, pointer(own.panels))
        return own

    def pack_groups(
        self, bits: int, values: Array, scales: Array, minima: Array | None, bias: Array | None = None
    ) -> Weight:
        """values [out, in] int8, scales and minima [out, groups] of one type, float16 or float32."""
        number = TYPES[scales.dtype.name]
        form = INT4 if bits == 4 else INT8, number, NONE if minima is None else number
        own = Weight(self, values.shape, (*form, values.shape[1] // scales.shape[1]), bias)
        given = [pointer(each) for each in (values, scales)] + [None if minima is None else pointer(minima)]
        self.functions.sd_pack_groups(ctypes.byref(own.struct), *given, pointer(own.panels))
        return own


class Weight:
    """A weight [out, in] of one library, whose panels are to be filled. `form`: the last fields of sd_weight."""

    def __init__(self, library: Library, shape: tuple[int, ...], form: tuple[int, ...], bias: Array | None):
        self.functions = library.functions
        self.out_size, self.in_size = shape
        self.bias = bias
        self.struct = WeightStruct(None, None if bias is None else bias.ctypes.data, *shape, *form)
        self.panels = np.empty(self.functions.sd_packed_bytes(ctypes.byref(self.struct)), np.uint8)
        self.struct.panels = self.panels.ctypes.data

    def product(self, x: Array, name: str, threads: int = 1, gap: int = 0) -> Array:
        """x [rows, in] -> float32 [rows, out]; `gap`: numbers that follow each row in memory, all not-a-number. They
        also follow the last row, and none of the gaps of the result is written."""
        rows = x.shape[0]
        wide = np.full((rows + 1, self.in_size + gap), np.nan, np.float16 if name == "float16" else np.float32)
        wide[:rows, : self.in_size] = x
        given = stored(wide, name)
        y = np.full((rows, self.out_size + gap), 7, np.float32)
        strides = [ctypes.c_int64(stride) for stride in (self.in_size + gap, self.out_size + gap)]
        self.functions.sd_product(
            *(ctypes.byref(self.struct), pointer(given), TYPES[name], strides[0]),
            *(pointer(y), TYPES["float32"], strides[1], ctypes.c_int64(rows), threads),
        )
        assert (y[:, self.out_size :] == 7).all(), "wrote beyond a row"
        return np.ascontiguousarray(y[:, : self.out_size])


def pointer(array: Array) -> ctypes.c_void_p:
    """The address of an array, which the caller keeps alive."""
    return ctypes.c_void_p(array.ctypes.data)


def build(
    folder: Path,
    compiler: Compiler,
    unit: str,
    changes: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    optimization: str = "-O1",
) -> Library:
    """A library of products for one instruction set, of sources in which each (old, new) is replaced, by file."""
    sources = folder / "sources"
    shutil.copytree(SOURCES, sources, dirs_exist_ok=True)
    (sources / "unit.c").write_text(PRODUCTS_ONLY)
    for name, replacements in (changes or {}).items():
        text = (sources / name).read_text()
        for old, new in replacements:
            assert old in text, f"{name} has no longer: {old}"
            text = text.replace(old, new)
        (sources / name).write_text(text)
    flags = [optimization, "-std=c11", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-pthread"]
    unit_flags = next(units[unit] for units in UNITS.values() if unit in units)
    files = [compiler.compile(sources / "unit.c", folder / "unit.o", [*flags, *unit_flags, f"-DUNIT={unit}"])]
    for name in ("kernels", "parallel"):
        files.append(compiler.compile(sources / f"{name}.c", folder / f"{name}.o", [*flags, f"-DHAVE_{unit}"]))
    library = folder / "products.so"
    # Linked by this machine's compiler: the runtime library of another need not know the processor.
    find_compiler().run("-shared", "-pthread", "-o", str(library), *map(str, files))
    built = Library(library, unit)
    assert built.is_usable, unit
    return built
