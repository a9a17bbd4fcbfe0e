"""What kernels of several modules have in common: dependent launch, the product of a tile, the scale of a normalized
row.

Everything is called by kernels, nothing by a host. Shapes are those of one block of threads: ROWS rows, TILE outputs.
With PDL a kernel begins while the one before it runs. Every block lets the next begin, may read what no kernel of a
step writes (weights, gains), and waits: then all kernels before have ended, and what they wrote is there.
"""

from __future__ import annotations

from specdec.engine.cuda.kernels.launch import constexpr, gdc_launch_dependents, gdc_wait, jit, tl


@jit()
def let_next_begin(PDL: constexpr):
    """The next kernel may begin once every block of this one has come here, or ended."""
    if PDL:
        gdc_launch_dependents()


@jit()
def wait_for_last(PDL: constexpr):
    """Waits until the kernel before has ended. Every block waits, even one that has nothing to do: the end of a kernel
    tells the next that all before it have ended too."""
    if PDL:
        gdc_wait()


@jit()
def begin(PDL: constexpr):
    """What a kernel does first that reads nothing before it waits."""
    let_next_begin(PDL)
    wait_for_last(PDL)


@jit()
def row_scale(sums_ptr, rows, live, K: constexpr, PARTS: constexpr, PARTS_PADDED: constexpr, EPSILON: constexpr):
    """1 / sqrt(mean square + EPSILON) of each row, from its PARTS sums of squares, float32 [ROWS]."""
    parts = tl.arange(0, PARTS_PADDED)
    known = live[:, None] & (parts < PARTS)[None, :]
    sums = tl.load(sums_ptr + rows.to(tl.int64)[:, None] * PARTS + parts[None, :], mask=known, other=0.0)
    return tl.rsqrt(tl.sum(sums, 1) / K + EPSILON)


@jit()
def tile_weights(weight_ptr, tile, k, N: constexpr, K: constexpr, TILE: constexpr, STEP: constexpr, SLICES: constexpr):
    """The weights of a tile for the STEP inputs from k on, [SLICES, TILE, STEP / SLICES]."""
    PART: constexpr = STEP // SLICES
    inputs = k + tl.arange(0, SLICES)[:, None] * PART + tl.arange(0, PART)[None, :]
    columns = tl.arange(0, TILE)
    at = weight_ptr + tile.to(tl.int64) * TILE * K + columns[None, :, None] * K + inputs[:, None, :]
    if N % TILE == 0 and K % STEP == 0:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        known = (tile * TILE + columns < N)[None, :, None] & (inputs < K)[:, None, :]
        w = tl.load(at, mask=known, other=0.0, eviction_policy="evict_first")
    return w


@jit()
def begin_product(
    weight_ptr, tile, N: constexpr, K: constexpr, TILE: constexpr, STEP: constexpr, SLICES: constexpr, PDL: constexpr
):
    """What a product does first: with PDL it has its first step's weights under way before it waits, and returns them;
    without, the loop loads them."""
    let_next_begin(PDL)
    if PDL:
        w = tile_weights(weight_ptr, tile, 0, N, K, TILE, STEP, SLICES)
    else:
        w = tile
    wait_for_last(PDL)
    return w


@jit()
def step_product(
    w,
    x_ptr,
    gain_ptr,
    scale,
    rows,
    live,
    k,
    total,
    N: constexpr,
    K: constexpr,
    TILE: constexpr,
    STEP: constexpr,
    SLICES: constexpr,
    NORM: constexpr,
    WIDE: constexpr,
):
    """total + w @ x^T over the STEP inputs from k on, x normalized before if NORM."""
    PART: constexpr = STEP // SLICES
    inputs = k + tl.arange(0, SLICES)[:, None] * PART + tl.arange(0, PART)[None, :]
    x_at = x_ptr + rows.to(tl.int64)[None, None, :] * K + inputs[:, :, None]
    if N % TILE == 0 and K % STEP == 0:
        x = tl.load(x_at, mask=live[None, None, :], other=0.0)
    else:
        x = tl.load(x_at, mask=live[None, None, :] & (inputs < K)[:, :, None], other=0.0)
    if NORM:
        gain = tl.load(gain_ptr + inputs, mask=inputs < K, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * scale[None, None, :] * gain[:, :, None]).to(x_ptr.dtype.element_ty)
    if WIDE:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(w, x, total)


@jit()
def tile_product(
    first,
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
    PDL: constexpr,
):
    """weight[tile] @ x^T, float32 [TILE, ROWS], x normalized before if NORM: x * scale * gain, rounded once.

    Each of the SLICES of a step's inputs has its own sum, over all steps in order; the sums are added at the end.
    `first`: of `begin_product`.
    """
    total = tl.zeros((SLICES, TILE, ROWS), tl.float32)
    START: constexpr = STEP if PDL else 0
    if PDL:
        total = step_product(first, x_ptr, gain_ptr, scale, rows, live, 0, total, N, K, TILE, STEP, SLICES, NORM, WIDE)
    for k in tl.range(START, K, STEP, num_stages=STAGES):
        w = tile_weights(weight_ptr, tile, k, N, K, TILE, STEP, SLICES)
        total = step_product(w, x_ptr, gain_ptr, scale, rows, live, k, total, N, K, TILE, STEP, SLICES, NORM, WIDE)
    return tl.sum(total, 0)
