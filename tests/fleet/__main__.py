"""`python -m tests.fleet`: routing over a fleet on discrete events, with its bars."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from bench.bars import add_check_flag, conclude
from specdec.telemetry.progress import loading_bar
from tests.fleet.proof import bars, measure, table
from tests.fleet.world import Size


def main() -> int:
    """Runs the command; returns 1 where a bar is missed and `--check` was given."""
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description=__doc__)
    for name in ("targets", "drafts", "coordinators"):
        count = getattr(Size(), name)
        parser.add_argument(f"--{name}", type=int, default=count, metavar="COUNT", help=f"{name} (default {count})")
    parser.add_argument("--seed", type=int, default=1, help="of the workload (default 1)")
    add_check_flag(parser)
    asked = parser.parse_args()
    if asked.targets < 2 or min(asked.drafts, asked.coordinators) < 1:
        parser.error("--targets must be at least 2, --drafts and --coordinators at least 1")
    size = Size(asked.targets, asked.drafts, asked.coordinators)
    with loading_bar("fleet") as progress:
        ways = measure(size, asked.seed, progress)
    console = Console()
    console.print(table(ways))
    return conclude(bars(ways), console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
