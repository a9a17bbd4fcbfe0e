"""The driver of the native kernels, compiled with a sanitizer, and its runs over files of plans."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.engine.cpu.compile_kernels import SOURCES, compile_kernels, find_compiler
from tests.native.plans import Plan

DRIVER = Path(__file__).with_name("driver.c")
TIMEOUT_S = 600
# Leaks: the pool keeps its threads' memory for as long as the process lives.
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "TSAN_OPTIONS": "halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


@dataclass(frozen=True, slots=True)
class Verdicts:
    """A run of the driver: a line for each plan that it came to; what a sanitizer or the driver reported, or ""."""

    lines: list[str]
    report: str


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver for these instruction sets, under one or more sanitizers."""

    program: Path
    instructions: tuple[str, ...]

    def run(self, plans: Sequence[Plan], instructions: str, file: Path) -> Verdicts:
        """Runs the plans, which it writes to `file`, until the first that is reported."""
        file.write_text("".join(plan.text() for plan in plans), encoding="utf-8")
        done = subprocess.run(
            [self.program, file, instructions],
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        report = done.stderr if done.returncode == 0 else done.stderr or f"ended with code {done.returncode}"
        return Verdicts(done.stdout.splitlines(), report)


def make_driver(
    folder: Path, sanitizers: str, instructions: Sequence[str], sources: Path = SOURCES, optimization: str = "-O1"
) -> Driver:
    """Compiles kernels and driver with these sanitizers (-fsanitize=...). Raises NotCompiled."""
    flags = [optimization, "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    library, program = folder / "kernels.so", folder / "driver"
    lacks = compile_kernels(library, flags, sources, instructions)
    compiler = find_compiler()
    linking = [str(DRIVER), str(library), f"-Wl,-rpath,{folder}", "-o", str(program)]
    compiler.run("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", *flags, f"-I{sources}", *linking)
    return Driver(program, tuple(name for name in instructions if not lacks[name]))
