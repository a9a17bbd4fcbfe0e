"""`python -m bench.policy_cells`: the policy in a simulated service, against off and against the best fixed plan.

Two kinds of cells. Where the draft is of no use, or ceases to be, the policy must reach 0.98 of off within 2 s of the
change. Where speculation pays it must reach 0.97 of the best fixed plan, that plan chosen on other seeds. Steps jitter
and now and then pause; no models, no services, no real clock: bench/policy_world.py.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Printed

from bench.bars import Bar, add_check_flag, as_json, conclude, worst_of
from bench.event_simulation import Scenario
from bench.policy_world import FixedService, OnePlan, Service, Simulated, World
from specdec.policy.acceptance import Acceptance
from specdec.policy.draft_time import DraftTimes
from specdec.policy.goodput import Goodput
from specdec.policy.goodput_policy import GoodputPolicy
from specdec.policy.plans import catalogue
from specdec.policy.steps import StepTimes
from specdec.protocol.plan import OFF_PLAN
from specdec.protocol.policy import Policy

TARGET_S, OVERHEAD_S, LENGTH_CAP = 0.018, 0.0012, 16
OF_OFF, OF_BEST = 0.98, 0.97
WAIT_S = 0.5  # of fixed plans that wait


class AutoService(Service):
    """A coordinator that knows what its replicas measured when they had loaded."""

    def __init__(self, world: World) -> None:
        steps, draft, scenario = StepTimes(), DraftTimes(), world.scenario
        steps.prime(tuple((rows, scenario.target_step_s(rows)) for rows in (1, 2, 4, 8, 16)))
        draft.prime(tuple((nodes, scenario.draft_step_s(nodes)) for nodes in (1, 2, 4, 8)))
        draft.on_network(scenario.network_s)
        self.draft, self.goodput = draft, Goodput(steps, draft, Acceptance(), LENGTH_CAP)

    def policy(self, index: int) -> Policy:
        return GoodputPolicy(self.goodput, LENGTH_CAP)

    def on_draft_step(self, nodes: int, seconds: float) -> None:
        self.draft.on_step(nodes, seconds)

    def on_network(self, network_s: float) -> None:
        self.draft.on_network(network_s)


class SomeOff(AutoService):
    """The same, but some streams decode plainly."""

    def __init__(self, world: World, streams: tuple[int, ...]) -> None:
        super().__init__(world)
        self._streams = streams

    def policy(self, index: int) -> Policy:
        return OnePlan(OFF_PLAN) if index in self._streams else super().policy(index)


@dataclass(frozen=True, slots=True)
class Cell:
    """A world, and the time from which it counts, 2 s after what changes in it. `streams`: those that count; with
    `beside`, off is those streams alone, the others speculate. `pays`: the bar is of the best fixed plan."""

    name: str
    world: World
    from_s: float
    to_s: float
    streams: tuple[int, ...] = (0,)
    pays: bool = False
    beside: bool = False


def steps_of(slope: float) -> Callable[[int], float]:
    """A target's step by rows: each row beyond the first adds a share."""
    return partial(_step_s, slope)


def _step_s(slope: float, rows: int) -> float:
    return TARGET_S * (1 + slope * (rows - 1))


def _draft_step_s(first_s: float, more_s: float, nodes: int) -> float:
    return first_s + more_s * (nodes - 1)


def scenario(
    network_s: float = 0.003,
    slope: float = 0.02,
    draft_s: float = 0.0011,
    branches: tuple[float, ...] = (0.4, 0.13),
    bonus_match: float | None = None,
) -> Scenario:
    """A near and fast draft, unless said otherwise."""
    draft = partial(_draft_step_s, draft_s, 0.12 * draft_s)
    return Scenario(steps_of(slope), draft, network_s, (0.7,), branches, bonus_match, OVERHEAD_S, 1, 0.15)


def one(acceptance: float = 0.7, **of_scenario: Any) -> World:
    """One stream."""
    return World(scenario(**of_scenario), ((acceptance,),))


def many(count: int, acceptance: float, begins_s: tuple[float, ...], **of_scenario: Any) -> World:
    """Streams of equal texts."""
    return World(scenario(**of_scenario), ((acceptance,),) * count, begins_s)


def _slow_later(now_s: float) -> float:
    return 1.0 if now_s < 60 else 100.0


