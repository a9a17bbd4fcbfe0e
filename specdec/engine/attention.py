"""Paged attention on a CPU, batched over sequences; a row's result depends on its own past only.

Every product has one of a few fixed shapes: query tiles of measured widths against splits of KEY_SPLIT cached
positions (for a tree also one of TREE_KEYS), accumulated split by split in order. Padding to a longer neighbour adds
splits that are masked, that is, exact zeros. All arithmetic is float32, whatever the model's type; the cache holds
float32. A layer passes a `ScoreRule`; the plan holds the rows and the positions they attend to.

The attention parameters of a model's layers are measured by calling the layers once with a recorder in place of a
step's plan. A layer with an unknown parameter is refused then, when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from specdec.engine.interface import StepAbandoned
from specdec.engine.storage import PagedStorage
from specdec.engine.tile_sizes import ROW_MULTIPLE, aligned, probe
from specdec.errors import ModelRefused

NAME = "specdec_paged"
KEY_SPLIT = 64  # cached positions per product; the library would split longer products by rules of its own
TREE_KEYS = 2 * KEY_SPLIT  # of one tile with all paths: those since the first row's split began, and of the rows
CANDIDATE_QUERY_TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
BATCH_COUNTS = (1, 2, 3, 8)
# Arguments of models to an attention function without effect here: positions are the plan's.
WITHOUT_EFFECT = frozenset({"position_ids", "use_cache", "dropout", "output_attentions", "cache_position"})


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """One layer's rule for q k^T: times `scaling`, then softcap * tanh(score / softcap), within `window` positions.

    A row sees the last `window` positions, its own included; None is all of its past. `softcap` None leaves scores.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Query tiles of one width whose sequences are about equally long; computed together.

    `query_rows` [tiles * kv heads * splits * group size * width] int64: rows of the queries seen as [rows * heads,
    head size], in the order (tile, kv head, split, query head of it, row): repeated for every split. `cells`
    [2 * tiles * kv heads * blocks] int64: cache cells, keys then values. `mask` [tiles * kv heads * splits, group size
    * width, KEY_SPLIT] float32: 0 where a row may attend, minus infinity elsewhere.
    """

    split_count: int

    query_rows: torch.Tensor
    cells: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class TreeGroup:
    """The rows of all paths of a sequence as one tile, so that keys are read once, not once a path.

    `before`: the key splits before that of the first row; None if no row sees one. `own`: the keys after these, as one
    split of TREE_KEYS: cached positions, then the rows of the step; its `cells` are single positions, its mask
    [kv heads, group size * width, TREE_KEYS] hides from a row those not on its path. The softmax needs the order of a
    chain, the products any order in which hidden keys add exact zeros. So, int64: `places` [group size * width,
    splits * KEY_SPLIT], the own key at each position of a row's path, and `keys` [group size * width, splits *
    TREE_KEYS], the position of each own key, by split; hidden ones where there is none.
    """

    before: QueryGroup | None
    own: QueryGroup
    places: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Indices of one step: writes, reads and results; the same for every layer of a window.

    `written` [2 * writes * kv heads] int64: cache positions of the step's keys, then values; `sources` [writes] int64:
    the row of each, if some rows are written for several paths. `groups`: by the window of a layer. `output_rows`
    [padded rows * heads] int64: the index of each (row, head) in the groups' concatenated results.
    """

    storage: PagedStorage
    row_count: int
    written: torch.Tensor
    groups: Mapping[int | None, tuple[QueryGroup | TreeGroup, ...]]
    output_rows: torch.Tensor
    sources: torch.Tensor | None = None
    should_abandon: Callable[[], bool] | None = None

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, rule: ScoreRule
    ) -> torch.Tensor:
        """Writes the step's keys and values to the cache of a layer, then attends to it.

        queries [rows, heads, head size], keys and values [rows, kv heads, head size], of one type; returns the
        queries' shape and type. Raises StepAbandoned before it writes.
        """
        if self.should_abandon is not None and self.should_abandon():
            raise StepAbandoned
        storage = self.storage
        rows, head_count, size = queries.shape
        if self.sources is None:
            new = torch.cat((keys[: self.row_count], values[: self.row_count])).view(-1, size)
        else:
            new = torch.cat([part.index_select(0, self.sources) for part in (keys, values)]).view(-1, size)
        storage.positions[layer].index_copy_(0, self.written, new if new.dtype == torch.float32 else new.float())
        flat = queries.reshape(-1, size)
        if flat.dtype != torch.float32:
            flat = flat.float()
        parts = [
            _attend_tree(flat, storage.cells[layer], storage.positions[layer], group, rule)
            if isinstance(group, TreeGroup)
            else _attend(flat, storage.cells[layer], group, rule)
            for group in self.groups[rule.window]
        ]
        together = parts[0] if len(parts) == 1 else torch.cat(parts)  # [all tiles * heads * width, head size]
        output = together.index_select(0, self.output_rows).view(rows, head_count, size)
        return output if output.dtype == queries.dtype else output.to(queries.dtype)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    plan: AttentionPlan,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """The attention function for `transformers`: query [1, heads, rows, head size], key and value [1, kv heads, ...].

    Returns [1, rows, heads, head size]. Raises ModelRefused for an unknown argument that would change the result, such
    as attention sinks or position biases.
    """
    unknown = [name for name, given in others.items() if given is not None and name not in WITHOUT_EFFECT]
    if unknown or attention_mask is not None:
        asked = ", ".join(sorted(unknown)) or "attention_mask"
        raise ModelRefused(f"{type(module).__name__} asks for {asked} in its attention, which is not supported")
    layer: Any = module.layer_idx
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    rule = ScoreRule(scaling, sliding_window, softcap)
    return plan.attend(queries, keys, values, int(layer), rule)[None], None


