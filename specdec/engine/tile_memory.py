"""Stable tile sizes remembered between processes, so that only the first load of a shape measures them.

A file in the user's cache folder holds, by a key of everything the measurement depends on, the widths and query tiles
that it found. A remembered entry is used after a spot probe: the least, middle and largest sizes are tried on one row.
A file that cannot be read or written, or a spot probe that fails, costs a full measurement and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from specdec.engine import attention, tile_sizes, tiled_modules
from specdec.engine.attention import CANDIDATE_QUERY_TILES, AttentionShape, probe_query_tiles
from specdec.engine.tile_sizes import ALONE, CANDIDATE_WIDTHS, TileSizes
from specdec.engine.tiled_modules import TiledLinear, distinct_shapes, probe_widths
from specdec.folders import cache_folder

StableTiles: TypeAlias = tuple[TileSizes, tuple[int, ...]]  # row widths, query tiles

FILE_NAME = "stable-tiles.json"
FILE_BYTES_MAX = 1 << 20
ENTRIES_MAX = 256  # of some 200 bytes; the oldest are dropped
# Environment variables by which a user chooses other kernels of the libraries.
LIBRARY_VARIABLES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_")

logger = logging.getLogger("specdec.engine")


def stable_tiles(linears: Sequence[TiledLinear], shape: AttentionShape) -> StableTiles:
    """The row widths and query tiles at which rows are independent, for the thread count in force: remembered ones if a
    spot probe confirms them, else measured and remembered."""
    key = _key(linears, shape)
    entries = _read()
    remembered = _checked(entries.get(key))
    if remembered is not None and _spot_probe(linears, shape, *remembered):
        return remembered
    if remembered is not None:
        logger.warning("remembered tile sizes no longer hold: measuring them again")
    widths, query_tiles = measured = measure(linears, shape)
    entries.pop(key, None)
    _write(entries | {key: {"widths": widths.widths, "query_tiles": query_tiles}})
    return measured


def measure(linears: Sequence[TiledLinear], shape: AttentionShape) -> StableTiles:
    """Measures both on the shapes of a model; a width or tile of 1 alone if no others are stable."""
    return probe_widths(linears), _query_tiles(shape, CANDIDATE_QUERY_TILES) or ALONE


def _query_tiles(shape: AttentionShape, candidates: Sequence[int]) -> tuple[int, ...]:
    group_size = shape.head_count // shape.kv_head_count
    return probe_query_tiles(group_size, shape.head_size, shape.rules, candidates)


def _spot_probe(
    linears: Sequence[TiledLinear], shape: AttentionShape, widths: TileSizes, query_tiles: tuple[int, ...]
) -> bool:
    """Whether the least, middle and largest sizes still agree on one row of every product."""
    few_widths, few_tiles = _ends_and_middle(widths.widths), _ends_and_middle(query_tiles)
    if widths.widths != ALONE and probe_widths(linears, few_widths, row_count=1).widths != few_widths:
        return False
    return query_tiles == ALONE or _query_tiles(shape, few_tiles) == few_tiles


def _ends_and_middle(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}))


def _key(linears: Sequence[TiledLinear], shape: AttentionShape) -> str:
    """SHA-256 of everything that decides which kernels run: processor, libraries, settings, threads, shapes, and the
    code that measures."""
    facts = {
        "processor": _processor(),
        "torch": [torch.__version__, torch.__config__.show(), torch.backends.cpu.get_cpu_capability()],
        "settings": [torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled],
        "variables": sorted(item for item in os.environ.items() if item[0].startswith(LIBRARY_VARIABLES)),
        "threads": torch.get_num_threads(),
        "linears": sorted(map(repr, distinct_shapes(linears))),
        "attention": [shape.head_count, shape.kv_head_count, shape.head_size, sorted(map(repr, shape.rules))],
        "code": [_source_digest(module.__file__) for module in (attention, tile_sizes, tiled_modules)],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _processor() -> str:
    """Model and instruction sets of the processor, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    kept = [line for line in lines if line.startswith(("vendor_id", "model", "stepping", "flags", "Features", "CPU"))]
    return "\n".join([platform.machine(), platform.processor(), *kept])


def _source_digest(file: str | None) -> str:
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _read() -> dict[str, Any]:
    """The entries of the file, oldest first; none if there is no such file or folder, or it holds something else."""
    try:
        file = cache_folder() / FILE_NAME
        if file.stat().st_size > FILE_BYTES_MAX:
            return {}
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _checked(entry: object) -> StableTiles | None:
    """An entry of the file as values, if these are ascending sizes that a measurement could have found."""
    if not isinstance(entry, dict):
        return None

    def sizes(name: str, candidates: Sequence[int]) -> tuple[int, ...]:
        found = entry.get(name)
        is_sound = isinstance(found, list) and found == [size for size in candidates if size in found]
        return tuple(found) if is_sound and found else ()

    widths = sizes("widths", (*ALONE, *CANDIDATE_WIDTHS))
    query_tiles = sizes("query_tiles", CANDIDATE_QUERY_TILES)
    if not query_tiles or not widths or (ALONE[0] in widths and widths != ALONE):
        return None
    return TileSizes(widths), query_tiles


def _write(entries: dict[str, Any]) -> None:
    """Replaces the file in one step; without permission or space the entries are forgotten."""
    kept = dict(list(entries.items())[-ENTRIES_MAX:])
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
            json.dump(kept, file)
        _replace(Path(file.name), folder / FILE_NAME)
    except OSError as error:
        logger.debug("tile sizes are not remembered: %s", error)


def _replace(new: Path, old: Path) -> None:
    try:
        new.replace(old)
    except OSError:
        new.unlink(missing_ok=True)
        raise
