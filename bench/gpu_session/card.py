"""What measurements are of: the card, the versions that decide its numbers, and the kernels' sources."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec.engine.cuda.kernels import launch

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "specdec/engine/cuda"


def facts_of(device: torch.device) -> dict[str, Any]:
    """Names the card and the versions. `kernels`: of the sources; `commit` is None outside a git checkout."""
    facts: dict[str, Any] = {
        "card": "a CPU, Triton's interpreter: times mean nothing",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": launch.version(),
        "transformers": transformers.__version__,
        "kernels": digest_of(ROOT / KERNELS),
        "commit": commit_of(ROOT),
    }
    if device.type == "cuda":
        its = torch.cuda.get_device_properties(device)
        facts |= {"card": its.name, "capability": f"{its.major}.{its.minor}", "memory_bytes": its.total_memory}
        facts |= {"multiprocessors": its.multi_processor_count, "l2_bytes": l2_bytes(device)}
    return facts


def l2_bytes(device: torch.device) -> int:
    """Bytes of the second cache; 0 on a CPU."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def digest_of(folder: Path) -> str:
    """The first 12 digits of the SHA-256 of all Python files below a folder, in the order of their paths."""
    whole = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        whole.update(file.read_bytes())
    return whole.hexdigest()[:12]


def commit_of(folder: Path) -> str | None:
    """The commit of a checkout, with `+` if files differ from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"], cwd=folder, capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() or None
