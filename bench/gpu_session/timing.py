"""Clocks: a device's own, and the host's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from specdec.engine.cuda.graphs import capture

WARM = 3  # runs that are not counted


def device_s(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds the device takes for some work, by its own clock where it has one."""
    if device.type != "cuda":
        return host_s(work)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms / 1e3


def host_s(work: Callable[[], object]) -> float:
    """Seconds some work takes, by the host's clock."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def host_us(work: Callable[[], object], rounds: int) -> float:
    """The median in microseconds, by the host's clock."""
    return statistics.median(host_s(work) for _ in range(rounds)) * 1e6


def each_us(device: torch.device, works: Sequence[Callable[[], None]], rounds: int) -> float:
    """Microseconds the device takes for one of several works that run one after another, captured: the median of
    `rounds` runs of all."""

    def run() -> None:
        for work in works:
            work()

    graph = capture(run, device, None)
    times_s = [device_s(device, graph.replay) for _ in range(WARM * (device.type == "cuda") + rounds)]
    return statistics.median(times_s[-rounds:]) / len(works) * 1e6
