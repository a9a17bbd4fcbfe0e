"""Environments of their own for packages of others, made once each."""

from __future__ import annotations

import re
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path


def environment_name(packages: Sequence[str]) -> str:
    """The folder of the environment of some packages; those that begin with the same one share it."""
    return re.split(r"[\[=]", packages[0])[0]


def python_of(packages: Sequence[str], environments: Path) -> Path:
    """The interpreter of the environment of some packages with versions, below `environments`, which is made if it is
    not there. Raises CalledProcessError."""
    folder = environments / environment_name(packages)
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.is_file() or done.read_text(encoding="utf-8") != " ".join(packages):
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        done.write_text(" ".join(packages), encoding="utf-8")
    return python
