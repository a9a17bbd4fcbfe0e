"""`python -m tests.writers`: folders that packages of others write, read by specdec.

compressed-tensors, in an environment of its own that is made once, writes a tiny Llama in every format that specdec
reads from it, and its weights as it decompresses them again. specdec's reader must give the same weights, bit for bit
after the one rounding to bfloat16 that the package does, and hold them packed. Prints a table; ends with 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from specdec.engine.loading.folder_files import WEIGHTS_FILE
from specdec.engine.loading.model_folder import stored_tensors
from specdec.engine.loading.schemes import read_scheme
from specdec.engine.loading.stored import PackedFolder
from tests.support.environments import python_of

PACKAGES = ("compressed-tensors==0.20.0", "torch==2.13.0", "transformers==5.23.0")
SCRIPT = Path(__file__).parent / "scripts" / "compressed_tensors_write.py"


def read_weights(folder: Path) -> PackedFolder:
    """The packed weights of a folder without a tokenizer. Raises ModelRefused."""
    config = folder / "config.json"
    scheme = read_scheme(config, json.loads(config.read_text(encoding="utf-8")))
    assert scheme is not None
    return scheme.weights(stored_tensors([folder / WEIGHTS_FILE]))


def difference(folder: Path, name: str) -> str:
    """What is wrong with the reading of a folder, in one line; empty if nothing is."""
    expected = load_file(folder / f"{name}.safetensors")
    found = read_weights(folder / name)
    for key, weight in expected.items():
        if not found.is_packed(key):
            return f"{key} is not held packed"
        if not torch.equal(found.packed(key).dense(), found.dense(key)):
            return f"{key} is not the same packed and unpacked"
        if not torch.equal(found.dense(key).to(weight.dtype), weight):
            return f"{key} differs"
    return "" if expected else "the package decompressed no weight"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes and reads the folders; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.writers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--environments", type=Path, default=Path("out/clients"), help="folder of the environments (%(default)s)"
    )
    options = parser.parse_args(arguments)
    python = python_of(PACKAGES, options.environments)
    with tempfile.TemporaryDirectory() as folder:
        told = json.dumps({"folder": folder})
        done = subprocess.run([python, SCRIPT], input=told, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stderr)
            return 1
        report = json.loads(done.stdout.splitlines()[-1])
        table = Table(f"folder by compressed-tensors {report['version']}", "result")
        results = {name: failed or difference(Path(folder), name) for name, failed in report["answers"].items()}
    for name, wrong in results.items():
        table.add_row(name, wrong or "equal, packed")
    Console().print(table)
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
