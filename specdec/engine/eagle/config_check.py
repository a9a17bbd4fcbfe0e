"""The config.json of an EAGLE-3 head, in the two layouts of the hub: every entry is read, known to change nothing, or
refused by its name.

The layout LlamaForCausalLMEagle3 is a Llama configuration with entries of the head; that of speculators has the Llama
configuration in `transformer_layer_config`. Layer ids are read as vLLM reads them: states that enter the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.engine.eagle.network import LAYERS_SPREAD_MIN, EagleConfig, default_layers
from specdec.engine.loading.architectures import SUPPORTED_ACTIVATIONS, SUPPORTED_ROPE_TYPES
from specdec.engine.loading.config_check import LAYERS_MAX, WIDTH_MAX, checked_config, whole
from specdec.folders import refuse, shown

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
SPECULATORS_TYPE, SPECULATORS_KIND, LLAMA_ENTRY = "speculators_model_type", "eagle3", "transformer_layer_config"
IDS_ENTRY, NESTED_ENTRY = "eagle_aux_hidden_state_layer_ids", "eagle_config"
COUNT_ENTRY = "num_aux_hidden_states"  # that vLLM wants beside layer ids other than three
FEATURE_LAYERS_MAX = 8
# The defaults of `transformers`' Llama.
POSITIONS, EPSILON, THETA, ACTIVATION = 2048, 1e-6, 10000.0, "silu"

REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
LLAMA = (
    *REQUIRED,
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "model_type"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)
# Entries that may only have the value that they have when absent: the network has nothing of the kind.
PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "bias", "use_qk_norm"), (False, None)),
    **dict.fromkeys(("fc_norm", "norm_before_fc", "norm_output", "parallel_drafting"), (False, None)),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "use_sliding_window"), (False, None)),
    **dict.fromkeys(("quantization_config", "compression_config", "sliding_window"), (None,)),
    "use_aux_hidden_state": (True, None),
    "layer_types": (["full_attention"], None),
    "logit_scale": (1, None),
    "partial_rotary_factor": (1, None),
    "is_causal": (True, None),
}
# Entries that change nothing of what the head computes.
IGNORED = frozenset(
    "_name_or_path _attn_implementation_autoset attn_implementation attention_dropout auto_map base_model_ep_plan "
    "base_model_pp_plan base_model_tp_plan begin_suppress_tokens bos_token_id eos_token_id pad_token_id sep_token_id "
    "decoder_start_token_id chunk_size_feed_forward cross_attention_hidden_size dtype torch_dtype "
    "early_stopping embed_requires_grad finetuning_task forced_bos_token_id forced_eos_token_id "
    "has_no_defaults_at_init id2label initializer_range is_decoder label2id max_window_layers output_attentions "
    "output_hidden_states prefix pretraining_tp problem_type pruned_heads return_dict return_dict_in_generate "
    "speculators_version suppress_tokens task_specific_params tf_legacy_loss tie_encoder_decoder tie_word_embeddings "
    "tokenizer_class torchscript transformers_version typical_p use_bfloat16 use_cache bad_words_ids diversity_penalty "
    "do_sample encoder_no_repeat_ngram_size exponential_decay_length_penalty length_penalty max_length min_length "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values "
    "repetition_penalty temperature top_k top_p target_model_type".split()
)
OF_HEAD = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", IDS_ENTRY)
OF_HUB = ("architectures", NESTED_ENTRY, COUNT_ENTRY, *OF_HEAD)
OF_SPECULATORS = ("architectures", SPECULATORS_TYPE, LLAMA_ENTRY, "speculators_config", *OF_HEAD)
OF_NESTED = (IDS_ENTRY, "use_aux_hidden_state", "norm_before_fc")


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a head must belong to. `vocabulary_size`: rows of the target's embeddings; `token_count`: ids it serves."""

    hidden_size: int
    layer_count: int
    vocabulary_size: int
    token_count: int


def head_config(file: Path, entries: Mapping[str, Any], target: TargetFacts) -> EagleConfig:
    """Returns the sizes that a config.json states. Raises ModelRefused, by the field, for a head of another target and
    for anything that `EagleHead` does not compute."""
    is_speculators = SPECULATORS_TYPE in entries
    if is_speculators and entries[SPECULATORS_TYPE] != SPECULATORS_KIND:
        raise refuse(file, SPECULATORS_TYPE, entries[SPECULATORS_TYPE], f'"{SPECULATORS_KIND}"')
    if not is_speculators:
        architectures = entries.get("architectures")
        if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
            raise refuse(file, "architectures", architectures, f"one of {', '.join(ARCHITECTURES)}")
        _check_names(file, entries, (*OF_HUB, *LLAMA))
        return _config(file, _llama(file, entries), entries, target, norms_first=False)
    _check_names(file, entries, OF_SPECULATORS)
    llama = entries.get(LLAMA_ENTRY)
    if not isinstance(llama, dict):
        raise refuse(file, LLAMA_ENTRY, llama, "an object")
    _check_names(file, llama, ("architectures", *LLAMA), f"{LLAMA_ENTRY}.")
    return _config(file, _llama(file, llama), entries, target, norms_first=True)


def _check_names(file: Path, entries: Mapping[str, Any], read: tuple[str, ...], prefix: str = "") -> None:
    """Raises ModelRefused for an entry that is neither read nor without effect."""
    for name, value in entries.items():
        if name in PLAIN:
            if value not in PLAIN[name]:
                raise refuse(file, prefix + name, value, f"{shown(PLAIN[name][0])} or absent")
        elif name not in read and name not in IGNORED:
            raise refuse(file, prefix + name, value, "absent: it is no entry of an EAGLE-3 head that is known")


