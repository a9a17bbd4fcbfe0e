"""The CPU backend: tiled products, paged attention in fixed shapes, plans for the measured tile sizes.

A target's rows have the same bits in every batch, by construction (`tile_sizes`). A draft, whose bits decide no text,
runs without stable tile sizes: products of any width, and the library's attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from specdec.engine.attention import KEY_SPLIT, AttentionShape
from specdec.engine.backend import Compute, StepInput, chunk_flags, finite_rows
from specdec.engine.devices import keep_freed_memory
from specdec.engine.interface import RaggedBatch, StepOutput
from specdec.engine.step_plan import StepPlanner
from specdec.engine.storage import DeviceStorage, PagedStorage
from specdec.engine.tile_memory import StableTiles, stable_tiles
from specdec.engine.tile_sizes import TileSizes
from specdec.engine.tiled_modules import FREE_WIDTHS, OutputLayer, TiledLinear, Weight, replace_modules
from specdec.engine.tree_attention import TreePlanner
from specdec.engine.tree_probe import probe_tree_tiles
from specdec.errors import ConfigError

OUTPUT_ROWS_MAX = 128  # for which kernels of an output layer are made at loading; steps with more logits are rare


class CpuBackend:
    """A `Backend`. `agree` reduces measured tile sizes to those common to all ranks; absent: one rank.

    `has_stable_rows`: a row's bits do not depend on its neighbours. Without it a model takes chunks of trees.
    `output_dtype`: of the product of the output layer; `many_dtype`: of the layers' products of many rows (`Weight`).
    """

    def __init__(
        self,
        dtype: torch.dtype,
        positions_max: int,
        agree: Callable[[StableTiles], StableTiles] | None = None,
        has_stable_rows: bool = True,
        output_dtype: torch.dtype = torch.float32,
        many_dtype: torch.dtype | None = None,
    ):
        self.device = torch.device("cpu")
        self.has_stable_rows = has_stable_rows
        self._dtype = dtype
        self._output_dtype = output_dtype
        self._many_dtype = many_dtype
        self._positions_max = positions_max
        self._agree = agree
        self._linears: list[TiledLinear] = []
        self._storage: PagedStorage | DeviceStorage | None = None
        self._planner: StepPlanner | TreePlanner | None = None
        self._thread_count = 0  # of the current planner
        self._stable_tiles: dict[int, StableTiles] = {}  # by thread count

    def replace_modules(self, base: nn.Module) -> None:
        replace_modules(base, self._dtype, product_dtype(self._dtype), self._positions_max, self._many_dtype)

    def output_layer(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float | None
    ) -> OutputLayer:
        return OutputLayer(Weight(weight.to(self._output_dtype)), bias, scale, softcap)

    def attach(self, base: nn.Module, output: nn.Module, shape: AttentionShape) -> None:
        self._linears = [
            module for part in (base, output) for module in part.modules() if isinstance(module, TiledLinear)
        ]
        self._shape = shape
        if not self.has_stable_rows:
            for linear in self._linears:
                linear.set_widths(FREE_WIDTHS)

    @property
    def product_bytes(self) -> int:
        return sum(linear.weight.byte_count for linear in self._linears)

    @property
    def cache_bytes_per_position(self) -> int:
        shape, item_bytes = self._shape, 4  # float32
        return 2 * item_bytes * shape.layer_count * shape.kv_head_count * shape.head_size  # keys and values

    def allocate(self, block_count: int, block_size: int) -> PagedStorage | DeviceStorage:
        keep_freed_memory()
        shape = self._shape
        if not self.has_stable_rows:
            make_kernels(self._linears, FREE_WIDTHS)
            sizes = (shape.layer_count, block_count, block_size, shape.kv_head_count, shape.head_size)
            self._storage = DeviceStorage(*sizes, torch.float32, self.device)
            self._planner = TreePlanner(self._storage, shape.windows)
            return self._storage
        if block_size > KEY_SPLIT:
            raise ConfigError(f"block size is {block_size}; on a CPU it must be at most {KEY_SPLIT}")
        self._storage = PagedStorage(shape.layer_count, block_count, shape.kv_head_count, block_size, shape.head_size)
        self._planner = None
        return self._storage

    def _plan(self, batch: RaggedBatch) -> StepInput:
        if isinstance(self._planner, TreePlanner):
            return self._planner.plan(batch)
        if self._planner is None or self._thread_count != torch.get_num_threads():
            self._thread_count = torch.get_num_threads()
            self._planner = self._planner_in_force()
        return self._planner.plan(batch)

    def run(self, batch: RaggedBatch, compute: Compute) -> StepOutput:
        plan = self._plan(batch)
        result = compute(plan)
        flags = chunk_flags(batch, result.is_finite.tolist(), plan.input_ids.shape[1])
        hidden = None if result.hidden is None else result.hidden[: batch.logit_count]
        return StepOutput(result.logits[: batch.logit_count], flags, hidden)

    def finite(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if math.isfinite(hidden.sum(dtype=torch.float32).item() + logits.sum().item()):
            return torch.ones(len(hidden) + len(logits), dtype=torch.bool)
        return finite_rows(hidden, logits)

    def counters(self) -> dict[str, float]:
        return {}

    @property
    def stable_tiles(self) -> StableTiles:
        """The row widths and query tiles for the current thread count, measured once for each count."""
        thread_count = torch.get_num_threads()
        if thread_count not in self._stable_tiles:
            measured = stable_tiles(self._linears, self._shape)
            self._stable_tiles[thread_count] = self._agree(measured) if self._agree else measured
        return self._stable_tiles[thread_count]

    def use_stable_tiles(self, tile_sizes: TileSizes, query_tiles: tuple[int, ...]) -> None:
        """Replaces the stable tile sizes without measuring: for benchmarks, and for tests of width 1."""
        self._stable_tiles[torch.get_num_threads()] = (tile_sizes, query_tiles)
        self._planner = None

    def _planner_in_force(self) -> StepPlanner:
        """Sets the stable tile sizes of the current thread count, by which the library picks kernels, and has them
        made."""
        if not isinstance(self._storage, PagedStorage):
            raise RuntimeError("forward was called before allocate")
        widths, query_tiles = self.stable_tiles
        for linear in self._linears:
            linear.set_widths(widths)
        make_kernels(self._linears, widths)
        tree_tiles = probe_tree_tiles(self._shape, query_tiles)
        return StepPlanner(self._storage, self._shape.head_count, query_tiles, widths, self._shape.windows, tree_tiles)


def make_kernels(linears: Iterable[TiledLinear], widths: TileSizes) -> None:
    """Multiplies once at every width by one weight of each layout, by output layers up to OUTPUT_ROWS_MAX. The
    library makes a kernel for each, in 1 to 16 ms, and keeps 0.6 MB of it: at loading, so that no later step is slow
    for it, or makes the process grow."""
    by_layout = {(linear.weight.layout, type(linear)): linear for linear in linears if linear.weight.has_kernels}
    for linear in by_layout.values():
        for width in widths.widths:
            if width <= OUTPUT_ROWS_MAX or not isinstance(linear, OutputLayer):
                linear.tile(torch.zeros(width, linear.weight.in_size, dtype=linear.weight.dtype))


def of_any_width(output: nn.Module) -> nn.Module:
    """Returns an output layer on the same weight for rows whose bits decide no text: without tile sizes."""
    if not isinstance(output, OutputLayer):
        return output
    layer = OutputLayer(output.weight, output.bias, output.scale, output.softcap)
    layer.set_widths(FREE_WIDTHS)
    return layer


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of matrix products: bfloat16 only where the processor multiplies it natively.

    Elsewhere, and for float16, weights are held in float32, which is exact, and each product is rounded to the model's
    type once: emulated bfloat16 converts the weights for every row.
    """
    if dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32
