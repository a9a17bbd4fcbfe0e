"""`python -m bench.goals`: the goals of the benchmarks beside their results, from the JSON they wrote."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from bench.bars import Bar, add_check_flag, conclude

BENCHMARKS = (
    "draft",
    "overhead",
    "peers",
    "pipeline",
    "poor_drafts",
    "policy_cells",
    "proposers",
    "pair",
    "concurrency",
    "fleet",
    "engine",
    "step",
    "tensor_parallel",
    "startup",
    "head_pass",
    "loading",
)


def bars_in(folder: Path) -> list[Bar]:
    """The bars of every benchmark's last results in a folder; one that is not measured where there are none."""
    found: list[Bar] = []
    for name in BENCHMARKS:
        file = folder / f"{name}.json"
        if file.is_file():
            found += [Bar(**bar) for bar in json.loads(file.read_text(encoding="utf-8"))["bars"]]
        else:
            found.append(Bar(f"everything of bench.{name}", 0.0, None))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.goals", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("out"), help="of the results (%(default)s)")
    add_check_flag(parser)
    asked = parser.parse_args()
    return conclude(bars_in(asked.folder), Console(width=170), asked.check)


if __name__ == "__main__":
    sys.exit(main())
