"""A step without native kernels: one row after the other through the unaltered modules of `transformers`.

Exact by construction: nothing that a row computes has a size or a neighbour that depends on the rest of the step. Its
attention runs by torch in float32 on its keys, gathered in the order of their positions, whatever blocks hold them. It
is the specification of the kernels, and many times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy
import torch
from torch.nn import functional

from specdec.engine.attention import PositionBias, ScoreRule
from specdec.engine.backend import Compute, StepAttention, StepInput, StepResult
from specdec.engine.cpu.plan import RowArrays, StepPlan
from specdec.engine.cpu.storage import CpuStorage
from specdec.engine.interface import StepAbandoned
from specdec.engine.linears import LinearProduct


class PlainOutput(LinearProduct):
    """The output layer in float32, softcap * tanh(scale * x @ weight / softcap). weight [vocab, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float | None):
        super().__init__(weight.float(), None if bias is None else bias.float())
        self.scale = scale
        self.softcap = softcap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, vocab] float32. One row after the other, since heads ask for several."""
        logits = torch.cat([functional.linear(row, self.weight, self.bias) for row in x.float().split(1)])
        logits *= self.scale
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)


@dataclass(slots=True)
class RowAttention:
    """The attention of row `row` of a step, in place of a plan of all its rows."""

    storage: CpuStorage
    rows: RowArrays
    row: int
    should_abandon: Callable[[], bool] | None = None
    _slots: dict[int | None, torch.Tensor] = field(default_factory=dict)  # of the keys it sees, by window

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, rule: ScoreRule
    ) -> torch.Tensor:
        """Writes the row's key and value [1, kv heads, head size] to the cache of a layer, then attends to it.

        queries [1, heads, head size]; returns the same shape and type. Raises StepAbandoned before it writes.
        """
        if self.should_abandon is not None and self.should_abandon():
            raise StepAbandoned
        write_slots(self.storage, layer, self.rows.slot[self.row : self.row + 1], keys, values)
        return self.read(queries, layer, rule)

    def read(self, queries: torch.Tensor, layer: int, rule: ScoreRule) -> torch.Tensor:
        """Attends to what the cache of a layer holds; see `attend`."""
        size, rows = self.storage.block_size, self.rows
        if rule.window not in self._slots:
            self._slots[rule.window] = torch.from_numpy(seen_slots(rows, self.row, rule.window, size))
        blocks, offsets = self._slots[rule.window] // size, self._slots[rule.window] % size
        # [kv heads, head size, keys], [kv heads, keys, head size]
        seen_keys = self.storage.keys[layer][blocks, :, :, offsets].float().permute(1, 2, 0)
        seen_values = self.storage.values[layer][blocks, :, offsets].float().transpose(0, 1)
        scores = torch.bmm(queries.float().view(len(seen_keys), -1, queries.shape[2]), seen_keys) * rule.scaling
        if rule.softcap is not None:
            scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
        if rule.bias is not None:
            end = int(rows.base[self.row] + rows.path_start[self.row + 1] - rows.path_start[self.row])
            distances = torch.arange(end - len(blocks), end) - int(rows.position[self.row])
            scores += bias_at(rule.bias, distances).view(len(seen_keys), -1, len(blocks))
        return torch.bmm(scores.softmax(-1), seen_values).view(queries.shape).to(queries.dtype)


def bias_at(bias: PositionBias, distances: torch.Tensor) -> torch.Tensor:
    """distances [...] int64 -> [heads, ...] float32."""
    return bias.table[:, distances.clamp(-bias.reach, bias.reach) + bias.reach]


def write_slots(
    storage: CpuStorage, layer: int, slots: numpy.ndarray, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Writes keys and values [slots, kv heads, head size] to the cache of a layer."""
    blocks, offsets = (torch.from_numpy(part.astype(numpy.int64)) for part in divmod(slots, storage.block_size))
    storage.keys[layer][blocks, :, :, offsets] = keys
    storage.values[layer][blocks, :, offsets] = values


def seen_slots(rows: RowArrays, row: int, window: int | None, block_size: int) -> numpy.ndarray:
    """Returns the storage slots that a row sees, in the order of their positions.  # [keys] int64"""
    table = rows.table[rows.table_start[rows.sequence[row]] :]
    below = numpy.arange(0 if rows.first is None else rows.first[row], rows.base[row])
    path = rows.path[rows.path_start[row] : rows.path_start[row + 1]]
    slots = numpy.concatenate((table[below // block_size].astype(numpy.int64) * block_size + below % block_size, path))
    return slots if window is None else slots[-window:]


def run_rows(
    plan: StepPlan, storage: CpuStorage, should_abandon: Callable[[], bool] | None, compute: Compute
) -> StepResult:
    """Runs every row of a step alone; the results are in the order of `StepResult`."""
    parts = ((row, 1, RowAttention(storage, plan.rows, row, should_abandon)) for row in range(plan.row_count))
    return run_parts(plan, parts, compute)


def run_parts(plan: StepPlan, parts: Iterable[tuple[int, int, StepAttention]], compute: Compute) -> StepResult:
    """Runs parts of a step, each with its first row, its number of rows and its attention, one after the other; a part
    of several rows has no logits. The parts are the rows of the step, in order, as are the results."""
    has_logits = set(plan.logit_rows.tolist())
    results, counts = [], []
    for row, count, attention in parts:
        own = slice(row, row + count)
        logit_rows = torch.zeros(int(row in has_logits), dtype=torch.int64)
        results.append(compute(StepInput(plan.input_ids[:, own], plan.position_ids[:, own], logit_rows, attention)))
        counts.append(count)
    flags = [result.is_finite[:count] for result, count in zip(results, counts)]
    flags += [result.is_finite[count:] for result, count in zip(results, counts)]
    hidden = [result.hidden for result in results if result.hidden is not None]
    features = [result.features for result in results if result.features is not None]
    return StepResult(
        torch.cat([result.logits for result in results]),
        torch.cat(flags),
        torch.cat(hidden) if hidden else None,
        torch.cat(features) if features else None,
    )
