"""A cost-realistic target: the shipped one with more layers whose output projections are zero.

Such a layer computes everything a layer computes and adds nothing, so the model is the same function, to the bit, at
the cost of a deeper one; the draft's guesses and their acceptance stay real. The draft is unchanged: its size beside
this target is that of a draft beside a target worth speculating for.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from specdec.engine.loading.folder_files import MANIFEST_FILE, WEIGHTS_FILE
from tests.support.harness import TARGET_MODEL

EXTRA_LAYERS_DEFAULT = 12  # 24 in all: about 18 ms a step with one thread, nearly flat to 8 rows in bfloat16
WIDTH_FACTOR_DEFAULT = 32  # 208 M weights: 45 ms a step, 51 of 9 rows on 8 paths
OUTPUT_PROJECTIONS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
LAYERS = "model.layers."


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
