"""Sums over ranks of one machine, in memory of every rank that all of them read: `meet`, then `rank_sum`.

Addresses are data: a table has one for each rank, and a kernel reads the ranks in their order. A step that is captured
once meets in every replay, because rounds are counted on the device.
"""

from __future__ import annotations

import torch

from specdec.engine.cuda.kernels.launch import cdiv, constexpr, jit, launch, power_of_two, tl

TURNS_MAX = 1 << 27  # polls of a rank that waits for another, a minute or more: then the device reports an error
TILE = 1024  # elements of a row that one program adds


@jit(checks=True)
def meet_kernel(flags_ptr, round_ptr, turns_max, RANK: constexpr, RANKS: constexpr, RANKS_PADDED: constexpr):
    """The one program of `meet`: tells the number of its round to every rank, then waits until all have told it."""
    ranks = tl.arange(0, RANKS_PADDED)
    known = ranks < RANKS
    count = tl.load(round_ptr) + 1
    counts = tl.zeros((RANKS_PADDED,), tl.int64) + count
    places = tl.load(flags_ptr + ranks, mask=known, other=0).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(places + RANK, counts, mask=known, sem="release", scope="sys")
    own = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int64))
    seen = tl.atomic_add(own + ranks, counts * 0, mask=known, sem="acquire", scope="sys")
    latest = tl.min(tl.where(known, seen, counts), 0)
    turns = 0
    while (latest < count) & (turns < turns_max):
        seen = tl.atomic_add(own + ranks, counts * 0, mask=known, sem="acquire", scope="sys")
        latest = tl.min(tl.where(known, seen, counts), 0)
        turns += 1
    tl.device_assert(latest >= count, "a rank did not come to a sum")
    tl.store(round_ptr, count)


def meet(flags: torch.Tensor, round_of: torch.Tensor, rank: int, turns_max: int = TURNS_MAX) -> None:
    """Waits on the device until every rank is here: what each wrote before can be read by all. All ranks call it alike.

    flags [ranks] int64: for each rank the address of [ranks] int64 in its memory, zeros before the first call; round_of
    [1] int64, this rank's own, zero before. A rank that does not come within `turns_max` polls is the device's error.
    """
    count = len(flags)
    launch(
        meet_kernel,
        (1,),
        flags,
        round_of,
        turns_max,
        RANK=rank,
        RANKS=count,
        RANKS_PADDED=power_of_two(count),
        warps=1,
        stages=1,
    )


@jit()
def rank_sum_kernel(parts_ptr, out_ptr, bias_ptr, WIDTH: constexpr, RANKS: constexpr, TILE: constexpr, BIAS: constexpr):
    """TILE elements of one row of `rank_sum`."""
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + columns
    first = tl.multiple_of(tl.load(parts_ptr), 16).to(tl.pointer_type(tl.float32))
    total = tl.load(first + at, mask=inside, other=0.0)
    for rank in tl.static_range(1, RANKS):
        part = tl.multiple_of(tl.load(parts_ptr + rank), 16).to(tl.pointer_type(tl.float32))
        total += tl.load(part + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def rank_sum(parts: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None = None) -> None:
    """Writes out [rows, width] = ((part 0 + part 1) + part 2) + ... + bias in float32, rounded once to the type of out.

    parts [ranks >= 2] int64: for each rank the address of its [rows, width] float32, a multiple of 16; bias [width].
    """
    rows, width = out.shape
    launch(
        rank_sum_kernel,
        (rows, cdiv(width, TILE)),
        parts,
        out,
        bias,
        WIDTH=width,
        RANKS=len(parts),
        TILE=min(TILE, power_of_two(width)),
        BIAS=bias is not None,
        warps=4,
        stages=1,
    )
