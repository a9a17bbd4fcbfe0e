"""Attention over the paged storage of a device, in one of three equivalent ways, and one for trees.

`block tables` and `gathered` run `torch.nn.attention.varlen.varlen_attn`, the first on the pages in place (torch from
2.13 on), the second on a packed copy of the keys. `plain` uses matrix products only; it computes float32, capped scores
and sizes the kernel does not support, and is the reference for the other ways (`select_backend`). Results of padding
rows have no meaning.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional

from specdec.engine.attention import ScoreRule
from specdec.engine.cuda.plan import StepTensors
from specdec.engine.cuda.storage import DeviceStorage

TABLE_BLOCK_MULTIPLE = 256  # the kernel behind varlen_attn reads pages of a multiple of this many positions only


class AttentionBackend(Protocol):
    """One way to attend: `prepare` once a step, `attend` once a layer with the prepared value."""

    name: str

    def prepare(self, storage: DeviceStorage, step: StepTensors) -> object:
        """Returns the value for every layer's `attend` of a step."""

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: StepTensors,
        prepared: Any,
        rule: ScoreRule,
    ) -> torch.Tensor:
        """queries [rows, heads, size]; keys and values [blocks, block size, kv heads, size] -> the queries' shape."""


@functools.cache
def varlen_parameters() -> frozenset[str]:
    """Returns the parameters of this torch's varlen_attn; empty if torch has no varlen_attn."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def run_varlen(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: StepTensors,
    rule: ScoreRule,
    **tables: Any,
) -> torch.Tensor:
    """Runs varlen_attn, causal, each sequence's last row at its last position. Rows of no sequence stay unset."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" in varlen_parameters():
        tables["enable_gqa"] = True  # earlier versions accept fewer key heads without this flag
    shape = step.shape
    output = varlen_attn(
        queries,
        keys,
        values,
        step.query_starts,
        step.key_starts,
        shape.query_max,
        shape.key_max,
        scale=rule.scaling,
        window_size=(-1, 0) if rule.window is None else (rule.window - 1, 0),
        **tables,
    )
    return output  # type: ignore[return-value]  # a tuple only with more outputs requested


class BlockTables:
    """varlen_attn on the pages themselves.

    One split, always: with more than one the kernel of torch 2.13 leaves rows of packed sequences unwritten (torch
    issue 194167). It also makes a row's result independent of the other sequences, and long texts slower.
    """

    name = "block tables"

    def prepare(self, storage: DeviceStorage, step: StepTensors) -> None:
        return None

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: StepTensors,
        prepared: None,
        rule: ScoreRule,
    ) -> torch.Tensor:
        tables = {"seqused_k": step.key_counts, "block_table": step.tables, "num_splits": 1}
        return run_varlen(queries, keys, values, step, rule, **tables)


class Gathered:
    """varlen_attn on a packed copy of each sequence's keys and values, made for every layer."""

    name = "gathered"

    def prepare(self, storage: DeviceStorage, step: StepTensors) -> torch.Tensor:
        """Returns the slots of the packed keys, [sequences * key_max] int64; the unused last ones have no meaning."""
        shape, size = step.shape, storage.block_size
        starts = step.key_starts.long()
        cells = torch.arange(shape.sequence_count * shape.key_max, device=starts.device)
        sequences = torch.searchsorted(starts[1:], cells, right=True).clamp_(max=shape.sequence_count - 1)
        offsets = (cells - starts[sequences]).clamp_(max=shape.key_max - 1)
        blocks = step.tables[sequences, offsets // size].long()
        return blocks * size + offsets % size

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: StepTensors,
        prepared: torch.Tensor,
        rule: ScoreRule,
    ) -> torch.Tensor:
        packed_keys, packed_values = (cache.flatten(0, 1).index_select(0, prepared) for cache in (keys, values))
        return run_varlen(queries, packed_keys, packed_values, step, rule)


@dataclass(frozen=True, slots=True)
class DenseIndices:
    """`rows` [sequences * query_max] int64: the batch's rows as a rectangle; `places` [rows] int64: the inverse.

    `distances` [sequences, query_max, keys] int64: positions from a key to its query; below 0 the key is later.
    """

    rows: torch.Tensor
    places: torch.Tensor
    distances: torch.Tensor


