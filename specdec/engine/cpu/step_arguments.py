"""A model whose step is one native call, and the arguments of one step: see `arguments`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.engine.cpu.arguments import DTYPES, Norm, Rows, WeightPanels, check_tensor, refuse
from specdec.engine.cpu.structs import FLOAT8, INT4, INT8, ChainStruct, Exchange, ModelStruct, StepStruct, WeightStruct

NO_EXCHANGE = Exchange()  # of one rank


@dataclass(frozen=True, slots=True)
class StepModel:
    """A model whose step is one call; `kept`: whatever its `struct` points into. Its layers' caches are alike."""

    struct: ModelStruct
    kept: tuple[object, ...] = field(repr=False)

    def __post_init__(self) -> None:
        model = self.struct
        if model.type not in DTYPES:
            refuse("type", model.type, "SD_FLOAT32, SD_BFLOAT16 or SD_FLOAT16")
        counts = "layer_count", "hidden_size", "heads", "kv_heads", "head_size", "vocabulary_size", "positions_max"
        for name in counts:
            if getattr(model, name) < 1:
                refuse(name, getattr(model, name), "1 or more")
        if model.heads % model.kv_heads:
            refuse("heads", model.heads, f"a multiple of {model.kv_heads} kv_heads")
        if model.rotated_size % 2 or not 0 <= model.rotated_size <= model.head_size:
            refuse("rotated_size", model.rotated_size, f"even, and at most {model.head_size}, the head size")
        if model.output.panels:
            self._check_weight("output", model.output, model.output.out_size, model.hidden_size)
            if not model.embedding and model.output.type not in (model.type, INT4, INT8, FLOAT8):
                refuse("output.type, without an embedding,", model.output.type, f"{model.type}, the model's, or packed")
        if self.has_seconds and (model.layer_count > 1 or self.has_cross):
            refuse("layer_count, with second inputs,", model.layer_count, "1, without cross attention")
        for index in range(model.layer_count):
            self._check_layer(index)

    @property
    def has_cross(self) -> bool:
        """Whether its layers attend to what lies before the first position that a row sees, too."""
        return bool(self.struct.layers[0].cross_queries.panels)

    @property
    def has_seconds(self) -> bool:
        """Whether its rows have second inputs."""
        return bool(self.struct.second.gain)

    def _check_weight(self, name: str, weight: WeightStruct, out_size: int, in_size: int) -> None:
        if not weight.panels:
            refuse(f"{name}.panels", None, "those of a packed weight")
        if (weight.out_size, weight.in_size) != (out_size, in_size):
            refuse(name, [weight.out_size, weight.in_size], f"{[out_size, in_size]} [out, in]")

    def _check_layer(self, index: int) -> None:
        model, layer = self.struct, self.struct.layers[index]
        hidden, between, size = model.hidden_size, model.intermediate_size, model.heads * model.head_size
        weights = {
            "qkv": (size + 2 * model.kv_heads * model.head_size, 2 * hidden if self.has_seconds else hidden),
            "out": (hidden, size),
            "gate": (between, hidden),
            "down": (hidden, between),
        }
        if layer.up.panels:
            weights["up"] = between, hidden
        if self.has_cross or layer.cross_queries.panels:
            weights |= {"cross_queries": (size, hidden), "cross_out": (hidden, size)}
        for name, sizes in weights.items():
            self._check_weight(f"{name} of layer {index}", getattr(layer, name), *sizes)
        if bool(layer.cosines) != bool(layer.sines):
            refuse(f"cosines and sines of layer {index}", "one of the two", "both or none")
        cache, first = layer.cache, model.layers[0].cache
        expected = first.block_count, first.block_size, model.kv_heads, model.head_size, model.type
        if (cache.block_count, cache.block_size, cache.kv_heads, cache.head_size, cache.type) != expected:
            limit = "[blocks, positions of a block, kv heads, head size, type] of the model and its first layer"
            shown = [cache.block_count, cache.block_size, cache.kv_heads, cache.head_size, cache.type]
            refuse(f"cache of layer {index}", shown, f"{list(expected)} {limit}")


