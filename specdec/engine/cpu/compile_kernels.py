"""Compiles the native kernels into one plain shared library; a command that needs nothing but Python and a compiler.

Each instruction set is a unit of its own, compiled from the same sources with its flags; the library chooses among its
units when it is loaded. A unit that the compiler cannot make is left out. CC in the environment names the compiler,
with flags if need be; else it is the first of cc, gcc and clang.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
LIBRARY = Path(__file__).with_name("_kernels.so")
EXACT = ("-ffp-contract=off", "-fno-fast-math", "-fno-math-errno")  # the last: a root is an instruction, not a call
FLAGS = ("-O3", "-std=c11", *EXACT, "-fvisibility=hidden", "-fPIC", "-pthread")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512")
UNITS: dict[str, dict[str, tuple[str, ...]]] = {  # by the first part of the compiler's target
    "x86_64": {
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx512": AVX512,
        "avx512_bf16": (*AVX512, "-mavx512bf16"),
    },
    "aarch64": {"neon": ()},
    "arm64": {"neon": ()},
}
UNIT = "unit.c"  # compiled for each instruction set; the other sources once, for every processor of the target


class NotCompiled(Exception):
    """A source that the compiler refuses, or no compiler; one line says which."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler and the flags of every source."""

    command: tuple[str, ...]

    def run(self, *arguments: str) -> str:
        """Its output. Raises NotCompiled with the first line that names an error, or else the first it printed."""
        try:
            done = subprocess.run([*self.command, *arguments], capture_output=True, text=True, check=False)
        except OSError as error:
            raise NotCompiled(f"{self.command[0]}: {error.strerror}") from error
        if done.returncode == 0:
            return done.stdout
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        lines = lines or [f"ended with code {done.returncode}"]
        told = next((line for line in lines if "error" in line), lines[0])
        raise NotCompiled(f"{self.command[0]}: {told}")

    def compile(self, source: Path, object_file: Path, flags: Sequence[str]) -> Path:
        """Compiles one source. Raises NotCompiled."""
        self.run(*flags, "-c", str(source), "-o", str(object_file))
        return object_file


def find_compiler() -> Compiler:
    """The C compiler of this machine. Raises NotCompiled."""
    named = shlex.split(os.environ.get("CC", ""))
    found = named or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    if not found:
        raise NotCompiled("no C compiler: cc, gcc or clang")
    return Compiler(tuple(found))


def compile_kernels(
    library: Path = LIBRARY, flags: Sequence[str] = (), sources: Path = SOURCES, only: Sequence[str] = ()
) -> dict[str, str]:
    """Compiles the library, in place of one that is there, with these flags after the usual ones; returns what each
    instruction set lacks, "" for those within. `only`: these instruction sets, if any are named. Raises NotCompiled if
    none can be had: no file is touched then."""
    compiler = find_compiler()
    target = compiler.run("-dumpmachine").split("-")[0].strip()
    units = {name: unit for name, unit in UNITS.get(target, {}).items() if not only or name in only}
    if not units:
        target = target or "an unknown processor"
        raise NotCompiled(f"{compiler.command[0]} compiles for {target}, which has no kernels")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_unit(name: str) -> str:
            unit_flags = [*FLAGS, *flags, *units[name], f"-DUNIT={name}"]
            try:
                compiler.compile(sources / UNIT, Path(folder, f"unit_{name}.o"), unit_flags)
            except NotCompiled as error:
                return str(error)
            return ""

        lacks = dict(zip(units, pool.map(compile_unit, units)))
        within = [name for name in units if not lacks[name]]
        if not within:
            raise NotCompiled("; ".join(lacks.values()))
        common_flags = [*FLAGS, *flags, *(f"-DHAVE_{name}" for name in within)]
        objects = [Path(folder, f"unit_{name}.o") for name in within]
        common = [source for source in sorted(sources.glob("*.c")) if source.name != UNIT]
        objects += [compiler.compile(source, Path(folder, f"{source.stem}.o"), common_flags) for source in common]
        linked = library.with_name(f".{library.name}.{os.getpid()}")
        try:
            compiler.run(*flags, "-shared", "-pthread", "-o", str(linked), *map(str, objects))
            linked.replace(library)  # a process that runs keeps the one it has loaded
        finally:
            linked.unlink(missing_ok=True)
    return lacks


def describe(lacks: dict[str, str]) -> str:
    """One line about a library."""
    left_out = [f"without {name} ({reason})" for name, reason in lacks.items() if reason]
    return "; ".join([f"native kernels compiled for {', '.join(n for n in lacks if not lacks[n])}", *left_out])


def main() -> int:
    """The command; see --help."""
    parser = argparse.ArgumentParser(description="Compile the native kernels of specdec's CPU engine.")
    parser.add_argument("library", nargs="?", type=Path, default=LIBRARY, help="default: where specdec looks for it")
    parser.add_argument("--complete", action="store_true", help="fail if the library or an instruction set is left out")
    options = parser.parse_args()
    try:
        lacks = compile_kernels(options.library)
    except NotCompiled as error:
        print(f"no native kernels, steps on a CPU will be slow: {error}", file=sys.stderr)
        return int(options.complete)
    print(describe(lacks), file=sys.stderr)
    return int(options.complete and any(lacks.values()))


if __name__ == "__main__":
    sys.exit(main())
