"""Prints the packages that the image of a service installs, one a line: those of pyproject.toml, which stay the only
list. A coordinator runs no model, so its image goes without what only models need.

Used while images are built, where nothing but Python is there: standard library only.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ENGINE = frozenset({"numpy", "safetensors", "torch", "transformers"})  # imported by draft and target only
IMAGES = ("coordinator", "replica", "ray")
NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements(project: Path, image: str) -> list[str]:
    """The requirements of `coordinator`, `replica` (draft and target) or `ray`, as pyproject.toml writes them."""
    content = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    found: list[str] = content["dependencies"]
    if image == "coordinator":
        return [line for line in found if name_of(line) not in ENGINE]
    return found + content["optional-dependencies"]["ray"] if image == "ray" else found


def name_of(requirement: str) -> str:
    """`grpcio` of `grpcio>=1.74`."""
    match = NAME.match(requirement)
    assert match is not None, requirement
    return match.group().lower()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in IMAGES:
        sys.exit(f"usage: requirements.py {'|'.join(IMAGES)}")
    print("\n".join(requirements(Path(__file__).resolve().parent.parent / "pyproject.toml", sys.argv[1])))
