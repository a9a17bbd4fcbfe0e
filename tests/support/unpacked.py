"""A packed model as a folder of dense weights, to measure beside it and for libraries that do not read it packed."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from specdec.engine.loading.folder_files import GENERATION_FILE
from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.transformers_model import read_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_unpacked(name: str, folder: Path) -> Path:
    """Writes the model of a folder, GGUF file or hub id with its weights in bfloat16 and returns `folder`. Raises
    ModelRefused."""
    packed = open_model_folder(name)
    read_weights(name, packed, packed.digest, torch.bfloat16).save_pretrained(folder)
    for file in (*TOKENIZER_FILES, GENERATION_FILE):
        if (packed.path / file).exists():
            shutil.copyfile(packed.path / file, folder / file)
    return folder
