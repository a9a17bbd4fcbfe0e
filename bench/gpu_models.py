"""Models of known shapes with random weights, made where they run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE

from specdec.engine import attention
from specdec.engine.cuda.backend import DeviceBackend
from specdec.engine.interface import ModelDescription
from specdec.engine.transformers_model import TransformersModel


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama of some size; `positions` bounds the tables of rotary angles."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    is_tied: bool
    positions: int = 8192


ONE_B = Shape("1B", 2048, 16, 32, 8, 8192, 128256, is_tied=True, positions=16384)
EIGHT_B = Shape("8B", 4096, 32, 32, 8, 14336, 128256, is_tied=False, positions=16384)
TINY = Shape("tiny", 128, 3, 4, 2, 256, 1000, is_tied=False, positions=512)
SMALL = Shape("small", 256, 4, 8, 2, 512, 4000, is_tied=False, positions=1024)  # for checks, in float32 too


def plain_model(
    shape: Shape, device: torch.device, dtype: torch.dtype, scale: float = 1.0
) -> transformers.LlamaForCausalLM:
    """The model as `transformers` has it. Weights are drawn anew for each call from one seed.

    `scale` widens the layers' weights: at the usual width random models answer one token over and over.
    """
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=shape.is_tied,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: transformers.LlamaForCausalLM = transformers.LlamaForCausalLM._from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    if scale != 1.0:
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data.mul_(scale)
    model.eval().requires_grad_(False)
    return model


def write_folder(folder: Path, shape: Shape, dtype: torch.dtype) -> Path:
    """Writes a model on a CPU to a folder, with a tokenizer of as many strings; returns the folder."""
    plain_model(shape, torch.device("cpu"), dtype).save_pretrained(folder)
    Tokenizer(BPE({f"t{index}": index for index in range(shape.vocabulary)}, [])).save(str(folder / "tokenizer.json"))
    return folder


def engine_model(
    plain: transformers.LlamaForCausalLM, device: torch.device, graph_sequences_max: int
) -> TransformersModel:
    """The engine's model of a plain one, whose modules it takes over."""
    plain.set_attn_implementation(attention.NAME)
    description = ModelDescription(
        model_digest="random",
        model_name="random",
        vocabulary_size=plain.config.vocab_size,
        positions_max=plain.config.max_position_embeddings,
        end_token_ids=(),
        dtype=str(plain.dtype),
        device=str(device),
        libraries="",
    )
    positions_max = description.positions_max
    backend = DeviceBackend(
        device, plain.dtype, positions_max, with_graphs=True, graph_sequences_max=graph_sequences_max
    )
    return TransformersModel(plain, description, backend)


def build(shape: Shape, device: torch.device, dtype: torch.dtype, graph_sequences_max: int) -> TransformersModel:
    """A shape's model in the engine."""
    return engine_model(plain_model(shape, device, dtype), device, graph_sequences_max)
