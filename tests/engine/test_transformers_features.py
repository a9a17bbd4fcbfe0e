"""Supported features of architectures, one by one, against `transformers` itself.

The architectures as a whole are in `test_transformers_equality.py`; refusals are in `test_model_folder.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.engine_models import Driver, make_tiny_model, random_tokens
from tests.support.reference import Reference, largest_difference

LOGIT_TOLERANCE = 2e-4  # see test_transformers_equality

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
BY_LAYER = {
    "full_attention": LINEAR | {"rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
SOME_SLIDING = {"use_sliding_window": True, "sliding_window": 24}
FEATURES: list[tuple[str, str, dict]] = [
    ("biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    ("tied", "llama", {"tie_word_embeddings": True}),
    ("all-heads", "llama", {"num_key_value_heads": 4}),
    ("one-key-head", "llama", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112}),
    ("odd-sizes", "llama", {"intermediate_size": 75, "head_dim": 18, "hidden_size": 72}),
    ("rope-linear", "llama", {"rope_parameters": LINEAR}),
    ("rope-llama3", "llama", {"rope_parameters": LLAMA3}),
    ("rope-yarn", "llama", {"rope_parameters": YARN}),
    ("rope-yarn-attention", "qwen3", {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16.0}}),
    ("rope-theta", "qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    ("rope-yarn-part", "phi", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    ("rope-by-layer", "gemma3", {"rope_parameters": BY_LAYER}),
    ("gelu", "llama", {"hidden_act": "gelu"}),
    ("relu", "gpt2", {"activation_function": "relu"}),
    ("gelu-tanh", "gpt2", {"activation_function": "gelu_pytorch_tanh"}),
    ("inverse-layer", "gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("upcast", "gpt2", {"reorder_and_upcast_attn": True}),
    ("inner", "gpt2", {"n_inner": 100}),
    ("later-layers-slide", "qwen2", SOME_SLIDING | {"max_window_layers": 1}),
    ("later-layers-slide", "qwen3", SOME_SLIDING | {"max_window_layers": 2}),
    ("biases-tied", "qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("slide-without-rope", "smollm3", SOME_SLIDING),
    ("window-beyond-a-split", "mistral", {"sliding_window": 150}),
    ("window-of-two", "mistral", {"sliding_window": 2}),
    ("no-window", "mistral", {"sliding_window": None}),
    ("no-caps", "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("window-beyond-a-split", "gemma2", {"sliding_window": 129}),
    ("final-cap", "gemma3", {"final_logit_softcapping": 8.0, "tie_word_embeddings": True}),
    ("cap-not-honoured-there", "gemma3", {"attn_logit_softcapping": 5.0}),  # nor by `transformers`
    ("head-norms", "phi", {"qk_layernorm": True}),
    ("fewer-key-heads", "phi", {"num_key_value_heads": 2}),
    ("part-rotated", "phi3", {"partial_rotary_factor": 0.5, "sliding_window": None}),
    ("one-after-the-other", "gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("all-rotated", "gpt_neox", {"rotary_pct": 1.0}),
    ("no-biases", "starcoder2", {"use_bias": False, "sliding_window": None, "tie_word_embeddings": True}),
    ("biases", "granite", {"attention_bias": True, "mlp_bias": True}),
    ("biases", "olmo2", {"attention_bias": True}),
    ("biases", "cohere", {"attention_bias": True, "tie_word_embeddings": True}),
]


def check_against_transformers(folder: Path, architecture: str) -> None:
    driver, reference = Driver.load(folder), Reference(folder, architecture)
    assert largest_difference(driver, reference, random_tokens(300, 2)) < LOGIT_TOLERANCE
    assert driver.greedy(random_tokens(20, 3), 32) == reference.generate(random_tokens(20, 3), 32)


@pytest.mark.parametrize(
    ("architecture", "overrides"), [case[1:] for case in FEATURES], ids=[f"{case[1]}-{case[0]}" for case in FEATURES]
)
def test_features_equal_transformers(architecture: str, overrides: dict, tmp_path: Path) -> None:
    """Claim: every feature that `check_supported` accepts gives `transformers`' logits and greedy text.

    Source: architectures.py. Conclusive: positions to 300 reach beyond every window and rotary scale of the configs,
    and 32 greedy tokens are compared exactly.
    """
    check_against_transformers(make_tiny_model(tmp_path, architecture, seed=3, **overrides), architecture)


def test_older_spellings_of_a_config_are_understood(tmp_path: Path) -> None:
    """Claim: rotary parameters and layer kinds as older files spell them give `transformers`' answers too.

    Source: the published files of Gemma-3 models. Conclusive: the newer entries are removed from the file, and the
    older ones differ from the defaults.
    """
    folder = make_tiny_model(tmp_path, "gemma3", seed=3)
    file = folder / "config.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    for newer in ("rope_parameters", "layer_types"):
        del entries[newer]
    older = {"rope_theta": 500000.0, "rope_local_base_freq": 5000.0, "sliding_window_pattern": 2}
    entries |= older | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "torch_dtype": "float32"}
    file.write_text(json.dumps(entries), encoding="utf-8")
    check_against_transformers(folder, "gemma3")
