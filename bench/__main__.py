"""`python -m bench`: runs the benchmarks one after another, each in a process of its own, then shows every bar.

`--list` names them with their time; `--bars` shows the bars of the last results without measuring.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import NAMES
from bench.bars import Bar, table_of
from bench.results import COMMITTED
from bench.runner import load
from tests.support.processes import module_command


def bars_in(folder: Path) -> dict[str, list[Bar]]:
    """Returns the bars of the results in a folder, by benchmark."""
    found = {}
    for name in NAMES:
        file = folder / f"{name}.json"
        if file.is_file():
            found[name] = [Bar(**bar) for bar in json.loads(file.read_text(encoding="utf-8")).get("bars", ())]
    return found


def listing() -> Table:
    """Returns the benchmarks, what each measures, and how long it takes."""
    table = Table()
    for column in ("command", "measures", "minutes", "--quick"):
        table.add_column(column, justify="right" if column in ("minutes", "--quick") else "left")
    for name in NAMES:
        own = load(name)
        quick = own.minutes * own.quick_turns / own.turns
        table.add_row(f"python -m bench.{name}", own.about, f"{own.minutes:g}", f"{quick:.1g}")
    return table


def run_all(names: Sequence[str], flags: Sequence[str], console: Console) -> int:
    """Runs benchmarks with these flags; returns how many failed. A failure does not end the others."""
    minutes = {name: load(name).minutes for name in names}
    failed = []
    started_s = time.monotonic()
    for place, name in enumerate(names):
        left = sum(minutes[other] for other in names[place:])
        spent = (time.monotonic() - started_s) / 60
        console.rule(f"{place + 1} of {len(names)}: {name}; {spent:.0f} minutes so far, some {left:.0f} more")
        if subprocess.run(module_command(f"bench.{name}", *flags), check=False).returncode:
            failed.append(name)
    if failed:
        console.print(f"[red]failed, or missed a bar: {', '.join(failed)}[/red]")
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help="(all)")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--bars", action="store_true", help="only show the bars of the last results")
    parser.add_argument("--quick", action="store_true", help="fewer cells and turns")
    parser.add_argument("--commit-results", action="store_true", help="write the JSON that the pages show")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    asked = parser.parse_args()
    console = Console(width=170)
    if asked.list:
        console.print(listing())
        return 0
    flags = [f"--{name.replace('_', '-')}" for name in ("quick", "commit_results", "check") if getattr(asked, name)]
    failed = 0 if asked.bars else run_all(asked.names or NAMES, flags, console)
    folder = COMMITTED if asked.commit_results or asked.bars else Path("out")
    for name, bars in bars_in(folder).items():
        console.print(f"[bold]{name}[/bold]")
        console.print(table_of(bars))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
