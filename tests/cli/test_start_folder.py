"""The folder that a command is started in: its Python files are not of the program, and none of them is run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from specdec.engine.table_model import write_table_model
from specdec.launch.children import python_command
from tests.support.engine_models import make_tiny_model

# Imported by Python's library, by packages of others, and by specdec itself, all after its own first module.
NAMES = (
    "random",
    "secrets",
    "statistics",
    "colorsys",
    "cProfile",
    "grpc",
    "numpy",
    "torch",
    "uvloop",
    "yaml",
    "_pytest",
)
SCRIPT = Path(sys.executable).with_name("specdec")


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with modules of such names, each of which notes that it was run and ends its process."""
    folder = tmp_path / "start"
    (folder / "specdec").mkdir(parents=True)
    for file in (*(f"{name}.py" for name in NAMES), "specdec/__init__.py"):
        (folder / file).write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({file!r})\nraise SystemExit(9)\n")
    return folder


def first_line(command: Sequence[str], folder: Path) -> str:
    """The first line that a command prints when it is started in `folder`; then it is interrupted."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
    return line


@pytest.mark.parametrize("way", ["specdec", pytest.param("python -m", marks=pytest.mark.more)])
def test_serve_runs_no_file_of_the_folder_it_is_started_in(planted: Path, tmp_path: Path, way: str) -> None:
    """Claim: `serve` starts its three services in a folder with modules named as those that they import, and with a
    folder named specdec, and none of these files is run, by the command or by a service.

    Source: children were started by `python -m`, which puts that folder first in the path. Conclusive: each planted
    file leaves a note and ends its process. By `python -m specdec.cli` the folder named specdec is left out: Python
    itself would run it in place of the command.
    """
    for name in ("target", "draft"):
        write_table_model(tmp_path / name, 8, seed=1)
    command = [str(SCRIPT)]
    if way == "python -m":
        command = [sys.executable, "-m", "specdec.cli"]
        (planted / "specdec" / "__init__.py").unlink()
        (planted / "specdec").rmdir()
    models = ["--model", str(tmp_path / "target"), "--draft-model", str(tmp_path / "draft")]
    line = first_line([*command, "serve", "--port", "0", *models], planted)
    assert line.startswith("specdec serves ") and not (tmp_path / "ran").exists()


@pytest.mark.more
def test_ranks_run_no_file_of_the_folder_either(planted: Path, tmp_path: Path) -> None:
    """Claim: the same for the ranks that a target starts, the children of a child."""
    model = make_tiny_model(tmp_path / "model", "llama")
    line = first_line([str(SCRIPT), "target", "--model", str(model), "--port", "0", "-tp", "2"], planted)
    assert line.startswith("target serves on ") and not (tmp_path / "ran").exists()


def test_what_is_in_pythonpath_is_found(planted: Path, tmp_path: Path) -> None:
    """Claim: the user's own PYTHONPATH still holds for every process, also where it names a relative folder."""
    (planted / "chosen").mkdir()
    (planted / "chosen" / "found.py").write_text("print('found')")
    done = subprocess.run(
        python_command("-m", "found"),
        cwd=planted,
        env=os.environ | {"PYTHONPATH": "chosen"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "found\n", done.stderr
