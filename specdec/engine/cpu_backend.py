"""The parts of a model on a CPU: tiled products, paged attention in fixed shapes, plans for the widths measured.

Rows get the same bits whatever else is in the batch, by construction: `row_widths` says how the widths are found. For a
draft, whose bits decide no text, that is switched off: products of any width, and the library's attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from specdec.engine.attention import KEY_SPLIT, AttentionShape, probe_query_tiles
from specdec.engine.backend import Compute, StepInput, finite_rows, segment_flags
from specdec.engine.interface import RaggedBatch, StepOutput
from specdec.engine.row_widths import ALONE, RowWidths
from specdec.engine.step_plan import StepPlanner
from specdec.engine.storage import DeviceStorage, PagedStorage
from specdec.engine.tiled_modules import OutputLayer, TiledLinear, probe_widths, replace_modules
from specdec.engine.tree_attention import TreePlanner
from specdec.errors import ConfigError

Families: TypeAlias = tuple[RowWidths, tuple[int, ...]]  # row widths, query tiles
ANY_WIDTH = RowWidths((1 << 30,))


class CpuBackend:
    """A `Backend`. `agree`: what all ranks of a model measured in common; absent, what this one measured.

    `has_stable_rows`: a row's bits do not depend on its neighbours. Without it a model takes segments of trees.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        positions_max: int,
        agree: Callable[[Families], Families] | None = None,
        has_stable_rows: bool = True,
    ):
        self.device = torch.device("cpu")
        self.has_stable_rows = has_stable_rows
        self._dtype = dtype
        self._positions_max = positions_max
        self._agree = agree
        self._linears: list[TiledLinear] = []
        self._storage: PagedStorage | DeviceStorage | None = None
        self._planner: StepPlanner | TreePlanner | None = None
        self._thread_count = 0  # the one the planner is for
        self._families: dict[int, Families] = {}  # by thread count

    def replace_modules(self, base: nn.Module) -> None:
        replace_modules(base, self._dtype, product_dtype(self._dtype), self._positions_max)

    def output_layer(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float | None
    ) -> OutputLayer:
        return OutputLayer(weight.t().float().contiguous(), bias, scale, softcap)

    def adopt(self, base: nn.Module, output: nn.Module, shape: AttentionShape) -> None:
        self._linears = [
            module for part in (base, output) for module in part.modules() if isinstance(module, TiledLinear)
        ]
        self._shape = shape
        if not self.has_stable_rows:
            for linear in self._linears:
                linear.set_widths(ANY_WIDTH)

    @property
    def product_bytes(self) -> int:
        return sum(linear.weight.numel() * linear.weight.element_size() for linear in self._linears)

    @property
    def cache_bytes_per_position(self) -> int:
        shape, item_bytes = self._shape, 4 if self.has_stable_rows else self._dtype.itemsize
        return 2 * item_bytes * shape.layer_count * shape.kv_head_count * shape.head_size  # keys and values

    def allocate(self, block_count: int, block_size: int) -> PagedStorage | DeviceStorage:
        shape = self._shape
        if not self.has_stable_rows:
            sizes = (shape.layer_count, block_count, block_size, shape.kv_head_count, shape.head_size)
            self._storage = DeviceStorage(*sizes, self._dtype, self.device)
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
        flags = segment_flags(batch, result.is_finite.tolist(), plan.input_ids.shape[1])
        return StepOutput(result.logits[: batch.logit_count], flags)

    def finite(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if math.isfinite(hidden.sum(dtype=torch.float32).item() + logits.sum().item()):
            return torch.ones(len(hidden) + len(logits), dtype=torch.bool)
        return finite_rows(hidden, logits)

    def counters(self) -> dict[str, float]:
        return {}

    @property
    def families(self) -> Families:
        """The row widths and query tiles for the thread count in force, measured once for each count."""
        thread_count = torch.get_num_threads()
        if thread_count not in self._families:
            shape = self._shape
            tiles = probe_query_tiles(shape.head_count // shape.kv_head_count, shape.head_size, shape.rules)
            measured = probe_widths(self._linears), tiles or ALONE
            self._families[thread_count] = self._agree(measured) if self._agree else measured
        return self._families[thread_count]

    def use_families(self, row_widths: RowWidths, query_tiles: tuple[int, ...]) -> None:
        """Replaces them by others, unmeasured: to measure what independence costs, or to try the last resort."""
        self._families[torch.get_num_threads()] = (row_widths, query_tiles)
        self._planner = None

    def _planner_in_force(self) -> StepPlanner:
        """Puts the families for the thread count in force: the library picks kernels by it."""
        if not isinstance(self._storage, PagedStorage):
            raise RuntimeError("forward was called before allocate")
        widths, query_tiles = self.families
        for linear in self._linears:
            linear.set_widths(widths)
        return StepPlanner(self._storage, self._shape.head_count, query_tiles, widths, self._shape.windows)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of matrix products: bfloat16 only where the processor multiplies it natively.

    Elsewhere, and for float16, the weights are kept in float32, which holds them exactly, and each product is rounded
    to the model's type once: emulated bfloat16 costs every row anew.
    """
    if dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32
