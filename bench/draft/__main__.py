"""`python -m bench.draft`: the draft's step beside the bare greedy loop of `transformers` on the same weights.

In turns, one thread, for short and long contexts: the bare loop, in the draft's type or in float32, the faster one, at
batch 8 for 8 sessions; the draft service's own engine and handler in this process, without streams; and draft tokens
per second arriving at a coordinator's link over loopback, from a draft of its own process. By rule, nodes of a session
in one step, and sessions. Values are medians over turns; `step / bare` are ratios within a turn, with the 95 % interval
of their median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.bars import Bar, add_check_flag, as_json, conclude, worst_of
from bench.draft.alone import DraftAlone
from bench.draft.bare import BareLoop
from bench.draft.delivery import Delivery
from bench.draft.reader import SPARE_TOKENS, texts_of
from bench.pipeline.placement import processor_name
from bench.pipeline.variants import RULES_DEFAULT, rule_of
from bench.results import Ratio, ratio_of
from specdec.errors import SpecdecError
from specdec.protocol.types import ResolvedSamplingParams, Rule
from specdec.rpc.process import set_startup_objects_aside
from specdec.telemetry.logs import configure_logs
from tests.support.harness import DRAFT_MODEL

CONTEXTS, NODE_COUNTS, SESSION_COUNTS, RULES_MEASURED = (64, 1000), (1, 2, 4, 8), (1, 8), (0, 3, 4)
BOUNDS = {1: (1.2, 1.6), 8: (2.0, 2.5)}  # of step / bare by nodes: GREEDY and COUPLED, and REJECTION
STRETCHES = {1: 0.5, 8: 1.0}
QUICK = {"turns": 3, "steps": 8, "seconds": 0.1}


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination that is measured in every turn."""

    context: int
    sessions: int
    rule: str
    nodes: int

    @property
    def params(self) -> ResolvedSamplingParams:
        """The sampling of every session of the cell."""
        rule, temperature = rule_of(self.rule)
        return ResolvedSamplingParams(rule, 1, self.context, temperature=temperature)


@dataclass(frozen=True, slots=True)
class DraftMeasurement:
    """Medians of one cell and type. Both steps in milliseconds, of all sessions; nodes a second of all sessions."""

    dtype: str
    context: int
    sessions: int
    rule: str
    nodes: int
    bare_ms: float
    step_ms: float
    ratio: Ratio
    delivered_per_s: float

    @property
    def name(self) -> str:
        """As a bar names it."""
        return f"{self.rule.split(',')[0]} {self.sessions} x {self.nodes} at {self.context} {self.dtype}"

    @property
    def delivered_share(self) -> float:
        """Of what would arrive if the steps alone cost time."""
        return self.delivered_per_s * self.step_ms / 1e3 / (self.sessions * self.nodes)


def measure(
    asked: argparse.Namespace, dtype: str, cells: Sequence[Cell], console: Console
) -> Iterator[DraftMeasurement]:
    """All cells with one type, in turns. Raises SpecdecError."""
    draft = DraftAlone(asked.model, dtype)
    bares = [BareLoop(asked.model, own) for own in dict.fromkeys((draft.dtype, "float32"))]
    set_startup_objects_aside()  # as services do
    bare_ms: dict[tuple[int, int], list[float]] = {}
    found: dict[Cell, list[tuple[float | None, float]]] = {cell: [] for cell in cells}
    with Delivery(asked.model, dtype, draft.vocabulary_size) as delivery:
        for _ in track(range(asked.turns + 1), draft.dtype, console=console):
            for context, sessions in dict.fromkeys((cell.context, cell.sessions) for cell in cells):
                texts = texts_of(sessions, context + SPARE_TOKENS)
                loop_ms = min(bare.step_ms([text[:context] for text in texts], asked.steps) for bare in bares)
                bare_ms.setdefault((context, sessions), []).append(loop_ms)
                for cell in (own for own in cells if (own.context, own.sessions) == (context, sessions)):
                    shape = (cell.params, texts, cell.nodes)
                    found[cell].append((draft.step_ms(*shape, asked.steps), delivery.rate(*shape, asked.seconds)))
    for cell, values in found.items():
        loops = bare_ms[cell.context, cell.sessions][1:]  # the first turn warms up
        rates = [rate for _, rate in values[1:]]
        pairs = [(step, loop) for (step, _), loop in zip(values[1:], loops, strict=True) if step is not None]
        if not pairs:
            console.print(f"{cell}: not measured, its trees have no step that wide", style="yellow")
        else:
            ratio = ratio_of([step / loop for step, loop in pairs])
            times = statistics.median(loops), statistics.median(step for step, _ in pairs)
            of_cell = cell.context, cell.sessions, cell.rule, cell.nodes
            yield DraftMeasurement(draft.dtype, *of_cell, *times, ratio, statistics.median(rates))


