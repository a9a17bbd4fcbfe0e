"""Stable tile sizes: the row counts of a matrix product at which a row's result never depends on the other rows.

A matrix library picks its kernel by shape, and kernels add in different orders: the same row alone, among five or
among sixty-four may differ in the last bits. So products run at stable tile sizes only, which are measured when a model
is loaded, on its own shapes, in its own arithmetic: the widths at which every row, at every index, has the same bits.
Width 1, where a product has one row only, is the last resort.

Elementwise kernels for exp and tanh round the remaining elements at the end of a run in scalar code, which differs from
the vector code before it, and torch divides long runs among threads. So such a function is applied to runs of whole
vector registers, each small enough for one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

# Multiples of 4, closest at the sizes of steps of few sequences; a larger batch runs as several tiles of the last.
CANDIDATE_WIDTHS = (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128)
ROW_MULTIPLE = 4  # the minimum outside products too: reductions may treat a single row differently
PROBE_ROW_COUNT = 3
ALONE = (1,)
RUN_ELEMENTS = 32768  # torch computes runs up to this size on one thread
REGISTER_ELEMENTS = 64  # float32 values that fill any register, or pair of them

Product = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] -> [rows, out], row by row


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Stable tile sizes, ascending, that agree bit for bit; padded counts are multiples of `row_multiple`."""

    widths: tuple[int, ...]
    row_multiple: int = ROW_MULTIPLE

    def padded(self, row_count: int) -> int:
        """Returns the smallest sum of tile sizes that is at least `row_count`."""
        whole, rest = divmod(row_count, self.widths[-1])
        padded = whole * self.widths[-1] + (self.widths[bisect_left(self.widths, rest)] if rest else 0)
        return -(-padded // self.row_multiple) * self.row_multiple

    def tiles(self, padded: int) -> Sequence[tuple[int, int]]:
        """Returns half-open row ranges that cover [0, padded), each of a tile size; see `padded`."""
        last = self.widths[-1]
        return [(start, min(start + last, padded)) for start in range(0, padded, last)]


def probe(
    product: Product, in_size: int, dtype: torch.dtype, candidates: Iterable[int], rows: torch.Tensor | None = None
) -> tuple[int, ...]:
    """Returns the candidate widths at which `product` gives every row, at every index, the same bits; () if none.

    Each of a few rows, random by default, is repeated over the whole width: equal rows must have equal results, and
    equal to those of the other widths. Two kernels that add in different orders do not agree by chance on thousands of
    random float32 sums; narrower results round the difference away, see `cancelling`.
    """
    if rows is None:
        rows = probe_rows(in_size, dtype)
    outcomes: dict[int, list[torch.Tensor] | None] = {}
    for width in candidates:
        results = [product(row.expand(width, in_size).contiguous()) for row in rows]  # each [width, out]
        is_uniform = all(torch.equal(result, result[:1].expand_as(result)) for result in results)
        outcomes[width] = [result[0] for result in results] if is_uniform else None
    best: tuple[int, ...] = ()
    for reference in outcomes.values():
        if reference is None:
            continue
        agreeing = tuple(width for width, rows_of in outcomes.items() if rows_of and _equal(rows_of, reference))
        best = max(best, agreeing, key=lambda widths: (len(widths), widths[-1:]))
    return best


def probe_rows(in_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows for `probe`, the same in every process.  # [PROBE_ROW_COUNT, in_size]"""
    generator = torch.Generator().manual_seed(in_size)
    return torch.randn(PROBE_ROW_COUNT, in_size, generator=generator).to(dtype)


def cancelling(in_size: int, out_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight [out, in] of this type, and rows for `probe`, whose products are rounding errors only.

    A result narrower than float32 hides the order of its additions: measured, one bfloat16 sum in ten thousand differs
    between two kernels. Here every term of a sum has a partner of the opposite sign, so the exact sum is 0, and the
    rounding errors differ in nine sums of ten. The library picks kernels by shape, layout and type, so it picks the
    same kernels for this weight as for the model's.
    """
    half = in_size // 2
    generator = torch.Generator().manual_seed(in_size)
    places = torch.randperm(2 * half, generator=generator)
    values = torch.randn(out_size, half, generator=generator).to(dtype)
    weight = torch.zeros(out_size, in_size, dtype=dtype)
    weight[:, places[:half]] = values
    weight[:, places[half:]] = -values
    sizes = torch.exp2(torch.randint(-4, 5, (PROBE_ROW_COUNT, half), generator=generator).float())
    terms = (torch.randn(PROBE_ROW_COUNT, half, generator=generator) * sizes).to(dtype)
    rows = torch.zeros(PROBE_ROW_COUNT, in_size, dtype=dtype)
    rows[:, places[:half]] = terms
    rows[:, places[half:]] = terms
    return weight, rows


def _equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right))


def aligned(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Returns function(x), elementwise, of any shape; the bits of a result do not depend on the element's index."""
    count = x.numel()
    if count <= RUN_ELEMENTS and count % REGISTER_ELEMENTS == 0:
        return function(x)
    flat = x.reshape(-1)
    padding = -count % REGISTER_ELEMENTS
    if padding:
        flat = nn.functional.pad(flat, (0, padding))
    runs = [function(run) for run in flat.split(RUN_ELEMENTS)]
    return torch.cat(runs)[:count].view(x.shape)


class AlignedActivation(nn.Module):
    """An activation module applied by `aligned`."""

    def __init__(self, function: nn.Module):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return aligned(self.function, x)
