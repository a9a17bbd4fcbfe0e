"""`python -m bench.goals`: what the benchmarks were to reach beside what they reached, from the JSON they wrote.

Goals of the pipeline, of overhead, of the wire and of the engine. A goal that nothing was measured for says so; where
rules or models differ the worst one counts and all are shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.pipeline.figures import geometric_mean

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """One goal. `reached` counts, the least or greatest of `shown`; None where nothing was measured.

    A goal is met at or above it, at or below it where `is_limit`.
    """

    claim: str
    goal: float
    stretch: float | None
    reached: float | None
    shown: str = ""
    is_limit: bool = False

    @property
    def state(self) -> str:
        if self.reached is None:
            return "not measured"
        if self.stretch is not None and self._passes(self.stretch):
            return "stretch"
        return "met" if self._passes(self.goal) else "missed"

    def _passes(self, bar: float) -> bool:
        assert self.reached is not None
        return self.reached <= bar if self.is_limit else self.reached >= bar


def read(file: Path) -> Json | None:
    """The results in a file, None where it is missing."""
    if not file.is_file():
        return None
    found: Json = json.loads(file.read_text(encoding="utf-8"))
    return found


def rate(cell: Json, name: str) -> float:
    return float(cell["figures"][name]["tokens_per_s"])


def gain_of(cell: Json, name: str) -> float:
    """Tokens/s over off's on the same prompts."""
    return float(cell["gain_over_off"][name])


def worst_of(claim: str, goal: float, stretch: float | None, values: dict[str, float], is_limit: bool = False) -> Line:
    """A line of several values by name: the worst counts."""
    if not values:
        return Line(claim, goal, stretch, None, is_limit=is_limit)
    worst = max(values.values()) if is_limit else min(values.values())
    shown = "; ".join(f"{name} {value:.3g}" for name, value in values.items())
    return Line(claim, goal, stretch, worst, shown, is_limit)


def never_slower(pipeline: Json | None, concurrency: Json | None) -> Iterator[Line]:
    """Auto against off, in every cell of round trip and rule and at every concurrency."""
    cells = [cell for run in (pipeline, concurrency) if run for cell in run["cells"] if cell.get("ratio")]
    medians = [cell["ratio"]["median"] for cell in cells]
    claim = "auto / off: least of the cells' medians"
    if not medians:
        yield Line(claim, 0.95, 0.98, None)
        return
    below = [f"{name_of(cell)} {cell['ratio']['median']:.3f}" for cell in cells if cell["ratio"]["median"] < 0.98]
    yield Line(claim, 0.95, 0.98, min(medians), f"{len(medians)} cells; below 0.98: {', '.join(below) or 'none'}")
    yield Line("auto / off: geometric mean over cells", 1.0, None, geometric_mean(medians))


def name_of(cell: Json) -> str:
    if "streams" in cell:
        return f"{cell['streams']} streams"
    return f"{cell['rule']} at {cell['rtt_ms']:g} ms"


def half_step(pipeline: Json | None) -> Iterator[Line]:
    """At half a target step of round trip: against synchronous rounds over the same link, and beside the target."""
    claims = ("auto / best synchronous at RTT = T/2", "auto / co-located best synchronous at RTT = T/2")
    over_link: dict[str, float] = {}
    over_near: dict[str, float] = {}
    found = pipeline or {"cells": [], "half_step_ms": None}
    complete = [cell for cell in found["cells"] if cell["auto_over_best_synchronous"] is not None]
    near = {cell["rule"]: gain_of(cell, cell["best_synchronous"]) for cell in complete if cell["rtt_ms"] == 0}
    for cell in complete:
        if cell["rtt_ms"] == found["half_step_ms"]:
            over_link[cell["rule"]] = cell["auto_over_best_synchronous"]
            if cell["rule"] in near:
                over_near[cell["rule"]] = gain_of(cell, "auto") / near[cell["rule"]]
    yield worst_of(claims[0], 1.2, 1.4, over_link)
    yield worst_of(claims[1], 0.85, 1.0, over_near)


