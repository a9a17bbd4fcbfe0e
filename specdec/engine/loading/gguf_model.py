"""The model in a GGUF file: its configuration, end tokens and weights, by the names that `transformers` has for them.

Source: llama.cpp's convert_hf_to_gguf.py, whose steps are undone. Every entry of the architecture and every tensor must
be understood: a file that has another one is refused by its name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec.engine.loading.gguf import GgufFile, GgufTensor, Value, read_gguf
from specdec.engine.loading.gguf_formats import FORMATS, dense_weight, packed_weight
from specdec.engine.loading.stored import StoredTensor
from specdec.engine.packed import PackedWeight
from specdec.errors import ModelRefused
from specdec.folders import refuse

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PERMUTED = ("llama",)  # rows of queries and keys: llama.cpp rotates neighbours, `transformers` halves
SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
OTHERS = (
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
    "expert_count",
)
LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
WHOLE = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
LAYER_TENSOR = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_BASE = 10000.0  # where a file names none


class GgufWeights:
    """The weights of a GGUF file: a `PackedFolder`. `config`: the model's checked configuration."""

    def __init__(self, file: Path, config: Mapping[str, Any]):
        self._gguf = read_gguf(file)
        self._heads = {
            "self_attn.q_proj": config["num_attention_heads"],
            "self_attn.k_proj": config["num_key_value_heads"],
        }
        self._names = {parameter_name(file, name): name for name in self._gguf.tensors if name != ROPE_FACTORS}
        self._is_permuted = architecture_of(self._gguf) in PERMUTED
        self.tensors = {name: self._stored(file, self._gguf.tensors[own]) for name, own in self._names.items()}

    @property
    def format(self) -> str:
        kinds = {tensor.format for tensor in self._gguf.tensors.values() if FORMATS[tensor.format].unpack}
        return " ".join(["GGUF", *sorted(kinds)])

    def dense(self, name: str) -> torch.Tensor:
        tensor = self._gguf.tensors[self._names[name]]
        weight = dense_weight(tensor.format, self._gguf.stored(tensor), tensor.shape)
        order = self._order(name, tensor.shape[0])
        return weight if order is None else weight[order]

    def is_packed(self, name: str) -> bool:
        tensor = self._gguf.tensors[self._names[name]]
        return FORMATS[tensor.format].bits > 0 and len(tensor.shape) == 2

    def packed(self, name: str) -> PackedWeight:
        tensor = self._gguf.tensors[self._names[name]]
        weight = packed_weight(tensor.format, self._gguf.stored(tensor), tensor.shape)
        order = self._order(name, tensor.shape[0])
        return weight if order is None else weight.chosen(order)

    def _stored(self, file: Path, tensor: GgufTensor) -> StoredTensor:
        return StoredTensor(file, tensor.format, tensor.shape)

    def _order(self, name: str, row_count: int) -> torch.Tensor | None:
        """Returns the rows of the file in the order of `transformers`; None if that is the file's own."""
        heads = next((count for part, count in self._heads.items() if f".{part}." in name), None)
        if not self._is_permuted or heads is None:
            return None
        return torch.arange(row_count).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def architecture_of(gguf: GgufFile) -> str:
    """Returns the name of the architecture. Raises ModelRefused unless it is one of ARCHITECTURES."""
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise refuse(gguf.path, "general.architecture", name, f"one of {', '.join(ARCHITECTURES)}")
    return name


def parameter_name(file: Path, name: str) -> str:
    """Returns the parameter's name of a tensor. Raises ModelRefused for one that is not known."""
    found = LAYER_TENSOR.fullmatch(name)
    if found and found[2] in LAYER_PARTS:
        return f"model.layers.{int(found[1])}.{LAYER_PARTS[found[2]]}.{found[3]}"
    if name not in WHOLE:
        raise ModelRefused(f"{file}: the tensor {name} is none of the model's")
    return WHOLE[name]


