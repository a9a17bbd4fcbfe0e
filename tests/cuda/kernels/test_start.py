"""What Triton needs to start on a GPU, in an environment as small as an image's: no compiler in PATH, no home.

There is no GPU and no driver here: a library with the driver's functions, each of which fails, is what Triton's own
module in C, compiled and loaded for real, is linked to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.prebuild import stand_in
from specdec.engine.cuda.kernels import launch
from tests.hygiene.sources import ROOT
from tests.support.interpreter import needs_triton

pytestmark = needs_triton
COMPILER = shutil.which("gcc") or shutil.which("clang") or ""
# What a process finds: whether kernels can start, asked twice, then the lines of the log.
SCRIPT = """
import logging, pathlib, sys
import torch
from specdec.engine.cuda.kernels import launch
lines = []
logger = logging.getLogger("specdec.engine")
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logger.addHandler(handler)
launch.PREBUILT = pathlib.Path(sys.argv[1])
print(launch.can_start() and launch.can_start(), launch.is_usable(torch.device("cuda")))
print(*lines, sep="\\n")
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a library of the driver's name, and the functions that Triton's module calls."""
    if not COMPILER:
        pytest.skip("no C compiler")
    from triton.backends.nvidia import driver

    folder = tmp_path_factory.mktemp("driver")
    stand_in(folder, Path(driver.__file__).with_name("driver.c").read_text(encoding="utf-8"))
    return folder


def started(driver: Path, cache: Path, prebuilt: Path, **more: str) -> list[str]:
    """Whether kernels can start in a process with an empty PATH and no home, and its lines."""
    variables = {
        "PATH": str(driver / "empty"),
        "HOME": "/dev/null/home",
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_LIBCUDA_PATH": str(driver),
        "LD_LIBRARY_PATH": str(driver),
    }
    command = [sys.executable, "-c", SCRIPT, str(prebuilt)]
    done = subprocess.run(command, cwd=ROOT, env=variables | more, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_kernels_start_with_what_an_image_has(driver: Path, tmp_path: Path) -> None:
    """Claim: with what `deploy/prebuild.py` made where a compiler is, and a writable folder for the cache, Triton
    starts where there is no compiler, no home and nothing in PATH; and so it does with the cache that this filled.

    Conclusive: Triton's own module is loaded; what is missing in the test below is there here, and nothing else.
    """
    prebuilt, cache = tmp_path / "prebuilt", tmp_path / "made" / "cache"
    making = [sys.executable, str(ROOT / "deploy" / "prebuild.py"), str(prebuilt)]
    subprocess.run(making, check=True, env=dict(os.environ) | {"CC": COMPILER}, timeout=300)
    assert [file.suffix for file in prebuilt.iterdir()] == [".so"]
    assert started(driver, cache, prebuilt) == ["True True", ""]
    assert list(cache.glob("*/cuda_utils*.so"))
    assert started(driver, cache, tmp_path / "none") == ["True True", ""]


def test_one_line_says_what_kernels_lack(driver: Path, tmp_path: Path) -> None:
    """Claim: without a compiler, a filled cache or what an image has, and with a cache that cannot be written, torch
    computes and one line says why and what to do; a compiler named by CC suffices."""
    none = tmp_path / "none"
    first, *lines = started(driver, tmp_path / "empty", none)
    assert first == "False False" and len(lines) == 1
    assert lines[0].startswith("our own kernels are not used, torch computes in their place: Failed to find C compiler")
    assert "gcc or clang in PATH, or CC" in lines[0] and f"TRITON_CACHE_DIR, now {tmp_path / 'empty'}" in lines[0]
    first, *lines = started(driver, Path("/dev/null/cache"), none)
    assert first == "False False" and len(lines) == 1
    assert "/dev/null/cache cannot be written (Not a directory): TRITON_CACHE_DIR" in lines[0]
    compiling = {"CC": COMPILER, "PATH": os.environ["PATH"]}  # which finds the assembler and the linker
    assert started(driver, tmp_path / "compiled", none, **compiling) == ["True True", ""]


def test_another_triton_has_no_use_for_what_was_prebuilt(driver: Path, tmp_path: Path) -> None:
    """Claim: a module made for another version of Triton is not taken. Conclusive: one that is no library at all, by
    another name, leads to the line above."""
    (tmp_path / f"{'0' * 64}.so").write_bytes(b"no library")
    assert launch.PREBUILT.name == "prebuilt"
    assert started(driver, tmp_path / "cache", tmp_path)[0] == "False False"
