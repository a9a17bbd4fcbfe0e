"""`python -m bench.pipeline`: ways to speculate across machines, by round trip, rule and temperature.

Three services on three emulated machines, the target on one core, draft and coordinator on the other; a target made
deeper by layers that add nothing (bench/deepened.py), so that a step costs what steps cost while acceptance stays real;
held-out prompts. The round trip changes while the services run. Variants take turns on every prompt: plain decoding
(off), synchronous rounds at fixed draft lengths, a streamed chain, a streamed tree, and the policy's own choice (auto).
Prints tables and bars, writes JSON and a picture. Co-located is synchronous rounds at round trip 0. Drafts that are of
no use are measured by `bench.poor_drafts`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import deepened, plot
from bench.bars import add_check_flag, conclude
from bench.bars import as_json as bars_as_json
from bench.pipeline import ranks, simulated
from bench.pipeline.bars import bars_of
from bench.pipeline.placement import OTHERS, description, placed
from bench.pipeline.sweep import Cell, Effort, Sweep, cells
from bench.pipeline.tables import rate_table, share_table, simulator_table, speculation_table, step_table
from bench.pipeline.variants import AUTO, CHAIN, OFF, RULES, RULES_DEFAULT, TREE, Variant, variants_of
from specdec.errors import SpecdecError
from tests.support.harness import heldout_prompts

RTTS_MS = (0.0, 1.0, 5.0, 10.0, 20.0, 50.0, 100.0)
DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8)
WARM_UPS = 2
OTHERS_MAX = 0.1  # of a core; more disturbs the measurement
RANK_PROMPTS, RANK_TOKENS = 6, 64
QUICK = {  # instead of the defaults; flags that are given count all the same
    "rtt_ms": [0.0, 20.0],
    "rules": [0, 1, 4],
    "draft_lengths": [1, 3],
    "pairs": 4,
    "full": 4,
    "pairs_max": 0,
    "max_tokens": 32,
    "far_target_rtt_ms": 0.0,
}
FAR = (OFF, AUTO, CHAIN, TREE)  # with the target farther away


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rtt-ms", type=float, nargs="+", default=list(RTTS_MS), help="coordinator-draft (%(default)s)"
    )
    parser.add_argument("--half-step", action=argparse.BooleanOptionalAction, default=True, help="also half a step")
    parser.add_argument("--target-rtt-ms", type=float, default=0.2, help="coordinator-target (%(default)s)")
    parser.add_argument("--far-target-rtt-ms", type=float, default=2.0, help="of one more table; 0: none (%(default)s)")
    parser.add_argument("--rules", type=int, nargs="+", default=list(range(len(RULES_DEFAULT))), help=rules_help())
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=list(DRAFT_LENGTHS), help="synchronous rounds")
    parser.add_argument("--without", nargs="+", default=[], metavar="VARIANT", help="variants to leave out, by name")
    parser.add_argument("--pairs", type=int, default=9, help="of auto and off in a cell (%(default)s)")
    parser.add_argument("--full", type=int, default=6, help="of these with all variants (%(default)s)")
    parser.add_argument("--pairs-max", type=int, default=60, help="where auto is below 0.98 of off (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of a generation (%(default)s)")
    parser.add_argument("--extra-layers", type=int, default=deepened.EXTRA_LAYERS_DEFAULT, help="of the target")
    parser.add_argument("--dtype", default="bfloat16", help="of the target (%(default)s)")
    parser.add_argument("--draft-dtype", default="float32", help="of the draft (%(default)s)")
    parser.add_argument("--proxies", action="store_true", help="delay proxies although namespaces could be made")
    parser.add_argument("--quick", action="store_true", help="about five minutes: few cells, few pairs")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of JSON and picture (%(default)s)")
    add_check_flag(parser)
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    asked = parser.parse_args(arguments)
    known = {variant.name for variant in variants_of(asked.draft_lengths)} - {OFF.name}
    if strangers := set(asked.without) - known:
        parser.error(f"--without takes {', '.join(sorted(known))}; not {', '.join(sorted(strangers))}")
    return asked


def rules_help() -> str:
    return "; ".join(f"{number}: {name}" for number, name in enumerate(RULES_DEFAULT))


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[tuple[Progress, TaskID]]:
    """A bar with the time left, and its one task."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        yield bar, bar.add_task("measuring", total=None)


def measure(asked: argparse.Namespace, variants: list[Variant], model: Path, console: Console) -> dict[str, Any]:
    """The whole run: cells, and all that goes into the JSON."""
    console.print("timing steps of both models alone", style="dim")
    rules = [list(RULES)[number] for number in asked.rules]
    steps = simulated.measure_steps(model, asked.dtype, asked.draft_dtype, rules)
    console.print(step_table(steps))
    half_step = [round(steps.target_ms[1] / 2, 1)] if asked.half_step else []
    rtts_ms = sorted({*asked.rtt_ms, *half_step})
    effort = Effort(asked.pairs, asked.full, asked.pairs_max, WARM_UPS, asked.max_tokens)
    services = placed(model, asked.dtype, asked.draft_dtype, namespaces_allowed=not asked.proxies)
    with services as place, progress_bar(Console(stderr=True)) as (bar, task):
        hardware = description(place)
        console.print(json.dumps(hardware), highlight=False, soft_wrap=True)

        def advance(weight: float) -> None:
            bar.advance(task, weight)

        def say(cell: Cell) -> None:
            console.print(line_of(cell), highlight=False, soft_wrap=True)

        sweep = Sweep(place, variants, heldout_prompts(), effort, advance)
        far_sweep = Sweep(place, [own for own in FAR if own in variants], heldout_prompts(), effort, advance)
        far_rules = rules[:1] if asked.far_target_rtt_ms else []
        bar.update(task, total=sweep.weights(rtts_ms, len(rules)) + far_sweep.weights(rtts_ms, len(far_rules)))
        shares = place.begin_shares()
        made = cells(sweep, rtts_ms, rules, asked.target_rtt_ms, say)
        made += cells(far_sweep, rtts_ms, far_rules, asked.far_target_rtt_ms, say)
        used = shares.so_far()
    console.print("measuring the draft's guesses, simulating", style="dim")
    prompts = list(heldout_prompts().values())[:RANK_PROMPTS]
    guesses = ranks.measure_ranks(prompts, rules, RANK_TOKENS)
    simulations = simulated.simulate_all(made, steps, guesses, variants)
    models = {"target": f"shipped target and {asked.extra_layers} layers that add nothing, {asked.dtype}"}
    models["draft"] = f"shipped draft, {asked.draft_dtype}"
    return {
        "hardware": hardware,
        "models": models,
        "effort": asdict(effort),
        "half_step_ms": half_step[0] if half_step else None,
        "steps": steps.as_json(),
        "ranks": {rule: asdict(own) for rule, own in guesses.items()},
        "cpu_shares": used,
        "cells": made,
        "simulated": simulations,
    }


