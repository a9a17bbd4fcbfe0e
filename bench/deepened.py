"""A cost-realistic target: the shipped one with more layers whose output projections are zero.

Such a layer computes everything a layer computes and adds nothing, so the model is the same function, to the bit, at
the cost of a deeper one; the draft's guesses and their acceptance stay real. The draft is unchanged: its size beside
this target is that of a draft beside a target worth speculating for.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bench.engine.steps import BLOCK_SIZE, time_step
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.loading.folder_files import MANIFEST_FILE, WEIGHTS_FILE
from specdec.engine.loading.model import load_model
from specdec.engine.transformers_model import TransformersModel
from tests.support.harness import TARGET_MODEL

EXTRA_LAYERS_DEFAULT = 12  # 24 in all: about 18 ms a step with one thread, nearly flat to 8 rows in bfloat16
WIDTH_FACTOR_DEFAULT = 32  # 208 M weights: 45 ms a step, 51 of 9 rows on 8 paths
OUTPUT_PROJECTIONS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
LAYERS = "model.layers."
CONTEXT = 256  # cached tokens before a timed step


def write_deepened(folder: Path, extra_layer_count: int = EXTRA_LAYERS_DEFAULT, source: Path = TARGET_MODEL) -> Path:
    """Writes the model folder and returns it; `source` is a Llama-like model in one weights file.

    The extra layers follow the real ones and repeat their weights in turn, output projections aside.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = load_file(source / WEIGHTS_FILE)
    layer_count = config["num_hidden_layers"]
    for extra in range(extra_layer_count):
        copied = f"{LAYERS}{extra % layer_count}."
        for name in [name for name in weights if name.startswith(copied)]:
            part = name.removeprefix(copied)
            weight = weights[name]
            is_zero = part in OUTPUT_PROJECTIONS
            weights[f"{LAYERS}{layer_count + extra}.{part}"] = torch.zeros_like(weight) if is_zero else weight.clone()
    config["num_hidden_layers"] = layer_count + extra_layer_count
    return _write(folder, config, weights, source)


def write_widened(folder: Path, factor: int = WIDTH_FACTOR_DEFAULT, source: Path = TARGET_MODEL) -> Path:
    """Writes the model with `factor` times as wide hidden layers of its MLPs, the further columns of their output
    projections zero, and returns the folder: the same function but for rounding, whose steps are bounded by reading
    weights, as those of a large model are."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = load_file(source / WEIGHTS_FILE)
    for name, weight in weights.items():
        if ".mlp.down_proj." in name:
            weights[name] = nn.functional.pad(weight, (0, (factor - 1) * weight.shape[1]))
        elif ".mlp." in name:
            weights[name] = weight.repeat(factor, 1)
    config["intermediate_size"] *= factor
    return _write(folder, config, weights, source)


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], source: Path) -> Path:
    """Writes a model folder with the other files of `source`."""
    skipped = shutil.ignore_patterns(MANIFEST_FILE, WEIGHTS_FILE, "config.json")  # the manifest is of other bytes
    shutil.copytree(source, folder, ignore=skipped, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder


def step_times_ms(
    model: TransformersModel, shapes: Sequence[tuple[int, int]], repeats: int
) -> dict[tuple[int, int], float]:
    """Median milliseconds of one forward by (sequences, rows of each), after CONTEXT tokens; shapes take turns."""
    sequences, rows = (max(counts) for counts in zip(*shapes))
    size = (CONTEXT + rows) // BLOCK_SIZE + 1
    tables = [range(1 + index * size, 1 + (index + 1) * size) for index in range(sequences)]
    model.allocate(1 + sequences * size, BLOCK_SIZE)
    for table in tables:
        model.forward(RaggedBatch((Chunk(table, 0, [5] * CONTEXT, 0),)))
    batches = {
        (count, own): RaggedBatch(tuple(Chunk(table, CONTEXT, [7] * own, own) for table in tables[:count]))
        for count, own in shapes
    }
    times_ms: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for _ in range(repeats):
        for shape, batch in batches.items():
            times_ms[shape].append(time_step(model, batch))
    return {shape: statistics.median(times) for shape, times in times_ms.items()}


def load(folder: Path | str, dtype: str, has_stable_rows: bool = True) -> TransformersModel:
    """A model of `transformers`, as a target's or, without stable rows, a draft's.

    Raises ModelRefused for a folder that cannot be used, TypeError for a table model.
    """
    model = load_model(str(folder), dtype, has_stable_rows=has_stable_rows)
    if not isinstance(model, TransformersModel):
        raise TypeError(f"{folder} is no transformers model")
    return model
