"""A model folder of the Llama class as a GGUF file, for llama.cpp: the same weights in the same type.

Weight matrices are copied bit for bit, those of queries and keys with their rows in llama.cpp's order; the gains of
norms are float32, as llama.cpp wants them. The tokenizer is copied as far as token ids need one: prompts are sent as
ids. Uses the package `gguf` of the extra `bench`, imported here only.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specdec.engine.loading.folder_files import WEIGHTS_FILE
from specdec.errors import ConfigError
from specdec.folders import read_json

ROTATED = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}


def write_gguf(folder: Path, file: Path, kind: str = "BF16") -> Path:
    """Writes the model of `folder`, which has one weights file, and returns `file`. `kind`: the format of its matrices,
    BF16 or one that the package writes.

    Raises ConfigError without the package `gguf`, or for another class.
    """
    if find_spec("gguf") is None:
        raise ConfigError("a GGUF file needs the package gguf: pip install 'specdec[bench]'")
    import gguf

    config = read_json(folder / "config.json")
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ConfigError(f"{folder}: a model of class {config['architectures']} is not written as GGUF")
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    _add_sizes(writer, config)
    _add_tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(folder / WEIGHTS_FILE).items():
        found = names.get_name(name, try_suffixes=(".weight",))
        assert found is not None, name
        for part, heads_key in ROTATED.items():
            if part in name:
                weight = in_pairs(weight, config[heads_key])
        if weight.dim() == 1:
            writer.add_tensor(found, weight.float().numpy())
        else:
            form = gguf.GGMLQuantizationType[kind]
            stored = gguf.quants.quantize(weight.float().numpy(), form)  # bf16 back to what it was
            writer.add_tensor(found, stored, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def in_pairs(weight: torch.Tensor, head_count: int) -> torch.Tensor:
    """The rows of every head in llama.cpp's order, [out, in]: an element stands beside the one that it is rotated with,
    which is half a head further in `transformers`."""
    out_size, in_size = weight.shape
    halves = weight.reshape(head_count, 2, out_size // head_count // 2, in_size)
    return halves.transpose(1, 2).reshape(out_size, in_size).contiguous()


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name("model")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """Byte pairs with GPT-2's splitting, which llama.cpp refuses to load a file without."""
    import gguf

    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    strings = {index: string for string, index in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    strings |= special
    ids = range(config["vocab_size"])
    kinds = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in ids]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([strings.get(index, f"[unused {index}]") for index in ids])
    writer.add_token_types(kinds)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
