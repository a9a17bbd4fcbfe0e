"""Tiny models as GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from specdec.engine.loading.gguf_formats import FORMATS
from tests.support.engine_models import make_tiny_model
from tests.support.gguf_files import plain_stored, write_gguf
from tests.support.k_formats import stored_k

KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}  # blocks of 256


def gguf_name(name: str) -> str:
    path, _, last = name.rpartition(".")
    if path in TOP:
        return f"{TOP[path]}.{last}"
    _, _, layer, part = path.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.{last}"


def permuted(weight: torch.Tensor, head_count: int) -> torch.Tensor:
    """Rows of a llama's queries or keys in llama.cpp's order, as its converter has it."""
    return weight.view(head_count, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def make_tiny_gguf(folder: Path, architecture: str, kind: str, fields: dict | None = None, **overrides: object) -> Path:
    """Writes NAME.gguf in a folder of its own: a tiny model with the matrices of its layers in one format. `fields`:
    further metadata."""
    source = make_tiny_model(folder / "source", architecture, **(WIDE | {"tie_word_embeddings": True} | overrides))
    file = folder / "model" / f"{architecture}.{kind}.gguf"
    file.parent.mkdir()
    return write_model(source, file, kind, {f"{architecture}.rope.freq_base": 5000.0} | (fields or {}))


def write_model(source: Path, file: Path, kind: str, fields: dict | None = None) -> Path:
    """Writes a folder's model as a GGUF file with its matrices in one format, those whose rows are no whole blocks of
    it in Q8_0. `fields`: further metadata."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    architecture = config["model_type"]
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        count = next((count for part, count in heads.items() if part in name), 0)
        weight = permuted(weight, count) if count and architecture == "llama" else weight
        own = kind if weight.shape[-1] % FORMATS[kind].block == 0 else "Q8_0"
        stored = stored_in(own, weight) if weight.dim() == 2 else ("F32", plain_stored(weight.float()))
        tensors[gguf_name(name)] = (stored[0], tuple(weight.shape), stored[1])
    entries = {f"{architecture}.{key}": config[name] for key, name in KEYS.items()}
    entries |= {"general.architecture": architecture}
    return write_gguf(file, entries | tokenizer_fields(source / "tokenizer.json") | (fields or {}), tensors)


def stored_in(kind: str, weight: torch.Tensor) -> tuple[str, bytes]:
    """Returns a format and a weight's bytes in it: those of the `gguf` package, or of `stored_k`."""
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if kind in plain:
        return kind, plain_stored(weight.to(plain[kind]))
    if kind in ("Q4_K", "Q6_K"):
        return kind, stored_k(kind, weight)
    from gguf import GGMLQuantizationType, quants

    return kind, quants.quantize(weight.float().numpy(), GGMLQuantizationType[kind]).tobytes()


def tokenizer_fields(file: Path) -> dict[str, object]:
    """The metadata of a tokenizer.json of byte-level BPE; its first token ends a text."""
    content = json.loads(file.read_text(encoding="utf-8"))
    added = {entry["id"]: (entry["content"], 3 if entry["special"] else 4) for entry in content["added_tokens"]}
    plain = {index: (token, 1) for token, index in content["model"]["vocab"].items()}
    entries = [(plain | added)[index] for index in range(len(plain | added))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in entries],
        "tokenizer.ggml.token_type": [kind for _, kind in entries],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    }