def predictions(pipeline: Json | None) -> Iterator[Line]:
    """Against the simulator, and the policy against itself."""
    simulated: dict[str, list[float]] = {}
    own: dict[str, list[float]] = {}
    for cell in pipeline["cells"] if pipeline else []:
        if "tree" in cell["figures"]:
            simulated.setdefault(cell["rule"], []).append(rate(cell, "tree") / cell["simulated"]["tree"])
        auto = cell["figures"].get("auto")
        if auto and auto["predicted_tokens_per_s"]:
            own.setdefault(cell["rule"], []).append(auto["tokens_per_s"] / auto["predicted_tokens_per_s"])
    medians = {rule: statistics.median(values) for rule, values in simulated.items()}
    yield worst_of("streamed tree / simulator (median over RTT)", 0.85, 0.95, medians)
    ratios = {rule: statistics.median(values) for rule, values in own.items()}
    yield worst_of("observed / predicted by the policy, at least", 0.9, None, ratios)
    yield worst_of("observed / predicted by the policy, at most", 1.1, None, ratios, is_limit=True)


def overheads(overhead: Json | None) -> Iterator[Line]:
    """A round beyond forward and evidence, CPU, bytes."""
    found = overhead or {"round_ms": {}, "cpu_us_per_token": {}, "bytes_per_token": {}}
    streamed = {name: ms for name, ms in found["round_ms"].items() if not name.startswith("sync")}  # those never wait
    yield worst_of("round beyond forward and evidence, loopback, p50, ms", 1.0, 0.5, streamed, True)
    cpu = found["cpu_us_per_token"]
    yield worst_of("coordinator CPU per committed token, 32 streams, µs", 150, 75, cpu, True)
    limits = {("chain", False): 100, ("chain", True): 400, ("tree", False): 800, ("tree", True): 3500}
    for (variant, is_drawn), limit in limits.items():
        values = {
            rule: own[variant]
            for rule, own in found["bytes_per_token"].items()
            if variant in own and ("top-p" in rule if is_drawn else "REJECTION" not in rule)
        }
        rules = "REJECTION, 0.7, top-p 0.95" if is_drawn else "ids"
        yield worst_of(
            f"bytes per committed token on the draft link, {variant}, {rules}", limit, limit / 2, values, True
        )


def peers(found: Json | None) -> Iterator[Line]:
    """One stream on loopback beside transformers' assisted generation at its own best settings."""
    yield worst_of("auto / transformers assisted generation", 1.5, 2.0, found["against_assisted"] if found else {})


def engine(found: Json | None) -> Iterator[Line]:
    """Streams decoding at once, by the engine alone, for every model and type."""
    rates: dict[str, dict[int, float]] = {}
    for line in found["streams"] if found else []:
        rates.setdefault(f"{line['model']} {line['dtype']}", {})[line["streams"]] = line["tokens_per_s"]
    gains = {name: own[16] / own[1] for name, own in rates.items() if 1 in own and 16 in own}
    yield worst_of("plain decoding, 16 streams / 1, the engine alone", 5.0, 8.0, gains)


def lines(folder: Path) -> list[Line]:
    """All goals, with what the results in a folder reached."""
    pipeline, concurrency = read(folder / "pipeline.json"), read(folder / "concurrency.json")
    return [
        *never_slower(pipeline, concurrency),
        *half_step(pipeline),
        *predictions(pipeline),
        *peers(read(folder / "peers.json")),
        *overheads(read(folder / "overhead.json")),
        *engine(read(folder / "engine.json")),
    ]


def table(folder: Path) -> Table:
    """All goals, with what the results in a folder reached."""
    return table_of(lines(folder))


def table_of(found: Iterable[Line]) -> Table:
    """One line per goal."""
    result = Table(title="goals", show_lines=True)
    for name in ("goal", "to reach", "stretch", "reached", "", "of"):
        result.add_column(name, justify="right" if name in ("to reach", "stretch", "reached") else "left")
    for line in found:
        sign = "≤" if line.is_limit else "≥"
        reached = "" if line.reached is None else f"{line.reached:.3g}"
        stretch = "" if line.stretch is None else f"{sign} {line.stretch:g}"
        result.add_row(line.claim, f"{sign} {line.goal:g}", stretch, reached, line.state, line.shown)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.goals", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("out"), help="of the results (%(default)s)")
    Console(width=170).print(table(parser.parse_args().folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
