"""Kernels with one program a row, which no product includes: the norm alone, and the lookup of embeddings."""

from __future__ import annotations

import torch

from specdec.engine.cuda.kernels.configs import output_tile, sum_parts
from specdec.engine.cuda.kernels.launch import cdiv, constexpr, jit, launch, power_of_two, tl
from specdec.engine.cuda.kernels.tiles import begin, let_next_begin, wait_for_last

LOOKUP_PARTS = 64  # sums of squares that one program of the lookup computes


@jit()
def rms_norm_kernel(
    x_ptr,
    gain_ptr,
    out_ptr,
    residual_ptr,
    sums_ptr,
    finite_ptr,
    index_ptr,
    WIDTH: constexpr,
    TILE: constexpr,
    PARTS: constexpr,
    PARTS_PADDED: constexpr,
    EPSILON: constexpr,
    RESIDUAL: constexpr,
    SUMS: constexpr,
    FINITE: constexpr,
    INDEX: constexpr,
    STAGES: constexpr,
    PDL: constexpr,
):
    """One row of `rms_norm`, as [PARTS, TILE]."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS_PADDED)
    columns = parts[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = columns < WIDTH
    at = row * WIDTH + columns
    out = out_ptr.dtype.element_ty
    let_next_begin(PDL)
    gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_last(PDL)
    source = tl.load(index_ptr + row) if INDEX else row
    x = tl.load(x_ptr + source * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / WIDTH + EPSILON)
    y = (x * scale * gain).to(out).to(tl.float32)
    if RESIDUAL:
        y = (y + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(out).to(tl.float32)
    tl.store(out_ptr + at, y.to(out), mask=inside)
    if SUMS:
        tl.store(sums_ptr + row * PARTS + parts, tl.sum(y * y, 1), mask=parts < PARTS)
    if FINITE:
        tl.store(finite_ptr + row, tl.min(tl.min((y - y == 0).to(tl.int32), 1), 0))


def rms_norm(
    x: torch.Tensor,
    gain: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    epsilon: float,
    *,
    residual: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    finite: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
) -> None:
    """Writes out = x / sqrt(mean(x^2) + epsilon) * gain, rounded once, + residual for the first `rows` rows.

    x, residual and out [>= rows, width] of one 16-bit type, of which any two may be one tensor; gain [width] float32 or
    16-bit, 1 + weight where the model says so. `sums` [>= rows, sum_parts(width)] float32: see `product`. `finite`
    [>= rows] int32 gets 1 if all that was written of a row is finite, else 0. With `index` [>= rows] int64, row i is
    that of x[index[i]], and `out` is another tensor.
    """
    width = x.shape[1]
    parts = sum_parts(width)
    launch(
        rms_norm_kernel,
        (rows,),
        x,
        gain,
        out,
        residual,
        sums,
        finite,
        index,
        WIDTH=width,
        TILE=output_tile(width),
        PARTS=parts,
        PARTS_PADDED=power_of_two(parts),
        EPSILON=epsilon,
        RESIDUAL=residual is not None,
        SUMS=sums is not None,
        FINITE=finite is not None,
        INDEX=index is not None,
        warps=4 if width <= 4096 else 8,
        stages=1,
    )


@jit()
def embed_kernel(
    id_ptr,
    table_ptr,
    out_ptr,
    sums_ptr,
    WIDTH: constexpr,
    TILE: constexpr,
    PARTS: constexpr,
    CHUNK: constexpr,
    SCALE: constexpr,
    STAGES: constexpr,
    PDL: constexpr,
):
    """CHUNK sums of one row of `embed`."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    parts = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    columns = parts[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = columns < WIDTH
    out = out_ptr.dtype.element_ty
    y = tl.load(table_ptr + tl.load(id_ptr + row) * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if SCALE != 1.0:
        y = (y * SCALE).to(out).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, y.to(out), mask=inside)
    tl.store(sums_ptr + row * PARTS + parts, tl.sum(y * y, 1), mask=parts < PARTS)


def embed(
    ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, rows: int, *, scale: float = 1.0
) -> None:
    """Writes out = table[ids] * scale, rounded once, and its sums of squares, for the first `rows` rows.

    ids [>= rows] int64, each a row of table [vocab, width]; out [>= rows, width] of the table's 16-bit type; sums
    [>= rows, sum_parts(width)] float32: see `product`.
    """
    width = table.shape[1]
    parts = sum_parts(width)
    chunk = min(LOOKUP_PARTS, power_of_two(parts))
    launch(
        embed_kernel,
        (rows, cdiv(parts, chunk)),
        ids,
        table,
        out,
        sums,
        WIDTH=width,
        TILE=output_tile(width),
        PARTS=parts,
        CHUNK=chunk,
        SCALE=scale,
        warps=4,
        stages=1,
    )
