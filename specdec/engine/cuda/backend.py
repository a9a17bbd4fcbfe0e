"""The GPU backend: storage, plans, attention, and steps replayed from captured graphs.

Only reading a `Readback` waits for the device: the sampler does it, once. On a GPU a row's bits may depend on its
neighbours where the modules run a step: their kernels are chosen by its shape. Where a step of our own kernels serves
(`step`), its rows have the same bits in every step, if that was found at loading: `numerics` says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, cast, overload

import torch
from torch import nn

from specdec.engine.attention import AttentionShape
from specdec.engine.backend import Compute, Product, StepInput, StepResult, check_inputs, chunk_flags, finite_rows
from specdec.engine.cuda import dependent
from specdec.engine.cuda.attention import DENSE, TREES, AttentionBackend, BlockTables, DeviceMetadata
from specdec.engine.cuda.graphs import SEQUENCE_COUNTS, Captured, capture, capture_steps, graph_shapes
from specdec.engine.cuda.item_attention import ItemAttention, ItemMetadata
from specdec.engine.cuda.kernels import launch
from specdec.engine.cuda.modules import DeviceOutput, replace_modules
from specdec.engine.cuda.near_ties import MarginCounter, blocks_of_drift, measure_drift
from specdec.engine.cuda.parts import KernelParts, kernel_parts
from specdec.engine.cuda.plan import StepBuffer, StepShape, StepTensors, exact_shape
from specdec.engine.cuda.select import select_backend
from specdec.engine.cuda.step import DeviceStep, PlannedStep
from specdec.engine.cuda.step_check import device_step, have_kernels
from specdec.engine.cuda.step_plan import ItemBuffer, ItemTensors, captured_shapes, shape_of
from specdec.engine.cuda.storage import DeviceStorage
from specdec.engine.interface import RaggedBatch, StepOutput
from specdec.engine.linears import replace_linears
from specdec.engine.packed import PackedWeight
from specdec.engine.readback import Readback

logger = logging.getLogger("specdec.engine")

KEY_MAXES = (512, 2048)  # key capacities of graphs per sequence, if a step's cost grows with its key capacity
KEY_CELLS_MAX = 1 << 15  # key capacity of a graph, all sequences together


class FiniteFlags(Sequence[bool]):
    """Whether all values of each chunk are finite; the first read waits for the step, unless the sampler did."""

    def __init__(self, batch: RaggedBatch, readback: Readback, logit_offset: int):
        """`logit_offset`: index of the first flag of logits among the step's flags."""
        self._batch = batch
        self._readback = readback
        self._logit_offset = logit_offset
        self._flags: tuple[bool, ...] | None = None

    def __len__(self) -> int:
        return len(self._batch.chunks)

    @overload
    def __getitem__(self, index: int) -> bool: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[bool, ...]: ...

    def __getitem__(self, index: int | slice) -> bool | tuple[bool, ...]:
        if self._flags is None:
            self._flags = chunk_flags(self._batch, self._readback.flags(), self._logit_offset)
        return self._flags[index]


class DeviceResult(NamedTuple):
    """Results of a step that stay on the device: see `StepResult`. `numbers`: see `Readback`."""

    logits: torch.Tensor
    numbers: torch.Tensor
    hidden: torch.Tensor | None
    features: torch.Tensor | None


