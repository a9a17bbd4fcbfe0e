"""A model of the Llama family as a list of launches of our own kernels over fixed buffers, made from its modules.

A step takes any mix of prompts, decodes and trees. Up to GROUP_ROWS rows run in the same memory, so that a CUDA graph
can replay them; more rows run by the same kernels in memory that grows. `step_check` compares step and modules at
loading: the step serves only where each of its layers agrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.engine.backend import Asked, StepResult
from specdec.engine.cuda.item_attention import Cache, ItemAttention
from specdec.engine.cuda.items import GROUP_ROWS
from specdec.engine.cuda.kernels.configs import head_tiles, sum_parts
from specdec.engine.cuda.kernels.norms import embed, rms_norm
from specdec.engine.cuda.kernels.products import RowNorm, head, pick, product
from specdec.engine.cuda.kernels.qkv import qkv_rope, rope_write
from specdec.engine.cuda.modules import DeviceRMSNorm
from specdec.engine.cuda.step_parts import LayerParts, ModelParts
from specdec.engine.cuda.step_plan import ItemTensors
from specdec.engine.cuda.storage import DeviceStorage
from specdec.engine.linears import LinearProduct


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """What kernels write of each row; the model's 16-bit type where not said otherwise."""

    hidden: Tensor  # [rows, hidden], the residual
    sums: Tensor  # [rows, parts] float32, its sums of squares
    queries: Tensor  # [rows, heads, head size]
    attended: Tensor  # [rows, heads, head size]
    qkv: Tensor  # [rows, heads + 2 kv heads, head size], where the product does not rotate
    activated: Tensor  # [rows, intermediate]
    branch: Tensor  # [rows, hidden], what is normalized before it is added; in the end the last norm
    is_finite: Tensor  # [rows] int32


@dataclass(frozen=True, slots=True)
class LogitBuffers:
    """What kernels write of each row with logits."""

    hidden: Tensor  # [logits, hidden] of the model's type
    logits: Tensor  # [logits, vocab] float32
    best: Tensor  # [logits, tiles] float32, the largest of each tile
    ids: Tensor  # [logits, tiles] int32, where it is
    finite_tiles: Tensor  # [logits, tiles] int32
    best_ids: Tensor  # [logits] int64
    is_finite: Tensor  # [logits] int32


