"""`python -m bench.gpu`: the engine on one GPU, with random weights of 1B and 8B shape.

Needs this repository, torch and transformers, and nothing else. Checks that the engine answers what `transformers`
answers, then times the steps speculation is made of: a draft step, verifications of 1 to 8 rows, a tree, several
together; with captured graphs and without, beside the time in which the device reads the model's weights once, measured
in the same run. Last, how far a row's logits drift with the shape of the step, and how many decisions lie within that.

`--small` runs all of it on a CPU with tiny shapes in less than a minute; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.gpu_checks import check_greedy, check_logits, check_tree, margin_measurements
from bench.gpu_models import EIGHT_B, ONE_B, TINY, build
from bench.gpu_steps import STEPS, Step, StepMeasurement, bandwidth_gb_per_s, time_steps
from specdec.engine.loading.devices import find_device

GOALS = {("1B", 1, 1): (1.4, 1.2), ("8B", 1, 8): (1.25, 1.1)}  # model, sequences, rows: goal and stretch
TINY_STEPS = (Step(1, 1), Step(1, 3), Step(2, 2), Step(1, 8, paths=4))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU: tries the script, not a device")
    parser.add_argument("--rounds", type=int, default=30, help="times each step is timed; medians are printed")
    parser.add_argument("--json", type=Path, help="file to write all measurements to")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    asked = parser.parse_args(arguments)
    device = find_device("cpu" if asked.small else asked.device)
    measurements = run(device, asked.small, asked.rounds)
    if asked.json:
        asked.json.write_text(json.dumps(measurements, indent=1), encoding="utf-8")
    is_right = all(check["passed"] for check in measurements["checks"])
    return 0 if is_right and not (asked.check and measurements["missed"]) else 1


def run(device: torch.device, is_small: bool, rounds: int) -> dict[str, Any]:
    """All parts in order, printed as they come."""
    say(f"torch {torch.__version__}, transformers {transformers.__version__}, {name_of(device)}")
    dtypes = (torch.float32, torch.bfloat16)
    checks = [check_greedy(device), *(check(device, dtype) for check in (check_logits, check_tree) for dtype in dtypes)]
    for check in checks:
        say(f"{'ok    ' if check.passed else 'FAILED'} {check.claim}: {check.found}")
    limit = bandwidth_gb_per_s(device, 1 << (22 if is_small else 31))
    say(f"memory: {limit:.0f} GB/s read")
    steps_requested = TINY_STEPS if is_small else STEPS
    steps: list[StepMeasurement] = []
    margins = []
    for shape in (TINY,) if is_small else (ONE_B, EIGHT_B):
        model = build(shape, device, torch.bfloat16, max(step.sequences for step in steps_requested))
        timed = time_steps(model, shape.name, steps_requested, limit, 2 if is_small else rounds)
        margins.append({"model": shape.name} | margin_measurements(model))
        print_steps(timed)
        print_margins(margins[-1])
        steps += timed
        del model
    return {
        "device": name_of(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "weights": "random",
        "gb_per_s": limit,
        "checks": [asdict(check) for check in checks],
        "steps": [asdict(step) | {"outside_ms": step.outside_ms, "ratio": step.ratio} for step in steps],
        "margins": margins,
        "missed": [asdict(step) for step in steps if (goal := goal_of(step)) and step.ratio > goal[0]],
    }


def goal_of(step: StepMeasurement) -> tuple[float, float] | None:
    """(goal, stretch) of a step's ratio; None where there is none."""
    is_chain = step.paths == 1
    return GOALS.get((step.model, step.sequences, step.rows)) if step.with_graphs and is_chain else None


def print_steps(steps: Sequence[StepMeasurement]) -> None:
    heads = ("seqs", "rows", "paths", "graphs", "step ms", "forward", "outside", "limit", "ratio")
    say("     " + "".join(f"{head:>9}" for head in heads) + "  goal")
    for step in steps:
        goal = goal_of(step)
        told = "" if goal is None else f"<= {goal[0]} {'met' if step.ratio <= goal[0] else 'missed'}"
        say(
            f"{step.model:5}{step.sequences:9}{step.rows:9}{step.paths:9}{'yes' if step.with_graphs else 'no':>9}"
            f"{step.step_ms:9.3f}{step.forward_ms:9.3f}{step.outside_ms:9.3f}{step.limit_ms:9.3f}{step.ratio:9.2f}"
            f"  {told}"
        )


def print_margins(margins: dict[str, Any]) -> None:
    widths = ", ".join(map(str, margins["equal_widths"])) or "none"
    say(
        f"{margins['model']}: attention by {margins['way']}; logits drift by {margins['drift']:.3g} with the step; "
        f"rows equal to those of width 8 at widths: {widths}; {margins['close']} of {margins['positions']} positions "
        "have their two best nearer than that"
    )


def name_of(device: torch.device) -> str:
    """Returns the name of the measured device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, which stands in for a GPU here"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