def bounds_of(measurement: DraftMeasurement) -> float | None:
    """The bar of step / bare; None where there is none."""
    bounds = BOUNDS.get(measurement.nodes)
    return bounds and bounds[rule_of(measurement.rule)[0] is Rule.REJECTION]


def bars_of(measurements: Sequence[DraftMeasurement]) -> list[Bar]:
    """The worst of contexts, sessions, rules and types counts."""
    bars = []
    for nodes, (bound, rejection_bound) in BOUNDS.items():
        claim = f"draft's step / bare greedy loop, {nodes} node{'s' if nodes > 1 else ''}"
        of_nodes = [measurement for measurement in measurements if measurement.nodes == nodes]
        drawn = {own.name: own.ratio.median for own in of_nodes if rule_of(own.rule)[0] is Rule.REJECTION}
        guessed = {own.name: own.ratio.median for own in of_nodes if own.name not in drawn}
        bars.append(worst_of(f"{claim}, GREEDY and COUPLED", bound, guessed, True, STRETCHES[nodes]))
        bars.append(worst_of(f"{claim}, REJECTION", rejection_bound, drawn, True))
    return bars


def table_of(measurements: Sequence[DraftMeasurement]) -> Table:
    """A line per cell and type."""
    table = Table(title="the draft, one thread; medians over turns, milliseconds of all sessions together")
    numbers = (
        "context",
        "sessions",
        "nodes",
        "bare",
        "step",
        "step / bare [95 %]",
        "bar",
        "nodes/s arriving",
        "of steps",
    )
    for name in ("type", "rule", *numbers):
        table.add_column(name, justify="left" if name in ("type", "rule") else "right")
    for own in measurements:
        bound = bounds_of(own)
        ratio = f"{own.ratio.median:.2f} [{own.ratio.low:.2f}, {own.ratio.high:.2f}]"
        shown = "" if bound is None else f"≤ {bound:g}{' missed' if own.ratio.median > bound else ''}"
        counts = (str(own.context), str(own.sessions), str(own.nodes))
        times = (f"{own.bare_ms:.2f}", f"{own.step_ms:.2f}")
        arriving = (f"{own.delivered_per_s:.0f}", f"{own.delivered_share:.2f}")
        table.add_row(own.dtype, own.rule, *counts, *times, ratio, shown, *arriving)
    return table


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.draft", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="tokens (%(default)s)")
    parser.add_argument("--sessions", type=int, nargs="+", default=list(SESSION_COUNTS), help="at once (%(default)s)")
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODE_COUNTS), help="a step (%(default)s)")
    parser.add_argument("--rules", type=int, nargs="+", default=list(RULES_MEASURED), help="as bench.pipeline's")
    parser.add_argument("--dtype", nargs="+", default=["auto"], help="float32, bfloat16, auto (%(default)s)")
    parser.add_argument("--turns", type=int, default=9, help="each measures every cell once (%(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="of a cell in a turn (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.25, help="nodes are counted, in a turn (%(default)s)")
    parser.add_argument("--model", type=Path, default=DRAFT_MODEL, help="folder of the draft (the shipped one)")
    parser.add_argument("--quick", action="store_true", help="about a minute: three turns of few steps")
    parser.add_argument("--json", type=Path, default=Path("out/draft.json"), help="file (%(default)s)")
    add_check_flag(parser)
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = options(arguments)
    console = Console(width=170)
    torch.set_num_threads(1)
    configure_logs("error", "bench")
    rules = [RULES_DEFAULT[number] for number in asked.rules]
    cells = [Cell(*cell) for cell in product(asked.contexts, asked.sessions, rules, asked.nodes)]
    measurements: list[DraftMeasurement] = []
    try:
        for dtype in asked.dtype:
            measurements += measure(asked, dtype, cells, Console(stderr=True))
    except SpecdecError as error:
        print(f"draft: {error}", file=sys.stderr)
        return 1
    console.print(table_of(measurements))
    bars = bars_of(measurements)
    written: dict[str, Any] = {"cpu": processor_name(), "torch": torch.__version__, "model": str(asked.model)}
    written |= {"measurements": [asdict(measurement) for measurement in measurements], "bars": as_json(bars)}
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
