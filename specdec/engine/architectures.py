"""Which `transformers` architectures are proven here, and with which features.

Proven means: tests compare logits at every position, greedy text in ragged batches and text after rollbacks with
`transformers` itself. Whatever is not on the list is refused by name before any weight is read: a model that runs but
answers differently would be worse than one that does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdec.errors import ModelRefused

PROVEN_ROPE_TYPES = ("default", "linear", "llama3")
PROVEN_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One proven class of `transformers`: its name, the config key of its activation, and further checks."""

    class_name: str
    activation_key: str
    activation_default: str
    check: Callable[[str, dict], None]


def check_proven(name: str, config: dict) -> None:
    """Raises ModelRefused unless the architecture and every feature the config asks for are proven."""
    architecture = _architecture(name, config)
    if config.get("quantization_config") is not None:
        raise ModelRefused(f"{name} is quantized (quantization_config), which is not proven yet")
    activation = config.get(architecture.activation_key, architecture.activation_default)
    if activation not in PROVEN_ACTIVATIONS:
        proven = ", ".join(PROVEN_ACTIVATIONS)
        raise ModelRefused(f"{name}: {architecture.activation_key} {activation!r} is not proven yet; proven: {proven}")
    architecture.check(name, config)


def _architecture(name: str, config: dict) -> Architecture:
    asked = config.get("architectures")
    if not isinstance(asked, list) or len(asked) != 1:
        raise ModelRefused(f"{name}: config.json names architectures {asked!r}; exactly one is needed")
    for architecture in PROVEN:
        if architecture.class_name == asked[0]:
            return architecture
    proven = ", ".join(architecture.class_name for architecture in PROVEN)
    own_code = " (its auto_map asks for code from the folder, which is never run)" if "auto_map" in config else ""
    raise ModelRefused(f"{name}: architecture {asked[0]} is not proven yet{own_code}; proven: {proven}")


def _check_rope(name: str, config: dict) -> None:
    """Only rotary frequencies that do not change with the text's length can be tabled, and of those the proven."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in PROVEN_ROPE_TYPES:
        proven = ", ".join(PROVEN_ROPE_TYPES)
        raise ModelRefused(f"{name}: rope type {rope_type!r} is not proven yet; proven: {proven}")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1:
        raise ModelRefused(f"{name}: a partial_rotary_factor is not proven yet")


def _check_qwen2(name: str, config: dict) -> None:
    _check_rope(name, config)
    layer_types = config.get("layer_types") or []
    if config.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        raise ModelRefused(f"{name}: sliding window attention is not proven yet")


def _check_gpt2(name: str, config: dict) -> None:
    if config.get("add_cross_attention"):
        raise ModelRefused(f"{name}: cross attention is not proven yet")


PROVEN = (
    Architecture("LlamaForCausalLM", "hidden_act", "silu", _check_rope),
    Architecture("Qwen2ForCausalLM", "hidden_act", "silu", _check_qwen2),
    Architecture("GPT2LMHeadModel", "activation_function", "gelu_new", _check_gpt2),
)
