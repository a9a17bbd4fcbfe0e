"""Attention over the paged storage: `attend` over work items (`cuda/items.py`), then `combine` over a row's splits.

One block of threads computes an item for the query heads of one key head: the sum of values weighted by
exp(score - maximum), the maximum, and the sum of the weights. A row's splits are added in their order. All sums depend
on positions alone, so a row has the same bits in any step, as a node of a tree and in a chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.engine.cuda.items import GROUP_ROWS, TILE_SHIFT, TILE_WORDS, ItemLayout, split_count
from specdec.engine.cuda.kernels.launch import cdiv, constexpr, jit, launch, power_of_two, tl
from specdec.engine.cuda.kernels.tiles import begin

KEYS = 64  # keys of a turn of the loop; every split begins at a multiple of it
NO_WINDOW = 1 << 30
BLOCKS_MAX = 1024  # blocks of threads of one launch: some 8 a multiprocessor, and few that find no item


@dataclass(frozen=True, slots=True)
class AttendConfig:
    """How `attend` computes an item: `lanes`, rows times query heads that share a key head, 16 or 32 (with 64 Triton
    takes another tensor-core instruction); `heads` of them, all of a key head's or a part; `stages` of a turn of its
    loop, in which loads are under way; `warps` of 32 threads. A function of a model's shape alone."""

    lanes: int
    heads: int
    stages: int
    warps: int

    @property
    def tile_rows(self) -> int:
        """The rows of an item at most: `ItemLayout.tile_rows`."""
        return self.lanes // self.heads


def attend_config(head_count: int, kv_head_count: int, head_size: int) -> AttendConfig:
    """The configuration of a model's shape, or of one rank's share. Raises ValueError for shapes without one."""
    group = head_count // kv_head_count
    if head_count % kv_head_count or not 16 <= head_size <= 256 or head_size % 8:
        limits = "heads a multiple of key heads, head size a multiple of 8 from 16 to 256"
        raise ValueError(f"{head_count} heads, {kv_head_count} key heads of size {head_size}; they must be {limits}")
    lanes = 16 if group <= 4 else 32  # four rows or more in most shapes
    heads = min(group, lanes)
    # Four warps have too few registers for wide heads, or for many lanes divided by no power of two.
    is_large = head_size > 128 or (head_size > 64 and lanes == 32 and heads & (heads - 1) > 0)
    # A turn's slots are loaded before its keys: five stages have two turns of each under way.
    return AttendConfig(lanes, heads, stages=5, warps=8 if is_large else 4)


@dataclass(frozen=True, slots=True)
class Partials:
    """Results of the splits of at most GROUP_ROWS rows, float32: `values` [rows, heads, splits, head size], weighted
    sums; `maxima` and `sums` [rows, heads, splits]. One memory serves all layers. Entries of splits in which a row sees
    no key have no meaning."""

    values: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor


def make_partials(
    row_count: int, head_count: int, head_size: int, positions_max: int, device: torch.device
) -> Partials:
    """Returns memory for `row_count` rows, of which GROUP_ROWS suffice, at positions below `positions_max`."""
    shape = (min(row_count, GROUP_ROWS), head_count, split_count(positions_max))
    values, maxima, sums = (torch.empty(*shape, *more, device=device) for more in ((head_size,), (), ()))
    return Partials(values, maxima, sums)


@jit()
def split_start(split):
    """The first position of a split: `items.split_start`."""
    return tl.where(split < 16, split * 128, tl.where(split < 46, (split - 14) * 1024, (split - 38) * 4096))


