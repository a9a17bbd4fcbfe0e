"""`python -m bench.loading`: the memory that loading a model takes at most, beside what it has when it is loaded.

Each model is loaded in a process of its own, after a small one, so that libraries, allocator and kernels are there
before; anonymous memory is read every millisecond, which leaves out pages of the files. The bar allows 1.15 of the
final memory and the largest file. Models: the chat model in its own 4 bits, and unpacked to bfloat16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.bars import Bar, add_check_flag, as_json, conclude, worst_of
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.folders import CHAT_MODEL
from tests.support.harness import DRAFT_MODEL
from tests.support.processes import module_command
from tests.support.unpacked import write_unpacked

OVER_FINAL = 1.15
PAUSE_S = 0.001
MB = 1e6


@dataclass(frozen=True, slots=True)
class LoadingMeasurement:
    """Bytes of one model: of its files together and of the largest, at most while it was loaded, and afterwards."""

    model: str
    file_bytes: int
    largest_file_bytes: int
    peak_bytes: int
    final_bytes: int
    seconds: float

    @property
    def over_allowed(self) -> float:
        """The most memory over what the bar allows."""
        return self.peak_bytes / (OVER_FINAL * self.final_bytes + self.largest_file_bytes)


def anonymous_bytes() -> int:
    """Of this process, in memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def measure(name: str, model: str) -> LoadingMeasurement:
    """Loads a model in this process. Raises ModelRefused."""
    kept = [load_model(str(DRAFT_MODEL))]
    before, readings, is_over = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(PAUSE_S):
            readings.append(anonymous_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    began_s = time.perf_counter()
    try:
        kept.append(load_model(model))
    finally:
        seconds = time.perf_counter() - began_s
        is_over.set()
        watching.join()
    sizes = [file.stat().st_size for file in open_model_folder(model).weight_files]
    final = anonymous_bytes()
    peak = max(*readings, final)
    return LoadingMeasurement(name, sum(sizes), max(sizes), peak - before, final - before, seconds)


def measured_apart(name: str, model: str) -> LoadingMeasurement:
    """As `measure`, in a process of its own. Raises CalledProcessError."""
    command = module_command("bench.loading", "--one", name, model)
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return LoadingMeasurement(**json.loads(found.splitlines()[-1]))


def table_of(found: Sequence[LoadingMeasurement]) -> Table:
    """A line per model."""
    table = Table(title="memory at loading, MB; beyond a process that has loaded a small model", title_justify="left")
    for name in ("model", "files", "at most", "loaded", "at most / allowed", "seconds"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for own in found:
        sizes = (own.file_bytes, own.peak_bytes, own.final_bytes)
        ratio, seconds = f"{own.over_allowed:.2f}", f"{own.seconds:.1f}"
        table.add_row(own.model, *(f"{size / MB:.0f}" for size in sizes), ratio, seconds)
    return table


def bars_of(found: Sequence[LoadingMeasurement]) -> list[Bar]:
    claim = f"most memory at loading / ({OVER_FINAL} of the final and the largest file)"
    return [worst_of(claim, 1.0, {own.model: own.over_allowed for own in found}, is_limit=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(prog="python -m bench.loading", description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--models", nargs="+", help="folders, GGUF files or hub ids (the chat model, packed and not)")
    flags.add_argument("--one", nargs=2, metavar=("NAME", "MODEL"), help=argparse.SUPPRESS)
    flags.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    add_check_flag(flags)
    asked = flags.parse_args(arguments)
    if asked.one:
        print(json.dumps(asdict(measure(*asked.one))))
        return 0
    console = Console()
    with tempfile.TemporaryDirectory() as scratch, console.status("loading models"):
        models = {name: name for name in asked.models or ()}
        if not models:
            models = {"chat model, 4 bits": CHAT_MODEL}
            models["chat model, bfloat16"] = str(write_unpacked(CHAT_MODEL, Path(scratch) / "chat"))
        found = [measured_apart(name, model) for name, model in models.items()]
    console.print(table_of(found))
    bars = bars_of(found)
    asked.out.mkdir(parents=True, exist_ok=True)
    written = {"measurements": [asdict(own) for own in found], "bars": as_json(bars)}
    (asked.out / "loading.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