def rectangle(step: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `DenseIndices.rows` as [sequences, query_max], and `places`."""
    shape, device = step.shape, step.tables.device
    starts = step.query_starts.long()
    inside = torch.arange(shape.query_max, device=device)
    rows = (starts[:-1, None] + inside).clamp_(max=shape.row_count - 1)
    every_row = torch.arange(shape.row_count, device=device)
    sequences = torch.searchsorted(starts[1:], every_row, right=True).clamp_(max=shape.sequence_count - 1)
    within = (every_row - starts[sequences]).clamp_(max=shape.query_max - 1)
    return rows, sequences * shape.query_max + within


class Dense:
    """Scores, softmax, sum: rectangular, masked, in float32. The reference for the other ways."""

    name = "plain"

    def prepare(self, storage: DeviceStorage, step: StepTensors) -> DenseIndices:
        rows, places = rectangle(step)
        keys = torch.arange(step.tables.shape[1] * storage.block_size, device=step.tables.device)
        distances = step.positions[rows][:, :, None] - keys
        return DenseIndices(rows.view(-1), places, distances)

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: StepTensors,
        prepared: DenseIndices,
        rule: ScoreRule,
    ) -> torch.Tensor:
        return attend_rectangle(queries.float(), keys, values, step, prepared, rule).to(queries.dtype)


class Trees:
    """As `Dense`, in the model's own type, for steps whose rows have visible cells."""

    name = "trees"

    def prepare(self, storage: DeviceStorage, step: StepTensors) -> DenseIndices:
        rows, places = rectangle(step)
        distances = step.positions[rows][:, :, None] - step.cell_positions[:, None, :]
        return DenseIndices(rows.view(-1), places, distances.masked_fill_(step.visible[rows] == 0, -1))

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: StepTensors,
        prepared: DenseIndices,
        rule: ScoreRule,
    ) -> torch.Tensor:
        return attend_rectangle(queries, keys, values, step, prepared, rule)


def attend_rectangle(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: StepTensors,
    prepared: DenseIndices,
    rule: ScoreRule,
) -> torch.Tensor:
    """Attends over the rectangle of `prepared`, in the type of the queries; see `AttentionBackend.attend`."""
    shape = step.shape
    head_count, size = queries.shape[1:]
    count, rows = shape.sequence_count, shape.query_max
    group = head_count // keys.shape[2]
    blocks = step.tables.view(-1).long()
    chosen = queries.index_select(0, prepared.rows).view(count, rows, -1, group, size)
    # A group's query heads share their keys: [sequences, kv heads, group * rows, size].
    chosen = chosen.permute(0, 2, 3, 1, 4).reshape(count, -1, group * rows, size)
    cached = [c.index_select(0, blocks).view(count, -1, *c.shape[2:]).transpose(1, 2) for c in (keys, values)]
    hidden = prepared.distances < 0
    if rule.window is not None:
        hidden = hidden | (prepared.distances >= rule.window)
    hidden = hidden[:, None, None].expand(-1, -1, group, -1, -1).reshape(count, 1, group * rows, -1)
    output = masked_attention(chosen, cached[0].to(chosen.dtype), cached[1].to(chosen.dtype), ~hidden, rule)
    output = output.view(count, -1, group, rows, size).permute(0, 3, 1, 2, 4).reshape(count * rows, -1, size)
    return output.index_select(0, prepared.places)


def masked_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """queries [sequences, heads, rows, size], keys and values [.., kv heads, keys, size] -> the queries' shape.

    `visible` [.., rows, keys] bool is broadcast over the heads.
    """
    group = queries.shape[1] // keys.shape[1]
    if rule.softcap is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, visible, scale=rule.scaling, enable_gqa=group > 1
        )
    if group > 1:
        keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.tanh(queries @ keys.transpose(-1, -2) * rule.scaling / rule.softcap) * rule.softcap
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values


DENSE = Dense()
TREES = Trees()


@dataclass(slots=True)
class DeviceMetadata:
    """The attention plan of one step, the same for every layer; each way is prepared at its first use.

    Used in place of an `AttentionMetadata`.
    """

    storage: DeviceStorage
    step: StepTensors
    way: AttentionBackend
    _prepared: dict[str, Any] = field(default_factory=dict)

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, rule: ScoreRule
    ) -> torch.Tensor:
        """Writes the step's keys and values [rows, kv heads, head size] to the cache of a layer, then attends to it.

        queries [rows, heads, head size]; returns the same shape and type.
        """
        self.storage.write(layer, self.step.slots, keys, values)
        way = self.way
        if self.step.shape.has_trees:
            way = TREES
        elif rule.softcap is not None:
            way = DENSE
        if way.name not in self._prepared:
            self._prepared[way.name] = way.prepare(self.storage, self.step)
        cached_keys, cached_values = self.storage.blocks[layer]
        return way.attend(queries, cached_keys, cached_values, self.step, self._prepared[way.name], rule)
