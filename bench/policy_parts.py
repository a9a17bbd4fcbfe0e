"""`python -m bench.policy_parts`: the cells of the simulated service that each part of the policy earns its lines by.

Each part is taken out by itself, and all cells of `python -m bench.policy_cells` run with the same seeds, with it and
without. A part whose absence lowers no cell is one to delete.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest import mock

from rich.console import Console
from rich.progress import track
from rich.table import Table as Printed

from bench.policy_cells import AutoService, failing_cells, geometric_mean, paying_cells, rate
from specdec.policy import auto_policy, steps, table
from specdec.policy.catalogue import DraftTimes
from specdec.policy.table import Table, probability
from specdec.protocol.records import RoundRecord

CELLS = failing_cells() + paying_cells()
SHOWN = 3  # cells a part is shown with: those that lose most without it


def _nothing(*_arguments: Any) -> None:
    pass


def _no_seconds(*_arguments: Any) -> float:
    return 0.0


def _common_level(policy: auto_policy.AutoPolicy, record: RoundRecord) -> None:
    """One acceptance level for all sessions."""
    if tested := record.tokens.tested_count:
        shared, expected = policy._table, probability(policy._table.level)
        surprise = record.tokens.accepted_count - tested * expected
        step = surprise / max(expected * (1 - expected), auto_policy.LEVEL_VARIANCE_MIN)
        shared.level += step / (2 * auto_policy.LEVEL_TESTED)
        policy._level = shared.level


Change = tuple[object, str, object]  # the owner of a name, the name, its value without the part
PARTS: dict[str, list[Change]] = {
    "explorations": [(auto_policy.AutoPolicy, "_consider_exploration", _nothing)],
    "baseline probes": [(auto_policy, "BASELINE_FIRST_S", math.inf)],
    "credit of explorations": [(table, "EXPLORATION_SHARE", 1.0), (table, "CREDIT_MAX_S", math.inf)],
    "a session's own level": [(auto_policy.AutoPolicy, "_learn_level", _common_level)],
    "surprise": [(auto_policy, "SURPRISE_SIGMA", math.inf)],
    "spread of a level": [(auto_policy, "LEVEL_SPREAD", 0.0)],
    "doubt": [(auto_policy, "DOUBT", 0.0)],
    "least gain of a change": [(auto_policy, "CHANGE_GAIN", 1.0)],
    "least gain over plain": [(auto_policy, "WORTH_GAIN", 1.0), (auto_policy, "START_GAIN", 1.0)],
    "rounds of a change do not count": [(auto_policy.AutoPolicy, "_warm_s", _no_seconds)],
    "contention": [(steps.Steps, "_learn_contention", _nothing)],
    "speed of the machine": [(steps, "LEVEL_S", math.inf)],
    "turns": [(steps, "ALIKE", -1.0)],
    "share of a path": [(steps, "PATH_SHARE_GUESS", 0.0), (steps, "PATH_WEIGHT", 0.0)],
    "usual waits": [(DraftTimes, "on_wait", _nothing)],
    "price of a row": [(Table, "reach_min", lambda *_: (0.0, 0.0))],
}


def rate_without(job: tuple[str, int, int]) -> float:
    """Tokens per second of a cell, the mean of some seeds, without a part; "" is with all of them."""
    part, index, seed_count = job
    with ExitStack() as stack:
        for owner, name, value in PARTS.get(part, []):
            stack.enter_context(mock.patch.object(owner, name, value))
        cell = CELLS[index]
        return sum(rate(cell, AutoService(cell.world), seed) for seed in range(seed_count)) / seed_count


def measured(parts: list[str], seed_count: int, run_all: Callable[..., Any]) -> dict[str, list[tuple[float, str]]]:
    """Rates without a part over those with it, by part: (ratio, cell), the lowest first."""
    jobs = [(part, index, seed_count) for part in ["", *parts] for index in range(len(CELLS))]
    rates = [*track(run_all(rate_without, jobs), "cells", len(jobs), console=Console(stderr=True))]
    whole = rates[: len(CELLS)]
    found = {}
    for place, part in enumerate(parts, start=1):
        own = rates[place * len(CELLS) : (place + 1) * len(CELLS)]
        found[part] = sorted((without / all_, cell.name) for without, all_, cell in zip(own, whole, CELLS))
    return found


def table_of(found: dict[str, list[tuple[float, str]]]) -> Printed:
    """A line for each part."""
    printed = Printed(title="tokens per second without a part of the policy, over with it")
    printed.add_column("part")
    printed.add_column("geometric mean", justify="right")
    printed.add_column("cells that lose most")
    for part, ratios in found.items():
        mean = geometric_mean([ratio for ratio, _ in ratios])
        worst = "; ".join(f"{ratio:.3f} {name}" for ratio, name in ratios[:SHOWN])
        printed.add_row(part, f"{mean:.3f}", worst)
    return printed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.policy_parts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4, help="runs of each cell (4)")
    parser.add_argument("--only", default="", help="parts whose names hold this")
    asked = parser.parse_args()
    parts = [part for part in PARTS if asked.only in part]
    with ProcessPoolExecutor() as pool:
        found = measured(parts, asked.seeds, pool.map)
    Console(width=170).print(table_of(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
