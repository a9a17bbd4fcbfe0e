"""Prints the packages that an image installs, as pip's --require-hashes reads them: sections of requirements.lock.

Their source is pyproject.toml: coordinator and gateway run no model, so their images go without what only models need.
The variable TORCH_INDEX_URL names another index of torch, whose files have other hashes: the version alone is pinned
there. Used while images are built, where nothing but Python is there: standard library only.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
LOCK = PROJECT.with_name("requirements.lock")
ENGINE = frozenset({"numpy", "safetensors", "torch", "transformers"})  # imported by draft and target only
SECTION = "# == "
NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements(project: Path, image: str) -> list[str]:
    """The requirements of `coordinator`, `gateway`, `replica` (draft and target) or `ray` (all of these on Ray), as
    pyproject.toml writes them."""
    content = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    found: list[str] = content["dependencies"]
    extras: dict[str, list[str]] = content["optional-dependencies"]
    if image in ("coordinator", "gateway"):
        found = [line for line in found if name_of(line) not in ENGINE]
    added = {"gateway": extras["gateway"], "ray": extras["gateway"] + extras["ray"]}
    return found + added.get(image, [])


def name_of(requirement: str) -> str:
    """`grpcio` of `grpcio>=1.74`."""
    match = NAME.match(requirement)
    assert match is not None, requirement
    return match.group().lower()


def entries(text: str) -> list[str]:
    """The entries of a lock or of a part of it: a package's line with those of its hashes."""
    return re.findall(r"^\w.*\n(?:    .*\n)*", text, re.MULTILINE)


def sections(lock: str) -> dict[str, list[str]]:
    """The entries of every section of a lock, by the section's name."""
    parts = lock.split(f"\n{SECTION}")[1:]
    return {part.partition("\n")[0]: entries(part.partition("\n")[2]) for part in parts}


def printed(lock: str, names: list[str], torch_index: str) -> str:
    """The lines of the named sections for pip; those of torch for `torch_index` if it is not empty."""
    found = sections(lock)
    if torch_index and "torch" in names:
        (torch,) = (entry for entry in found["torch"] if name_of(entry) == "torch")
        found["torch"] = [f"--index-url {torch_index}\n", torch.split(" ")[0] + "\n"]
    return "".join(dict.fromkeys(entry for name in names for entry in found[name]))


if __name__ == "__main__":
    lock = LOCK.read_text(encoding="utf-8")
    if not sys.argv[1:] or not set(sys.argv[1:]) <= sections(lock).keys():
        sys.exit(f"usage: requirements.py {'|'.join(sections(lock))} ...")
    print(printed(lock, sys.argv[1:], os.environ.get("TORCH_INDEX_URL", "")), end="")
