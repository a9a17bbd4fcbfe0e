"""`python -m bench.gpu_session --minutes 8 --json FILE`: everything that is to be known of one GPU, in one command.

Stages run by value, each with a time limit, and FILE is written after each: what is there counts, whatever happens
next. A stage that fails or is over its time is in it with its reason. Every row names the card. Models have random
weights of the shapes of Llama 1B and 8B; bars stand beside the results, ratios to the time in which the memory is read
at the speed measured in the same session. It needs this repository, torch with Triton, transformers and rich; the
stages `cuda_tests` and `sameness` need what tests and services do.

`--small` runs all stages on a CPU with tiny shapes, kernels in Triton's interpreter: it tries the command, not a card.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.bars import Bar, add_check_flag, as_json, conclude, table_of
from bench.gpu_session.results import Results, bars_of, completed, told
from bench.gpu_session.stages import MINUTES, Stage, stages_of
from bench.gpu_session.worker import Worker


class Run:
    """A session: its facts, and a record of each stage."""

    def __init__(self, minutes: float, is_small: bool, file: Path | None, console: Console):
        self.found: dict[str, Any] = {"minutes": minutes, "is_small": is_small, "facts": {}, "stages": [], "bars": []}
        self._minutes, self._is_small, self._file, self._console = minutes, is_small, file, console
        self._until_s = time.monotonic() + 60 * minutes
        self._worker: Worker | None = None
        self._is_sound = True  # the worker's last stage came to its end

    def stage(self, stage: Stage) -> None:
        """Runs a stage, records and shows it, and writes all records."""
        record: dict[str, Any] = {"stage": stage.name, "results": [], "log": []}
        self.found["stages"].append(record)
        started_s = time.monotonic()
        limit_s = min(stage.limit_s * self._minutes / MINUTES, self._until_s - started_s)
        reason: str | None = "no time is left"
        if limit_s > 0:
            reason = self._worker_for(stage).run(stage, limit_s, lambda kind, what: self._hear(record, kind, what))
            self._is_sound = reason is None
        record |= {
            "done": reason is None,
            "reason": reason,
            "seconds": time.monotonic() - started_s,
            "limit_s": limit_s,
        }
        self.found["bars"] = as_json(self._bars(stage.name for stage in stages_of(None)))
        self._show(stage, record)
        self.write()

    def close(self) -> None:
        """Ends the process of stages."""
        if self._worker is not None:
            self._worker.stop(self._is_sound)
        self._worker = None

    def write(self) -> None:
        """Writes all records, whole or not at all."""
        if self._file is not None:
            beside = self._file.with_name(self._file.name + ".new")
            beside.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
            beside.replace(self._file)

    def _worker_for(self, stage: Stage) -> Worker:
        if stage.is_alone or not self._is_sound:
            self.close()
        if self._worker is None:
            self._worker = Worker(self._is_small)
        return self._worker

    def _hear(self, record: dict[str, Any], kind: str, what: Any) -> None:
        if kind == "facts":
            self.found["facts"] = what
        elif kind == "log":
            record["log"].append(what)
        else:
            speed = Results(self.found["stages"]).gb_per_s
            record["results"].append(completed(what, speed) | {"card": self.found["facts"]["card"]})

    def _bars(self, names: Any) -> list[Bar]:
        results = Results(self.found["stages"])
        return [bar for name in names for bar in bars_of(name, results)]

    def _show(self, stage: Stage, record: dict[str, Any]) -> None:
        card = self.found["facts"].get("card", "no card")
        ending = "" if record["done"] else f": {record['reason']}"
        self._say(f"{card}, {stage.name} ({stage.claim}), {record['seconds']:.0f} s{ending}")
        for line in record["log"]:
            self._say(f"  log: {line}")
        for row in record["results"]:
            self._say("  " + told({name: value for name, value in row.items() if name != "card"}))
        if bars := self._bars([stage.name]):
            self._console.print(table_of(bars))

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_session", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all stages together (%(default)s)")
    parser.add_argument("--json", type=Path, help="file to write all results to, after each stage")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU: tries the command, not a device")
    parser.add_argument("--stages", nargs="+", metavar="NAME", help="these stages only")
    add_check_flag(parser)
    asked = parser.parse_args(arguments)
    try:
        stages = stages_of(asked.stages)
    except ValueError as error:
        parser.error(str(error))
    if not 0 < asked.minutes < float("inf"):
        parser.error(f"--minutes is {asked.minutes}; it must be above 0")
    console = Console(width=150)
    with tempfile.TemporaryDirectory(prefix="specdec-triton-") as cache:
        # For the processes of stages: what is compiled is compiled in this session.
        os.environ["TRITON_CACHE_DIR"] = cache
        if asked.small:
            os.environ["TRITON_INTERPRET"] = "1"
        run = Run(asked.minutes, asked.small, asked.json, console)
        try:
            for stage in stages:
                run.stage(stage)
        finally:
            run.close()
    console.print(f"{run.found['facts'].get('card', 'no card')}:", markup=False, highlight=False)
    code = conclude([Bar(**bar) for bar in run.found["bars"]], console, asked.check)
    return 1 if code or not all(record["done"] for record in run.found["stages"]) else 0


if __name__ == "__main__":
    sys.exit(main())
