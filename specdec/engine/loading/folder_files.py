"""The names of a model folder's files, and the list of their digests."""

from __future__ import annotations

import hashlib
from pathlib import Path

GENERATION_FILE = "generation_config.json"
HUB_FILES = [
    "config.json",
    "additional_chat_templates/*.jinja",
    "chat_template.jinja",
    "draft_vocabulary.json",
    GENERATION_FILE,
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
]
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
GGUF_FILE = "model.gguf"  # of a folder that `gguf_folder` makes
ADAPTER_FILE = "adapter_config.json"
MANIFEST_FILE = "SHA256SUMS"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def write_manifest(folder: Path) -> None:
    """Writes the SHA256SUMS of a folder's model files."""
    files = [file for pattern in HUB_FILES for file in folder.glob(pattern)]
    files = [file for file in files if file.suffix != ".safetensors" or file.name.startswith("model")]
    names = sorted({file.relative_to(folder).as_posix() for file in files})
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / MANIFEST_FILE).write_text("".join(lines), encoding="utf-8")
