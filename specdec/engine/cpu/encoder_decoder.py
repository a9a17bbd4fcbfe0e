"""The attention of a step of an encoder-decoder model on a CPU: on native kernels, or by torch.

On the kernels the encoders of all inputs of a step run as one ragged batch. Between an encoder's layers the keys and
values of its self attention lie in the input's own cells of the decoder's first layer, which cross attention's are
written to at the end: heads and head sizes are the same. Without kernels each encoder runs by itself, whole, so that
the shapes of its products depend on its own input only, and then the decoder's rows one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch

from specdec.engine.attention import ScoreRule
from specdec.engine.backend import Compute, StepResult
from specdec.engine.cpu import kernels as native
from specdec.engine.cpu.fallback import RowAttention, bias_at, run_parts, write_slots
from specdec.engine.cpu.kernels import Kernels, LayerCache, Rows
from specdec.engine.cpu.plan import RowArrays, StackRows, StepPlan, rows_before
from specdec.engine.cpu.storage import CpuStorage
from specdec.engine.interface import StepAbandoned

ShouldAbandon = Callable[[], bool] | None


class KernelStacks:
    """An `EncoderDecoderMetadata` on the kernels. `caches`: of the decoder's layers."""

    def __init__(
        self,
        kernels: Kernels,
        caches: Sequence[LayerCache],
        rules: Mapping[ScoreRule, native.ScoreRule],
        stacks: StackRows,
        should_abandon: ShouldAbandon,
    ):
        common = kernels, caches, rules, should_abandon
        self.encoder: KernelEncoder | None = None
        self.decoder: KernelDecoder | None = None
        if stacks.encoder is not None:
            rows = rows_on(kernels, caches[0], stacks.encoder)
            self.encoder = KernelEncoder(*common, stacks.encoder_index, rows)
        if stacks.decoder is not None:
            pair = (rows_on(kernels, caches[0], arrays) for arrays in (stacks.decoder, rows_before(stacks.decoder)))
            self.decoder = KernelDecoder(*common, stacks.decoder_index, *pair)


def rows_on(kernels: Kernels, cache: LayerCache, arrays: RowArrays) -> Rows:
    """Returns planned rows for caches of this one's size."""
    return kernels.rows(block_count=cache.struct.block_count, block_size=cache.struct.block_size, **arrays._asdict())


@dataclass(frozen=True, slots=True)
class KernelStack:
    """What both stacks share."""

    kernels: Kernels
    caches: Sequence[LayerCache]
    rules: Mapping[ScoreRule, native.ScoreRule]
    should_abandon: ShouldAbandon
    index: torch.Tensor
    rows: Rows

    def attend_in(
        self, cache: LayerCache, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor:
        """Writes keys and values to the rows' cells of a cache, then attends to it. Raises StepAbandoned."""
        if self.should_abandon is not None and self.should_abandon():
            raise StepAbandoned
        self.kernels.write(cache, self.rows, keys, values)
        return self.kernels.attend(cache, self.rows, self.rules[rule], queries)


@dataclass(frozen=True, slots=True)
class KernelEncoder(KernelStack):
    """An `EncoderAttention` on the kernels."""

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
        return self.attend_in(self.caches[0], queries, keys, values, rule)

    def write(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        self.kernels.write(self.caches[layer], self.rows, keys, values)


@dataclass(frozen=True, slots=True)
class KernelDecoder(KernelStack):
    """A `DecoderAttention` on the kernels. `cross`: its rows as they see their inputs."""

    cross: Rows

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, rule: ScoreRule
    ) -> torch.Tensor:
        return self.attend_in(self.caches[layer], queries, keys, values, rule)

    def attend_to_input(self, queries: torch.Tensor, layer: int, rule: ScoreRule) -> torch.Tensor:
        return self.kernels.attend(self.caches[layer], self.cross, self.rules[rule], queries)


@dataclass(frozen=True, slots=True)
class PlainEncoder:
    """An `EncoderAttention` of one input, by torch in float32."""

    storage: CpuStorage
    rows: RowArrays
    own: slice  # of the encoders' rows
    should_abandon: ShouldAbandon

    @property
    def index(self) -> torch.Tensor:
        return torch.arange(self.own.stop - self.own.start)

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
        if self.should_abandon is not None and self.should_abandon():
            raise StepAbandoned
        positions = torch.from_numpy(self.rows.position[self.own]).long()
        bias = None if rule.bias is None else bias_at(rule.bias, positions[None] - positions[:, None])
        results = []
        for head in range(queries.shape[1]):  # one at a time: scores of all would be many
            scores = (queries[:, head].float() @ keys[:, head].float().T) * rule.scaling
            scores = scores if bias is None else scores.add_(bias[head])
            results.append(scores.softmax(-1) @ values[:, head].float())
        return torch.stack(results, 1).to(queries.dtype)

    def write(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        write_slots(self.storage, layer, self.rows.slot[self.own], keys, values)


@dataclass(frozen=True, slots=True)
class PlainDecoder:
    """A `DecoderAttention` of one row, by torch in float32."""

    self_attention: RowAttention
    cross: RowAttention

    @property
    def index(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64)

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, rule: ScoreRule
    ) -> torch.Tensor:
        return self.self_attention.attend(queries, keys, values, layer, rule)

    def attend_to_input(self, queries: torch.Tensor, layer: int, rule: ScoreRule) -> torch.Tensor:
        return self.cross.read(queries, layer, rule)


@dataclass(frozen=True, slots=True)
class PlainStacks:
    """An `EncoderDecoderMetadata` of one part of a step: an encoder's input, or a row of the decoder."""

    encoder: PlainEncoder | None
    decoder: PlainDecoder | None


def run_stacks(
    plan: StepPlan, stacks: StackRows, storage: CpuStorage, should_abandon: ShouldAbandon, compute: Compute
) -> StepResult:
    """Runs every encoder of a step, whole, and every row of the decoder alone; the results are in the order of
    `StepResult`."""

    parts: list[tuple[int, int, PlainStacks]] = []
    if stacks.encoder is not None:
        rows = stacks.encoder_index.tolist()
        for _, run in groupby(range(len(rows)), stacks.encoder.sequence.tolist().__getitem__):
            own = [*run]
            encoder = PlainEncoder(storage, stacks.encoder, slice(own[0], own[-1] + 1), should_abandon)
            parts.append((rows[own[0]], len(own), PlainStacks(encoder, None)))
    if stacks.decoder is not None:
        before = rows_before(stacks.decoder)
        for index, row in enumerate(stacks.decoder_index.tolist()):
            own_rows = RowAttention(storage, stacks.decoder, index, should_abandon)
            decoder = PlainDecoder(own_rows, RowAttention(storage, before, index))
            parts.append((row, 1, PlainStacks(None, decoder)))
    return run_parts(plan, sorted(parts, key=itemgetter(0)), compute)
