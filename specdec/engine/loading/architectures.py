"""The supported `transformers` architectures and their supported features.

Supported means: tests compare logits at every position, greedy text in ragged batches and text after rollbacks with
`transformers` itself. Every other architecture is refused by name before any weight is read: a model that runs with
different results is worse than one that does not run. A new architecture is one record here and one entry in those
tests; the attention of its layers is measured by calling them (`attention.measure_shape`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.errors import ModelRefused

# Only angles that depend on the position alone fit a table; "dynamic" and "longrope" change with the text's length.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
SUPPORTED_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")
DERIVED_ACTIVATIONS = {"dense_act_fn"}  # entries that a configuration class writes beside the one it reads
REFUSED = {
    "add_cross_attention": "cross attention",
    "use_bidirectional_attention": "attention to later positions",
    "per_layer_config": "layers of different sizes",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One supported class of `transformers`: its name, its config keys, and its scaling of logits.

    Logits are multiplied by the value of `logit_factor_key`, divided by that of `logit_divisor_key` and capped at that
    of `logit_softcap_key`, where these keys are set; and divided by the root of the hidden size, if `logit_width_key`
    is true. The value of `activation_key` may begin with `gated_prefix`.
    """

    class_name: str
    activation_key: str = "hidden_act"
    activation_default: str = "silu"
    may_rotate_partly: bool = False
    refused_keys: tuple[str, ...] = ()
    logit_factor_key: str | None = None
    logit_divisor_key: str | None = None
    logit_softcap_key: str | None = None
    logit_width_key: str | None = None
    gated_prefix: str = ""
    has_encoder: bool = False


GELU_TANH = "gelu_pytorch_tanh"
SUPPORTED = (
    Architecture("LlamaForCausalLM"),
    Architecture("Qwen2ForCausalLM"),
    Architecture("Qwen3ForCausalLM"),
    Architecture("MistralForCausalLM"),
    Architecture("GemmaForCausalLM", activation_default=GELU_TANH),
    Architecture("Gemma2ForCausalLM", "hidden_activation", GELU_TANH, logit_softcap_key="final_logit_softcapping"),
    Architecture("Gemma3ForCausalLM", "hidden_activation", GELU_TANH, logit_softcap_key="final_logit_softcapping"),
    Architecture("PhiForCausalLM", activation_default="gelu_new", may_rotate_partly=True),
    Architecture("Phi3ForCausalLM", may_rotate_partly=True),
    Architecture("GPTNeoXForCausalLM", activation_default="gelu", may_rotate_partly=True),
    Architecture("Starcoder2ForCausalLM", activation_default=GELU_TANH),
    Architecture("GraniteForCausalLM", logit_divisor_key="logits_scaling"),
    Architecture("SmolLM3ForCausalLM"),
    Architecture("Olmo2ForCausalLM"),
    Architecture("CohereForCausalLM", refused_keys=("use_qk_norm",), logit_factor_key="logit_scale"),
    Architecture("GPT2LMHeadModel", "activation_function", "gelu_new"),
    Architecture(
        "T5ForConditionalGeneration",
        "feed_forward_proj",
        "relu",
        logit_width_key="scale_decoder_outputs",
        gated_prefix="gated-",
        has_encoder=True,
    ),
)


def check_supported(name: str, config: dict[str, Any]) -> Architecture:
    """Returns the architecture. Raises ModelRefused unless it and every feature of the config are supported."""
    architecture = architecture_of(name, config)
    for key, what in REFUSED.items():
        if config.get(key):
            raise ModelRefused(f"{name} asks for {what} ({key}), which is not supported")
    for key in architecture.refused_keys:
        if config.get(key):
            raise ModelRefused(f"{name}: {key} {config[key]!r} is not supported")
    if config.get("is_causal") is False:
        raise ModelRefused(f"{name}: is_causal false is not supported")
    prefix = architecture.gated_prefix
    _check_value(
        name,
        architecture.activation_key,
        config.get(architecture.activation_key, architecture.activation_default),
        SUPPORTED_ACTIVATIONS + (tuple(prefix + each for each in SUPPORTED_ACTIVATIONS) if prefix else ()),
    )
    for key in DERIVED_ACTIVATIONS & config.keys():
        _check_value(name, key, config[key], SUPPORTED_ACTIVATIONS)
    for layer_type in config.get("layer_types") or ():
        _check_value(name, "layer type", layer_type, SUPPORTED_LAYER_TYPES)
    _check_rope(name, config, architecture.may_rotate_partly)
    return architecture


def architecture_of(name: str, config: dict[str, Any]) -> Architecture:
    """Returns the record of a config's architecture. Raises ModelRefused if it is not supported."""
    asked = config.get("architectures")
    if not isinstance(asked, list) or len(asked) != 1:
        raise ModelRefused(f"{name}: config.json names architectures {asked!r}; exactly one is needed")
    for architecture in SUPPORTED:
        if architecture.class_name == asked[0]:
            return architecture
    supported = ", ".join(architecture.class_name for architecture in SUPPORTED)
    own_code = " (its auto_map asks for code from the folder, which is never run)" if "auto_map" in config else ""
    raise ModelRefused(f"{name}: architecture {asked[0]} is not supported{own_code}; supported: {supported}")


def _check_value(name: str, key: str, value: object, supported: tuple[str, ...]) -> None:
    if value not in supported:
        raise ModelRefused(f"{name}: {key} {value!r} is not supported; supported: {', '.join(supported)}")


def _check_rope(name: str, config: dict[str, Any], may_rotate_partly: bool) -> None:
    """Checks one set of rotary parameters, or one for each layer type."""
    ropes = [config.get(key) or {} for key in ("rope_parameters", "rope_scaling")]  # the second one counts, if set
    nested = [value or {} for rope in ropes for key, value in rope.items() if key in SUPPORTED_LAYER_TYPES]
    for parameters in [*ropes, *nested]:
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        _check_value(name, "rope type", rope_type, SUPPORTED_ROPE_TYPES)
        factor = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
        if factor != 1 and not may_rotate_partly:
            raise ModelRefused(f"{name}: a partial_rotary_factor is not supported")