def _slow_first(now_s: float) -> float:
    return 100.0 if now_s < 20 else 1.0


def _silent_later(now_s: float) -> float | None:
    return 1.0 if now_s < 10 else None


def _silent(now_s: float) -> None:
    return None


def _wrong_later(now_s: float) -> float:
    return 1.0 if now_s < 10 else 0.0


def crowded(count: int) -> World:
    """Streams whose draft takes more time from the target than it saves."""
    return replace(many(count, 0.3, (0.0,) * count), contention=1.6)


def _right_later(now_s: float) -> float:
    return 0.0 if now_s < 20 else 1.0


def failing_cells() -> list[Cell]:
    """A draft that is of no use, or ceases to be; load under which nothing should be drafted."""
    jump = (0.0, *(10.0 + 0.01 * index for index in range(31)))
    flat = many(32, 0.7, (0.0,) * 32, slope=0.002)
    steepens = replace(flat, changes=((6.0, "target_step_s", steps_of(0.25)),))
    cells = [
        Cell("draft as slow as its target", one(draft_s=TARGET_S), 2, 20),
        Cell("draft as slow, and on its cores", replace(one(draft_s=TARGET_S), contention=1.4), 2, 20),
        Cell("always wrong", one(0.0), 2, 20),
        Cell("always wrong, on the target's cores", replace(one(0.0), contention=1.3), 2, 20),
        Cell("silent", replace(one(), draft_factor=_silent), 2, 20),
        Cell("100 times slower from the second minute on", replace(one(), draft_factor=_slow_later), 62, 80),
        Cell("silent from 10 s on", replace(one(), draft_factor=_silent_later), 12, 30),
        Cell("always wrong from 10 s on", replace(one(), acceptance_at=_wrong_later), 12, 30),
        Cell("gains on its own, loses by shared cores", replace(one(0.5, network_s=0.03), contention=1.6), 2, 20),
        *(
            Cell(f"{count} streams, poor draft on the target's cores", crowded(count), 2, 30, tuple(range(count)))
            for count in (2, 4, 8)
        ),
        Cell("useless text beside three perfect ones", _mixed(), 2, 15, (0,), beside=True),
        Cell("perfect texts beside a useless one", _mixed(), 2, 15, (1, 2, 3)),
        Cell("1 stream, then 32, steep rows", many(32, 0.6, jump, slope=0.25), 12, 30, tuple(range(32))),
        Cell("32 streams, steep rows", many(32, 0.6, (0.0,) * 32, slope=0.25), 2, 20, tuple(range(32))),
        Cell("32 streams, rows steep from 6 s on", steepens, 8, 20, tuple(range(32))),
        Cell("32 streams, flat rows", many(32, 0.7, (0.0,) * 32, slope=0.002), 2, 6, tuple(range(32))),
    ]
    for network_ms in (0, 10, 30, 100):
        poor = one(0.3, network_s=network_ms / 1e3, bonus_match=0.2)
        cells.append(Cell(f"poor draft, RTT {network_ms} ms", poor, 2, 20))
    for network_ms in (9, 20):
        poor = one(0.4, network_s=0.0005, bonus_match=0.2)
        moved = replace(poor, changes=((10.0, "network_s", network_ms / 1e3),))
        cells.append(Cell(f"acceptance 0.4, RTT 0.5, then {network_ms} ms", moved, 12, 20))
    return cells


def _mixed() -> World:
    return World(scenario(slope=0.05), ((0.02,), (0.98,), (0.98,), (0.98,)), (0.0,) * 4)


def paying_cells() -> list[Cell]:
    """Where speculation pays: acceptance by round trip, and a draft that is slower."""
    cells = []
    for acceptance in (0.5, 0.7, 0.85):
        for network_ms in (0, 3, 7, 30, 100):
            world = one(acceptance, network_s=network_ms / 1e3)
            cells.append(Cell(f"acceptance {acceptance}, RTT {network_ms} ms", world, 2, 20, pays=True))
    slow = one(0.7, draft_s=0.004)
    cells.append(Cell("acceptance 0.7, RTT 3 ms, draft 4 ms", slow, 2, 20, pays=True))
    for network_ms in (3, 10):
        better = replace(one(0.7, network_s=network_ms / 1e3), acceptance_at=_right_later)
        cells.append(Cell(f"always wrong for 20 s, then 0.7, RTT {network_ms} ms", better, 60, 90, pays=True))
        faster = replace(one(0.7, network_s=network_ms / 1e3), draft_factor=_slow_first)
        cells.append(Cell(f"100 times slower for 20 s, then 0.7, RTT {network_ms} ms", faster, 30, 60, pays=True))
    for first_ms, then_ms in ((0.5, 9), (0.5, 30), (30, 0.5)):
        moved = replace(one(0.7, network_s=first_ms / 1e3), changes=((10.0, "network_s", then_ms / 1e3),))
        cells.append(Cell(f"acceptance 0.7, RTT {first_ms}, then {then_ms} ms", moved, 12, 20, pays=True))
    cells.append(Cell("8 streams, acceptance 0.7", many(8, 0.7, (0.0,) * 8), 2, 8, tuple(range(8)), True))
    return cells


