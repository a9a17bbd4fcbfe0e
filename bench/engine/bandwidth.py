"""The memory limit of a step: the read rate of one thread, and the least bytes a step reads.

The buffer is as large as the model's weights, which every step reads once, from memory or from a cache of that size. A
limit measured with a larger buffer would be easier to reach.
"""

from __future__ import annotations

import time

import torch

from specdec.engine.transformers_model import TransformersModel

COLUMNS = 1024
READS = 3  # the fastest counts: others on this machine only ever make one slower
LARGE_BYTES = 1 << 29  # beyond caches that a machine does not share among many


class Reader:
    """A buffer, and the time to read all of it once."""

    def __init__(self, byte_count: int) -> None:
        rows = max(1, byte_count // (4 * COLUMNS))
        self._matrix = torch.ones(rows, COLUMNS)  # [rows, columns] float32
        self._vector = torch.ones(COLUMNS)
        self._sums = torch.empty(rows)

    def gb_per_s(self) -> float:
        """10^9 bytes a second, of a product with one vector: it uses every number once, as a decoding step does."""
        least_s = min(self._read_s() for _ in range(READS))
        return self._matrix.numel() * 4 / least_s / 1e9

    def _read_s(self) -> float:
        started_s = time.perf_counter()
        torch.mv(self._matrix, self._vector, out=self._sums)
        return time.perf_counter() - started_s


def step_bytes(model: TransformersModel, sequence_count: int, context: int) -> int:
    """The least bytes of a step: the weights of its products once, and the sequences' cached positions."""
    return model.product_bytes + sequence_count * context * model.cache_bytes_per_position


def limit_ms(byte_count: int, gb_per_s: float) -> float:
    """The milliseconds to read `byte_count` bytes."""
    return byte_count / gb_per_s / 1e6
