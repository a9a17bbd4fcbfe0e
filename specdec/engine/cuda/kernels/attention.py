"""Attention over the paged storage: `attend` over work items (`cuda/items.py`), then `combine` over a row's splits.

One block of threads computes one item for the query heads of one key head: partial sums of values, weighted by
exp(score - maximum), with the maximum and the sum of the weights. A row's splits are combined in their order. Sums
depend on positions alone, so a row has the same bits in any step, as a node of a tree and in a chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.engine.attention import ScoreRule
from specdec.engine.cuda.items import GROUP_ROWS, ItemLayout, split_count


@dataclass(frozen=True, slots=True)
class AttendConfig:
    """How `attend` computes an item: `lanes` rows times query heads of a key head, 16 or 32; `stages` of keys and values
    whose loads are under way; `warps` of 32 threads. A function of the model's shape alone."""

    lanes: int
    stages: int
    warps: int


def attend_config(head_count: int, kv_head_count: int, head_size: int) -> AttendConfig:
    """The configuration of a model's shape, or of one rank's share."""
    raise NotImplementedError


def tile_rows(head_count: int, kv_head_count: int, head_size: int) -> int:
    """The rows of an item at most: `ItemLayout.tile_rows`."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Partials:
    """The results of the splits of GROUP_ROWS rows, float32: `values` [rows, heads, splits, head size] weighted sums,
    `maxima` and `sums` [rows, heads, splits]. One for all layers; entries of splits that a row does not see have no
    meaning."""

    values: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor


def make_partials(
    head_count: int, head_size: int, positions_max: int, device: torch.device, rows_max: int = GROUP_ROWS
) -> Partials:
    """Returns memory for the splits of at most `positions_max` positions."""
    raise NotImplementedError


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    words: torch.Tensor,
    layout: ItemLayout,
    partials: Partials,
    rule: ScoreRule,
    *,
    group: int = 0,
    blocks: int,
) -> None:
    """Writes to `partials` what each row of a group gets from each of its splits.

    queries [rows, heads, head size]; keys and values [slots, kv heads, head size], the storage of one layer; all of one
    16-bit type. `words` int32 on the device: see `ItemLayout`, whose windows hold the rule's. `group`: rows from
    `group` * GROUP_ROWS on. `blocks`: blocks of threads for each key head, see `attend_blocks`; any number is right.
    """
    raise NotImplementedError


def attend_blocks(row_count: int, positions_max: int, kv_head_count: int) -> int:
    """Returns how many blocks of threads for each key head to launch for any step of `row_count` rows."""
    raise NotImplementedError


def combine(
    partials: Partials,
    words: torch.Tensor,
    layout: ItemLayout,
    rule: ScoreRule,
    out: torch.Tensor,
    row_count: int,
    *,
    group: int = 0,
) -> None:
    """Writes out [rows, heads, head size], of a 16-bit type, for the rows of a group among the step's `row_count`, padding
    included; padding rows are 0."""
    raise NotImplementedError