def rate(cell: Cell, service: Service, seed: int) -> float:
    """Tokens per second of the streams that count."""
    run = Simulated(cell.world, service, seed)
    run.run_until(cell.to_s)
    return sum(run.rate(index, cell.from_s, cell.to_s) for index in cell.streams)


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a cell, means over its seeds. `best`: of the best fixed plan, if it was searched."""

    name: str
    off: float
    auto: float
    best: float | None
    plan: str

    @property
    def share(self) -> float:
        """Of what the bar is of."""
        return self.auto / (self.best or self.off)

    @property
    def is_met(self) -> bool:
        return self.share >= (OF_OFF if self.best is None else OF_BEST)


def run(cell: Cell, seed_count: int, make: Callable[[World], Service] = AutoService) -> Result:
    """Runs a cell over some seeds; the best plan is chosen on seeds of its own."""
    seeds = range(seed_count)

    def mean(service_of: Callable[[], Service], first_seed: int = 0) -> float:
        return sum(rate(cell, service_of(), first_seed + seed) for seed in seeds) / seed_count

    auto = mean(lambda: make(cell.world))
    off = mean(lambda: SomeOff(cell.world, cell.streams) if cell.beside else FixedService(OFF_PLAN))
    if not cell.pays:
        return Result(cell.name, off, auto, None, "")
    waits = {plan: replace(plan, wait_s=WAIT_S if plan.wait_length else 0.0) for plan in catalogue()}
    chosen = max(waits.values(), key=lambda plan: mean(lambda: FixedService(plan), 1000))
    best = mean(lambda: FixedService(chosen))
    return Result(cell.name, off, auto, best, chosen.description)


def table_of(results: list[Result]) -> Printed:
    """A line for each cell."""
    table = Printed(title="the policy in a simulated service; tokens per second")
    for name in ("cell", "off", "auto", "auto / off", "auto / best", "best fixed plan", ""):
        table.add_column(name, justify="left" if name in ("cell", "best fixed plan") else "right")
    for line in results:
        of_best = "" if line.best is None else f"{line.auto / line.best:.3f}"
        measurements = (f"{line.off:.1f}", f"{line.auto:.1f}", f"{line.auto / line.off:.3f}", of_best, line.plan)
        table.add_row(line.name, *measurements, "" if line.is_met else "below")
    return table


def geometric_mean(ratios: list[float]) -> float:
    """Of positive ratios."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def bars_of(results: list[Result]) -> list[Bar]:
    """Each cell without gain at OF_OFF of off, those with gain together at OF_BEST of the best fixed plans."""
    failing = {line.name: line.share for line in results if line.best is None}
    paying = [line.share for line in results if line.best is not None]
    return [
        worst_of("simulated: auto / off where speculation gains nothing", OF_OFF, failing),
        Bar("simulated: auto / best fixed where it pays", OF_BEST, geometric_mean(paying) if paying else None),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.policy_cells", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cell (3)")
    parser.add_argument("--only", default="", help="cells whose names hold this")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    add_check_flag(parser)
    asked = parser.parse_args()
    cells = [cell for cell in failing_cells() + paying_cells() if asked.only in cell.name]
    with ProcessPoolExecutor() as pool:
        results = list(pool.map(partial(run, seed_count=asked.seeds), cells))
    console = Console(width=150)
    console.print(table_of(results))
    bars = bars_of(results)
    asked.out.mkdir(parents=True, exist_ok=True)
    written = {"cells": [asdict(line) for line in results], "bars": as_json(bars)}
    (asked.out / "policy_cells.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