def _attend(queries: torch.Tensor, cells: torch.Tensor, group: QueryGroup, rule: ScoreRule) -> torch.Tensor:
    """softmax(capped(q k^T * scaling) + mask) v for every tile and head of a group: [tiles * heads * width, size]."""
    size, count, width = queries.shape[1], group.split_count, group.mask.shape[1]
    scores, values = _scores(queries, cells, group, rule)
    if count == 1:
        return torch.bmm(torch.softmax(scores, -1), values).view(-1, size)
    weights = torch.softmax(_joined(scores, count), -1)
    parts = torch.bmm(_by_split(weights, count), values).view(-1, count, width, size)
    return _sum([*parts.unbind(1)]).view(-1, size)


def _attend_tree(
    queries: torch.Tensor, cells: torch.Tensor, positions: torch.Tensor, group: TreeGroup, rule: ScoreRule
) -> torch.Tensor:
    """As `_attend`, for the one tile of a tree: [heads * width, size]. `positions`: the same cache by position."""
    size, before, before_count = queries.shape[1], group.before, 0
    own_scores, own_values = _scores(queries, positions, group.own, rule)
    heads, width, _ = own_scores.shape
    scores = own_scores.gather(2, group.places.expand(heads, -1, -1))
    parts: list[torch.Tensor] = []
    if before is not None:
        before_scores, before_values = _scores(queries, cells, before, rule)
        before_count = before.split_count
        scores = torch.cat((_joined(before_scores, before_count), scores), 2)
    weights = torch.softmax(scores, -1)  # [kv heads, group size * width, positions]
    if before is not None:
        seen = _by_split(weights[:, :, : before_count * KEY_SPLIT], before_count)
        parts += torch.bmm(seen, before_values).view(heads, before_count, width, size).unbind(1)
    own_weights = weights[:, :, before_count * KEY_SPLIT :].gather(2, group.keys.expand(heads, -1, -1))
    parts += [torch.bmm(part, own_values) for part in own_weights.split(TREE_KEYS, 2)]
    return _sum(parts).view(-1, size)


def _joined(scores: torch.Tensor, split_count: int) -> torch.Tensor:
    """scores [tiles * splits, rows, KEY_SPLIT] -> [tiles, rows, splits * KEY_SPLIT]."""
    _, rows, keys = scores.shape
    return scores.view(-1, split_count, rows, keys).transpose(1, 2).reshape(-1, rows, split_count * keys)


def _by_split(weights: torch.Tensor, split_count: int) -> torch.Tensor:
    """The reverse of `_joined`."""
    tiles, rows, _ = weights.shape
    return weights.reshape(tiles, rows, split_count, -1).transpose(1, 2).reshape(tiles * split_count, rows, -1)


