"""Folders of packed weights in any layout: their writing, and the check that what is served is what they mean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from specdec.engine.loading.folder_files import WEIGHTS_FILE
from tests.support.engine_models import Driver, random_tokens

Tensors = dict[str, torch.Tensor]


def write_packed(
    source: Path,
    folder: Path,
    entry: dict[str, Any],
    store: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]],
) -> Tensors:
    """Writes the packed copy of a folder and returns all of its weights as they are meant, in float64. `store`: the
    tensors of a weight, by its name and its float64, and what they mean."""
    shutil.copytree(source, folder)
    packed: Tensors = {}
    meant = {}
    for name, weight in load_file(source / WEIGHTS_FILE).items():
        if name.endswith("_proj.weight"):
            parts, meant[name] = store(name, weight.double())
            packed |= parts
        else:
            packed[name], meant[name] = weight, weight.double()
    save_file(packed, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}), encoding="utf-8")
    return meant


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Changes the tensors of a folder's file."""
    parts = load_file(folder / WEIGHTS_FILE)
    change(parts)
    save_file(parts, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def check_served(plain: Path, folder: Path, meant: Tensors, form: str) -> None:
    """Asserts that the logits of a folder at 60 positions are those of `transformers` on the plain one with the meant
    weights, and that the description names the format."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    reference.load_state_dict({name: weight.to(torch.float32) for name, weight in meant.items()})
    driver, tokens = Driver.load(folder, "float32"), random_tokens(60, 1)
    found = driver.feed(driver.open(60), tokens)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, :, :288]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert f"weights {form}" in driver.model.description.libraries
