"""The native kernels, called through `ctypes`, which releases the interpreter's lock during a call.

The library is a plain shared library without Python's headers, compiled at installation (setup.py). Every number of a
row is computed in one order that depends on the row alone: see docs/exactness.md. Calls run on as many threads as torch
is told to use, and no result depends on their number.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import zlib
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from specdec.engine.cpu import structs
from specdec.engine.cpu.arguments import (
    TYPES,
    LayerCache,
    Norm,
    Rows,
    ScoreRule,
    WeightPanels,
    check_tensor,
    refuse,
    type_of,
)
from specdec.engine.cpu.packing import Packer
from specdec.engine.cpu.step_arguments import ChainArguments, StepArguments, StepModel
from specdec.engine.packed import PackedWeight
from specdec.errors import ConfigError

__all__ = [
    "Kernels",
    "LayerCache",
    "Norm",
    "Rows",
    "ScoreRule",
    "StepArguments",
    "StepModel",
    "WeightPanels",
    "kernels",
]

logger = logging.getLogger("specdec.engine")

CHOICE_VARIABLE = "SPECDEC_KERNELS"
CHOICES = ("avx2", "avx512", "avx512_bf16", "neon", "off")
LIBRARY = Path(__file__).with_name("_kernels.so")
SOURCES = Path(__file__).with_name("native")
ACTIVATIONS = {
    "silu": structs.SILU,
    "gelu": structs.GELU_ERF,
    "gelu_new": structs.GELU_TANH,
    "gelu_pytorch_tanh": structs.GELU_TANH,
    "relu": structs.RELU,
}

_RESULTS: dict[str, Any] = {  # of the functions of kernels.h; the others return nothing
    "sd_version": c_int32,
    "sd_family": c_char_p,
    "sd_instructions": c_char_p,
    "sd_use": c_int32,
    "sd_packed_bytes": c_int64,
    "sd_step": c_int32,
    "sd_draft": c_int32,
    "sd_check_rows": c_char_p,
}
_TENSOR = (c_void_p, c_int32, c_int64)  # address, type, stride
_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "sd_version": (),
    "sd_family": (),
    "sd_instructions": (),
    "sd_use": (c_char_p,),
    "sd_packed_bytes": (POINTER(structs.WeightStruct),),
    "sd_pack": (c_void_p, c_int32, c_int64, c_int64, c_int64, c_int64, c_void_p),
    "sd_pack_groups": (POINTER(structs.WeightStruct), *(c_void_p,) * 4),
    "sd_unpack": (POINTER(structs.WeightStruct), c_void_p, c_int64, c_void_p, c_int32),
    "sd_product": (POINTER(structs.WeightStruct), *_TENSOR, *_TENSOR, c_int64, c_int32),
    "sd_normalize": (
        POINTER(structs.NormStruct),
        *(c_void_p, c_int64, c_void_p, c_int64),
        *(c_int32, c_int64, c_int64, c_int32),
    ),
    "sd_activate": (c_int32, c_void_p, c_void_p, c_int32, c_int64, c_int32),
    "sd_tanh": (c_void_p, c_void_p, c_int64, c_int32),
    "sd_write": (
        *(POINTER(structs.CacheStruct), POINTER(structs.RowsStruct)),
        *(c_void_p, c_int64, c_void_p, c_int64, c_int32),
    ),
    "sd_attend": (
        *(POINTER(structs.CacheStruct), POINTER(structs.RowsStruct), POINTER(structs.RuleStruct)),
        *(c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int32),
    ),
    "sd_argmax": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int32),
    "sd_race": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int32),
    "sd_guess": (c_void_p, *(c_int64,) * 3, *(c_void_p,) * 3, c_int64, c_void_p, c_void_p, c_int32),
    "sd_mask": (c_void_p, *(c_int64,) * 3, c_void_p, c_int64, c_void_p, c_void_p, c_int32),
    "sd_step": (
        *(POINTER(structs.ModelStruct), POINTER(structs.RowsStruct), POINTER(structs.StepStruct)),
        c_int32,
    ),
    "sd_draft": (
        *(POINTER(structs.ModelStruct), POINTER(structs.RowsStruct), POINTER(structs.StepStruct)),
        *(POINTER(structs.ChainStruct), c_int32),
    ),
    "sd_check_rows": (POINTER(structs.RowsStruct), c_int64, c_int64),
}


@functools.cache
def kernels() -> Kernels | None:
    """Returns the kernels of this process, the same at every call; None where there are none, and one line of the log
    says why. Raises ConfigError if SPECDEC_KERNELS names none that this machine can run."""
    choice = os.environ.get(CHOICE_VARIABLE, "")
    if choice and choice not in CHOICES:
        raise ConfigError(f"{CHOICE_VARIABLE} is {choice!r}; it must be one of {', '.join(CHOICES)}, or unset")
    if choice == "off":
        logger.warning(
            "native kernels are off (%s=off): rows are computed one at a time, which is slow", CHOICE_VARIABLE
        )
        return None
    try:
        found = Kernels(LIBRARY, choice)
    except (OSError, AttributeError) as error:
        if choice:
            raise ConfigError(
                f"{CHOICE_VARIABLE} is {choice!r}, but the native kernels cannot be loaded: {error}"
            ) from error
        logger.warning("no native kernels, rows are computed one at a time, which is slow: %s", error)
        return None
    newer = [path.name for path in sorted(SOURCES.glob("*.[ch]")) if path.stat().st_mtime > LIBRARY.stat().st_mtime]
    if newer:
        logger.warning("native kernels are older than their sources (%s): run `make install`", ", ".join(newer))
    return found


class Kernels:
    """The kernels of a library for one instruction set.

    Tensors are of a CPU and of float32, bfloat16 or float16; results are new and contiguous. An argument of another
    shape or type raises ValueError, and nothing is computed. Safe to call from several threads, also at the same time.
    """

    def __init__(self, library: Path, choice: str = "") -> None:
        """Loads it; `choice`: the instruction set, "" for the best of this processor. Raises OSError where it cannot be
        loaded or this processor has none of its instruction sets, AttributeError for a library that is another,
        ConfigError if it cannot run this choice."""
        self._library = ctypes.CDLL(str(library))
        self._packer = Packer(self._library)
        for name, parameters in _PARAMETERS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = parameters, _RESULTS.get(name)
        if choice and not self._library.sd_use(choice.encode()):
            raise ConfigError(f"{CHOICE_VARIABLE} is {choice!r}, which this processor or library does not have")
        self.version: int = self._library.sd_version()
        self.family: str = self._library.sd_family().decode()
        self.instructions: str = self._library.sd_instructions().decode()
        if not self.family:
            raise OSError(f"{library.name} has no kernels for this processor, which lacks AVX2 or NEON")

    def __repr__(self) -> str:
        return f"Kernels(version {self.version}, {self.family}, {self.instructions})"

    @property
    def library(self) -> ctypes.CDLL:
        """The functions of kernels.h, for modules of this package; their arguments are not checked."""
        return self._library

    @functools.cached_property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits of the bits of a small fixed set of products, norms, activations and attention:
        machines with equal ones compute alike."""
        return f"{zlib.crc32(b''.join(_bits_of(result) for result in _fixed_set(self))):08x}"

    def pack(self, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> WeightPanels:
        """Returns a weight [out, in], dense of any strides or packed, in the layout of `product`, with its `bias` [out]
        in float32."""
        if isinstance(weight, PackedWeight):
            return self._packer.pack_groups(weight, bias)
        return self._packer.pack(weight, bias)

    def unpack(self, weight: WeightPanels, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns outputs [...] int64 of a weight.  # [..., in] of dtype, rounded once to it"""
        result = torch.empty(*outputs.shape, weight.in_size, dtype=dtype)
        outputs = outputs.contiguous()
        check_tensor("outputs", outputs, torch.int64, tuple(outputs.shape))
        if outputs.numel() and not 0 <= int(outputs.min()) <= int(outputs.max()) < weight.out_size:
            refuse("outputs", f"from {int(outputs.min())} to {int(outputs.max())}", f"from 0 to {weight.out_size - 1}")
        number = type_of("result", result)
        self._library.sd_unpack(weight.struct, outputs.data_ptr(), outputs.numel(), result.data_ptr(), number)
        return result

    def product(self, weight: WeightPanels, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [..., in] -> x @ weight.T + bias [..., out] in `dtype`, else in that of x."""
        x, stride = _rows_of("x", x, weight.in_size)
        result = torch.empty(*x.shape[:-1], weight.out_size, dtype=dtype or x.dtype)
        types = type_of("x", x), type_of("result", result)
        self._library.sd_product(
            weight.struct,
            *(x.data_ptr(), types[0], stride),
            *(result.data_ptr(), types[1], weight.out_size),
            x.numel() // weight.in_size,
            torch.get_num_threads(),
        )
        return result

    def normalize(self, norm: Norm, x: Tensor) -> Tensor:
        """Normalizes over the last dimension."""
        x, stride = _rows_of("x", x, norm.size)
        result = torch.empty(x.shape, dtype=x.dtype)
        self._library.sd_normalize(
            norm.struct,
            *(x.data_ptr(), stride, result.data_ptr(), norm.size),
            *(type_of("x", x), x.numel() // norm.size, norm.size),
            torch.get_num_threads(),
        )
        return result

    def activate(self, name: str, x: Tensor) -> Tensor:
        """The activation of this name in the configuration of a `transformers` model, of each element."""
        if name not in ACTIVATIONS:
            refuse("activation", repr(name), f"one of {', '.join(ACTIVATIONS)}")
        number, x = type_of("x", x), x.contiguous()
        result = torch.empty_like(x)
        arguments = x.data_ptr(), result.data_ptr(), number, x.numel(), torch.get_num_threads()
        self._library.sd_activate(ACTIVATIONS[name], *arguments)
        return result

    def tanh(self, x: Tensor) -> Tensor:
        """Of each element, float32."""
        x = x.contiguous()
        check_tensor("x", x, torch.float32, tuple(x.shape))
        result = torch.empty_like(x)
        self._library.sd_tanh(x.data_ptr(), result.data_ptr(), x.numel(), torch.get_num_threads())
        return result

    def rows(
        self, *, block_count: int, block_size: int, first: numpy.ndarray | None = None, **arrays: numpy.ndarray
    ) -> Rows:
        """Returns the rows of a step, its `arrays` named as in sd_rows, for caches of these sizes. Raises ValueError if
        an index lies outside them, or outside the rows' own tables."""
        rows = Rows(block_count=block_count, block_size=block_size, first=first, **arrays)
        wrong = self._library.sd_check_rows(rows.struct, block_count, block_size)
        if wrong is not None:
            raise ValueError(f"rows for {block_count} blocks of {block_size} positions: {wrong.decode()}")
        return rows

    def write(self, cache: LayerCache, rows: Rows, keys: Tensor, values: Tensor) -> None:
        """Writes keys and values [rows, kv heads, head size] to the rows' slots."""
        rows.check_cache("cache", cache.struct)
        sides = [_heads_of(*pair, cache, rows, cache.kv_heads) for pair in (("keys", keys), ("values", values))]
        places = [part for side, stride in sides for part in (side.data_ptr(), stride)]
        self._library.sd_write(cache.struct, rows.struct, *places, torch.get_num_threads())

    def attend(self, cache: LayerCache, rows: Rows, rule: ScoreRule, queries: Tensor) -> Tensor:
        """queries [rows, heads, head size] -> results of the same shape. The keys that rows see have been written."""
        rows.check_cache("cache", cache.struct)
        heads = queries.shape[1] if queries.dim() == 3 else 0
        if not heads or heads % cache.kv_heads:
            refuse("queries.shape", list(queries.shape), f"[rows, a multiple of {cache.kv_heads} kv heads, head size]")
        if rule.bias is not None and len(rule.bias) != heads:
            refuse("bias.shape", list(rule.bias.shape), f"[{heads} heads, 2 reach + 1]")
        queries, stride = _heads_of("queries", queries, cache, rows, heads)
        result = torch.empty(queries.shape, dtype=queries.dtype)
        self._library.sd_attend(
            *(cache.struct, rows.struct, rule.struct, heads),
            *(queries.data_ptr(), stride, result.data_ptr(), heads * cache.head_size),
            torch.get_num_threads(),
        )
        return result

    def argmax(self, x: Tensor) -> Tensor:
        """x [..., size] float32 -> the index of the first largest [...], int64."""
        if not x.dim() or not x.shape[-1]:
            refuse("x.shape", list(x.shape), "[..., size], of at least one")
        size = x.shape[-1]
        x, stride = _rows_of("x", x, size)
        if x.dtype is not torch.float32:
            refuse("x.dtype", x.dtype, "torch.float32")
        result = torch.empty(x.shape[:-1], dtype=torch.int64)
        arguments = x.data_ptr(), stride, result.numel(), size, result.data_ptr(), torch.get_num_threads()
        self._library.sd_argmax(*arguments)
        return result

    def step(self, model: StepModel, rows: Rows, arguments: StepArguments) -> int:
        """Runs the model's step over these rows, into the results of `arguments`; returns structs.DONE, ABANDONED,
        EXCHANGE_FAILED or NO_MEMORY."""
        _check_step(model, rows, arguments, 0)
        code: int = self._library.sd_step(model.struct, rows.struct, arguments.struct, torch.get_num_threads())
        return code

    def draft(self, model: StepModel, rows: Rows, arguments: StepArguments, chain: ChainArguments) -> int:
        """Runs a step, of which the logits of the last row and one feature are asked, and drafts a chain behind it; see
        sd_draft. Returns what `step` does."""
        _check_step(model, rows, arguments, chain.count - 1)
        chain.check(rows)
        own = model.struct, rows.struct, arguments.struct, chain.struct
        code: int = self._library.sd_draft(*own, torch.get_num_threads())
        return code


def _check_step(model: StepModel, rows: Rows, arguments: StepArguments, behind: int) -> None:
    """Raises ValueError for rows that are not those of the arguments or of the model; `behind`: rows that follow."""
    if arguments.row_count != rows.count:
        refuse("the length of ids", arguments.row_count, f"{rows.count}, the number of rows")
    last = max(rows.position.tolist(), default=0) + behind
    if last >= model.struct.positions_max:
        refuse("the last position", last, f"below {model.struct.positions_max}, the model's")
    rows.check_cache("the cache", model.struct.layers[0].cache)
    if model.has_cross and (rows.first is None or not rows.first.all()):
        refuse("first of a row", 0, "1 or more: the model attends to what lies before it")


def _rows_of(name: str, x: Tensor, size: int) -> tuple[Tensor, int]:
    """Returns x [..., size] and the distance of its rows in elements; a contiguous copy unless its rows lie at equal
    distances, each contiguous."""
    type_of(name, x)
    if not x.dim() or x.shape[-1] != size:
        refuse(f"{name}.shape", list(x.shape), f"[..., {size}]")
    if x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= size:
        return x, x.stride(0)
    return x.contiguous(), size


def _heads_of(name: str, x: Tensor, cache: LayerCache, rows: Rows, heads: int) -> tuple[Tensor, int]:
    """Returns keys, values or queries [rows, heads, head size] of the cache's type, and the distance of their rows."""
    if x.dtype is not cache.dtype:
        refuse(f"{name}.dtype", x.dtype, f"{cache.dtype}, the cache's")
    type_of(name, x)
    expected = [rows.count, heads, cache.head_size]
    if list(x.shape) != expected:
        refuse(f"{name}.shape", list(x.shape), f"{expected} [rows, heads, head size]")
    size = heads * cache.head_size
    if x.stride(2) == 1 and x.stride(1) == cache.head_size and x.stride(0) >= size:
        return x, x.stride(0)
    return x.contiguous(), size


def _bits_of(result: Tensor) -> bytes:
    return result.contiguous().view(torch.uint8).numpy().tobytes()


def _fixed_set(kernels: Kernels) -> list[Tensor]:
    """Results of every kind of kernel over numbers that are the same on every machine."""

    def numbers(*shape: int, scale: float = 1.0) -> Tensor:
        count = torch.Size(shape).numel()
        whole = (torch.arange(count) * 40503 + 977) % 65521  # no library's random numbers: these stay
        return ((whole.to(torch.float32) / 65521 - 0.5) * scale).reshape(shape)

    results = []
    for dtype in TYPES:
        weight = kernels.pack(numbers(37, 129).to(dtype), numbers(37))
        results += [kernels.product(weight, numbers(rows, 129).to(dtype), torch.float32) for rows in (1, 7)]
    for is_centered in (False, True):
        results.append(kernels.normalize(Norm(numbers(129), is_centered=is_centered), numbers(5, 129)))
    results += [kernels.activate(name, numbers(5, 129, scale=30)) for name in ACTIVATIONS]
    cache = LayerCache(numbers(40, 2, 16, 16), numbers(40, 2, 16, 16).neg())
    last = 620  # beyond a split of the positions
    rows = kernels.rows(
        block_count=40,
        block_size=16,
        sequence=numpy.zeros(1, numpy.int32),
        position=numpy.array([last], numpy.int32),
        slot=numpy.array([last], numpy.int32),
        base=numpy.array([last + 1], numpy.int32),
        path_start=numpy.zeros(2, numpy.int64),
        path=numpy.zeros(0, numpy.int32),
        table_start=numpy.array([0, 40], numpy.int64),
        table=numpy.arange(40, dtype=numpy.int32),
    )
    results.append(kernels.attend(cache, rows, ScoreRule(scaling=0.25, softcap=30.0), numbers(1, 4, 16, scale=20)))
    return results
