"""The CPU backend, of targets, drafts and ranks alike: native kernels where there are some, else one row at a time.

On both paths a row has the same bits in every batch, whatever the number of threads of the kernels: see
docs/exactness.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from specdec.engine.attention import AttentionShape, ScoreRule
from specdec.engine.backend import (
    Asked,
    Compute,
    Product,
    StepInput,
    StepResult,
    check_inputs,
    chunk_flags,
    finite_rows,
)
from specdec.engine.cpu import kernels as native
from specdec.engine.cpu.encoder_decoder import KernelStacks, run_stacks
from specdec.engine.cpu.encoder_decoder_call import StackCalls, native_stacks, stack_calls
from specdec.engine.cpu.fallback import PlainOutput, run_rows
from specdec.engine.cpu.kernels import Kernels, LayerCache, Rows, kernels
from specdec.engine.cpu.llama import LlamaModel, llama_model
from specdec.engine.cpu.plan import StackRows, StepPlan, divide_rows, plan_step
from specdec.engine.cpu.products import OutputLayer, replace_modules
from specdec.engine.cpu.storage import CpuStorage
from specdec.engine.encoder_decoder import EncoderDecoder
from specdec.engine.interface import RaggedBatch, StepAbandoned, StepFlag, StepOutput
from specdec.engine.linears import replace_linears
from specdec.engine.loading.devices import keep_freed_memory
from specdec.engine.packed import PackedWeight
from specdec.engine.parallel.modules import RankSum
from specdec.engine.rotary_attention import table_angles


@dataclass(frozen=True, slots=True)
class KernelAttention:
    """The attention of one step on the kernels: see `AttentionMetadata`."""

    kernels: Kernels
    caches: list[LayerCache]
    rules: Mapping[ScoreRule, native.ScoreRule]
    rows: Rows
    should_abandon: Callable[[], bool] | None

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, rule: ScoreRule
    ) -> torch.Tensor:
        if self.should_abandon is not None and self.should_abandon():
            raise StepAbandoned
        cache = self.caches[layer]
        self.kernels.write(cache, self.rows, keys, values)
        return self.kernels.attend(cache, self.rows, self.rules[rule], queries)


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A step in one call: see `WholeStep`. `output`: the output layer that the call computes itself, if it does."""

    call: LlamaModel
    rows: Rows
    flag: StepFlag | None
    output: nn.Module | None

    def run(self, input_ids: torch.Tensor, logit_rows: torch.Tensor, output: nn.Module, asked: Asked) -> StepResult:
        is_whole = output is self.output
        word = self.flag.word if self.flag else None
        keeps_hidden = asked.hidden or not is_whole
        step = self.call.step(self.rows, input_ids, logit_rows, word, keeps_hidden, asked.feature_layers)
        logits, is_finite = step.logits, step.is_finite
        if not is_whole and step.hidden is not None and len(step.hidden):
            logits = output(step.hidden)
            is_finite = torch.cat((is_finite, torch.isfinite(logits.sum(-1))))
        return StepResult(logits, is_finite, step.hidden if asked.hidden else None, step.features)


