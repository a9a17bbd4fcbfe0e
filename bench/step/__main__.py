"""`python -m bench.step`: a step on a CPU beside reading its weights once, beside llama.cpp, and by part.

In turns, with one and two threads, of the chat model in bfloat16, in its own 4 bits, in 8 bits and in FP8, and of the
deepened target (bench/deepened.py) in bfloat16: the step by rows and as a tree; plain decoding through the services
beside llama.cpp's server with the same weights (FP8 alone: it does not read it), and a prompt of 1,000 tokens; the
draft's step beside the bare loop of `transformers`; the step by part. llama.cpp comes from an environment of its own,
which the command makes. Parts of the results that are not measured again are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import torch
from rich.console import Console
from rich.progress import Progress

from bench import plot
from bench.bars import Bar, add_check_flag, as_json, conclude
from bench.deepened import write_deepened
from bench.draft.__main__ import Cell
from bench.draft.__main__ import measure as measure_draft
from bench.draft.__main__ import table_of as draft_table
from bench.pipeline.placement import processor_name
from bench.pipeline.variants import RULES_DEFAULT
from bench.step import results
from bench.step.float8_folder import write_float8
from bench.step.gguf_file import write_gguf
from bench.step.llama_cpp import environment
from bench.step.parts import measure_parts
from bench.step.picture import picture
from bench.step.rows import Reading, measure_rows
from bench.step.served import measure_served
from specdec.engine.cpu.kernels import kernels
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import SpecdecError
from specdec.folders import CHAT_MODEL
from specdec.telemetry.logs import configure_logs
from tests.support.harness import DRAFT_MODEL
from tests.support.unpacked import write_unpacked

PARTS = ("rows", "served", "draft", "parts")
MODELS = {"chat": results.CHAT, "chat-4": results.CHAT_4, "chat-8": results.CHAT_8}
MODELS |= {"chat-fp8": results.CHAT_FP8, "deepened": results.DEEPENED}
DRAFT_CONTEXTS, DRAFT_RULES = (64, 1000), (0, 3, 4)
QUICK = {"turns": 5, "prompts": 2, "long_prompts": 1, "tokens": 32}
Found = tuple[list[Any], list[Bar]]


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(%(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(%(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="on both sides (%(default)s)")
    parser.add_argument("--turns", type=int, default=15, help="each measures every shape once (%(default)s)")
    parser.add_argument("--prompts", type=int, default=6, help="of plain decoding (%(default)s)")
    parser.add_argument("--long-prompts", type=int, default=3, help="of 1,000 tokens (%(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of a prompt (%(default)s)")
    parser.add_argument("--no-llama", action="store_true", help="leave llama.cpp out, and its environment")
    parser.add_argument("--quick", action="store_true", help="a few minutes: few turns, prompts and tokens")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of JSON and picture (%(default)s)")
    add_check_flag(parser)
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


def _file_of(name: str) -> Path:
    """The GGUF file of a model. Raises ModelRefused or ConfigError."""
    return open_model_folder(name).weight_files[0].resolve()


class Run:
    """One run: its models in a folder for the time being, and where it is shown."""

    def __init__(self, asked: argparse.Namespace, scratch: Path, console: Console) -> None:
        self._asked, self._scratch, self._console = asked, scratch, console
        self._python: Path | None = None
        write: dict[str, Callable[[Path], Path]] = {
            "chat": partial(write_unpacked, CHAT_MODEL),
            "chat-4": lambda _: _file_of(CHAT_MODEL),
            "chat-8": lambda made: write_gguf(write_unpacked(CHAT_MODEL, made), made / "model.gguf", "Q8_0"),
            "chat-fp8": lambda made: write_float8(write_unpacked(CHAT_MODEL, made / "dense"), made / "packed"),
            "deepened": write_deepened,
        }
        self._folders = {MODELS[name]: write[name](scratch / name) for name in asked.models}

    def measure(self, part: str) -> Found:
        """Shows a part's table and returns its measurements and bars. Raises SpecdecError, grpc.RpcError, OSError."""
        measured: dict[str, Callable[[], Found]] = {
            "rows": self._rows,
            "served": self._served,
            "draft": self._draft,
            "parts": self._parts,
        }
        return measured[part]()

    def _rows(self) -> Found:
        reading = Reading()
        with self._shown("rows", (self._asked.turns + 1) * len(self._asked.threads)) as advance:
            found = [
                measure_rows(folder, name, threads, self._asked.turns, reading, advance)
                for threads in self._asked.threads
                for name, folder in self._folders.items()
            ]
        self._console.print(results.row_table(found))
        return found, results.row_bars(found, results.multiplies_bfloat16())

    def _served(self) -> Found:
        counts = self._asked.prompts, self._asked.long_prompts, self._asked.tokens
        files = self._gguf_files()
        with self._shown("served", (sum(counts[:2]) + 2) * len(self._asked.threads)) as advance:
            found = [
                measure_served(folder, name, threads, files.get(name), *counts, advance)
                for name, folder in self._folders.items()
                for threads in self._asked.threads
            ]
        self._console.print(results.served_table(found))
        return found, results.served_bars(found)

    def _gguf_files(self) -> dict[str, tuple[Path, Path]]:
        """llama.cpp's Python and file by model; none, with a line that says why, where it cannot be had."""
        if self._asked.no_llama:
            return {}
        try:
            python = environment()
            return {
                name: (python, own if own.is_file() else write_gguf(own, self._scratch / f"{index}.gguf"))
                for index, (name, own) in enumerate(self._folders.items())
                if name != results.CHAT_FP8  # which it does not read
            }
        except (SpecdecError, OSError) as error:
            self._console.print(f"llama.cpp is left out: {error}", style="yellow")
            return {}

    def _draft(self) -> Found:
        torch.set_num_threads(1)
        rules = [RULES_DEFAULT[number] for number in DRAFT_RULES]
        cells = [Cell(*cell) for cell in product(DRAFT_CONTEXTS, (1,), rules, results.DRAFT)]
        own = argparse.Namespace(model=DRAFT_MODEL, turns=self._asked.turns, steps=24, seconds=0.05)
        found = list(measure_draft(own, "auto", cells, Console(stderr=True)))
        self._console.print(draft_table(found))
        return found, results.draft_bars(found)

    def _parts(self) -> Found:
        with self._shown("parts", len(self._asked.threads)) as advance:
            found = []
            for threads, (name, folder) in product(self._asked.threads, self._folders.items()):
                found.append(measure_parts(folder, name, threads, self._asked.turns, self._asked.tokens))
                advance()
        self._console.print(results.part_table(found))
        return found, []

    @contextlib.contextmanager
    def _shown(self, part: str, count_per_model: int) -> Iterator[Callable[[], None]]:
        with Progress(console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task(part, total=count_per_model * len(self._folders))
            yield lambda: shown.update(task, advance=1)


def hardware() -> dict[str, Any]:
    """The machine, and how busy it was."""
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "kernels": repr(kernels()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


def bars_in(written: dict[str, Any]) -> list[Bar]:
    """Of all parts, in their order; those of a part that was never measured are not measured."""
    unmeasured = {
        "rows": results.row_bars([], results.multiplies_bfloat16()),
        "served": results.served_bars([]),
        "draft": results.draft_bars([]),
    }
    return [
        bar
        for part, absent in unmeasured.items()
        for bar in ([Bar(**own) for own in written[part]["bars"]] if part in written else absent)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    asked = options(arguments)
    console = Console(width=170)
    configure_logs("error", "bench")
    file = asked.out / "step.json"
    written: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    asked.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            run = Run(asked, Path(scratch), console)
            for part in asked.parts:
                found, bars = run.measure(part)
                measurements = [asdict(measurement) for measurement in found]
                written[part] = {"hardware": hardware(), "measurements": measurements, "bars": as_json(bars)}
                written["bars"] = as_json(bars_in(written))
                file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    except (SpecdecError, grpc.RpcError, OSError) as error:
        print(f"step: {error}", file=sys.stderr)
        return 1
    if plot.is_possible():
        picture(written, asked.out / "step.png")
    return conclude(bars_in(written), console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
