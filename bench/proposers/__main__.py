"""`python -m bench.proposers`: trees beside chains, and the proposers that need no draft model.

`steps`: T(rows, paths) of the deepened target. `trees`, `expected`, `chat`, `heads`, `lost`: see the modules. Variants
take turns prompt by prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.bars import Bar, add_check_flag, as_json, conclude
from bench.pipeline.variants import RULES_DEFAULT
from bench.proposers.chat import measure_chat
from bench.proposers.expected import measure_expected
from bench.proposers.heads import measure_heads
from bench.proposers.lost import measure_lost
from bench.proposers.steps import measure_steps
from bench.proposers.trees import measure_trees
from specdec.errors import SpecdecError

PARTS = {
    "steps": measure_steps,
    "trees": measure_trees,
    "expected": measure_expected,
    "chat": measure_chat,
    "heads": measure_heads,
    "lost": measure_lost,
}


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return int(text)

    return number


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.proposers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS), help="(all)")
    parser.add_argument("--prompts", type=at_least(1), default=40, help="prompts of each kind (%(default)s)")
    parser.add_argument(
        "--rules",
        type=int,
        nargs="+",
        choices=range(len(RULES_DEFAULT)),
        default=[0, 1, 2],
        help="of trees, as bench.pipeline lists them",
    )
    parser.add_argument(
        "--pair",
        choices=["deepened", "widened", "chat"],
        default="deepened",
        help="of trees and expected: the embedded target, deepened or widened, or the chat model (%(default)s)",
    )
    parser.add_argument(
        "--waited-only", action="store_true", help="trees: only plans that wait, whose tokens a step no load changes"
    )
    parser.add_argument(
        "--tuning-prompts", type=at_least(1), default=8, help="for prompt lookup's setting (%(default)s)"
    )
    parser.add_argument("--tokens", type=at_least(16), default=128, help="output tokens of a generation (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    add_check_flag(parser)
    return parser.parse_args()


def main() -> int:
    asked = options()
    console = Console(width=150)
    bars: list[Bar] = []
    written: dict[str, Any] = {"asked": vars(asked) | {"out": ""}}
    try:
        for part in asked.parts:
            tables, own, numbers = PARTS[part](asked, console)
            bars += own
            written[part] = numbers
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / "proposers.json").write_text(json.dumps(written | {"bars": as_json(bars)}, indent=2) + "\n")
            for table in tables if part != "trees" else ():
                console.print(table)
    except SpecdecError as error:
        print(f"proposers: {error}", file=sys.stderr)
        return 1
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
