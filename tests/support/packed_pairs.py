"""Models in packed formats, and the shipped pair in them: real texts of packed weights."""

from __future__ import annotations

from pathlib import Path

from specdec.engine.loading.folder_files import MANIFEST_FILE
from tests.support import awq_gptq_folders, compressed_folders
from tests.support.gguf_models import write_model
from tests.support.services import MODELS

COMPRESSED = ("w4-groups", "w8-groups-zeros", "int8-rows", "fp8-even-blocks", "fp8-tensor", "fp8-rows", "mxfp4")
GGUF = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
FORMATS = (*GGUF, *COMPRESSED, *awq_gptq_folders.LAYOUTS)


def write_format(source: Path, folder: Path, name: str) -> Path:
    """Writes a folder's model in a format to FOLDER, or FOLDER.gguf, and returns which."""
    if name in GGUF:
        return write_model(source, folder.with_suffix(".gguf"), name)
    if name in COMPRESSED:
        compressed_folders.pack_folder(source, folder, name)
    else:
        awq_gptq_folders.pack_folder(source, folder, awq_gptq_folders.LAYOUTS[name])
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    return folder


def write_pair(name: str, folder: Path) -> tuple[Path, Path]:
    """Writes the shipped target in a format; returns it and a draft: the shipped one, or, of a GGUF file, which has a
    tokenizer of its own, that in Q8_0."""
    target = write_format(MODELS / "target", folder / "target", name)
    return target, write_format(MODELS / "draft", folder / "draft", "Q8_0") if name in GGUF else MODELS / "draft"
