"""Copies of the project, for tests that build or change it."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.hygiene.sources import ROOT, project_files


def copy_project(folder: Path) -> None:
    """Copies the files of the project into a folder, those that git ignores left out."""
    for path in project_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    for link in (ROOT / "specdec").iterdir():
        if link.is_symlink():
            (folder / "specdec" / link.name).symlink_to(link.readlink())
