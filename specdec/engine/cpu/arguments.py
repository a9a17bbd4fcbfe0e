"""What the native kernels are called with: weights in panels, norms, caches and rows, each checked at construction and
holding the memory that its `struct` points to; `step_arguments` has those of a whole step.

Every check of a type, size or stride that native/kernels.h leaves to its caller is here, there or in `kernels`. A wrong
one raises ValueError that names field, value and limit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import numpy
import torch
from torch import Tensor

from specdec.engine.cpu.structs import (
    NONE,
    ROUND_FIRST,
    ROUND_ONCE,
    CacheStruct,
    NormStruct,
    RowsStruct,
    RuleStruct,
    WeightStruct,
)

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # SD_FLOAT32 ...
DTYPES = {number: dtype for dtype, number in TYPES.items()}
COUNT_MAX = 2**31 - 1  # of rows, slots and positions, which are int32
HEAD_SIZE_MAX = 512  # of native/attention.h


def refuse(name: str, value: object, limit: str) -> NoReturn:
    """Raises ValueError: this argument has this value, and must be `limit`."""
    raise ValueError(f"{name} is {value}; it must be {limit}")


def type_of(name: str, tensor: Tensor) -> int:
    """The number of its type in kernels.h. Raises ValueError unless it is a tensor of a CPU of such a type."""
    number = TYPES.get(tensor.dtype)
    if number is None:
        refuse(f"{name}.dtype", tensor.dtype, "float32, bfloat16 or float16")
    if tensor.device.type != "cpu":
        refuse(f"{name}.device", tensor.device, "cpu")
    return number


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless it is a contiguous tensor of a CPU of this type and shape."""
    if tensor.dtype is not dtype:
        refuse(f"{name}.dtype", tensor.dtype, str(dtype))
    if tensor.device.type != "cpu":
        refuse(f"{name}.device", tensor.device, "cpu")
    if tensor.shape != shape:
        refuse(f"{name}.shape", list(tensor.shape), str(list(shape)))
    if not tensor.is_contiguous():
        refuse(f"{name}.stride", tensor.stride(), "that of a contiguous tensor")


def address_of(array: numpy.ndarray) -> int | None:
    """Where the numbers of a contiguous array begin; None of an empty one. An eighth of the time of `array.ctypes`,
    which every step would spend eight times."""
    if not array.size:
        return None
    if not array.flags.writeable:
        return array.ctypes.data
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


class PanelFormat(NamedTuple):
    """The last fields of sd_weight: the type of the panels, and of packed weights those of their groups."""

    type: int
    scale_type: int = NONE
    minimum_type: int = NONE
    group: int = 0


@dataclass(frozen=True, slots=True)
class WeightPanels:
    """A weight [out_size, in_size] as `Kernels.pack` lays it out, with its bias; of the kernels that packed it."""

    out_size: int
    in_size: int
    format: PanelFormat
    panels: Tensor = field(repr=False)  # bytes
    bias: Tensor | None = field(repr=False)  # [out_size] float32
    struct: WeightStruct = field(init=False, repr=False)

    def __post_init__(self) -> None:
        bias = None if self.bias is None else self.bias.data_ptr()
        sizes = self.out_size, self.in_size
        object.__setattr__(self, "struct", WeightStruct(self.panels.data_ptr(), bias, *sizes, *self.format))

    @property
    def byte_count(self) -> int:
        return self.panels.numel() + (0 if self.bias is None else 4 * self.out_size)

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of its numbers; None of a packed weight."""
        return DTYPES.get(self.format.type)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension: of root mean squares, or `is_centered`, which subtracts the mean first (Ba et al.
    2016). `rounds_first`: the normalized value is rounded to the type before the gain too, as in Llama."""

    gain: Tensor  # [size] float32
    bias: Tensor | None = None  # [size] float32
    epsilon: float = 1e-6
    rounds_first: bool = True
    is_centered: bool = False
    struct: NormStruct = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.gain.dim() != 1 or not self.gain.numel():
            refuse("gain.shape", list(self.gain.shape), "[size], of at least one")
        check_tensor("gain", self.gain, torch.float32, (self.size,))
        if self.bias is not None:
            check_tensor("bias", self.bias, torch.float32, (self.size,))
        if not 0 <= self.epsilon < float("inf"):
            refuse("epsilon", self.epsilon, "0 or more, and finite")
        bias = None if self.bias is None else self.bias.data_ptr()
        rounding = ROUND_FIRST if self.rounds_first else ROUND_ONCE
        struct = NormStruct(self.gain.data_ptr(), bias, self.epsilon, rounding, int(self.is_centered))
        object.__setattr__(self, "struct", struct)

    @property
    def size(self) -> int:
        return self.gain.numel()


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer. `keys` [blocks, kv heads, head size, block size], `values` [blocks, kv heads, block size,
    head size], of one type; a block has 8 positions or a multiple of 16."""

    keys: Tensor
    values: Tensor
    struct: CacheStruct = field(init=False, repr=False)

    def __post_init__(self) -> None:
        number = type_of("keys", self.keys)
        if self.keys.dim() != 4 or not self.keys.numel():
            refuse(
                "keys.shape", list(self.keys.shape), "[blocks, kv heads, head size, block size], each of at least one"
            )
        blocks, heads, head_size, block_size = self.keys.shape
        if head_size > HEAD_SIZE_MAX:
            refuse("keys.shape[2], the head size,", head_size, f"at most {HEAD_SIZE_MAX}")
        if block_size != 8 and block_size % 16:
            refuse("keys.shape[3], positions of a block,", block_size, "8 or a multiple of 16")
        if blocks * block_size > COUNT_MAX:
            refuse("keys.shape, of blocks * positions of a block,", blocks * block_size, f"at most {COUNT_MAX}")
        check_tensor("keys", self.keys, self.keys.dtype, (blocks, heads, head_size, block_size))
        check_tensor("values", self.values, self.keys.dtype, (blocks, heads, block_size, head_size))
        sizes = blocks, block_size, heads, head_size, number
        object.__setattr__(self, "struct", CacheStruct(self.keys.data_ptr(), self.values.data_ptr(), *sizes))

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def head_size(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """softmax(softcap * tanh(scaling * q k / softcap) + bias), within the last `window` positions; 0: no soft cap, no
    window. `bias` [heads, 2 reach + 1] float32: by the key's distance from the query, the middle column that of 0."""

    scaling: float
    softcap: float = 0.0
    window: int = 0
    bias: Tensor | None = field(default=None, repr=False)
    struct: RuleStruct = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not abs(self.scaling) < float("inf"):
            refuse("scaling", self.scaling, "finite")
        if not 0 <= self.softcap < float("inf"):
            refuse("softcap", self.softcap, "0 or more, and finite")
        if not 0 <= self.window < 2**62:
            refuse("window", self.window, "0 or more")
        address, reach = None, 0
        if self.bias is not None:
            if self.bias.dim() != 2 or not self.bias.numel() or self.bias.shape[1] % 2 == 0:
                refuse("bias.shape", list(self.bias.shape), "[heads, 2 reach + 1]")
            check_tensor("bias", self.bias, torch.float32, tuple(self.bias.shape))
            address, reach = self.bias.data_ptr(), self.bias.shape[1] // 2
        object.__setattr__(self, "struct", RuleStruct(self.scaling, self.softcap, self.window, address, reach))