@jit()
def split_of(position):
    """The split that holds a position: `items.split_of`."""
    later = tl.where(position < 32768, 14 + position // 1024, 38 + position // 4096)
    return tl.where(position < 2048, position // 128, later)


@jit()
def key_slots(words_ptr, keys, known, table, base, path, BLOCK_SIZE: constexpr):
    """The slots of keys at these positions, int64: see `items.ItemLayout`."""
    in_table = keys < base
    word = tl.load(words_ptr + tl.where(in_table, table + keys // BLOCK_SIZE, path + keys - base), mask=known, other=0)
    return tl.where(in_table, word.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE, word)


@jit()
def split_sums(
    q,
    position,
    tile,
    split,
    kv_head,
    keys_ptr,
    values_ptr,
    words_ptr,
    window,
    SCALE: constexpr,
    SOFTCAP: constexpr,
    KV_HEAD_COUNT: constexpr,
    SIZE: constexpr,
    BLOCK_SIZE: constexpr,
    KEYS: constexpr,
    STAGES: constexpr,
    WIDE: constexpr,
):
    """What queries q [lanes, size padded] at these positions get from a tile's keys of a split: sums of values [lanes,
    size padded], maxima and sums of weights [lanes]. Each turn takes KEYS keys; one not seen has weight 0."""
    dims = tl.arange(0, q.shape[1])
    real = dims < SIZE
    table, lowest, stop = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 5)
    base, path = tl.load(tile + 6), tl.load(tile + 7)
    start = tl.maximum(split_start(split), (lowest - window + 1) // KEYS * KEYS)
    end = tl.minimum(split_start(split + 1), stop)
    most = tl.full((q.shape[0],), float("-inf"), tl.float32)
    weights = tl.zeros((q.shape[0], KEYS), tl.float32)
    total = tl.zeros(q.shape, tl.float32)
    for turn in tl.range(start, end, KEYS, num_stages=STAGES):
        keys = turn + tl.arange(0, KEYS)
        known = keys < end
        slots = key_slots(words_ptr, keys, known, table, base, path, BLOCK_SIZE)
        at = (slots * KV_HEAD_COUNT + kv_head) * SIZE
        k = tl.load(keys_ptr + at[None, :] + dims[:, None], mask=known[None, :] & real[:, None], other=0.0)
        v = tl.load(values_ptr + at[:, None] + dims[None, :], mask=known[:, None] & real[None, :], other=0.0)
        score = tl.dot(q, k.to(q.dtype)) * SCALE
        if SOFTCAP > 0:  # softcap * tanh(score / softcap)
            score = SOFTCAP - 2 * SOFTCAP / (1 + tl.exp(score * (2 / SOFTCAP)))
        distance = position[:, None] - keys[None, :]
        score = tl.where((distance >= 0) & (distance < window), score, float("-inf"))
        new = tl.maximum(most, tl.max(score, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)  # no key seen yet
        scale = tl.exp(most - finite)
        weight = tl.exp(score - finite[:, None])
        weights = weights * scale[:, None] + weight
        weight = weight.to(v.dtype)
        if WIDE:
            weight = weight.to(tl.float32)
            v = v.to(tl.float32)
        total = tl.dot(weight, v, total * scale[:, None])
        most = new
    return total, most, tl.sum(weights, 1)


@jit("list_at", "order_at", "positions_at", "first_place", "window")
def attend_kernel(
    queries_ptr,
    keys_ptr,
    values_ptr,
    words_ptr,
    totals_ptr,
    maxima_ptr,
    sums_ptr,
    list_at,
    order_at,
    positions_at,
    first_place,
    window,
    SCALE: constexpr,
    SOFTCAP: constexpr,
    HEAD_COUNT: constexpr,
    KV_HEAD_COUNT: constexpr,
    SIZE: constexpr,
    SIZE_PADDED: constexpr,
    BLOCK_SIZE: constexpr,
    SPLIT_COUNT: constexpr,
    SHIFT: constexpr,
    TILE_WORDS: constexpr,
    LANES: constexpr,
    HEADS: constexpr,
    KEYS: constexpr,
    STAGES: constexpr,
    WIDE: constexpr,
    PDL: constexpr,
):
    """The items program_id(0), program_id(0) + num_programs(0), ... of a list, for HEADS query heads of a key head.
    Lane l is row l // HEADS of the item and head l % HEADS."""
    begin(PDL)
    GROUP: constexpr = HEAD_COUNT // KV_HEAD_COUNT
    PARTS: constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // PARTS
    lane = tl.arange(0, LANES)
    in_group = tl.program_id(1) % PARTS * HEADS + lane % HEADS
    head = kv_head * GROUP + in_group
    dims = tl.arange(0, SIZE_PADDED)
    items, tiles = words_ptr + tl.load(words_ptr + list_at + 1), words_ptr + tl.load(words_ptr + 1)
    for index in range(tl.program_id(0), tl.load(words_ptr + list_at), tl.num_programs(0)):
        item = tl.load(items + index)
        tile, split = tiles + (item >> SHIFT) * TILE_WORDS, item & ((1 << SHIFT) - 1)
        place = tl.load(tile) + lane // HEADS
        live = (lane // HEADS < tl.load(tile + 1)) & (in_group < GROUP)
        row = tl.load(words_ptr + order_at + place, mask=live, other=0)
        position = tl.load(words_ptr + positions_at + row, mask=live, other=-1)
        known = live[:, None] & (dims < SIZE)[None, :]
        at = (row.to(tl.int64) * HEAD_COUNT + head) * SIZE
        q = tl.load(queries_ptr + at[:, None] + dims[None, :], mask=known, other=0.0)
        q = q.to(tl.float32) if WIDE else q
        total, most, sums = split_sums(
            q, position, tile, split, kv_head, keys_ptr, values_ptr, words_ptr, window,
            SCALE, SOFTCAP, KV_HEAD_COUNT, SIZE, BLOCK_SIZE, KEYS, STAGES, WIDE
        )  # fmt: skip
        result = ((place - first_place).to(tl.int64) * HEAD_COUNT + head) * SPLIT_COUNT + split
        tl.store(totals_ptr + result[:, None] * SIZE + dims[None, :], total, mask=known)
        tl.store(maxima_ptr + result, most, mask=live)
        tl.store(sums_ptr + result, sums, mask=live)


@jit("order_at", "positions_at", "first_place", "window")
def combine_kernel(
    totals_ptr,
    maxima_ptr,
    sums_ptr,
    words_ptr,
    out_ptr,
    order_at,
    positions_at,
    first_place,
    window,
    HEAD_COUNT: constexpr,
    SIZE: constexpr,
    SIZE_PADDED: constexpr,
    SPLIT_COUNT: constexpr,
    SPLITS_PADDED: constexpr,
    TURN: constexpr,
    PDL: constexpr,
):
    """One row and head: its splits, in their order, TURN of them loaded at once."""
    begin(PDL)
    place = first_place + tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, SIZE_PADDED)
    live = place < tl.load(words_ptr)
    row = tl.load(words_ptr + order_at + place, mask=live, other=place)
    result = tl.zeros((SIZE_PADDED,), tl.float32)
    if live:
        position = tl.load(words_ptr + positions_at + row)
        first = split_of(tl.maximum(position - window + 1, 0))
        last = split_of(position)
        at = (tl.program_id(0).to(tl.int64) * HEAD_COUNT + head) * SPLIT_COUNT
        splits = tl.arange(0, SPLITS_PADDED)
        seen = (splits >= first) & (splits <= last)
        most = tl.max(tl.load(maxima_ptr + at + splits, mask=seen, other=float("-inf")), 0)
        total = tl.zeros((SIZE_PADDED,), tl.float32)
        sum_of_weights = 0.0
        for turn in range(first, last + 1, TURN):
            for inner in tl.static_range(TURN):
                split = turn + inner
                its = at + split
                scale = tl.exp(tl.load(maxima_ptr + its, mask=split <= last, other=float("-inf")) - most)
                sum_of_weights += tl.load(sums_ptr + its, mask=split <= last, other=0.0) * scale
                part = tl.load(totals_ptr + its * SIZE + dims, mask=(split <= last) & (dims < SIZE), other=0.0)
                total += part * scale
        result = total / sum_of_weights
    out = out_ptr + (row.to(tl.int64) * HEAD_COUNT + head) * SIZE + dims
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=dims < SIZE)


def attend_blocks(row_count: int, positions_max: int, kv_head_count: int) -> int:
    """Returns how many blocks of threads for each key head suit any step of `row_count` rows at positions below
    `positions_max`: enough for every item of few rows at once, else each takes several items in turn."""
    return min(row_count * split_count(positions_max), max(1, BLOCKS_MAX // kv_head_count))


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    words: torch.Tensor,
    layout: ItemLayout,
    partials: Partials,
    blocks: int,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    group: int = 0,
) -> None:
    """Writes to `partials` what each row of a group gets from each of its splits.

    queries [rows, heads, head size]; keys and values [slots, kv heads, head size], one layer's storage; all of one
    16-bit type. words [any] int32 on the device, as `items.fill` wrote them; `layout` has the window, and the rows of
    an item that `attend_config` gives. `blocks`: blocks of threads for each key head (`attend_blocks`); any number has
    the same result. `scaling`, `window`, `softcap`: see `ScoreRule`. `group`: its rows are the GROUP_ROWS from place
    `group` * GROUP_ROWS of their order on.
    """
    (_, head_count, size), kv_head_count = queries.shape, keys.shape[1]
    config = attend_config(head_count, kv_head_count, size)
    if layout.tile_rows > config.tile_rows:
        raise ValueError(f"tile_rows is {layout.tile_rows}; it must be at most {config.tile_rows} for these heads")
    launch(
        attend_kernel,
        (blocks, kv_head_count * cdiv(head_count // kv_head_count, config.heads)),
        queries,
        keys,
        values,
        words,
        partials.values,
        partials.maxima,
        partials.sums,
        2 + 2 * layout.list_of(window, group),
        layout.order_at,
        layout.positions_at,
        group * GROUP_ROWS,
        NO_WINDOW if window is None else window,
        SCALE=scaling,
        SOFTCAP=softcap or 0.0,
        HEAD_COUNT=head_count,
        KV_HEAD_COUNT=kv_head_count,
        SIZE=size,
        SIZE_PADDED=power_of_two(size),
        BLOCK_SIZE=layout.block_size,
        SPLIT_COUNT=partials.maxima.shape[2],
        SHIFT=TILE_SHIFT,
        TILE_WORDS=TILE_WORDS,
        LANES=config.lanes,
        HEADS=config.heads,
        KEYS=KEYS,
        warps=config.warps,
        stages=config.stages,
    )


def combine(
    partials: Partials,
    words: torch.Tensor,
    layout: ItemLayout,
    out: torch.Tensor,
    *,
    window: int | None = None,
    group: int = 0,
) -> None:
    """Writes out [rows, heads, head size], of a 16-bit type: the results of a group's rows, 0 for padding rows.

    `partials`, `words`, `layout`, `window` and `group` are those of `attend`.
    """
    _, head_count, size = out.shape
    split_max = partials.maxima.shape[2]
    launch(
        combine_kernel,
        (min(GROUP_ROWS, layout.row_count - group * GROUP_ROWS), head_count),
        partials.values,
        partials.maxima,
        partials.sums,
        words,
        out,
        layout.order_at,
        layout.positions_at,
        group * GROUP_ROWS,
        NO_WINDOW if window is None else window,
        HEAD_COUNT=head_count,
        SIZE=size,
        SIZE_PADDED=power_of_two(size),
        SPLIT_COUNT=split_max,
        SPLITS_PADDED=power_of_two(split_max),
        TURN=8,
        warps=1,
        stages=1,
    )
