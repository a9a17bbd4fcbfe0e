"""Many schedules over all cores: a schedule has one thread and shares nothing with another."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import structlog

from tests.simulation.schedule import run_seed
from tests.simulation.tally import Tally

SHARE_COUNT = 250  # schedules that a process runs before it reports


def quiet() -> None:
    """Silences the log of this process: faults make the driven classes log much."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def tally_of(seeds: range) -> Tally:
    """The schedules of these seeds, one after another."""
    tally = Tally()
    for seed in seeds:
        tally.add(seed, run_seed(seed))
    return tally


def run_many(first: int, count: int) -> Iterator[Tally]:
    """The schedules of seeds `first` to `first + count - 1`, in shares; yields the sum so far after each share."""
    shares = [
        range(start, min(start + SHARE_COUNT, first + count)) for start in range(first, first + count, SHARE_COUNT)
    ]
    # Spawned: what imported this may have threads, of which a fork has none.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"), quiet) as processes:
        yield from itertools.accumulate(processes.map(tally_of, shares), Tally.plus)
