"""Tiny encoder-decoder models, randomly initialised yet with varied text, and `transformers` itself on them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from tests.support.engine_models import OUTPUT_PADDING, make_tokenizer

VOCABULARY_SIZE = 288
START = 3  # the decoder's start token
SIZES = {
    "d_model": 64,
    "d_kv": 12,  # four heads are narrower than the model
    "d_ff": 100,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 40,  # shorter than most texts of the tests
    "n_positions": 256,
}
# By name: the feed-forward layers, and whether embeddings and output layer are one. "as-saved" has the entries that
# transformers 5 writes, the others those of published folders.
KINDS: dict[str, tuple[str, bool]] = {
    "t5": ("relu", True),
    "t5-gated": ("gated-gelu", False),
    "t5-gated-tied": ("gated-silu", True),
    "t5-as-saved": ("relu", False),
}
UNPUBLISHED = ("scale_decoder_outputs", "dense_act_fn", "is_gated_act")


def make_encoder_decoder(folder: Path, kind: str = "t5", seed: int = 0, **overrides: Any) -> Path:
    """Writes the model folder of a kind of KINDS and returns it; `overrides` are config entries."""
    projection, is_tied = KINDS[kind]
    width = VOCABULARY_SIZE + OUTPUT_PADDING
    entries = SIZES | {"vocab_size": width, "decoder_start_token_id": START, "eos_token_id": 0, "pad_token_id": 0}
    entries |= {"feed_forward_proj": projection, "tie_word_embeddings": is_tied} | overrides
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(**entries))
    scale_up(model, seed, is_tied)
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if kind != "t5-as-saved":
        config = {key: value for key, value in config.items() if key not in UNPUBLISHED}
        config["tie_word_embeddings"] = is_tied
        if is_tied:
            del config["tie_word_embeddings"]
    file.write_text(json.dumps(config), encoding="utf-8")
    make_tokenizer(VOCABULARY_SIZE).save(str(folder / "tokenizer.json"))
    return folder


def scale_up(model: T5ForConditionalGeneration, seed: int, is_tied: bool) -> None:
    """Redraws the weights so that every layer, the input and the distances matter."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    if not is_tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if name == "decoder.final_layer_norm.weight" and is_tied:
            pass  # of both signs: else a token's own embedding, in its hidden state, would make it its successor
        elif "norm" in name:
            drawn = 1 + 0.2 * drawn
        elif name == "lm_head.weight":
            drawn *= 3 / math.sqrt(config.d_model)
        elif name == "shared.weight":
            drawn *= 2.5 if is_tied else 1.0
        elif name.endswith(".q.weight"):
            drawn *= 1.5 / math.sqrt(config.d_model * config.d_kv)
        elif name.endswith(".o.weight"):
            drawn *= 4 / math.sqrt(weight.shape[1])
        elif "relative_attention_bias" not in name:
            drawn *= 1.5 / math.sqrt(weight.shape[1])
        weight.data = drawn


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors of a folder's weights, by their names with "__" for dots, or removes those that are None."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_resembling(folder: Path, model: Path) -> Path:
    """A model whose weights are near those of another one: they often agree."""
    shutil.copytree(model, folder)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(3)
    tensors = {
        name: weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


class PairReference:
    """A model folder in `transformers`' own hands, with its own attention in plain matrix products."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32):
        kind = T5ForConditionalGeneration
        self.model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self._hidden_ids = list(range(VOCABULARY_SIZE, VOCABULARY_SIZE + OUTPUT_PADDING))

    @torch.inference_mode()
    def logits(self, encoder_input: list[int], token_ids: list[int]) -> torch.Tensor:
        """Logits of every token of an output, its beginning included: [rows, vocab] float32."""
        inputs = {"input_ids": torch.tensor([encoder_input]), "decoder_input_ids": torch.tensor([token_ids])}
        return self.model(**inputs).logits[0, :, :VOCABULARY_SIZE].float()

    @torch.inference_mode()
    def generate(self, encoder_input: list[int], count: int) -> list[int]:
        """`count` greedy tokens behind the start token."""
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
        inputs = torch.tensor([encoder_input])
        output = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),  # else the padding token would be left out of it
            suppress_tokens=self._hidden_ids,
            **options,
        )
        return output[0, 1:].tolist()
