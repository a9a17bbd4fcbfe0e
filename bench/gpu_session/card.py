"""What measurements are of: the card, the versions that decide its numbers, and the kernels' sources."""

from __future__ import annotations

import hashlib
import platform
from typing import Any

import torch
import transformers

from bench.runner import ROOT, commit
from specdec.engine.cuda.kernels import launch


def facts_of(device: torch.device) -> dict[str, Any]:
    """Names the card and the versions. `kernels`: the first digits of the SHA-256 of their sources, in the order of
    their paths; `commit` is None outside a git checkout."""
    sources = sorted((ROOT / "specdec/engine/cuda").rglob("*.py"))
    facts: dict[str, Any] = {
        "card": "a CPU, Triton's interpreter: times mean nothing",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": launch.version(),
        "transformers": transformers.__version__,
        "kernels": hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:12],
        "commit": commit() or None,
    }
    if device.type == "cuda":
        its = torch.cuda.get_device_properties(device)
        facts |= {"card": its.name, "capability": f"{its.major}.{its.minor}", "memory_bytes": its.total_memory}
        facts |= {"multiprocessors": its.multi_processor_count, "l2_bytes": l2_bytes(device)}
    return facts


def l2_bytes(device: torch.device) -> int:
    """Bytes of the second cache; 0 on a CPU."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0
