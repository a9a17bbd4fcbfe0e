"""The shipped pair in packed formats: real texts of packed weights."""

from __future__ import annotations

from pathlib import Path

from specdec.engine.loading.folder_files import MANIFEST_FILE
from tests.support import awq_gptq_folders, compressed_folders
from tests.support.gguf_models import write_model
from tests.support.services import MODELS

COMPRESSED = ("w4-groups", "w8-groups-zeros", "int8-rows", "fp8-even-blocks", "fp8-tensor", "fp8-rows", "mxfp4")
GGUF = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
FORMATS = (*GGUF, *COMPRESSED, *awq_gptq_folders.LAYOUTS)


def write_pair(name: str, folder: Path) -> tuple[Path, Path]:
    """Writes the shipped target in a format; returns it and a draft: the shipped one, or, of a GGUF file, which has a
    tokenizer of its own, that in Q8_0."""
    if name in GGUF:
        target, draft = folder / "target.gguf", folder / "draft.gguf"
        return write_model(MODELS / "target", target, name), write_model(MODELS / "draft", draft, "Q8_0")
    target = folder / "target"
    if name in COMPRESSED:
        compressed_folders.pack_folder(MODELS / "target", target, name)
    else:
        awq_gptq_folders.pack_folder(MODELS / "target", target, awq_gptq_folders.LAYOUTS[name])
    (target / MANIFEST_FILE).unlink()
    return target, MODELS / "draft"
