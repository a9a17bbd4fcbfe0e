"""`python -m tests.chaos PROOF`: one proof by fault, with a table of its conditions; exit 1 where one does not hold."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.bars import as_json, conclude
from tests.chaos import proofs


def modules() -> dict[str, Any]:
    """Returns the modules of all proofs by the names of their commands."""
    names = [module.name for module in pkgutil.iter_modules(proofs.__path__)]
    return {name.replace("_", "-"): importlib.import_module(f"{proofs.__name__}.{name}") for name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--list", action="store_true", help="the proofs, one line each")
    commands = parser.add_subparsers(dest="proof", metavar="PROOF")
    known = modules()
    for name, module in known.items():
        first_line = module.__doc__.splitlines()[0]
        own = commands.add_parser(name, help=first_line, description=first_line)
        module.add_options(own)
        own.add_argument("--json", type=Path, metavar="FILE", help="also write the conditions there")
    asked = parser.parse_args(arguments)
    if asked.list or asked.proof is None:
        print("\n".join(f"{name:16} {module.__doc__.splitlines()[0]}" for name, module in known.items()))
        return 0
    console = Console()
    bars = known[asked.proof].prove(asked, console)
    if asked.json:
        asked.json.write_text(json.dumps({"proof": asked.proof, "bars": as_json(bars)}, indent=1) + "\n")
    return conclude(bars, console, is_checked=True)


if __name__ == "__main__":
    sys.exit(main())
