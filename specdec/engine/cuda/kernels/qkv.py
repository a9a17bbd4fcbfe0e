"""Queries, keys and values of a layer: the product with its norm before, the rotation, and the write to the cache.

Positions and slots are int64: a slot is one position of the cache's storage, [slots, kv heads, head size].
"""

from __future__ import annotations

import torch

from specdec.engine.cuda.kernels.configs import ROWS, qkv_config
from specdec.engine.cuda.kernels.launch import cdiv, constexpr, jit, launch, power_of_two, tl
from specdec.engine.cuda.kernels.products import NO_NORM, RowNorm
from specdec.engine.cuda.kernels.tiles import begin, begin_product, row_scale, tile_product


@jit()
def first_of(pair, SIZE: constexpr, ROTATED: constexpr):
    """The element of a head with which a pair begins: see `qkv_rope`."""
    return pair if ROTATED == SIZE else tl.where(pair < ROTATED // 2, pair, pair + ROTATED // 2)


@jit()
def second_of(pair, SIZE: constexpr, ROTATED: constexpr):
    """The other element of a pair."""
    return pair + SIZE // 2 if ROTATED == SIZE else tl.where(pair < ROTATED // 2, pair + ROTATED // 2, pair + SIZE // 2)


@jit()
def rotated(a, b, cos_ptr, sin_ptr, at, turned, SIZE: constexpr, ROTATED: constexpr):
    """The two elements of pairs after the rotation by the angles at these places; as they were if not `turned`."""
    cos = tl.load(cos_ptr + at, mask=turned, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=turned, other=0.0).to(tl.float32)
    left, right = a * cos - b * sin, b * cos + a * sin
    if ROTATED < SIZE:
        left, right = tl.where(turned, left, a), tl.where(turned, right, b)
    return left, right


@jit()
def head_of(
    query_ptr,
    key_ptr,
    value_ptr,
    slot_ptr,
    rows,
    live,
    head,
    HEADS: constexpr,
    KV_HEADS: constexpr,
    SIZE: constexpr,
):
    """Where a head of these rows is written: queries by row, keys and values by slot."""
    if head < HEADS:
        place = query_ptr + (rows.to(tl.int64) * HEADS + head) * SIZE
    else:
        cache_ptr = key_ptr if head < HEADS + KV_HEADS else value_ptr
        slots = tl.load(slot_ptr + rows, mask=live, other=0)
        place = cache_ptr + (slots * KV_HEADS + (head - HEADS) % KV_HEADS) * SIZE
    return place


def rotated_size(cos: torch.Tensor | None) -> int:
    """The number of elements of a head that angles [positions, pairs] rotate."""
    return 0 if cos is None else 2 * cos.shape[1]


@jit("row_count")
def qkv_rope_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    gain_ptr,
    sums_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    row_count,
    HEADS: constexpr,
    KV_HEADS: constexpr,
    SIZE: constexpr,
    ROTATED: constexpr,
    K: constexpr,
    PARTS: constexpr,
    PARTS_PADDED: constexpr,
    EPSILON: constexpr,
    ROWS: constexpr,
    TILE: constexpr,
    STEP: constexpr,
    SLICES: constexpr,
    STAGES: constexpr,
    NORM: constexpr,
    BIAS: constexpr,
    WIDE: constexpr,
    PDL: constexpr,
):
    """One tile of `qkv_rope`: rows of the weight alternate within a head, so that a tile has both halves of a pair."""
    HALF: constexpr = TILE // 2
    N: constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    tile = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < row_count
    scale = live
    first = begin_product(weight_ptr, tile, N, K, TILE, STEP, SLICES, PDL)
    if NORM:
        scale = row_scale(sums_ptr, rows, live, K, PARTS, PARTS_PADDED, EPSILON)
    y = tile_product(
        first, x_ptr, weight_ptr, gain_ptr, scale, rows, live, tile,
        N, K, ROWS, TILE, STEP, SLICES, STAGES, NORM, WIDE, PDL
    )  # fmt: skip
    out = query_ptr.dtype.element_ty
    if BIAS:
        y += tl.load(bias_ptr + tile * TILE + tl.arange(0, TILE)).to(tl.float32)[:, None]
    a, b = tl.split(y.to(out).to(tl.float32).reshape(HALF, 2, ROWS).trans(0, 2, 1))  # [HALF, ROWS] each
    head = tile * TILE // SIZE
    pair = (tile * TILE % SIZE) // 2 + tl.arange(0, HALF)
    if ROTATED > 0:
        if head < HEADS + KV_HEADS:
            at = tl.load(position_ptr + rows, mask=live, other=0)[None, :] * (ROTATED // 2) + pair[:, None]
            a, b = rotated(a, b, cos_ptr, sin_ptr, at, (pair < ROTATED // 2)[:, None] & live[None, :], SIZE, ROTATED)
    place = head_of(query_ptr, key_ptr, value_ptr, slot_ptr, rows, live, head, HEADS, KV_HEADS, SIZE)[None, :]
    tl.store(place + first_of(pair, SIZE, ROTATED)[:, None], a.to(out), mask=live[None, :])
    tl.store(place + second_of(pair, SIZE, ROTATED)[:, None], b.to(out), mask=live[None, :])


def qkv_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: int,
    *,
    norm: RowNorm | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Computes norm(x) @ weight^T + bias for the first `rows` rows, rotates queries and keys, writes queries to
    `queries` and keys and values to their slots of a layer's cache.

    x [>= rows, inputs]; weight [(heads + 2 kv heads) * size, inputs] and bias: all query heads, then keys, then values,
    `alternated` by the head's size and its rotated part; cos and sin [positions, rotated / 2], 16-bit or float32;
    positions and slots [>= rows] int64; queries [>= rows, heads, size]; key_cache and value_cache [slots, kv heads,
    size]. One 16-bit type. An element i < rotated / 2 is rotated with i + rotated / 2; those from `rotated` on are not,
    without `cos` and `sin` none.
    """
    _, heads, size = queries.shape
    outputs, inputs = weight.shape
    config = qkv_config(outputs, inputs, size)
    launch(
        qkv_rope_kernel,
        (cdiv(rows, ROWS), outputs // config.tile),
        x,
        weight,
        bias,
        norm.gain if norm else None,
        norm.sums if norm else None,
        cos,
        sin,
        positions,
        slots,
        queries,
        key_cache,
        value_cache,
        rows,
        HEADS=heads,
        KV_HEADS=key_cache.shape[1],
        SIZE=size,
        ROTATED=rotated_size(cos),
        K=inputs,
        **(norm.constants() if norm else NO_NORM),
        ROWS=ROWS,
        TILE=config.tile,
        STEP=config.step,
        SLICES=config.slices,
        NORM=norm is not None,
        BIAS=bias is not None,
        warps=config.warps,
        stages=config.stages,
    )


@jit()
def rope_write_kernel(
    qkv_ptr,
    query_gain_ptr,
    key_gain_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    HEADS: constexpr,
    KV_HEADS: constexpr,
    SIZE: constexpr,
    ROTATED: constexpr,
    HALF_PADDED: constexpr,
    EPSILON: constexpr,
    NORMS: constexpr,
    STAGES: constexpr,
    PDL: constexpr,
):
    """One head of one row of `rope_write`."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, HALF_PADDED)
    inside = pair < SIZE // 2
    first, second = first_of(pair, SIZE, ROTATED), second_of(pair, SIZE, ROTATED)
    source = qkv_ptr + (row * (HEADS + 2 * KV_HEADS) + head) * SIZE
    out = query_ptr.dtype.element_ty
    a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMS:
            gain_ptr = query_gain_ptr if head < HEADS else key_gain_ptr
            scale = tl.rsqrt(tl.sum(a * a + b * b, 0) / SIZE + EPSILON)
            gain = tl.load(gain_ptr + first, mask=inside, other=0.0).to(tl.float32)
            more = tl.load(gain_ptr + second, mask=inside, other=0.0).to(tl.float32)
            a = (a * scale * gain).to(out).to(tl.float32)
            b = (b * scale * more).to(out).to(tl.float32)
        if ROTATED > 0:
            at = tl.load(position_ptr + row) * (ROTATED // 2) + pair
            a, b = rotated(a, b, cos_ptr, sin_ptr, at, pair < ROTATED // 2, SIZE, ROTATED)
    place = head_of(query_ptr, key_ptr, value_ptr, slot_ptr, row, row >= 0, head, HEADS, KV_HEADS, SIZE)
    tl.store(place + first, a.to(out), mask=inside)
    tl.store(place + second, b.to(out), mask=inside)


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: int,
    *,
    gains: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 0.0,
) -> None:
    """As `qkv_rope`, from its product: qkv [>= rows, heads + 2 kv heads, size], elements of heads in their own order.

    With `gains` (queries, keys), each [size], every head of a query or key is normalized first: norms of heads.
    """
    _, heads, size = queries.shape
    kv_heads = key_cache.shape[1]
    query_gain, key_gain = gains or (None, None)
    launch(
        rope_write_kernel,
        (rows, heads + 2 * kv_heads),
        qkv,
        query_gain,
        key_gain,
        cos,
        sin,
        positions,
        slots,
        queries,
        key_cache,
        value_cache,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        ROTATED=rotated_size(cos),
        HALF_PADDED=power_of_two(size // 2),
        EPSILON=epsilon,
        NORMS=gains is not None,
        warps=1,
        stages=1,
    )