class StepArguments:
    """The arguments of `Kernels.step`, and its results: `logits` [logit rows, vocabulary] float32, `hidden` [logit
    rows, hidden size] of the model's type if asked for, `is_finite` [rows] bool.

    `is_abandoned` is read between layers: another thread that sets it ends the step. `exchange`: see sd_exchange.
    `seconds` [rows, hidden size] of the model's type: second inputs, of a model that has them. `features` [rows,
    len(feature_layers) * hidden size]: the residual as it enters these layers, if any are named; the number of layers
    stands for that after the last.
    """

    def __init__(
        self,
        model: StepModel,
        ids: Tensor,
        logit_rows: Tensor,
        *,
        keeps_hidden: bool = False,
        is_abandoned: ctypes.c_int32 | None = None,
        exchange: Callable[[object, int], int] | None = None,
        inputs: Tensor | None = None,
        seconds: Tensor | None = None,
        feature_layers: Sequence[int] = (),
    ) -> None:
        """`ids` of int64, a row each, in any shape; `logit_rows` of any integers."""
        if ids.dtype is not torch.int64:
            refuse("ids.dtype", ids.dtype, "torch.int64")
        sizes = model.struct
        self.ids = ids.contiguous()
        self.row_count = rows = len(_checked("ids", self.ids, sizes.vocabulary_size))
        chosen = _checked("logit_rows", logit_rows, rows)
        self._logit_rows = (ctypes.c_int32 * len(chosen))(*chosen)
        self.logits = torch.empty(len(chosen), sizes.output.out_size, dtype=torch.float32)
        dtype = DTYPES[sizes.type]
        self.inputs = None if inputs is None else inputs.reshape(rows, -1).contiguous()
        if self.inputs is not None:
            check_tensor("inputs", self.inputs, dtype, (rows, sizes.hidden_size))
        self.seconds = None if seconds is None else seconds.reshape(rows, -1).contiguous()
        if self.seconds is not None:
            check_tensor("seconds", self.seconds, dtype, (rows, sizes.hidden_size))
        if (self.seconds is not None) != model.has_seconds:
            refuse("seconds", "given" if seconds is not None else None, "given for a model with second inputs, only")
        if feature_layers and not 0 <= min(feature_layers) <= max(feature_layers) <= sizes.layer_count:
            refuse("feature_layers", list(feature_layers), f"from 0 to {sizes.layer_count}, the number of layers")
        self._feature_layers = (ctypes.c_int32 * len(feature_layers))(*feature_layers)
        shape = rows, len(feature_layers) * sizes.hidden_size
        self.features = torch.empty(shape, dtype=dtype) if feature_layers else None
        self.hidden = torch.empty(len(chosen), sizes.hidden_size, dtype=dtype) if keeps_hidden else None
        self.is_finite = torch.empty(rows, dtype=torch.bool)
        self.is_abandoned = is_abandoned
        self._exchange = Exchange(exchange) if exchange is not None else NO_EXCHANGE
        self.struct = StepStruct(
            self.ids.data_ptr(),
            None if self.inputs is None else self.inputs.data_ptr(),
            ctypes.addressof(self._logit_rows),
            len(chosen),
            self.logits.data_ptr(),
            None if self.hidden is None else self.hidden.data_ptr(),
            self.is_finite.data_ptr(),
            None if is_abandoned is None else ctypes.addressof(is_abandoned),
            self._exchange,
            None if self.seconds is None else self.seconds.data_ptr(),
            ctypes.addressof(self._feature_layers),
            len(feature_layers),
            None if self.features is None else self.features.data_ptr(),
        )


class ChainArguments:
    """The arguments of `Kernels.draft` beside those of its step, and its results: `token_ids`, `shares` and
    `is_finite`, one of each token; those behind the first row that is not finite mean nothing."""

    def __init__(
        self,
        model: StepModel,
        table: Tensor | WeightPanels,
        before: Norm | None,
        columns: Tensor,
        path: Sequence[int],
        keys: Sequence[int] | None,
        temperature: float,
        count: int,
    ) -> None:
        """table: [tokens, hidden] of the model's type, or packed; columns: [logits of a row] int64, the token of each;
        path: of the step's last row, then the slots of the `count` - 1 rows behind it; keys: see `sampling.race`."""
        size, dtype = model.struct.hidden_size, DTYPES[model.struct.type]
        if count < 1 or keys is not None and len(keys) != count or len(path) < count:
            refuse("count", count, f"1 or more, that of the keys, and at most {len(path)}, the slots of the path")
        check_tensor("columns", columns, torch.int64, (model.struct.output.out_size,))
        address, packed = None, None
        if isinstance(table, Tensor):
            check_tensor("table", table, dtype, (len(table), size))
            address, table_count = table.data_ptr(), len(table)
        else:
            packed, table_count = ctypes.addressof(table.struct), table.out_size
            if table.in_size != size:
                refuse("inputs of the table", table.in_size, f"{size}, the hidden size")
        self.count = count
        self._path_length = len(path)
        self._path = (ctypes.c_int32 * len(path))(*path)
        self._keys = None if keys is None else (ctypes.c_uint64 * count)(*keys)
        self._ids, self._shares = (ctypes.c_int64 * count)(), (ctypes.c_float * count)()
        self._is_finite = (ctypes.c_uint8 * count)()
        self._scratch = torch.empty(2, size, dtype=dtype)
        self._kept = table, before, columns
        self.struct = ChainStruct(
            count,
            None if before is None else ctypes.addressof(before.struct),
            address,
            packed,
            table_count,
            ctypes.addressof(self._path),
            columns.data_ptr(),
            None if self._keys is None else ctypes.addressof(self._keys),
            temperature,
            self._scratch.data_ptr(),
            ctypes.addressof(self._ids),
            ctypes.addressof(self._shares),
            ctypes.addressof(self._is_finite),
        )

    def check(self, rows: Rows) -> None:
        """Raises ValueError unless the path is that of the last of these rows with one slot for each row behind it."""
        known = int(rows.path_start[-1] - rows.path_start[-2])
        if self._path_length != known + self.count - 1:
            refuse("the length of path", self._path_length, f"{known} + {self.count - 1}")

    @property
    def token_ids(self) -> list[int]:
        return list(self._ids)

    @property
    def shares(self) -> list[float]:
        return list(self._shares)

    @property
    def is_finite(self) -> list[bool]:
        return [bool(one) for one in self._is_finite]


def _checked(name: str, values: Tensor, count: int) -> list[int]:
    """Returns integers of a CPU in a row. Raises ValueError unless each is in [0, count)."""
    if values.device.type != "cpu":
        refuse(f"{name}.device", values.device, "cpu")
    if values.dtype not in (torch.int32, torch.int64):
        refuse(f"{name}.dtype", values.dtype, "torch.int32 or torch.int64")
    found: list[int] = values.flatten().tolist()
    if found and not (0 <= min(found) and max(found) < count):
        refuse(name, f"from {min(found)} to {max(found)}", f"from 0 to {count - 1}")
    return found
