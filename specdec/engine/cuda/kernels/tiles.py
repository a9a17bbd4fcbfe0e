"""What kernels of several modules have in common: the product of a tile, the scale of a normalized row.

Everything is called by kernels, nothing by a host. Shapes are those of one block of threads: ROWS rows, TILE outputs.
"""

from __future__ import annotations

from specdec.engine.cuda.kernels.launch import constexpr, jit, tl


@jit()
def row_scale(sums_ptr, rows, live, K: constexpr, PARTS: constexpr, PARTS_PADDED: constexpr, EPSILON: constexpr):
    """1 / sqrt(mean square + EPSILON) of each row, from its PARTS sums of squares, float32 [ROWS]."""
    parts = tl.arange(0, PARTS_PADDED)
    known = live[:, None] & (parts < PARTS)[None, :]
    sums = tl.load(sums_ptr + rows.to(tl.int64)[:, None] * PARTS + parts[None, :], mask=known, other=0.0)
    return tl.rsqrt(tl.sum(sums, 1) / K + EPSILON)


@jit()
def tile_product(
    x_ptr,
    weight_ptr,
    gain_ptr,
    scale,
    rows,
    live,
    tile,
    N: constexpr,
    K: constexpr,
    ROWS: constexpr,
    TILE: constexpr,
    STEP: constexpr,
    SLICES: constexpr,
    STAGES: constexpr,
    NORM: constexpr,
    WIDE: constexpr,
):
    """weight[tile] @ x^T, float32 [TILE, ROWS], x normalized before if NORM: x * scale * gain, rounded once.

    Each of the SLICES of a step's inputs has its own sum, over all steps in order; the sums are added at the end.
    """
    PART: constexpr = STEP // SLICES
    inner = tl.arange(0, SLICES)[:, None] * PART + tl.arange(0, PART)[None, :]
    columns = tl.arange(0, TILE)
    weight_rows = weight_ptr + tile.to(tl.int64) * TILE * K + columns * K
    x_rows = x_ptr + rows.to(tl.int64) * K
    total = tl.zeros((SLICES, TILE, ROWS), tl.float32)
    for k in tl.range(0, K, STEP, num_stages=STAGES):
        inputs = k + inner
        w_at = weight_rows[None, :, None] + inputs[:, None, :]
        x_at = x_rows[None, None, :] + inputs[:, :, None]
        if N % TILE == 0 and K % STEP == 0:
            w = tl.load(w_at, eviction_policy="evict_first")
            x = tl.load(x_at, mask=live[None, None, :], other=0.0)
        else:
            known = (tile * TILE + columns < N)[None, :, None] & (inputs < K)[:, None, :]
            w = tl.load(w_at, mask=known, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_at, mask=live[None, None, :] & (inputs < K)[:, :, None], other=0.0)
        if NORM:
            gain = tl.load(gain_ptr + inputs, mask=inputs < K, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * scale[None, None, :] * gain[:, :, None]).to(x_ptr.dtype.element_ty)
        if WIDE:
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        total = tl.dot(w, x, total)
    return tl.sum(total, 0)
