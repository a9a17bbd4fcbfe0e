"""Which reader the packed weights of a safetensors folder have, by its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specdec.engine.loading.awq_gptq import AWQ, GPTQ, read_awq, read_gptq
from specdec.engine.loading.compressed import COMPRESSED, FP8, read_compressed, read_fp8
from specdec.engine.loading.stored import ENTRY, PackedScheme
from specdec.folders import refuse

READERS: Mapping[str, Callable[[Path, Mapping[str, Any]], PackedScheme]] = {
    AWQ: read_awq,
    COMPRESSED: read_compressed,
    FP8: read_fp8,
    GPTQ: read_gptq,
}


def read_scheme(file: Path, config: Mapping[str, Any]) -> PackedScheme | None:
    """Returns the scheme of a config.json, None if its weights are dense. Raises ModelRefused for another one."""
    entry = config.get(ENTRY)
    if not entry:
        return None
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        limit = f"one of {', '.join(READERS)}: weights that are quantized otherwise are not read"
        raise refuse(file, f"{ENTRY}.quant_method", method, limit)
    return reader(file, entry)
