"""Tiny models for tests of the engine: randomly initialised, yet with varied text, and a driver without a thread.

Random weights at their usual scale collapse into one repeated token and hide errors, so these are scaled up: greedy
text varies and an early token changes later logits (tests assert both). Folders are complete: config, safetensors,
a byte-level BPE tokenizer; the output layer is wider than the tokenizer, as in released models.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec.engine.cache.kv_cache import BlockTable, KVCache
from specdec.engine.cpu import backend
from specdec.engine.interface import CausalModel, Chunk, RaggedBatch, StepOutput
from specdec.engine.loading.model import load_model

END_TOKEN = "<|end|>"
OUTPUT_PADDING = 13  # output columns without a token: they must never be seen
TRAINING_TEXT = "def total(values): return sum(value for value in values if value is not None)\n" * 8

SIZES = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 112,
    "max_position_embeddings": 512,
}
ALL_HEADS = SIZES | {"num_key_value_heads": 4}
WINDOW = 40  # shorter than most prompts of the tests, and no multiple of a block
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA = SIZES | SLIDING | {"head_dim": 16, "query_pre_attn_scalar": 24}
# By name: the class of `transformers` and the config entries of a tiny model that needs every feature of its kind.
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "qwen2": ("Qwen2ForCausalLM", SIZES),
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 3, "n_head": 4, "n_embd": 64, "n_positions": 512}),
    "qwen3": ("Qwen3ForCausalLM", SIZES | {"head_dim": 24}),
    "mistral": ("MistralForCausalLM", SIZES | {"sliding_window": WINDOW}),
    "gemma": ("GemmaForCausalLM", SIZES | {"head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    "phi": ("PhiForCausalLM", ALL_HEADS | {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3ForCausalLM", SIZES | {"sliding_window": WINDOW, "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoXForCausalLM", ALL_HEADS | {"rotary_pct": 0.25}),
    "starcoder2": ("Starcoder2ForCausalLM", SIZES | {"sliding_window": WINDOW}),
    "granite": (
        "GraniteForCausalLM",
        SIZES
        | {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", SIZES | {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "olmo2": ("Olmo2ForCausalLM", SIZES),
    "cohere": ("CohereForCausalLM", SIZES | {"logit_scale": 0.5}),
}
# Each has what no other of them has: nothing special; Conv1D; windows and norms of heads; heads turned in part.
DIFFERENT = ("llama", "gpt2", "gemma3", "gpt_neox")
# All, of which the others run with the longer tests.
SEVERAL_ARCHITECTURES = [
    pytest.param(name, marks=[pytest.mark.more] * (name not in DIFFERENT)) for name in ARCHITECTURES
]


def with_each(values: Sequence[str], usual: Collection[str] = DIFFERENT) -> list[Any]:
    """Parameters of a test: each architecture with each value, of which those not in `usual` run with the longer
    tests."""
    return [
        pytest.param(name, value, marks=[pytest.mark.more] * (name not in usual))
        for name in ARCHITECTURES
        for value in values
    ]


def model_class(architecture: str) -> type[transformers.PreTrainedModel]:
    """The class of `transformers` behind a name of ARCHITECTURES."""
    return getattr(transformers, ARCHITECTURES[architecture][0])


def make_tiny_model(
    folder: Path, architecture: str, seed: int = 0, vocabulary_size: int = 288, **overrides: object
) -> Path:
    """Writes a model folder of a kind of ARCHITECTURES and returns it; `overrides` are config entries."""
    kind = model_class(architecture)
    width = vocabulary_size + OUTPUT_PADDING
    common = {"vocab_size": width, "eos_token_id": 0, "bos_token_id": 0, "tie_word_embeddings": False}
    config = kind.config_class(**(ARCHITECTURES[architecture][1] | common | overrides))
    torch.manual_seed(seed)
    model = kind(config)
    scale_up(model, seed)
    model.save_pretrained(folder)
    make_tokenizer(vocabulary_size).save(str(folder / "tokenizer.json"))
    return folder


def scale_up(model: transformers.PreTrainedModel, seed: int) -> None:
    """Redraws the weights so that every layer matters: text varies, and early tokens reach late logits."""
    generator = torch.Generator().manual_seed(seed)
    output = model.get_output_embeddings().weight
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            offset = 1.0 if "norm" in name or "ln_" in name else 0.0
            weight.data = (offset if name.endswith("weight") else 0.0) + 0.2 * drawn
        elif weight is output and not model.config.tie_word_embeddings:
            weight.data = drawn * 3 / math.sqrt(weight.shape[1])
        elif "embed" in name or "wte" in name or "wpe" in name:
            weight.data = drawn
        else:
            weight.data = drawn * 1.5 / math.sqrt(model.config.hidden_size)
    model.tie_weights()


def make_tokenizer(vocabulary_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocabulary_size` tokens, at least 257; id 0 is the end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[AddedToken(END_TOKEN, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    missing = vocabulary_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<word{index}>" for index in range(missing)])
    return tokenizer


def random_tokens(count: int, seed: int, vocabulary_size: int = 288) -> list[int]:
    """`count` token ids from 1 on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary_size, (count,), generator=generator).tolist()


