"""The step of one sequence by its rows, in turns, beside reading: how near one row is to the limit, how flat more are.

The limit is the time to read the weights once, as the folder stores them, at the best rate at which the same threads
read a gigabyte in the same turns. The reading loop is a sum of torch's: of its loops (products with a vector, maxima,
numpy's sum too) it reads fastest, so the limit is the hardest to reach.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.deepened import load
from bench.engine.steps import BLOCK_SIZE, time_step
from bench.results import Ratio, ratio_of
from bench.verification import verification
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.loading.folder_files import WEIGHTS_FILE
from specdec.engine.loading.gguf import read_gguf
from specdec.engine.loading.model_folder import stored_tensors
from specdec.folders import GGUF_SUFFIX

READ_BYTES = 10**9
BYTES = {"F32": 4, "F8_E4M3": 1}  # of numbers in files of weights, where they are not 2
CONTEXT = 100  # cached tokens
CHAINS = (1, 2, 4, 8)  # rows
TREE = (8, 4)  # rows, paths


@dataclass(frozen=True, slots=True)
class RowMeasurement:
    """One model and thread count. Milliseconds are medians over turns by rows, the tree's apart; `least_ms` is the
    least of one row. The ratios are of turns, each with its own step of one row or chain of as many."""

    model: str
    threads: int
    stored_bytes: int
    gb_per_s: float
    chain_ms: dict[int, float]
    tree_ms: float
    least_ms: float
    over_one_row: dict[int, Ratio]
    tree_over_chain: Ratio

    @property
    def name(self) -> str:
        """As bars and tables have it."""
        return f"{self.model}, {self.threads} thread{'s' * (self.threads > 1)}"

    @property
    def reading_ms(self) -> float:
        """To read all weights once."""
        return self.stored_bytes / self.gb_per_s / 1e6

    @property
    def over_reading(self) -> float:
        """The step of one row over it."""
        return self.chain_ms[1] / self.reading_ms


class Reading:
    """A gigabyte, larger than any cache, and the seconds to read it with torch's threads."""

    def __init__(self, byte_count: int = READ_BYTES) -> None:
        self._numbers = torch.ones(byte_count // 4)

    def read_s(self) -> float:
        """Of one reading."""
        began_s = time.perf_counter()
        self._numbers.sum()
        return time.perf_counter() - began_s

    def gb_per_s(self, least_s: float) -> float:
        """10^9 bytes a second, of one that took `least_s`."""
        return self._numbers.numel() * 4 / least_s / 1e9


def stored_bytes(folder: Path) -> int:
    """The bytes of the weights that every step reads, as the folder or GGUF file stores them; an embedding that is no
    output layer is not among them: a step reads single rows of it."""
    if folder.suffix == GGUF_SUFFIX:
        sizes = {name: tensor.byte_count for name, tensor in read_gguf(folder).tensors.items()}
        embedding, output = "token_embd.weight", "output.weight"
    else:
        tensors = stored_tensors([folder / WEIGHTS_FILE])
        sizes = {name: math.prod(own.shape) * BYTES.get(own.dtype, 2) for name, own in tensors.items()}
        embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    return sum(size for name, size in sizes.items() if name != embedding or output not in sizes)


def measure_rows(
    folder: Path, name: str, threads: int, turns: int, reading: Reading, advance: Callable[[], None] = lambda: None
) -> RowMeasurement:
    """Times every shape and a reading once a turn; the first turn warms up. Raises ModelRefused."""
    torch.set_num_threads(threads)
    model = load(folder, "bfloat16")
    model.allocate(1 + (TREE[1] + 1) * (CONTEXT // BLOCK_SIZE + 2), BLOCK_SIZE)
    prompt = Chunk(verification(1, 1, CONTEXT).chunks[0].block_ids, 0, [5] * CONTEXT, 0)
    model.forward(RaggedBatch((prompt,)))
    batches = {(rows, 1): verification(rows, 1, CONTEXT) for rows in CHAINS} | {TREE: verification(*TREE, CONTEXT)}
    times_ms: dict[tuple[int, int], list[float]] = {shape: [] for shape in batches}
    reads_s: list[float] = []
    for turn in range(turns + 1):
        reads_s.append(reading.read_s())
        model.forward(batches[1, 1])  # not timed: caches hold what was read
        for shape, batch in batches.items():
            times_ms[shape] += [time_step(model, batch)] * (turn > 0)
        advance()
    return measurement_of(name, threads, stored_bytes(folder), reading.gb_per_s(min(reads_s)), times_ms)


def measurement_of(
    name: str, threads: int, byte_count: int, gb_per_s: float, times_ms: dict[tuple[int, int], list[float]]
) -> RowMeasurement:
    """Medians and ratios of the same turns."""

    def over(shape: tuple[int, int], base: tuple[int, int]) -> Ratio:
        return ratio_of([own / other for own, other in zip(times_ms[shape], times_ms[base], strict=True)])

    medians = {shape: statistics.median(own) for shape, own in times_ms.items()}
    chain_ms = {rows: medians[rows, 1] for rows in CHAINS}
    over_one_row = {rows: over((rows, 1), (1, 1)) for rows in CHAINS[1:]}
    least_ms, tree_over_chain = min(times_ms[1, 1]), over(TREE, (TREE[0], 1))
    own = byte_count, gb_per_s, chain_ms, medians[TREE], least_ms, over_one_row, tree_over_chain
    return RowMeasurement(name, threads, *own)