class CpuBackend:
    """A `Backend`. `dtype`: of the model, its activations and its cache. `product_shapes`: [out, in] of the weights of
    all matrix products."""

    def __init__(self, dtype: torch.dtype, positions_max: int):
        self.device = torch.device("cpu")
        self._dtype = dtype
        self._positions_max = positions_max
        self._kernels = kernels()
        self._storage: CpuStorage | None = None
        self._caches: list[LayerCache] = []  # its layers
        self._call: LlamaModel | StackCalls | None = None
        self._output: nn.Module | None = None  # that the call computes itself

    def replace_modules(self, base: nn.Module) -> None:
        if self._kernels:
            replace_modules(self._kernels, base, self._dtype, self._positions_max)
        else:
            replace_linears(base, self._dtype)
            table_angles(base, self._positions_max, self._dtype, with_stand_ins=False)

    def output_layer(
        self, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None, scale: float, softcap: float | None
    ) -> nn.Module:
        if self._kernels:
            return OutputLayer(self._kernels, weight, bias, scale, softcap)
        return PlainOutput(weight.dense() if isinstance(weight, PackedWeight) else weight, bias, scale, softcap)

    def attach(self, base: nn.Module, output: nn.Module, shape: AttentionShape, ids_end: int) -> None:
        products = [module for module in (*base.modules(), output) if isinstance(module, Product)]
        self.product_shapes = [product.shape for product in products]
        self.product_bytes = sum(product.byte_count for product in products)
        self._shape = shape
        self._rules = {
            rule: native.ScoreRule(
                rule.scaling, rule.softcap or 0, rule.window or 0, None if rule.bias is None else rule.bias.table
            )
            for rule in shape.rules
        }
        sizes = shape, self._dtype, self._positions_max, ids_end
        if self._kernels and isinstance(base, EncoderDecoder):
            self._call = stack_calls(self._kernels, base, output, *sizes, self._rules)
        elif self._kernels:
            split = next((module for module in base.modules() if isinstance(module, RankSum)), None)
            self._output = None if split else output
            self._call = llama_model(self._kernels, base, self._output, *sizes, split.total_of if split else None)

    @property
    def numerics(self) -> str:
        return ""

    @property
    def cache_bytes_per_position(self) -> int:
        shape = self._shape
        return 2 * self._dtype.itemsize * shape.layer_count * shape.kv_head_count * shape.head_size  # keys and values

    def allocate(self, block_count: int, block_size: int) -> CpuStorage:
        keep_freed_memory()
        shape = self._shape
        self._storage = storage = CpuStorage(
            shape.layer_count, block_count, shape.kv_head_count, block_size, shape.head_size, self._dtype
        )
        if self._kernels:
            self._caches = [LayerCache(*layer) for layer in zip(storage.keys, storage.values)]
        if self._call:
            self._call.attach(self._caches)
        return storage

    def run(self, batch: RaggedBatch, compute: Compute) -> StepOutput:
        if self._storage is None:
            raise RuntimeError("forward was called before allocate")
        check_inputs(batch, self._shape.has_encoder)
        plan = plan_step(batch, self._storage.block_size)
        if self._shape.has_encoder:
            result = self._compute_stacks(self._storage, plan, divide_rows(batch, plan.rows), batch, compute)
        else:
            result = self._compute(self._storage, plan, batch.should_abandon, compute)
        flags = chunk_flags(batch, result.is_finite.tolist(), batch.row_count)
        return StepOutput(result.logits, flags, result.hidden, result.features)

    def _compute(
        self, storage: CpuStorage, plan: StepPlan, should_abandon: Callable[[], bool] | None, compute: Compute
    ) -> StepResult:
        """Runs a planned step: on the kernels in one call, or module by module."""
        if self._kernels is None:
            return run_rows(plan, storage, should_abandon, compute)
        rows = self._kernels.rows(block_count=storage.block_count, block_size=storage.block_size, **plan.rows._asdict())
        if isinstance(self._call, LlamaModel) and (should_abandon is None or isinstance(should_abandon, StepFlag)):
            call = NativeStep(self._call, rows, should_abandon, self._output)
            return compute(StepInput(plan.input_ids, plan.position_ids, plan.logit_rows, None, call))
        attention = KernelAttention(self._kernels, self._caches, self._rules, rows, should_abandon)
        return compute(StepInput(plan.input_ids, plan.position_ids, plan.logit_rows, attention))

    def _compute_stacks(
        self, storage: CpuStorage, plan: StepPlan, stacks: StackRows, batch: RaggedBatch, compute: Compute
    ) -> StepResult:
        """Runs a planned step of an encoder-decoder model: on the kernels in a call a stack, or module by module."""
        if self._kernels is None:
            return run_stacks(plan, stacks, storage, batch.should_abandon, compute)
        flag = batch.should_abandon
        if isinstance(self._call, StackCalls) and (flag is None or isinstance(flag, StepFlag)):
            call = native_stacks(self._call, self._kernels, self._caches, stacks, flag)
            return compute(StepInput(plan.input_ids, plan.position_ids, plan.logit_rows, None, call))
        attention = KernelStacks(self._kernels, self._caches, self._rules, stacks, flag)
        return compute(StepInput(plan.input_ids, plan.position_ids, plan.logit_rows, attention))

    def finite(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if math.isfinite(hidden.sum(dtype=torch.float32).item() + logits.sum().item()):
            return torch.ones(len(hidden) + len(logits), dtype=torch.bool)
        return finite_rows(hidden, logits)

    def counters(self) -> dict[str, float]:
        return {}