# Fields of sd_rows that are arrays, and their types.
ROW_ARRAYS = {
    "sequence": numpy.int32,
    "position": numpy.int32,
    "slot": numpy.int32,
    "base": numpy.int32,
    "path_start": numpy.int64,
    "path": numpy.int32,
    "table_start": numpy.int64,
    "table": numpy.int32,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step, as in sd_rows, for caches of at least `block_count` blocks of `block_size` positions.

    Types and lengths are checked here; `Kernels.rows` also checks every index, and is the way to make them.
    """

    sequence: numpy.ndarray  # [rows] int32
    position: numpy.ndarray  # [rows] int32
    slot: numpy.ndarray  # [rows] int32
    base: numpy.ndarray  # [rows] int32
    path_start: numpy.ndarray  # [rows + 1] int64
    path: numpy.ndarray  # [path slots] int32
    table_start: numpy.ndarray  # [sequences + 1] int64
    table: numpy.ndarray  # [blocks of all sequences] int32
    block_count: int
    block_size: int
    first: numpy.ndarray | None = None  # [rows] int32
    struct: RowsStruct = field(init=False, repr=False)

    def __post_init__(self) -> None:
        types = ROW_ARRAYS if self.first is None else ROW_ARRAYS | {"first": numpy.int32}
        arrays: dict[str, numpy.ndarray] = {name: getattr(self, name) for name in types}
        for name, dtype in types.items():
            array = arrays[name]
            if array.dtype != dtype:
                refuse(f"{name}.dtype", array.dtype, numpy.dtype(dtype).name)
            if array.ndim != 1 or not array.flags.c_contiguous:
                refuse(f"{name}.shape", f"{array.shape}, strides {array.strides}", "one dimension, contiguous")
        count, sequences = len(self.sequence), len(self.table_start) - 1
        lengths = {"position": count, "slot": count, "base": count, "path_start": count + 1}
        if self.first is not None:
            lengths["first"] = count
        for name, length in lengths.items():
            if len(arrays[name]) != length:
                refuse(f"the length of {name}", len(arrays[name]), str(length))
        if sequences < 0:
            refuse("the length of table_start", 0, "1 or more")
        for name, starts in (("path", self.path_start), ("table", self.table_start)):
            if starts[-1] != len(arrays[name]):
                refuse(f"the last of {name}_start", starts[-1], f"{len(arrays[name])}, the length of {name}")
        addresses = {name: address_of(array) for name, array in arrays.items()}
        counts = {"count": count, "sequence_count": sequences}
        object.__setattr__(self, "struct", RowsStruct(**counts, **addresses))

    @property
    def count(self) -> int:
        return len(self.sequence)

    def check_cache(self, name: str, cache: CacheStruct) -> None:
        """Raises ValueError unless the cache has the blocks that these rows were checked for."""
        if cache.block_size != self.block_size or cache.block_count < self.block_count:
            shown = f"of {cache.block_count} blocks of {cache.block_size} positions"
            refuse(name, shown, f"of {self.block_count} blocks of {self.block_size} or more, as its rows")
