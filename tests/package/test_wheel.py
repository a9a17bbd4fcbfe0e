"""The package as a user installs it: built, installed without a network into an empty environment, run from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hygiene.sources import project_files
from tests.support.copies import copy_project

pytestmark = [pytest.mark.lengthy, pytest.mark.more]
TIMEOUT_S = 300
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@dataclass(frozen=True, slots=True)
class Installation:
    """An environment that holds the wheel and sees the libraries of this one. `added`: names the wheel brought."""

    python: Path
    folder: Path
    added: frozenset[str]

    def run(self, *arguments: str) -> str:
        """Standard output of the installed command, run outside of any checkout."""
        command = [str(self.python.with_name("specdec")), *arguments]
        return run(command, self.folder)


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Standard output of a command that has to succeed."""
    whole = {**ENVIRONMENT, **environment}
    done = subprocess.run(
        command, cwd=folder, env=whole, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of the files of the project, made by `python -m build`: the wheel from the sdist. The
    compiler optimizes nothing, which takes most of the time: the kernels are the same functions."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    copy_project(source)
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("cc") or "false"} "$@" -O0\n', encoding="utf-8")
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    run(command, folder, CC=str(compiler))
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel in a new environment."""
    return install(distributions[0], tmp_path_factory.mktemp("empty"))


def install(wheel: Path, folder: Path) -> Installation:
    """A wheel in a new environment. Its dependencies are those of this one, by a path file: nothing is fetched."""
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    packages = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    before = {path.name for path in packages.iterdir()}
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    run([*pip, "--no-compile", str(wheel)], folder)
    added = frozenset({path.name for path in packages.iterdir()} - before)
    libraries = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (packages / "libraries.pth").write_text("\n".join(libraries), encoding="utf-8")
    return Installation(python, folder, added)


def test_the_wheel_adds_one_name(installed: Installation) -> None:
    """Claim: site-packages gets `specdec` and its metadata, and no name as generic as `coordinator`."""
    assert {name.split("-")[0] for name in installed.added} == {"specdec"}, installed.added


def test_types_and_models_are_inside(installed: Installation) -> None:
    """Claim: the installed package, not the checkout, is imported; it is typed and holds the embedded pair."""
    program = "import specdec.folders as f; print(f.__file__); print(f.EMBEDDED_MODELS)"
    module, models = map(Path, run([str(installed.python), "-c", program], installed.folder).split())
    assert installed.folder in module.parents and (module.parent / "py.typed").is_file()
    assert installed.folder in models.parents
    for name in ("draft", "target"):
        assert (models / name / "model.safetensors").stat().st_size > 1 << 20


def test_the_demo_runs_from_the_wheel(installed: Installation) -> None:
    """Claim: `specdec demo --json` starts the three services of the installed package and finds equal texts."""
    report = json.loads(installed.run("demo", "--json", "--max-tokens", "8"))
    assert report["texts"] and all(text["on_token_ids"] == text["off_token_ids"] for text in report["texts"])


def test_the_other_commands_are_there(installed: Installation) -> None:
    """Claim: serve, generate and bench can be run from the wheel. Conclusive: bench goes on to its address with all
    that it imports, and the prompts that are shipped."""
    assert "--otlp-traces-endpoint" in installed.run("serve", "--help")
    assert "--temperature" in installed.run("generate", "--help")
    asked = [str(installed.python.with_name("specdec")), "bench", "--address", "127.0.0.1:1"]
    refused = subprocess.run(asked, cwd=installed.folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "127.0.0.1:1" in refused.stderr and "Traceback" not in refused.stderr


def test_the_sdist_holds_the_sources(distributions: tuple[Path, Path]) -> None:
    """Claim: the sdist builds by itself: it holds the build file and, as plain files, every package of the wheel; the
    benchmarks and the recipe are in neither, and the embedded models, prompts and the gateway's page in both."""
    with tarfile.open(distributions[1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for package in ("coordinator", "draft_service", "gateway", "target_service"):
        assert f"specdec/{package}/__init__.py" in names
    with zipfile.ZipFile(distributions[0]) as archive:
        inside = set(archive.namelist())
    data = {path for path in project_files() if path.startswith("specdec/embedded/")}
    data |= {f"specdec/{path}" for path in project_files() if path.startswith("gateway/static/")}
    assert len(data) > 25 and data <= names and data <= inside
    strays = {name for name in names | inside if {"bench", "models"} & {*name.split("/")[:2]}}
    assert not strays, strays
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names
    native = {path for path in project_files() if path.startswith("specdec/engine/cpu/native/")}
    assert len(native) > 5 and native <= names


KERNELS = "from specdec.engine.cpu.kernels import kernels; print(kernels())"


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_the_wheel_carries_the_kernels(distributions: tuple[Path, Path], installed: Installation) -> None:
    """Claim: the wheel has the compiled kernels and not their sources, is tagged with a platform and no version of
    Python, and the installed package computes with them. Conclusive: the program runs outside of any checkout."""
    wheel = distributions[0]
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "specdec/engine/cpu/_kernels.so" in names
    assert not [name for name in names if name.endswith((".c", ".h", ".o"))]
    assert run([str(installed.python), "-c", KERNELS], installed.folder).startswith("Kernels(version ")


def test_without_a_compiler_the_package_is_installed(tmp_path: Path) -> None:
    """Claim: where the compiler fails, the wheel is built and installed without the kernels, and the engine goes on
    without them, which one line says."""
    source, folder = tmp_path / "source", tmp_path / "dist"
    copy_project(source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    assert "no native kernels" in run(command, tmp_path, CC="false")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    installation = install(wheel, tmp_path / "empty")
    assert run([str(installation.python), "-c", KERNELS], tmp_path) == "None\n"
