"""The kernels for Arm's processors, compiled for them and run by an emulator, where both are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from specdec.engine.cpu import kernels as binding
from specdec.engine.cpu.compile_kernels import SOURCES, compile_kernels, find_compiler
from tests.native.plans import NANS, sound_plan
from tests.native.sanitized import DRIVER

COMPILER, EMULATOR, LIBRARIES = "aarch64-linux-gnu-gcc", "qemu-aarch64-static", "/usr/aarch64-linux-gnu"
PLANS = 300


def run(folder: Path, emulator: list[str], instructions: str) -> list[str]:
    """The bits of plans, by a driver for one instruction set, compiled here."""
    folder.mkdir()
    assert not any(compile_kernels(folder / "kernels.so", only=[instructions]).values())
    linking = [str(DRIVER), str(folder / "kernels.so"), f"-Wl,-rpath,{folder}", "-o", str(folder / "driver")]
    find_compiler().run("-std=gnu11", "-O1", "-pthread", f"-I{SOURCES}", *linking)
    # A number that is none has another sign on another processor.
    plans = [plan for plan in map(sound_plan, range(PLANS)) if not plan.sizes.flags & NANS]
    (folder / "plans").write_text("".join(plan.text() for plan in plans), encoding="utf-8")
    command = [*emulator, str(folder / "driver"), str(folder / "plans"), instructions]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(plans) > 100
    return lines


@pytest.mark.more
@pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}")
def test_neon_has_the_bits_of_avx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: NEON and AVX2 give the same bits: products, norms, activations, attention and whole steps, of all types.

    Conclusive: a sum over all results of each plan is compared; that of one thread and of several agree in each run.
    """
    found = binding.kernels()
    if found is None or found.instructions == "neon":
        pytest.skip("no AVX2 here")
    here = run(tmp_path / "here", [], "avx2")
    monkeypatch.setenv("CC", COMPILER)
    there = run(tmp_path / "there", [EMULATOR, "-L", LIBRARIES], "neon")
    assert there == here
