"""Products of a model's weights by row count, on the native kernels and on torch, in turns.

The kernels' have the same bits at every row count, torch's have not: the difference is what the promise costs, or
saves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from specdec.engine.cpu.kernels import kernels

ROWS = (1, 2, 4, 8, 16, 64, 512)


@dataclass(frozen=True, slots=True)
class ProductMeasurement:
    """Medians of the products of all `shapes` [out, in], one after the other, at a row count."""

    model: str
    dtype: str
    rows: int
    kernels_ms: float
    torch_ms: float


def measure_products(
    name: str,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> list[ProductMeasurement]:
    """Returns one measurement per row count; none where there are no kernels."""
    native = kernels()
    if native is None:
        return []
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    packed = [native.pack(weight) for weight in plain]
    rows = {
        (count, size): torch.randn(count, size, generator=generator).to(dtype)
        for count in ROWS
        for size in {in_size for _, in_size in shapes}
    }
    own: dict[int, list[float]] = {count: [] for count in ROWS}
    library: dict[int, list[float]] = {count: [] for count in ROWS}
    for _ in range(rounds):
        for count in ROWS:
            started_s = time.perf_counter()
            for weight in packed:
                native.product(weight, rows[count, weight.in_size])
            between_s = time.perf_counter()
            for matrix in plain:
                linear(rows[count, matrix.shape[1]], matrix)
            own[count].append((between_s - started_s) * 1e3)
            library[count].append((time.perf_counter() - between_s) * 1e3)
        advance()
    return [
        ProductMeasurement(
            name,
            str(dtype).removeprefix("torch."),
            count,
            statistics.median(own[count]),
            statistics.median(library[count]),
        )
        for count in ROWS
    ]