def _llama(file: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the checked entries of a Llama configuration."""
    for name in REQUIRED:
        if entries.get(name) is None:
            raise refuse(file, name, None, "present")
    found = checked_config(file, {name: entries[name] for name in LLAMA if name in entries})
    if found["num_hidden_layers"] != 1:
        raise refuse(file, "num_hidden_layers", found["num_hidden_layers"], "1")
    if found.get("model_type", "llama") != "llama":
        raise refuse(file, "model_type", found["model_type"], '"llama"')
    if found.get("hidden_act", ACTIVATION) not in SUPPORTED_ACTIVATIONS:
        raise refuse(file, "hidden_act", found["hidden_act"], f"one of {', '.join(SUPPORTED_ACTIVATIONS)}")
    return found


def _config(
    file: Path, llama: dict[str, Any], entries: Mapping[str, Any], target: TargetFacts, norms_first: bool
) -> EagleConfig:
    hidden, heads, vocabulary = llama["hidden_size"], llama["num_attention_heads"], llama["vocab_size"]
    if vocabulary != target.vocabulary_size:
        raise refuse(file, "vocab_size", vocabulary, f"the target's, {target.vocabulary_size}")
    read = _size(file, entries, "target_hidden_size", WIDTH_MAX) or hidden
    if read != target.hidden_size:
        name = "hidden_size" if entries.get("target_hidden_size") is None else "target_hidden_size"
        raise refuse(file, name, read, f"the target's, {target.hidden_size}")
    head_size = llama.get("head_dim") or hidden // heads
    if head_size % 2:
        raise refuse(file, "head_dim", head_size, "even: its halves are rotated")
    norm_before = entries.get("norm_before_residual")
    if norm_before is not None and not isinstance(norm_before, bool):
        raise refuse(file, "norm_before_residual", norm_before, "true or false")
    theta, scaling = _rope(file, llama)
    return EagleConfig(
        hidden_size=hidden,
        target_hidden_size=read,
        aux_layer_ids=_layer_ids(file, entries, target.layer_count),
        head_count=heads,
        kv_head_count=llama.get("num_key_value_heads") or heads,
        head_size=head_size,
        intermediate_size=llama["intermediate_size"],
        activation=llama.get("hidden_act", ACTIVATION),
        norm_epsilon=llama.get("rms_norm_eps", EPSILON),
        rope_theta=theta,
        vocabulary_size=vocabulary,
        draft_vocabulary_size=_size(file, entries, "draft_vocab_size", vocabulary) or vocabulary,
        norm_before_residual=norms_first if norm_before is None else norm_before,
        positions_max=llama.get("max_position_embeddings", POSITIONS),
        rope_scaling=scaling,
    )


def _size(file: Path, entries: Mapping[str, Any], name: str, most: int) -> int | None:
    """Returns an entry that is an integer from 1 to `most`, or absent."""
    value = entries.get(name)
    size = whole(value)
    if value is not None and (size is None or not 1 <= size <= most):
        raise refuse(file, name, value, f"an integer from 1 to {most}, or null")
    return size


def _rope(file: Path, llama: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Returns rope_theta, and the other rotary parameters if there are any."""
    name = "rope_scaling" if llama.get("rope_scaling") else "rope_parameters"
    found = dict(llama.get(name) or {})
    theta = found.pop("rope_theta", None) or llama.get("rope_theta") or THETA
    kind = found.pop("rope_type", found.pop("type", "default"))
    found.pop("type", None)
    if kind not in SUPPORTED_ROPE_TYPES:
        raise refuse(file, f"{name}.rope_type", kind, f"one of {', '.join(SUPPORTED_ROPE_TYPES)}")
    if found.get("partial_rotary_factor", 1) != 1:
        raise refuse(file, f"{name}.partial_rotary_factor", found["partial_rotary_factor"], "1 or absent")
    return float(theta), None if kind == "default" else {"rope_type": kind, **found}


def _layer_ids(file: Path, entries: Mapping[str, Any], layer_count: int) -> tuple[int, ...]:
    """Returns the layers whose inputs are the features."""
    nested = entries.get(NESTED_ENTRY)
    if nested is not None and not isinstance(nested, dict):
        raise refuse(file, NESTED_ENTRY, nested, "an object or null")
    _check_names(file, nested or {}, OF_NESTED, f"{NESTED_ENTRY}.")
    own, within = entries.get(IDS_ENTRY), (nested or {}).get(IDS_ENTRY)
    if own and within and own != within:
        raise refuse(file, f"{NESTED_ENTRY}.{IDS_ENTRY}", within, f"as {IDS_ENTRY} beside it, {own}")
    value = own or within
    if value is None:
        if layer_count < LAYERS_SPREAD_MIN:
            raise refuse(file, IDS_ENTRY, None, f"present for a target of {layer_count} layers")
        ids: tuple[int, ...] = default_layers(layer_count)
    else:
        listed = [whole(one) for one in value] if isinstance(value, list) and len(value) <= LAYERS_MAX else []
        ids = tuple(one for one in listed if one is not None)
        is_ascending = all(first < second for first, second in zip(ids, ids[1:]))
        if not 1 <= len(ids) <= FEATURE_LAYERS_MAX or len(ids) < len(listed) or not is_ascending:
            raise refuse(file, IDS_ENTRY, value, f"a list of 1 to {FEATURE_LAYERS_MAX} ascending layers")
        if ids[0] < 0 or ids[-1] > layer_count:
            raise refuse(file, IDS_ENTRY, value, f"of layers from 0 to the target's {layer_count}")
    count = entries.get(COUNT_ENTRY)
    if count is not None and count != len(ids):
        raise refuse(file, COUNT_ENTRY, count, f"{len(ids)}, the number of layers")
    return ids
