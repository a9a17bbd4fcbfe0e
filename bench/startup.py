"""`python -m bench.startup`: from the start of a replica's process to SERVING, by phase, and the memory it takes.

Weights are in the page cache. Beside the phases that a replica logs stands a process that only imports torch and reads
the same files: the rest is specdec's and the libraries'. Anonymous memory, which leaves out pages of files, is read
every millisecond; allowed are 1.15 of what the serving replica has, and the largest file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from bench.bars import Bar, worst_of
from bench.results import Cell, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from bench.step.models import DENSE, FOUR, write_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.launch.children import Child, python_command
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL

SHIPPED = "shipped"
CASES = (("target", SHIPPED), ("draft", SHIPPED), ("target", FOUR), ("target", DENSE))  # service, model
START = "start"  # the only variant
BEYOND_S_MAX, OVER_SERVING = 5.0, 1.15
READY_TIMEOUT_S, PAUSE_S, MB = 600.0, 0.001, 1e6
SECONDS, MEMORY = ("total", "torch", "files", "beyond"), ("files_mb", "most_mb", "serving_mb", "of_allowed")
# Prints the seconds of importing torch and of reading files, in a process of its own.
BASELINE = """
import sys, time
began_s = time.perf_counter()
import torch
imported_s = time.perf_counter()
for file in sys.argv[1:]:
    torch.frombuffer(bytearray(open(file, "rb").read()), dtype=torch.uint8).clone()
print(imported_s - began_s, time.perf_counter() - imported_s)
"""


def anonymous_bytes(pid: int) -> int:
    """Of a process, in memory; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """Meanwhile the anonymous memory of a process is added to the list."""
    readings, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(PAUSE_S):
            readings.append(anonymous_bytes(pid))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield readings
    finally:
        is_over.set()
        watching.join()


def start_once(service: str, model: Path, turn: int = 0) -> Values:
    """Starts and stops a replica. Raises ConfigError where it does not start, ModelRefused for its folder."""
    files = open_model_folder(str(model)).weight_files
    done = subprocess.run(python_command("-c", BASELINE, *map(str, files)), stdout=subprocess.PIPE, check=True)
    torch_s, read_s = map(float, done.stdout.split())
    arguments = ["--model", str(model), "--port", "0", "--log-level", "debug", "--drain-grace-s", "1"]
    with TemporaryFile("w+") as log:
        began_s = time.perf_counter()
        with Child(service, arguments, stderr=log) as child, watched(child.process.pid) as readings:
            child.wait_ready(READY_TIMEOUT_S)
            total_s = time.perf_counter() - began_s
            serving = anonymous_bytes(child.process.pid)
        log.seek(0)
        lines = [json.loads(line) for line in log if line.startswith("{")]
    (phases,) = [line["seconds"] for line in lines if line["event"] == "startup"]
    sizes = [file.stat().st_size for file in files]
    allowed = OVER_SERVING * serving + max(sizes)
    seconds = dict(zip(SECONDS, (total_s, torch_s, read_s, total_s - torch_s - read_s)))
    memory = dict(zip(MEMORY, (sum(sizes) / MB, max(readings) / MB, serving / MB, max(readings) / allowed)))
    return seconds | memory | {f"phase {name}": own for name, own in phases.items()}


class Startup:
    """See the module."""

    name = "startup"
    about = "from the start of a replica's process to SERVING: seconds, and memory"
    turns, quick_turns, minutes = 5, 1, 4

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        pass

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        return [{"service": service, "model": model} for service, model in (CASES[:2] if asked.quick else CASES)]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        with TemporaryDirectory() as scratch:

            def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                service, model = str(cell["service"]), str(cell["model"])
                shipped = {"target": TARGET_MODEL, "draft": DRAFT_MODEL}[service]
                folder = shipped if model == SHIPPED else write_model(model, Path(scratch) / model)
                return {START: partial(start_once, service, folder)}

            yield contenders

    def tables(self, results: Results) -> list[Table]:
        names = [f"{cell['service']}, {cell['model']}" for cell in results.cells()]
        measures = dict.fromkeys(own for _, found in results.found for own in found[START] if own.startswith("phase "))

        def table(name: str, about: str, columns: Sequence[str], of: Sequence[str]) -> Table:
            medians = [[results.median(cell, START, own) for own in of] for cell in results.cells()]
            rows = [[name, *map(shown, own)] for name, own in zip(names, medians)]
            return Table(name, about, ["", *columns], rows)

        phases = [own.removeprefix("phase ") for own in measures]
        columns = [*phases, "in all", "torch alone", "files alone", f"beyond both (bar {BEYOND_S_MAX:g})"]
        about = "from the start of a replica's process to SERVING, seconds"
        sizes = ["files", "at most", "serving", f"at most / ({OVER_SERVING} serving + file), bar 1"]
        return [
            table("seconds", about, columns, [*measures, *SECONDS]),
            table("memory", "anonymous memory of a replica that starts, MB", sizes, MEMORY),
        ]

    def bars(self, results: Results) -> Sequence[Bar]:
        def medians(measure: str) -> dict[str, float]:
            found = {
                ", ".join(map(str, cell.values())): results.median(cell, START, measure) for cell in results.cells()
            }
            return {name: value for name, value in found.items() if value is not None}

        claim = "start to SERVING beyond importing torch and reading the weights, s"
        most = f"most memory at the start / ({OVER_SERVING} of serving's and the largest file)"
        return [
            worst_of(claim, BEYOND_S_MAX, medians("beyond"), is_limit=True),
            worst_of(most, 1.0, medians("of_allowed"), is_limit=True),
        ]


BENCHMARK = Startup()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