class DeviceStep:
    """The step of a model whose parts are `alternate`d. One thread at a time; results are valid until the next step."""

    def __init__(self, parts: ModelParts):
        """Raises ValueError for sizes that a kernel does not have."""
        self.parts = parts
        self.attention = ItemAttention(parts.shape, parts.table.device)
        self.has_equal_rows = False  # whether a row had the same bits in all tried steps
        self._fixed = self._make_rows(GROUP_ROWS), self._make_logits(GROUP_ROWS)
        self._rows, self._logits = self._fixed

    @property
    def results(self) -> LogitBuffers:
        """Where the results of steps of at most GROUP_ROWS rows lie."""
        return self._fixed[1]

    def run(
        self, storage: DeviceStorage, step: ItemTensors, ids: Tensor, logit_rows: Tensor, asked: Asked
    ) -> StepResult:
        """Runs a step: ids [rows] int64 below the table's length, logit_rows [logits] int64. Waits for nothing."""
        parts, rows, logit_count = self.parts, step.shape.row_count, step.shape.logit_count
        its, found = self._buffers(rows, logit_count)
        features = its.hidden.new_empty(rows, len(asked.feature_layers), its.hidden.shape[1])
        embed(ids, parts.table, its.hidden, its.sums, rows, scale=parts.scale)
        for index in range(len(parts.layers) + 1):
            for place, layer_id in enumerate(asked.feature_layers):
                if layer_id == index:
                    features[:, place] = its.hidden[:rows]
            if index < len(parts.layers):
                self.run_layer(parts.layers[index], storage.slots[index], step, its)
        return self._finish(its, found, rows, logit_rows, asked, features.flatten(1))

    def finish(self, states: Tensor) -> StepResult:
        """Returns the result of rows with these states [rows, hidden] behind the last layer, with hidden states."""
        count = len(states)
        its, found = self.rows_from(states), self._buffers(count, count)[1]
        rows = torch.arange(count, device=states.device)
        return self._finish(its, found, count, rows, Asked(hidden=True), states)

    def run_layer(self, layer: LayerParts, cache: Cache, step: ItemTensors, its: RowBuffers) -> None:
        """Runs one layer on the residual, in place: writes keys and values, attends, adds; then the MLP."""
        rows = step.shape.row_count
        norm = RowNorm(its.sums, layer.before_attention.gain, layer.before_attention.epsilon)
        angles = layer.cosines, layer.sines, step.positions, step.slots
        weight, bias = layer.qkv.weight, layer.qkv.bias
        if self.parts.is_rotated_in_product:
            qkv_rope(its.hidden, weight, *angles, its.queries, *cache, rows, norm=norm, bias=bias)
        else:
            product(its.hidden, weight, its.qkv.flatten(1), rows, norm=norm, bias=bias)
            norms = layer.head_norms
            gains = None if norms is None else (norms[0].gain, norms[1].gain)
            epsilon = 0.0 if norms is None else norms[0].epsilon
            rope_write(its.qkv, *angles, its.queries, *cache, rows, gains=gains, epsilon=epsilon)
        self.attention.run(its.queries, cache, step, layer.rule, its.attended)
        _add(its, its.attended.flatten(1), layer.out, layer.after_attention, rows)
        norm = RowNorm(its.sums, layer.before_mlp.gain, layer.before_mlp.epsilon)
        weight, bias = layer.gate_up.weight, layer.gate_up.bias
        product(its.hidden, weight, its.activated, rows, norm=norm, bias=bias, activation=layer.activation)
        _add(its, its.activated, layer.down, layer.after_mlp, rows)

    def rows_from(self, states: Tensor) -> RowBuffers:
        """Returns the memory of a step's rows, with these states [rows, hidden] as the residual."""
        its, _ = self._buffers(len(states), 0)
        embed(torch.arange(len(states), device=states.device), states, its.hidden, its.sums, len(states))
        return its

    def _finish(
        self, its: RowBuffers, found: LogitBuffers, rows: int, logit_rows: Tensor, asked: Asked, features: Tensor
    ) -> StepResult:
        """Runs the last norm and the output layer."""
        count, norm, output = len(logit_rows), self.parts.norm, self.parts.output
        rms_norm(its.hidden, norm.gain, its.branch, rows, norm.epsilon, finite=its.is_finite)
        if count:
            torch.index_select(its.branch, 0, logit_rows, out=found.hidden[:count])
            tiles, bias = (found.best, found.ids, found.finite_tiles), output.bias
            scale, softcap = output.scale, output.softcap
            head(found.hidden, self.parts.head, found.logits, *tiles, count, bias=bias, scale=scale, softcap=softcap)
            pick(*tiles, found.best_ids, found.is_finite, count)
        return StepResult(
            found.logits[:count],
            torch.cat((its.is_finite[:rows], found.is_finite[:count])),
            found.hidden[:count] if asked.hidden else None,
            features if asked.feature_layers else None,
            found.best_ids[:count],
        )

    def _buffers(self, row_count: int, logit_count: int) -> tuple[RowBuffers, LogitBuffers]:
        """Returns memory for a step: the same for every step of at most GROUP_ROWS rows."""
        if row_count <= GROUP_ROWS:
            return self._fixed
        if row_count > len(self._rows.hidden):
            self._rows = self._make_rows(row_count)
        if logit_count > len(self._logits.hidden):
            self._logits = self._make_logits(logit_count)
        return self._rows, self._logits

    def _make_rows(self, count: int) -> RowBuffers:
        parts, shape = self.parts, self.parts.shape
        width, heads, size = parts.table.shape[1], shape.head_count, shape.head_size
        qkv = (0 if parts.is_rotated_in_product else heads + 2 * shape.kv_head_count, size)
        new = parts.table.new_empty
        return RowBuffers(
            hidden=new(count, width),
            sums=new(count, sum_parts(width), dtype=torch.float32),
            queries=new(count, heads, size),
            attended=new(count, heads, size),
            qkv=new(count, *qkv),
            activated=new(count, parts.layers[0].down.shape[1]),
            branch=new(count, width),
            is_finite=new(count, dtype=torch.int32),
        )

    def _make_logits(self, count: int) -> LogitBuffers:
        new, (vocabulary, width) = self.parts.table.new_empty, self.parts.head.shape
        tiles = head_tiles(vocabulary)
        return LogitBuffers(
            hidden=new(count, width),
            logits=new(count, vocabulary, dtype=torch.float32),
            best=new(count, tiles, dtype=torch.float32),
            ids=new(count, tiles, dtype=torch.int32),
            finite_tiles=new(count, tiles, dtype=torch.int32),
            best_ids=new(count, dtype=torch.int64),
            is_finite=new(count, dtype=torch.int32),
        )


def _add(its: RowBuffers, x: Tensor, product_of: LinearProduct, norm: DeviceRMSNorm | None, rows: int) -> None:
    """Adds a product of x, normalized if there is a norm behind it, to the residual."""
    weight, bias = product_of.weight, product_of.bias
    if norm is None:
        product(x, weight, its.hidden, rows, bias=bias, residual=its.hidden, sums=its.sums)
    else:
        product(x, weight, its.branch, rows, bias=bias)
        rms_norm(its.branch, norm.gain, its.hidden, rows, norm.epsilon, residual=its.hidden, sums=its.sums)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A planned step in one call: see `WholeStep`."""

    call: DeviceStep
    storage: DeviceStorage
    step: ItemTensors

    def run(self, input_ids: Tensor, logit_rows: Tensor, output: nn.Module, asked: Asked) -> StepResult:
        return self.call.run(self.storage, self.step, input_ids[0], logit_rows, asked)
