"""Matrix products of few rows: a layer's, with what stands before and after them, and the output layer.

A product is computed as weight @ x^T in tiles of 16 rows, so that rows are the short side of a tensor core's
instruction and one binary serves 1 to 16 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from specdec.engine.cuda.kernels.configs import ROWS, head_config, head_tiles, product_config
from specdec.engine.cuda.kernels.launch import cdiv, constexpr, jit, launch, power_of_two, tl
from specdec.engine.cuda.kernels.tiles import begin, begin_product, row_scale, tile_product

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RowNorm:
    """An RMS norm of a product's input. `sums` [rows, parts] float32: sums of squares of each row, which the kernel
    before wrote, added in their order; `gain` [inputs] float32 or 16-bit, 1 + weight where the model says so."""

    sums: torch.Tensor
    gain: torch.Tensor
    epsilon: float

    def constants(self) -> dict[str, Any]:
        """The arguments of a kernel that normalizes."""
        parts = self.sums.shape[1]
        return {"PARTS": parts, "PARTS_PADDED": power_of_two(parts), "EPSILON": self.epsilon}


NO_NORM = {"PARTS": 1, "PARTS_PADDED": 1, "EPSILON": 0.0}


def alternated(weight: torch.Tensor, size: int, rotated: int | None = None) -> torch.Tensor:
    """Returns rows of a weight [n * size, inputs], or a bias [n * size], in the order in which kernels take pairs: of
    every `size` rows 0, size/2, 1, size/2 + 1, ... For gate and up, one above the other, `size` is all rows; for heads
    it is the head's size. Of heads of which a part is `rotated`, the first `rotated` rows alternate so, then the rest.
    """
    parts = weight.unflatten(0, (-1, size)).split((rotated, size - rotated) if rotated else size, 1)
    pairs = [part.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) for part in parts]
    return (pairs[0] if len(pairs) == 1 else torch.cat(pairs, 1)).flatten(0, 1)


@jit()
def activated(gate, ACTIVATION: constexpr):
    """silu(x) = x sigmoid(x), or gelu by tanh: x (1 + tanh(u)) / 2 = x sigmoid(2 u)."""
    if ACTIVATION == "silu":
        u = gate
    else:
        u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-u))


@jit()
def store_activated(
    out_ptr, y, rows, live, tile, N: constexpr, ROWS: constexpr, TILE: constexpr, ACTIVATION: constexpr
):
    """Writes activation(gate) * up of a tile y [TILE, ROWS] of alternating gates and ups."""
    out = out_ptr.dtype.element_ty
    gate, up = tl.split(y.reshape(TILE // 2, 2, ROWS).trans(0, 2, 1))
    y = activated(gate, ACTIVATION).to(out).to(tl.float32) * up
    half = tile * (TILE // 2) + tl.arange(0, TILE // 2)
    at = rows.to(tl.int64)[None, :] * (N // 2) + half[:, None]
    tl.store(out_ptr + at, y.to(out), mask=live[None, :] & (half < N // 2)[:, None])


@jit("row_count")
def product_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    bias_ptr,
    residual_ptr,
    sums_out_ptr,
    gain_ptr,
    sums_ptr,
    row_count,
    N: constexpr,
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
    RESIDUAL: constexpr,
    SUMS: constexpr,
    ACTIVATION: constexpr,
    WIDE: constexpr,
    PDL: constexpr,
):
    """One tile of `product`. Each number that a module of `transformers` would round is rounded here too."""
    tile = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tile * TILE + tl.arange(0, TILE)
    live = rows < row_count
    scale = live
    first = begin_product(weight_ptr, tile, N, K, TILE, STEP, SLICES, PDL)
    if NORM:
        scale = row_scale(sums_ptr, rows, live, K, PARTS, PARTS_PADDED, EPSILON)
    y = tile_product(
        first, x_ptr, weight_ptr, gain_ptr, scale, rows, live, tile,
        N, K, ROWS, TILE, STEP, SLICES, STAGES, NORM, WIDE, PDL
    )  # fmt: skip
    out = out_ptr.dtype.element_ty
    inside = columns < N
    if BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    y = y.to(out).to(tl.float32)
    if ACTIVATION is not None:  # rows of the weight alternate: gate 0, up 0, gate 1, up 1, ...
        store_activated(out_ptr, y, rows, live, tile, N, ROWS, TILE, ACTIVATION)
    else:
        at = rows.to(tl.int64)[None, :] * N + columns[:, None]
        written = live[None, :] & inside[:, None]
        if RESIDUAL:
            y += tl.load(residual_ptr + at, mask=written, other=0.0).to(tl.float32)
        rounded = y.to(out)
        if SUMS:
            wide = rounded.to(tl.float32)
            sums_at = sums_out_ptr + rows.to(tl.int64) * tl.cdiv(N, TILE) + tile
            tl.store(sums_at, tl.sum(wide * wide, 0), mask=live)
        tl.store(out_ptr + at, rounded, mask=written)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    *,
    norm: RowNorm | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> None:
    """Writes out = norm(x) @ weight^T + bias + residual for the first `rows` rows, and no other row.

    x [>= rows, inputs], weight [outputs, inputs], bias [outputs], residual and out [>= rows, outputs], all of one
    16-bit type; `out` may be `residual`, or float32, so that nothing is rounded: one rank's part of a sum. `sums`
    [>= rows, sum_parts(outputs)] float32 gets the sums of squares of what was written, for the norm of the next kernel.
    With an `activation` weight and bias are `alternated` gates and ups, and out [>= rows, outputs / 2] gets
    activation(gate) * up; then there is neither residual nor sums.
    """
    outputs, inputs = weight.shape
    config = product_config(outputs, inputs)
    launch(
        product_kernel,
        (cdiv(rows, ROWS), cdiv(outputs, config.tile)),
        x,
        weight,
        out,
        bias,
        residual,
        sums,
        norm.gain if norm else None,
        norm.sums if norm else None,
        rows,
        N=outputs,
        K=inputs,
        **(norm.constants() if norm else NO_NORM),
        ROWS=ROWS,
        TILE=config.tile,
        STEP=config.step,
        SLICES=config.slices,
        NORM=norm is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SUMS=sums is not None,
        ACTIVATION=activation,
        warps=config.warps,
        stages=config.stages,
    )


@jit()
def scored(y, SCALE: constexpr, SOFTCAP: constexpr):
    """SOFTCAP * tanh(SCALE * y / SOFTCAP), or SCALE * y without one."""
    if SCALE != 1.0:
        y = y * SCALE
    if SOFTCAP is not None:
        y = SOFTCAP * (1.0 - 2.0 / (tl.exp(y * (2.0 / SOFTCAP)) + 1.0))
    return y


@jit("row_count")
def head_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    logits_ptr,
    best_ptr,
    id_ptr,
    finite_ptr,
    row_count,
    N: constexpr,
    K: constexpr,
    SCALE: constexpr,
    SOFTCAP: constexpr,
    ROWS: constexpr,
    TILE: constexpr,
    STEP: constexpr,
    SLICES: constexpr,
    STAGES: constexpr,
    BIAS: constexpr,
    WIDE: constexpr,
    PDL: constexpr,
):
    """One tile of `head`."""
    tile = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tile * TILE + tl.arange(0, TILE)
    live = rows < row_count
    inside = (columns < N)[:, None]
    first = begin_product(weight_ptr, tile, N, K, TILE, STEP, SLICES, PDL)
    y = tile_product(
        first, x_ptr, weight_ptr, x_ptr, live, rows, live, tile,
        N, K, ROWS, TILE, STEP, SLICES, STAGES, False, WIDE, PDL
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    is_finite = (y - y == 0) | (inside == 0)  # before the softcap, which hides infinities
    y = scored(y, SCALE, SOFTCAP)
    wide_rows = rows.to(tl.int64)
    tl.store(logits_ptr + wide_rows[None, :] * N + columns[:, None], y, mask=live[None, :] & inside)
    known = tl.where((y == y) & inside, y, float("-inf"))
    best = tl.max(known, 0)
    ids = tl.where((known == best[None, :]) & inside, columns[:, None], 2147483647)
    at = wide_rows * tl.cdiv(N, TILE) + tile
    tl.store(best_ptr + at, best, mask=live)
    tl.store(id_ptr + at, tl.min(ids, 0), mask=live)
    tl.store(finite_ptr + at, tl.min(is_finite.to(tl.int32), 0), mask=live)


def head(
    x: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor,
    best: torch.Tensor,
    ids: torch.Tensor,
    finite: torch.Tensor,
    rows: int,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> None:
    """Writes logits = softcap * tanh(scale * (x @ weight^T + bias) / softcap) in float32 for the first `rows` rows.

    x [>= rows, inputs] and weight [vocab, inputs] of one 16-bit type, bias [vocab], logits [>= rows, vocab] float32.
    For `pick`, of each tile of a row: best [>= rows, head_tiles(vocab)] float32, its largest logit; ids, int32, the
    lowest id that has it; finite, int32, 1 if all values before the softcap are finite, else 0. NaN is no largest.
    """
    outputs, inputs = weight.shape
    config = head_config(inputs)
    launch(
        head_kernel,
        (cdiv(rows, ROWS), head_tiles(outputs)),
        x,
        weight,
        bias,
        logits,
        best,
        ids,
        finite,
        rows,
        N=outputs,
        K=inputs,
        SCALE=scale,
        SOFTCAP=softcap,
        ROWS=ROWS,
        TILE=config.tile,
        STEP=config.step,
        SLICES=config.slices,
        BIAS=bias is not None,
        warps=config.warps,
        stages=config.stages,
    )


@jit()
def pick_kernel(
    best_ptr,
    id_ptr,
    finite_ptr,
    token_ptr,
    flag_ptr,
    TILES: constexpr,
    TILES_PADDED: constexpr,
    STAGES: constexpr,
    PDL: constexpr,
):
    """One row of `pick`."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES_PADDED)
    inside = tiles < TILES
    at = row * TILES + tiles
    best = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
    ids = tl.load(id_ptr + at, mask=inside, other=2147483647)
    tl.store(token_ptr + row, tl.min(tl.where(best == tl.max(best, 0), ids, 2147483647), 0))
    tl.store(flag_ptr + row, tl.min(tl.load(finite_ptr + at, mask=inside, other=1), 0))


def pick(
    best: torch.Tensor, ids: torch.Tensor, finite: torch.Tensor, tokens: torch.Tensor, flags: torch.Tensor, rows: int
) -> None:
    """Writes what `head` found of each row: tokens [>= rows] int32, the lowest id of the largest logit; flags
    [>= rows] int32, 1 if all logits of the row are finite, else 0. A row of NaN alone has token 0."""
    tiles = best.shape[1]
    launch(
        pick_kernel,
        (rows,),
        best,
        ids,
        finite,
        tokens,
        flags,
        TILES=tiles,
        TILES_PADDED=power_of_two(tiles),
        warps=4,
        stages=1,
    )