def config_of(gguf: GgufFile) -> dict[str, Any]:
    """Returns the entries of a config.json, not yet checked for their ranges. Raises ModelRefused."""
    kind = architecture_of(gguf)
    own = {key.removeprefix(f"{kind}."): each for key, each in gguf.metadata.items() if key.startswith(f"{kind}.")}
    unknown = sorted(own.keys() - {*SIZES, *HEAD_SIZES, *OTHERS})
    if unknown or own.get("expert_count"):
        name = unknown[0] if unknown else "expert_count"
        raise refuse(gguf.path, f"{kind}.{name}", own[name], "absent: it is not supported")
    embedding = gguf.tensors.get(EMBEDDING)
    if embedding is None:
        raise ModelRefused(f"{gguf.path} has no tensor {EMBEDDING}: it holds no language model")
    config = {name: _integer(gguf, f"{kind}.{key}", own.get(key)) for key, name in SIZES.items()}
    heads = config["num_attention_heads"]
    head_size = _integer(
        gguf, f"{kind}.attention.key_length", own.get("attention.key_length", config["hidden_size"] // heads)
    )
    for key in HEAD_SIZES:
        if own.get(key, head_size) != head_size:
            raise refuse(gguf.path, f"{kind}.{key}", own[key], f"{head_size}, the size of a head")
    key_heads = _integer(gguf, f"{kind}.attention.head_count_kv", own.get("attention.head_count_kv", heads))
    epsilon = _number(gguf, f"{kind}.attention.layer_norm_rms_epsilon", own.get("attention.layer_norm_rms_epsilon"))
    bias = {"attention_bias": any(name.endswith(".attn_q.bias") for name in gguf.tensors)} if kind != "qwen2" else {}
    ids = {f"{each}_token_id": _token(gguf, key) for each, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **config,
        "num_key_value_heads": key_heads,
        "head_dim": head_size,
        "vocab_size": embedding.shape[0],
        "rms_norm_eps": epsilon,
        "rope_parameters": _rope(gguf, kind, own, head_size),
        "tie_word_embeddings": HEAD not in gguf.tensors,
        "dtype": _dtype(gguf),
        **bias,
        **ids,
    }


def end_ids_of(gguf: GgufFile) -> list[int]:
    """Returns the ids that end a text: of the end of a text and of a turn."""
    ids = [_token(gguf, key) for key in ("eos", "eot")]
    return list(dict.fromkeys(one for one in ids if one is not None))


def _dtype(gguf: GgufFile) -> str:
    """The type of products: that of most weights if they are dense, bfloat16 if they are packed."""
    counts: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        counts[tensor.format] += tensor.byte_count
    types = {"F32": "float32", "F16": "float16"}
    return types.get(counts.most_common(1)[0][0], "bfloat16")


def _rope(gguf: GgufFile, kind: str, own: Mapping[str, Value], head_size: int) -> dict[str, Any]:
    """Returns the entries of rotary positions, scaled as the file says."""
    base = _number(gguf, f"{kind}.rope.freq_base", own.get("rope.freq_base", ROPE_BASE))
    scaling = own.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise refuse(gguf.path, f"{kind}.rope.scaling.type", scaling, "none, linear or yarn")
    factors = gguf.tensors.get(ROPE_FACTORS)
    if factors is not None:
        if scaling != "none":
            raise ModelRefused(f"{gguf.path} has the tensor {ROPE_FACTORS} and also {kind}.rope.scaling.type")
        return {"rope_theta": base, **_llama3(gguf, factors, base, head_size)}
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": base}
    factor = _number(gguf, f"{kind}.rope.scaling.factor", own.get("rope.scaling.factor"))
    rope: dict[str, Any] = {"rope_type": scaling, "rope_theta": base, "factor": factor}
    if scaling == "yarn":
        key = "rope.scaling.original_context_length"
        rope["original_max_position_embeddings"] = _integer(gguf, f"{kind}.{key}", own.get(key))
    return rope


def _llama3(gguf: GgufFile, tensor: GgufTensor, base: float, head_size: int) -> dict[str, Any]:
    """Returns the entries of which the converter made its tensor of factors, one for each rotated pair."""
    found = dense_weight(tensor.format, gguf.stored(tensor), tensor.shape).to(torch.float64)
    if found.shape == (head_size // 2,) and bool(found.isfinite().all()) and float(found.max()) > 1:
        factor = round(float(found.max()), 4)  # stored as float32, of a reciprocal
        low, high, length = LLAMA3.values()
        wave = 2 * torch.pi * base ** (torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        smooth = ((length / wave - low) / (high - low)).clamp(0, 1)
        if torch.allclose(found, 1 / ((1 - smooth) / factor + smooth), rtol=1e-5):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    raise ModelRefused(f"{gguf.path}: {ROPE_FACTORS} are not the factors of Llama 3: no other ones are supported")


def _token(gguf: GgufFile, name: str) -> int | None:
    """Returns the id of a special token, if the file has it."""
    key = f"tokenizer.ggml.{name}_token_id"
    return None if gguf.metadata.get(key) is None else _integer(gguf, key, gguf.metadata[key])


def _integer(gguf: GgufFile, key: str, value: object) -> int:
    low = 0 if key.endswith("_id") else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise refuse(gguf.path, key, value, f"an integer from {low} on")
    return value


def _number(gguf: GgufFile, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(gguf.path, key, value, "a number")
    return float(value)
