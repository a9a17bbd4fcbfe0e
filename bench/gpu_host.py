"""`python -m bench.gpu_host`: the host's part of a step on a device, on any machine: planning it and sending the plan.

Medians in microseconds of `StepBuffer.fill` and `send`, in a cache of blocks of 256 positions, 480 tokens before the
rows. Without a GPU the copy is one within the host's memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from specdec.engine.cuda.plan import StepBuffer, exact_shape
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.loading.devices import find_device

START, BLOCK_SIZE, BLOCKS_EACH = 480, 256, 3
STEPS = ((1, 1), (1, 8), (8, 5), (32, 4))  # sequences, rows of each
BARS_US = {(1, 1): 40.0, (32, 4): 150.0}  # fill and send together


class HostMeasurement(NamedTuple):
    """Medians in microseconds; `bar_us`: of both together, 0 where there is none."""

    sequences: int
    rows: int
    fill_us: float
    send_us: float
    bar_us: float


def host_times(device: torch.device, rounds: int) -> list[HostMeasurement]:
    """Returns the times of all steps."""
    measurements = []
    for sequences, rows in STEPS:
        tables = [[*range(1 + BLOCKS_EACH * i, 1 + BLOCKS_EACH * (i + 1))] for i in range(sequences)]
        batch = RaggedBatch(tuple(Chunk(table, START, [5] * rows, rows) for table in tables))
        buffer, shape = StepBuffer(BLOCK_SIZE, BLOCK_SIZE * BLOCKS_EACH * (sequences + 1), device), exact_shape(batch)
        buffer.reserve(shape)
        fill_us = median_us(lambda: buffer.fill(batch, shape), rounds)  # noqa: B023  # called within the round
        send_us = median_us(lambda: buffer.send(shape), rounds)  # noqa: B023
        bar_us = BARS_US.get((sequences, rows), 0.0)
        measurements.append(HostMeasurement(sequences, rows, fill_us, send_us, bar_us))
    return measurements


def median_us(work: Callable[[], object], rounds: int) -> float:
    """Returns the median time of some work."""
    times_s = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s) * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_host", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--rounds", type=int, default=500, help="times each step is planned and sent")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = host_times(find_device(asked.device), asked.rounds)
    for one in found:
        told = f"bar {one.bar_us:.0f}" if one.bar_us else ""
        sys.stdout.write(
            f"{one.sequences:3} x {one.rows} rows: fill {one.fill_us:6.1f}, send {one.send_us:5.1f} us {told}\n"
        )
    is_missed = any(one.bar_us and one.fill_us + one.send_us > one.bar_us for one in found)
    return 1 if asked.check and is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
