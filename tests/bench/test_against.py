"""The comparison of two checkouts: what it refuses to compare, and a run of this checkout against itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.against import ROOT, python_of
from specdec.errors import SpecdecError


def test_a_checkout_is_run_by_its_own_environment_or_not_at_all(tmp_path: Path) -> None:
    """Claim: a folder without an environment is refused, and so is one whose environment runs other code, which would
    be compared with itself. Conclusive: the second environment is this test's own interpreter under another name."""
    with pytest.raises(SpecdecError, match="no environment"):
        python_of(tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(SpecdecError, match="install that checkout in it"):
        python_of(tmp_path)


@pytest.mark.more
def test_this_checkout_against_itself(tmp_path: Path) -> None:
    """Claim: both sides are measured in every turn, by every measurement. Conclusive: all counts of turns are compared,
    and every value is a time that a process took, however busy the machine."""
    if not (ROOT / ".venv").is_dir():
        pytest.skip("this checkout has no environment in .venv")
    sizes = ["--turns", "2", "--stream-turns", "1", "--streams", "3", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "bench.against", str(ROOT), *sizes], check=True, timeout=300)
    found = json.loads((tmp_path / "against.json").read_text(encoding="utf-8"))["other_and_this"]
    assert [[len(own) for own in sides] for sides in found.values()] == [[2, 2], [2, 2], [1, 1], [1, 1]]
    assert all(0 < value < 100_000 for sides in found.values() for own in sides for value in own)
