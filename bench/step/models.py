"""Models for benchmarks on a CPU: the chat model in its own 4 bits and in other formats, and the deepened target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.step.gguf_file import write_gguf
from specdec.engine.loading.folder_files import WEIGHTS_FILE
from specdec.folders import CHAT_MODEL, gguf_source, read_json
from tests.support.deepened import write_deepened
from tests.support.unpacked import write_unpacked

DENSE, FOUR, EIGHT, FP8, DEEPENED = "chat, bfloat16", "chat, 4 bits", "chat, 8 bits", "chat, FP8", "deepened"
BLOCK, LARGEST = 128, 448  # of FP8: rows and inputs of a scale, and the largest number
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def write_model(name: str, made: Path) -> Path:
    """Returns the folder or GGUF file of a model, which is written below `made` unless it is there. Raises ModelRefused
    or ConfigError."""
    if name == FOUR:
        file = gguf_source(CHAT_MODEL)
        assert file is not None
        return file
    if name == DEEPENED:
        return write_deepened(made)
    dense = write_unpacked(CHAT_MODEL, made / "dense")
    if name == EIGHT:
        return write_gguf(dense, made / "model.gguf", "Q8_0")
    return write_float8(dense, made / "packed") if name == FP8 else dense


def write_float8(folder: Path, made: Path) -> Path:
    """Writes the model of `folder`, which has one weights file, in FP8 by blocks, as the method `fp8` stores it, and
    returns `made`: every matrix that a step multiplies by, the output layer too, which gets a weight of its own."""
    shutil.copytree(folder, made)
    config = read_json(folder / "config.json")
    entry = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    stored = load_file(folder / WEIGHTS_FILE)
    found = {name: weight for name, weight in stored.items() if weight.dim() == 1 or name == EMBEDDING}
    for name, weight in ({OUTPUT: stored[EMBEDDING]} | stored).items():
        if name not in found:
            found[name], found[f"{name}_scale_inv"] = in_blocks(weight)
    save_file(found, made / WEIGHTS_FILE, metadata={"format": "pt"})
    config |= {"tie_word_embeddings": False, "quantization_config": entry}
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight's values [out, in] of float8_e4m3fn and its scales [blocks of out, blocks of in] of float32."""
    rows, width = weight.shape
    blocks = torch.nn.functional.pad(weight.float(), (0, -width % BLOCK, 0, -rows % BLOCK))
    blocks = blocks.view(-(-rows // BLOCK), BLOCK, -(-width // BLOCK), BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp_min(2.0**-100) / LARGEST
    values = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST)
    whole = values.view(scales.shape[0] * BLOCK, -1)[:rows, :width]
    return whole.to(torch.float8_e4m3fn).contiguous(), scales