def line_of(cell: Cell) -> str:
    """One cell in one line, as it is made."""
    rates = "  ".join(f"{name} {own.tokens_per_s:.0f}" for name, own in cell.measurements.items())
    ratio = f"  auto/off {cell.ratio}" if cell.ratio else ""
    differing = f"  DIFFERENT TEXTS, prompts {cell.differing_prompts}: a defect" if cell.differing_prompts else ""
    others = cell.cpu_shares[OTHERS]
    disturbed = f"  DISTURBED: others used {others:.0%} of a core" if others > OTHERS_MAX else ""
    best = f"  auto/best fixed {cell.over_best_fixed}" if cell.over_best_fixed else ""
    return f"{cell.rule}, RTT {cell.rtt_ms:g} ms: {rates}{ratio}{best}{differing}{disturbed}"


def over_best(cell: Cell, variant: str) -> float | None:
    """A variant's gain over the best synchronous one, where both were measured."""
    best = cell.best_synchronous()
    return cell.gain(variant, best) if best and variant in cell.comparable else None


def as_json(run: dict[str, Any]) -> dict[str, Any]:
    """The run with its cells as plain values, samples last."""
    made: list[Cell] = run["cells"]
    plain = [
        {
            "rule": cell.rule,
            "rtt_ms": cell.rtt_ms,
            "target_rtt_ms": cell.target_rtt_ms,
            "measured_rtt_ms": cell.measured_rtt_ms,
            "ratio": asdict(cell.ratio) if cell.ratio else None,
            "first_ratio": asdict(cell.first_ratio) if cell.first_ratio else None,
            "over_best_fixed": asdict(cell.over_best_fixed) if cell.over_best_fixed else None,
            "differing_prompts": cell.differing_prompts,
            "cpu_shares": cell.cpu_shares,
            "measurements": {name: asdict(own) for name, own in cell.measurements.items()},
            "gain_over_off": {name: cell.gain(name, OFF.name) for name in cell.comparable},
            "best_synchronous": cell.best_synchronous(),
            "auto_over_best_synchronous": over_best(cell, AUTO.name),
            "tree_over_best_synchronous": over_best(cell, TREE.name),
            "simulated": rates,
        }
        for cell, rates in zip(made, run["simulated"], strict=True)
    ]
    samples = [sample.as_json() for cell in made for sample in cell.samples]
    return {**{k: v for k, v in run.items() if k != "simulated"}, "cells": plain, "samples": samples}


def show(run: dict[str, Any], variants: list[Variant], console: Console) -> None:
    """All tables."""
    made: list[Cell] = run["cells"]
    groups = dict.fromkeys((cell.rule, cell.target_rtt_ms) for cell in made)
    for rule, target_rtt_ms in groups:
        group = [cell for cell in made if (cell.rule, cell.target_rtt_ms) == (rule, target_rtt_ms)]
        console.print(rate_table(rule, group, variants))
    console.print(speculation_table(made, [variant for variant in variants if variant in (OFF, AUTO, CHAIN, TREE)]))
    console.print(simulator_table(made, run["simulated"], variants))
    console.print(share_table(run["cpu_shares"]))


def main(arguments: Sequence[str] | None = None) -> int:
    asked = options(arguments)
    console = Console(width=170)
    variants = [variant for variant in variants_of(asked.draft_lengths) if variant.name not in asked.without]
    try:
        plot.require()
        with tempfile.TemporaryDirectory() as scratch:
            model = deepened.write_deepened(Path(scratch), asked.extra_layers)
            run = measure(asked, variants, model, console)
    except SpecdecError as error:
        print(f"pipeline: {error}", file=sys.stderr)
        return 1
    show(run, variants, console)
    asked.out.mkdir(parents=True, exist_ok=True)
    bars = bars_of(run["cells"], run["simulated"], run["half_step_ms"])
    written = as_json(run) | {"command": ["python", "-m", "bench.pipeline", *(arguments or sys.argv[1:])]}
    written["bars"] = bars_as_json(bars)
    (asked.out / "pipeline.json").write_text(json.dumps(written) + "\n", encoding="utf-8")
    plot.picture(written, asked.out / "pipeline.png")
    console.print(f"{asked.out / 'pipeline.json'}  {asked.out / 'pipeline.png'}")
    code = conclude(bars, console, asked.check)
    return 1 if any(cell.differing_prompts for cell in run["cells"]) else code


if __name__ == "__main__":
    sys.exit(main())
