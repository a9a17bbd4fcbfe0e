"""`python -m bench.startup`: from the start of a replica's process to SERVING, by phase.

Weights are in the page cache. Beside the phases a replica logs stands the time of a process that only imports torch and
reads the same weights: the rest is specdec's and the libraries'. The 135M-parameter model has the sizes of SmolLM-135M
and random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.bars import Bar, add_check_flag, as_json, conclude, worst_of
from specdec.launch.children import Child, python_command
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL

LARGE_NAME = "135M"
BEYOND_S_MAX = 5.0
READY_TIMEOUT_S = 600.0
# Prints the seconds of importing torch and of reading weights, in a process of its own.
BASELINE = """
import sys, time
began_s = time.perf_counter()
import torch
imported_s = time.perf_counter()
from safetensors.torch import load_file
for file in sys.argv[1:]:
    for tensor in load_file(file).values():
        tensor.clone()
print(imported_s - began_s, time.perf_counter() - imported_s)
"""


@dataclass(frozen=True, slots=True)
class StartupMeasurement:
    """Medians of starts of one service on one model. `seconds`: by phase, as the replica logs them."""

    service: str
    model: str
    seconds: dict[str, float]
    total_s: float  # process start to ready, as its parent sees it
    torch_s: float
    read_s: float

    @property
    def beyond_s(self) -> float:
        """What is neither the import of torch nor the reading of the weights."""
        return self.total_s - self.torch_s - self.read_s


def make_large_model(folder: Path) -> Path:
    """Writes a Llama of 135M parameters in bfloat16, with a tokenizer of as many strings. Imports torch."""
    import torch

    from bench.gpu_models import Shape, write_folder

    shape = Shape(LARGE_NAME, 576, 30, 9, 3, 1536, 49152, is_tied=True, positions=2048)
    return write_folder(folder, shape, torch.bfloat16)


def start_once(service: str, model: Path) -> tuple[dict[str, float], float]:
    """Starts and stops a replica; returns its logged phases and the seconds until it was ready."""
    arguments = ["--model", str(model), "--port", "0", "--log-level", "debug", "--drain-grace-s", "1"]
    with tempfile.TemporaryFile("w+") as log:
        began_s = time.perf_counter()
        with Child(service, arguments, stderr=log) as child:
            child.wait_ready(READY_TIMEOUT_S)
            total_s = time.perf_counter() - began_s
        log.seek(0)
        lines = [json.loads(line) for line in log if line.startswith("{")]
    (seconds,) = [line["seconds"] for line in lines if line["event"] == "startup"]
    return seconds, total_s


def baseline_s(model: Path) -> tuple[float, float]:
    """Seconds of importing torch, and of reading the model's weights after that."""
    files = [str(file) for file in sorted(model.glob("*.safetensors"))]
    done = subprocess.run(python_command("-c", BASELINE, *files), capture_output=True, text=True, check=True)
    torch_s, read_s = map(float, done.stdout.split())
    return torch_s, read_s


def measure(service: str, name: str, model: Path, repeats: int) -> StartupMeasurement:
    """Returns the medians of several starts, in turns with those of a process that only imports and reads."""
    starts: list[tuple[dict[str, float], float]] = []
    baselines = []
    for _ in track(range(repeats), f"{service} {name}", console=Console(stderr=True)):
        baselines.append(baseline_s(model))
        starts.append(start_once(service, model))
    torch_s, read_s = (statistics.median(column) for column in zip(*baselines))
    seconds = {phase: statistics.median(one.get(phase, 0.0) for one, _ in starts) for phase in starts[0][0]}
    return StartupMeasurement(
        service, name, seconds, statistics.median(total_s for _, total_s in starts), torch_s, read_s
    )


def table_of(measurements: Iterable[StartupMeasurement]) -> Table:
    """One line per service and model."""
    shown = list(measurements)
    phases = list(dict.fromkeys(phase for one in shown for phase in one.seconds))
    table = Table(title="from the start of the process to SERVING, seconds (medians)")
    for name in ("service", "model", *phases, "total", "torch alone", "weights alone", "beyond both"):
        table.add_column(name, justify="left" if name in ("service", "model") else "right")
    for one in shown:
        numbers = [*(one.seconds.get(phase, 0.0) for phase in phases), one.total_s]
        numbers += [one.torch_s, one.read_s, one.beyond_s]
        table.add_row(one.service, one.model, *(f"{number:.2f}" for number in numbers))
    return table


def bars_of(measurements: Iterable[StartupMeasurement]) -> list[Bar]:
    """Seconds beyond torch and weights."""
    return [
        worst_of(
            "start to SERVING beyond importing torch and reading the weights, s",
            BEYOND_S_MAX,
            {f"{one.service} {one.model}": one.beyond_s for one in measurements},
            is_limit=True,
        )
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="starts of each (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="the embedded pair only, one start of each")
    parser.add_argument("--json", type=Path, default=Path("out/startup.json"), help="file (%(default)s)")
    add_check_flag(parser)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases: list[tuple[str, str, Callable[[], Path]]] = [
            ("target", "embedded", lambda: TARGET_MODEL),
            ("draft", "embedded", lambda: DRAFT_MODEL),
        ]
        if not asked.quick:
            cases += [("target", LARGE_NAME, lambda: make_large_model(Path(folder)))]
        measurements: list[StartupMeasurement] = []
        for service, name, model in cases:
            measurements.append(measure(service, name, model(), 1 if asked.quick else asked.repeats))
    console = Console(width=170)
    console.print(table_of(measurements))
    bars = bars_of(measurements)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    written: Mapping[str, object] = {
        "cores": os.cpu_count(),
        "measurements": [asdict(one) | {"beyond_s": one.beyond_s} for one in measurements],
        "bars": as_json(bars),
    }
    asked.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
