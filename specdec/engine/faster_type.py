"""Which type a draft computes in where nobody says: the one whose products are faster on this processor.

A draft's numbers decide no text, so its type is free. Processors differ: with native bfloat16 products a model of many
weights is read in half the time, a small one spends more on setting each product up, and without them every weight is
unpacked first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

ROW_COUNTS = (1, 8)  # a chain's step, and a tree's
WEIGHT_BYTES_MAX = 64 << 20  # in float32, of the layers that take turns: as many as the caches would not hold at once
REPEATS = 3


@torch.inference_mode()
def faster_type(hidden_size: int, intermediate_size: int, layer_count: int) -> torch.dtype:
    """float32 or bfloat16, by the products of so many feed-forward layers; takes some milliseconds."""
    layer_bytes = 2 * 4 * hidden_size * intermediate_size
    count = max(1, min(layer_count, WEIGHT_BYTES_MAX // layer_bytes))
    times_s = {dtype: _products_s(hidden_size, intermediate_size, count, dtype) for dtype in PRODUCT_TYPES}
    return min(PRODUCT_TYPES, key=lambda dtype: times_s[dtype])


PRODUCT_TYPES = (torch.float32, torch.bfloat16)


def _products_s(hidden_size: int, intermediate_size: int, count: int, dtype: torch.dtype) -> float:
    """Seconds of all layers at all row counts; the least of some repeats."""
    shapes = (hidden_size, intermediate_size), (intermediate_size, hidden_size)
    layers = [[torch.ones(shape, dtype=dtype) for shape in shapes] for _ in range(count)]
    rows = [torch.ones(row_count, hidden_size, dtype=dtype) for row_count in ROW_COUNTS]
    return min(_once_s(layers, rows) for _ in range(REPEATS))


def _once_s(layers: Sequence[Sequence[torch.Tensor]], rows: Sequence[torch.Tensor]) -> float:
    started_s = time.perf_counter()
    for x in rows:
        for up, down in layers:
            torch.matmul(torch.matmul(x, up), down)
    return time.perf_counter() - started_s
