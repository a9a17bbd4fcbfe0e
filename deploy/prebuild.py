"""Compiles for an image what Triton would compile in C before its first launch on a GPU: python prebuild.py FOLDER.

The module is linked to the library of a GPU's driver, which is mounted into a container when it starts; while it is
compiled here, a library of that name whose functions fail stands for it. The file's name is the SHA-256 digest of the
source, by which `specdec/engine/cuda/kernels/launch.py` knows that it is that of the Triton at hand. Without Triton
FOLDER stays empty.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DRIVER = "libcuda.so.1"


def stand_in(folder: Path, source: str) -> None:
    """Writes a library of the driver's name with all functions that a source in C calls: else the linker drops it."""
    text = folder / "driver.c"
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\()", source)))
    text.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names), encoding="utf-8")
    compiler = os.environ.get("CC") or shutil.which("gcc") or "cc"
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", folder / DRIVER, text], check=True)


def prebuild(folder: Path) -> None:
    """Writes the module to a folder, which is made. Raises if it cannot be compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("triton") is None:
        return
    from triton.backends.nvidia import driver

    source = Path(driver.__file__).with_name("driver.c").read_bytes()
    with tempfile.TemporaryDirectory() as made:
        stand_in(Path(made), source.decode())
        os.environ["TRITON_LIBCUDA_PATH"], os.environ["TRITON_CACHE_DIR"] = made, f"{made}/cache"
        try:
            driver.CudaUtils()
        except ImportError:  # the module is there, the driver is not
            pass
        (module,) = Path(made).glob("cache/*/cuda_utils*.so")
        binary = module.read_bytes()
        if DRIVER.encode() not in binary:
            raise SystemExit(f"{module.name} is not linked to {DRIVER}")
        (folder / f"{hashlib.sha256(source).hexdigest()}.so").write_bytes(binary)


if __name__ == "__main__":
    prebuild(Path(sys.argv[1]))