def _scores(
    queries: torch.Tensor, cells: torch.Tensor, group: QueryGroup, rule: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scores [tiles * kv heads * splits, group size * width, keys], minus infinity where masked, and the
    values [tiles * kv heads * splits, keys, size] to be weighted. `cells`: the cache by block or by position."""
    splits, width, keys_max = group.mask.shape
    tiles = queries.index_select(0, group.query_rows).view(splits, width, -1)
    keys, values = cells.index_select(0, group.cells).view(2, splits, keys_max, -1).unbind()
    if rule.softcap is None:
        return torch.baddbmm(group.mask, tiles, keys.transpose(1, 2), alpha=rule.scaling), values
    raw = torch.bmm(tiles, keys.transpose(1, 2)).mul_(rule.scaling / rule.softcap)
    return aligned(torch.tanh, raw).mul_(rule.softcap).add_(group.mask), values


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Returns ((part 0 + part 1) + part 2) + ..., of any shape."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total.add_(part)
    return total


def probe_query_tiles(
    group_size: int, head_size: int, rules: Collection[ScoreRule], tiles: Collection[int] = CANDIDATE_QUERY_TILES
) -> tuple[int, ...]:
    """Returns those of `tiles`, row counts per query tile, at which a row's attention has the same bits in every batch.

    `group_size` query heads share one key head, so a tile of w rows is a product of group_size * w rows. Every width is
    tried with several tiles at once, with neighbours one and two splits longer, and, if one of the model's rules has a
    window, with a split before the visible one; at the model's own scales, because a kernel rounds at the point where
    it applies a scale that is no power of two.
    """
    generator = torch.Generator().manual_seed(head_size)
    cells = torch.randn(5, KEY_SPLIT, head_size, generator=generator)  # one zero cell, two of keys, two of values
    cells[0] = 0
    # Visible positions, those of cells 1 and 2, and the cells the row may be computed over; cell 0 is masked.
    texts = [
        ((0, KEY_SPLIT - 28), ([1], [1, 2], [1, 2, 0])),
        ((0, 2 * KEY_SPLIT - 28), ([1, 2], [1, 2, 0])),
    ]
    if any(rule.window is not None for rule in rules):
        texts.append(((KEY_SPLIT + 20, 2 * KEY_SPLIT - 28), ([2], [1, 2], [2, 0], [1, 2, 0], [1, 0, 2])))

    def attend(
        rows: torch.Tensor, seen: tuple[int, int], order: list[int], batch: int, rule: ScoreRule
    ) -> torch.Tensor:
        positions = torch.cat([torch.arange(KEY_SPLIT) + (cell - 1) * KEY_SPLIT for cell in order])
        is_hidden = (positions < seen[0]) | (positions >= seen[1])  # those of cell 0 are below 0
        mask = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf).view(-1, 1, KEY_SPLIT)
        mask = mask.expand(-1, len(rows), -1).repeat(batch, 1, 1)
        halves = torch.tensor([order * batch, [cell and cell + 2 for cell in order] * batch])
        query_rows = torch.arange(len(rows)).repeat(batch * len(order))
        group = QueryGroup(len(order), query_rows, halves.view(-1), mask)
        return _attend(rows, cells, group, rule).view(batch, len(rows), head_size)

    def product(rows: torch.Tensor) -> torch.Tensor:
        outputs = []  # [rows, head size] for each text and rule
        for rule in {replace(rule, window=None) for rule in rules}:
            for seen, orders in texts:
                tried = [attend(rows, seen, order, batch, rule) for order in orders for batch in BATCH_COUNTS]
                every = torch.cat(tried)  # [all batches, rows, head size]
                agrees = torch.equal(every, every[:1].expand_as(every))
                outputs.append(every[0] if agrees else torch.full_like(every[0], torch.nan))
        return torch.cat(outputs, -1)

    candidates = [tile for tile in tiles if group_size * tile % ROW_MULTIPLE == 0]
    agreed = probe(product, head_size, torch.float32, [group_size * tile for tile in candidates])
    return tuple(tile for tile in candidates if group_size * tile in agreed)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's queries [rows, heads, head size], keys and values [rows, kv heads, head size], and its rule."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    layer: int
    rule: ScoreRule


class CallRecorder:
    """Records attention calls in place of an AttentionPlan; returns the queries as the result of attention."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, rule: ScoreRule
    ) -> torch.Tensor:
        """Records the call. See `AttentionPlan.attend`."""
        self.calls.append(AttentionCall(queries, keys, values, layer, rule))
        return queries


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of a model, or of one rank's share, for storage and planner: the same for all its layers."""

    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    rules: tuple[ScoreRule, ...]  # distinct ones

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Distinct windows of the layers."""
        return tuple(dict.fromkeys(rule.window for rule in self.rules))


@torch.inference_mode()
def measure_shape(base: nn.Module, device: torch.device | None = None) -> AttentionShape:
    """Runs one token through a base model. Raises ModelRefused unless every layer attends once, all in one shape."""
    recorder = CallRecorder()
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    base(input_ids=token, position_ids=token, use_cache=False, plan=recorder)
    calls = recorder.calls
    shapes = {(call.queries.shape[1:], call.keys.shape[1:], call.values.shape[1:]) for call in calls}
    if [call.layer for call in calls] != list(range(len(calls))) or len(shapes) != 1:
        raise ModelRefused(f"{type(base).__name__} does not attend once in every layer in one shape: not supported")
    queries, keys, values = shapes.pop()
    if keys != values or queries[1] != keys[1] or queries[0] % keys[0]:
        raise ModelRefused(f"{type(base).__name__} has queries {queries}, keys {keys}, values {values}: not supported")
    rules = tuple(dict.fromkeys(call.rule for call in calls))
    return AttentionShape(len(calls), queries[0], keys[0], queries[1], rules)


AttentionInterface.register(NAME, paged_attention)
