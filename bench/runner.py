"""Runs a benchmark: variants in cells, in turns, to results, tables and bars. `python -m bench` runs all of them.

A benchmark says what its cells are, how one turn of each variant is measured, and which tables and bars follow from
the results. All else is here: options, progress with the time left, JSON after every cell, the exit code of `--check`.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Protocol, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.bars import Bar, as_json, conclude
from bench.results import COMMITTED, Cell, Results, Table, read_results
from specdec.errors import SpecdecError

ROOT = Path(__file__).resolve().parents[1]

Values: TypeAlias = Mapping[str, float]  # what one turn of a variant measured
Contender: TypeAlias = Callable[[int], Values]  # measures the turn of this number; turn 0 warms up and is dropped
# What a benchmark has ready while it runs: the contenders of a cell by variant, and the results, for notes.
Prepared: TypeAlias = Callable[[Cell, Results], Mapping[str, Contender]]


class Benchmark(Protocol):
    """One benchmark; its module has it as `BENCHMARK`."""

    @property
    def name(self) -> str:
        """The name of its module and its JSON file."""

    @property
    def about(self) -> str:
        """One sentence: what it measures."""

    @property
    def turns(self) -> int:
        """Turns of each variant in a cell."""

    @property
    def quick_turns(self) -> int:
        """The same with `--quick`."""

    @property
    def minutes(self) -> float:
        """How long it takes on two cores, about."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Adds its own options to those of all benchmarks."""

    def cells(self, asked: argparse.Namespace) -> Sequence[Cell]:
        """Returns what is measured, in order; fewer for `asked.quick`."""

    def prepared(self, asked: argparse.Namespace) -> AbstractContextManager[Prepared]:
        """Starts what all cells need, and stops it at the end. Raises SpecdecError."""

    def tables(self, results: Results) -> Sequence[Table]:
        """Returns its tables, also of results that lack cells."""

    def bars(self, results: Results) -> Sequence[Bar]:
        """Returns its bars; one without its cell is not measured."""


def options(benchmark: Benchmark, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m bench.{benchmark.name}", description=benchmark.about)
    parser.add_argument("--turns", type=int, help=f"of each variant in a cell ({benchmark.turns})")
    parser.add_argument("--quick", action="store_true", help=f"fewer cells, {benchmark.quick_turns} turns")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    parser.add_argument("--commit-results", action="store_true", help="write the JSON that the pages show")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    benchmark.add_options(parser)
    asked = parser.parse_args(arguments)
    if asked.turns is None:
        asked.turns = benchmark.quick_turns if asked.quick else benchmark.turns
    return asked


def file_of(benchmark: Benchmark, folder: Path = COMMITTED) -> Path:
    """Returns the file of a benchmark's results."""
    return folder / f"{benchmark.name}.json"


def description_of_run(benchmark: Benchmark, arguments: Sequence[str]) -> dict[str, str | int]:
    """Returns what the pages tell of a run: command, date, commit, machine."""
    hidden = ("--commit-results", "--check")
    command = " ".join([f"python -m bench.{benchmark.name}", *(each for each in arguments if each not in hidden)])
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Returns the checkout's commit, with a + if files differ from it; "" where git knows of none."""
    try:
        asked = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(asked, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> str:
    """Returns the processor as the kernel calls it, the number of cores used, and what decides a step's speed."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").is_file() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    told = {name.strip(): value.strip() for name, value in fields.items()}
    flags = told.get("flags", "").split()
    special = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{told.get('model name', platform.machine())}, {cores} cores, {' '.join(special[-2:]) or 'no AVX2'}"


def measure(benchmark: Benchmark, asked: argparse.Namespace, results: Results, written_to: Path) -> None:
    """Measures every cell: a turn that warms up, then turns of all variants, in alternating order."""
    cells = benchmark.cells(asked)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with benchmark.prepared(asked) as prepared, Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(benchmark.name, total=len(cells) * (asked.turns + 1))
        for cell in cells:
            progress.update(task, description=f"{benchmark.name}: {', '.join(map(str, cell.values()))}")
            contenders = prepared(cell, results)
            for turn in range(asked.turns + 1):
                for variant in list(contenders)[:: 1 if turn % 2 else -1]:
                    values = contenders[variant](turn)
                    if turn:
                        results.add(cell, variant, values)
                progress.advance(task)
            results.write(written_to)


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """The command of a benchmark: returns its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    asked = options(benchmark, given)
    written_to = file_of(benchmark, COMMITTED if asked.commit_results else asked.out)
    results = Results(description_of_run(benchmark, given))
    started_s = time.monotonic()
    try:
        measure(benchmark, asked, results, written_to)
    except SpecdecError as error:
        print(f"{benchmark.name}: {error}", file=sys.stderr)
        return 1
    results.run["minutes"] = round((time.monotonic() - started_s) / 60, 1)
    bars = benchmark.bars(results)
    results.write(written_to, bars=as_json(bars))
    console = Console(width=170)
    for table in benchmark.tables(results):
        console.print(table.rich())
    console.print(f"[dim]written to {written_to}[/dim]")
    return conclude(bars, console, asked.check)


def last_results(benchmark: Benchmark) -> Results | None:
    """Returns the committed results of a benchmark; None where there are none."""
    file = file_of(benchmark)
    return read_results(file) if file.is_file() else None


def load(name: str) -> Benchmark:
    """Returns a benchmark by name; that of a package is in its `__main__`."""
    module = import_module(f"bench.{name}")
    if hasattr(module, "__path__"):
        module = import_module(f"bench.{name}.__main__")
    found: Benchmark = module.BENCHMARK
    return found