def without_kernels() -> AbstractContextManager[object]:
    """In this context models are loaded as where there are no native kernels."""
    return mock.patch.object(backend, "kernels", lambda: None)


def kept(output: StepOutput) -> StepOutput:
    """A step's results, valid beyond the model's next forward."""
    copies = {name: getattr(output, name) for name in ("logits", "hidden", "features")}
    copies = {name: None if own is None else own.clone() for name, own in copies.items()}
    return replace(output, is_finite=tuple(output.is_finite), **copies)


class Driver:
    """Feeds a model through a cache step by step, on the test's own thread. Of the drivers of one model, only the last
    made can be used: a model writes to the storage it allocated last."""

    _last_of: WeakKeyDictionary[CausalModel, Driver] = WeakKeyDictionary()

    def __init__(self, model: CausalModel, block_count: int = 128, block_size: int = 16):
        self.model = model
        self.cache = KVCache(block_count, block_size, model.allocate(block_count, block_size))
        self._last_of[model] = self

    @classmethod
    def load(cls, folder: Path, dtype: str = "float32", block_count: int = 128, block_size: int = 16) -> Driver:
        return cls(load_model(str(folder), dtype), block_count, block_size)

    def open(self, capacity: int = 256, encoder_input: Sequence[int] = ()) -> BlockTable:
        return self.cache.reserve(capacity, encoder_input)

    def step(self, feeds: Sequence[tuple[BlockTable, Sequence[int], int]]) -> StepOutput:
        """One forward of (table, token ids after its cached ones, logit count) each; tables advance."""
        assert self._last_of[self.model] is self, "the model allocated another storage since: load one for each driver"
        for table, token_ids, _ in feeds:
            self.cache.prepare_write(table, table.length + len(token_ids))
        chunks = tuple(
            Chunk(table.block_ids, table.length, ids, count, encoder_length=table.encoder_length)
            for table, ids, count in feeds
        )
        output = kept(self.model.forward(RaggedBatch(chunks)))
        for table, token_ids, _ in feeds:
            self.cache.advance(table, table.length + len(token_ids))
        return output

    def feed(self, table: BlockTable, token_ids: Sequence[int], logit_count: int | None = None) -> torch.Tensor:
        """Logits of the last rows of one sequence fed alone, all of them by default: [rows, vocab] float32."""
        count = len(token_ids) if logit_count is None else logit_count
        return self.step([(table, token_ids, count)]).logits

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Plain greedy decoding, one token a step."""
        table = self.open(len(prompt) + count)
        token_ids = [int(self.feed(table, prompt, 1)[0].argmax())]
        while len(token_ids) < count:
            token_ids.append(int(self.feed(table, token_ids[-1:], 1)[0].argmax()))
        self.cache.release(table)
        return token_ids