class DeviceBackend:
    """A `Backend` on a GPU. `with_graphs`: steps of few rows are captured at the first step after `allocate`.

    `positions_max`: most positions of a sequence. `graph_sequences_max`: most sequences in a captured step.
    `has_trees`: the model is a draft's: captured steps have trees. `tries_dependent`: kernels of captured steps launch
    dependently where the device can and no bit changes. `is_dependent` says whether they do, None until it was tried;
    it may be set, for steps captured later. `agree`: whether all ranks of the model go on capturing as this one would.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        positions_max: int,
        with_graphs: bool,
        graph_sequences_max: int = SEQUENCE_COUNTS[-1],
        has_trees: bool = False,
        tries_dependent: bool = False,
        agree: Callable[[bool], bool] = bool,
    ):
        self.device = device
        self._has_trees = has_trees
        self.way: AttentionBackend = DENSE
        self._dtype = dtype
        self._positions_max = positions_max
        self.with_graphs = with_graphs
        self._graph_sequences_max = graph_sequences_max
        self.is_dependent: bool | None = None if tries_dependent else False
        self._agree = agree
        self._storage: DeviceStorage | None = None
        self._call: DeviceStep | None = None
        self._parts: KernelParts | None = None  # of a model without a step of our own kernels
        self._attention: ItemAttention | None = None

    def replace_modules(self, base: nn.Module) -> None:
        with self._current():
            replace_modules(base, self._dtype, self._positions_max)
            replace_linears(base, self._dtype)

    def output_layer(
        self, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None, scale: float, softcap: float | None
    ) -> DeviceOutput:
        weight = weight.dense().to(self._dtype) if isinstance(weight, PackedWeight) else weight
        with self._current():
            return DeviceOutput(weight, bias, scale, softcap)

    def attach(self, base: nn.Module, output: nn.Module, shape: AttentionShape, ids_end: int) -> None:
        products = [module for module in base.modules() if isinstance(module, Product)]
        weight = output.get_buffer("weight")
        self.product_bytes = sum(each.byte_count for each in products) + weight.numel() * weight.element_size()
        self._shape = shape
        if not have_kernels(self._dtype, self.device):
            return
        sizes = shape, self._dtype, self.device, self._positions_max
        with self._current():
            self._call = device_step(base, output, *sizes)
            if self._call is None:
                self._parts = kernel_parts(base, cast(DeviceOutput, output), *sizes)
        own = self._call or self._parts
        self._attention = own.attention if own else None

    @property
    def numerics(self) -> str:
        own = self._call or self._parts
        if own is None:
            return ""
        parts = f" for {', '.join(self._parts.names)}" if self._parts else ""
        bits = "equal bits in every step" if own.has_equal_rows else "bits of a row by its step"
        return f"triton {launch.version()}{parts}, {bits}"

    @property
    def cache_bytes_per_position(self) -> int:
        shape = self._shape
        return 2 * self._dtype.itemsize * shape.layer_count * shape.kv_head_count * shape.head_size

    def allocate(self, block_count: int, block_size: int) -> DeviceStorage:
        """Returns zeroed storage and chooses its way to attend. Graphs of an earlier storage are dropped."""
        shape = self._shape
        self._storage = DeviceStorage(
            shape.layer_count, block_count, block_size, shape.kv_head_count, shape.head_size, self._dtype, self.device
        )
        # No sequence of this cache is longer than this.
        key_max = min(self._positions_max, (block_count - 1) * block_size)
        self._key_max = key_max
        self._graphs: dict[StepShape, Captured] | None = None
        self.margins: MarginCounter | None = None
        self._results: DeviceResult | None = None
        with self._current():
            self._prepare(self._storage)
        return self._storage

    def _prepare(self, storage: DeviceStorage) -> None:
        """Makes what plans a step: captured steps read one buffer at fixed addresses; the other grows."""
        self._fixed: StepBuffer | ItemBuffer
        self._exact: StepBuffer | ItemBuffer
        if self._attention:
            self._attention.reserve(self._key_max)
            layout = self._attention.layout(storage)
            self._fixed, self._exact = (ItemBuffer(layout, self.device) for _ in range(2))
        else:
            sizes = storage.block_size, self._dtype, self.device
            self.way = TREES if self._has_trees else select_backend(self._shape, *sizes)
            buffers = (StepBuffer(storage.block_size, storage.scratch_slot, self.device) for _ in range(2))
            self._fixed, self._exact = buffers
        self._shapes = self._shapes_for(self._key_max) if self.with_graphs else []
        for step_shape in self._shapes:
            self._fixed.reserve(step_shape)

    def plan(self, batch: RaggedBatch) -> StepShape:
        """Fills the tensors of the step; returns the smallest captured shape that holds it, or its own."""
        if self._storage is None:
            raise RuntimeError("forward was called before allocate")
        needed = shape_of(batch) if self._attention else exact_shape(batch, self._has_trees)
        shape = next((shape for shape in self._shapes if shape.holds(needed)), None)
        if shape is not None:
            self._fixed.fill(batch, shape)
            return shape
        self._exact.reserve(needed)
        self._exact.fill(batch, needed)
        return needed

    @torch.inference_mode()
    def run(self, batch: RaggedBatch, compute: Compute) -> StepOutput:
        check_inputs(batch, has_encoder=False)
        with self._current():
            if self._graphs is None:
                self._capture(compute)
                if not self._has_trees:  # the drift of a draft decides no text
                    self.margins = MarginCounter(self._measured_drift(compute), self.device)
            output = self._step(batch, compute)
            if self.margins is not None:
                self.margins.look_at(output.logits)
            return output

    def finite(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return finite_rows(hidden, logits)

    def counters(self) -> dict[str, float]:
        """Returns the rows whose margin was within the drift: see `MarginCounter`."""
        return self.margins.report() if self.margins else {}

    def _step(self, batch: RaggedBatch, compute: Compute) -> StepOutput:
        plan = self.plan(batch)
        if self._graphs and self._results and plan in self._graphs:
            self._fixed.send(plan)
            self._graphs[plan].replay()
            result = self._part_of(self._results, plan)
        else:
            result = self._found(compute(self._input(self._exact.send(plan))))
        count = batch.logit_count
        hidden = None if result.hidden is None else result.hidden[:count]
        features = None if result.features is None else result.features[: batch.row_count]
        readback = Readback(result.numbers, 0 if self._has_trees else plan.logit_count)
        flags = FiniteFlags(batch, readback, plan.row_count)
        return StepOutput(result.logits[:count], flags, hidden, features, readback)

    def _found(self, result: StepResult) -> DeviceResult:
        """Returns the results as they are kept. A draft's best ids are not: no sampler reads them."""
        if self._has_trees:
            numbers = result.is_finite.to(torch.int64)
        else:
            best_ids = result.logits.argmax(1) if result.best_ids is None else result.best_ids  # the first maximum
            numbers = torch.cat((best_ids, result.is_finite))
        return DeviceResult(result.logits, numbers, result.hidden, result.features)

    def _number_count(self, shape: StepShape) -> int:
        return shape.row_count + (1 if self._has_trees else 2) * shape.logit_count

    def _part_of(self, results: DeviceResult, shape: StepShape) -> DeviceResult:
        """Returns the views of a captured shape's results."""
        count = shape.logit_count
        hidden = None if results.hidden is None else results.hidden[:count]
        features = None if results.features is None else results.features[: shape.row_count]
        return DeviceResult(results.logits[:count], results.numbers[: self._number_count(shape)], hidden, features)

    def _measured_drift(self, compute: Compute) -> float:
        """Returns the drift, measured on blocks without a holder, which are zeroed afterwards."""
        storage = self._storage
        assert storage is not None
        block_ids = range(1, storage.block_count)
        drift = measure_drift(lambda batch: self._step(batch, compute), block_ids, storage.block_size, self._key_max)
        for block_id in block_ids[: blocks_of_drift(storage.block_size)]:
            storage.scrub(block_id, 0, storage.block_size)
        return drift

    @property
    def graph_count(self) -> int:
        """Number of captured steps; 0 before the first step."""
        return len(self._graphs or ())

    def _shapes_for(self, key_max: int) -> list[StepShape]:
        """Returns the shapes to capture; with block tables, capacity for the longest text has no cost."""
        if self._attention:
            cells_max = 2 * key_max if self._has_trees else key_max  # a draft's sequences have more cells
            return captured_shapes(cells_max, self._graph_sequences_max)
        if isinstance(self.way, BlockTables):
            return graph_shapes([key_max], None, self._graph_sequences_max)
        if self._has_trees:  # its sequences have more cells than positions
            assert self._storage is not None
            key_max = (self._storage.block_count - 1) * self._storage.block_size
        key_maxes = [count for count in KEY_MAXES if count < key_max] or [key_max]
        return graph_shapes(key_maxes, KEY_CELLS_MAX, self._graph_sequences_max, self._has_trees)

    def _capture(self, compute: Compute) -> None:
        started_s = time.perf_counter()

        def prepare(shape: StepShape) -> Callable[[], None]:
            self._fixed.fill(RaggedBatch(()), shape)  # padding only
            self._fixed.send(shape)
            return lambda: self._run_fixed(shape, compute)

        if self.is_dependent is None:
            can_be = bool((self._call or self._parts) and self._shapes) and dependent.is_supported(self.device)
            self.is_dependent = can_be and dependent.tried(lambda: self._replays_agree(prepare), self.device)
        with launch.dependent(self.is_dependent):
            self._graphs = capture_steps(self._shapes, prepare, self.device, self._agree)
        self._shapes = list(self._graphs)
        if self._shapes:
            how = ", launched dependently" if self.is_dependent else ""
            logger.info("captured %d steps in %.1f s%s", len(self._shapes), time.perf_counter() - started_s, how)

    def _run_fixed(self, shape: StepShape, compute: Compute) -> None:
        """Runs what was sent as a step of a captured shape; the results lie in the buffer of all."""
        result = self._found(compute(self._input(self._fixed.views(shape))))
        if self._results is None:
            self._results = self._make_results(result)
        for place, own in zip(self._part_of(self._results, shape), result):
            if place is not None and own is not None and place.data_ptr() != own.data_ptr():
                place.copy_(own)

    def _replays_agree(self, prepare: Callable[[StepShape], Callable[[], None]]) -> bool:
        """Whether dependent launch changes no bit of captured steps, tried on blocks without a holder, which are zeroed
        afterwards."""
        storage = self._storage
        assert storage is not None
        blocks = range(1, storage.block_count)
        try:
            return all(self._shape_agrees(shape, blocks, prepare) for shape in dependent.tried_shapes(self._shapes))
        finally:
            for block_id in blocks[: -(-dependent.ROWS_MAX // storage.block_size)]:
                storage.scrub(block_id, 0, storage.block_size)

    def _shape_agrees(
        self, shape: StepShape, blocks: Sequence[int], prepare: Callable[[StepShape], Callable[[], None]]
    ) -> bool:
        def record(is_on: bool) -> Captured:
            with launch.dependent(is_on):
                return capture(prepare(shape), self.device, None)

        def feed(batch: RaggedBatch) -> None:
            self._fixed.fill(batch, shape)
            self._fixed.send(shape)

        def results() -> tuple[torch.Tensor, ...]:
            assert self._results is not None
            return self._part_of(self._results, shape)[:2]

        return dependent.replays_agree(record, feed, results, dependent.two_texts(shape, blocks, self._key_max))

    def _make_results(self, like: DeviceResult) -> DeviceResult:
        """Returns a buffer for the results of the captured shapes, shared by all: the step's own, if it has one."""
        counts = ((shape.logit_count, shape.row_count, self._number_count(shape)) for shape in self._shapes)
        logit_count, row_count, number_count = map(max, zip(*counts))
        hidden = None if like.hidden is None else like.hidden.new_empty(logit_count, like.hidden.shape[1])
        features = None if like.features is None else like.features.new_empty(row_count, like.features.shape[1])
        logits = like.logits.new_empty(logit_count, like.logits.shape[1])
        if self._call and like.logits.data_ptr() == self._call.results.logits.data_ptr():
            logits = self._call.results.logits
        return DeviceResult(logits, like.numbers.new_empty(number_count), hidden, features)

    def _input(self, step: StepTensors | ItemTensors) -> StepInput:
        assert self._storage is not None
        plan: ItemMetadata | DeviceMetadata
        if not isinstance(step, ItemTensors):
            plan = DeviceMetadata(self._storage, step, self.way)
        elif self._call:
            call = PlannedStep(self._call, self._storage, step)
            return StepInput(step.input_ids[None], step.positions[None], step.logit_rows, None, call)
        else:
            assert self._attention is not None
            plan = ItemMetadata(self._attention, self._storage, step)
        return StepInput(step.input_ids[None], step.positions[None], step.logit_rows, plan)

    def _current(self) -> AbstractContextManager[object]:
        """Makes the device this thread's current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
