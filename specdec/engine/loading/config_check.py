"""The values of config.json and generation_config.json: one table, by which a folder is checked when it is opened.

An entry that is absent has the default of its architecture in `transformers`; entries that the table does not name
are checked by `transformers`' own types before a weight is read (`fitting`). Spellings with one obvious meaning are
accepted and returned in the usual one: 2048.0 for 2048, "torch.bfloat16" for "bfloat16".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError
from specdec.folders import refuse
from specdec.protocol.limits import PARAMS_STOP_TOKEN_COUNT_MAX, TOKENS_MAX

LAYERS_MAX = 1024
WIDTH_MAX = 1 << 22  # of a layer, and numbers of heads
NUMBER_MAX = 1e12
END_TOKENS_MAX = PARAMS_STOP_TOKEN_COUNT_MAX // 2  # as many again may be a request's own
DTYPES = ("float32", "bfloat16", "float16", "float64")
TABLE_MODEL_TYPE = "specdec_table"  # of the table model (`table_model`), which is no model of `transformers`
RELATIVE_BUCKETS, RELATIVE_DISTANCE = 32, 128  # the defaults of T5
ROPE_ENTRIES = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True, slots=True)
class Field:
    """The entries of some names, of integers or numbers from `low` to `high`; `is_above`: greater than `low`."""

    names: str
    low: float
    high: float
    is_integer: bool = True
    may_be_null: bool = False
    is_above: bool = False

    @property
    def limit(self) -> str:
        """The values it may have, in words."""
        kind = "an integer" if self.is_integer else "a number"
        span = f"{kind} above {self.low:g} and" if self.is_above else f"{kind} from {self.low:g} to"
        at_most = f"at most {self.high:g}" if self.is_above else f"{int(self.high) if self.is_integer else self.high}"
        return f"{span} {at_most}{' or null' if self.may_be_null else ''}"

    def holds(self, value: object) -> bool:
        """Whether an entry may have this value."""
        if value is None:
            return self.may_be_null
        if self.is_integer and whole(value) is None:
            return False
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            return False
        return self.low <= value <= self.high and not (self.is_above and value == self.low)


def positive(names: str, may_be_null: bool = False) -> Field:
    """A number above 0."""
    return Field(names, 0, NUMBER_MAX, False, may_be_null, True)


SIZES = (
    Field("vocab_size max_position_embeddings n_positions", 2, TOKENS_MAX),
    Field("num_hidden_layers n_layer num_layers", 1, LAYERS_MAX),
    Field("num_decoder_layers", 1, LAYERS_MAX, may_be_null=True),
    Field("hidden_size n_embd intermediate_size num_attention_heads n_head", 1, WIDTH_MAX),
    Field("d_model d_kv d_ff num_heads", 1, WIDTH_MAX),
    Field("relative_attention_num_buckets", 4, WIDTH_MAX),
    Field("relative_attention_max_distance", 1, TOKENS_MAX),
    Field("num_key_value_heads head_dim n_inner", 1, WIDTH_MAX, may_be_null=True),
    Field("sliding_window", 1, (1 << 31) - 1, may_be_null=True),
    Field("original_max_position_embeddings", 1, TOKENS_MAX, may_be_null=True),
    Field("bos_token_id pad_token_id", -1, TOKENS_MAX, may_be_null=True),
    Field("decoder_start_token_id forced_bos_token_id", 0, TOKENS_MAX, may_be_null=True),
)
NUMBERS = (
    Field("rms_norm_eps layer_norm_eps layer_norm_epsilon", 0, 1, is_integer=False),
    Field("partial_rotary_factor rotary_pct", 0, 1, is_integer=False, is_above=True),
    positive("rope_theta rope_local_base_freq rotary_emb_base query_pre_attn_scalar"),
    positive("embedding_multiplier attention_multiplier residual_multiplier logits_scaling"),
    positive("logit_scale final_logit_softcapping attn_logit_softcapping", may_be_null=True),
)
ROPE = (
    positive("rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow"),
    positive("attention_factor", may_be_null=True),
    Field("mscale mscale_all_dim", 0, NUMBER_MAX, is_integer=False, may_be_null=True),
    Field("partial_rotary_factor", 0, 1, is_integer=False, is_above=True),
    Field("original_max_position_embeddings", 1, TOKENS_MAX),
)


def by_name(fields: Sequence[Field]) -> Mapping[str, Field]:
    """Returns the field of every name."""
    return {name: field for field in fields for name in field.names.split()}


CONFIG_FIELDS, ROPE_FIELDS = by_name(SIZES + NUMBERS), by_name(ROPE)
TABLE_MODEL_FIELDS = by_name((Field("positions_max", 2, TOKENS_MAX),))


def whole(value: object) -> int | None:
    """Returns an integer, also one written as 2048.0; None for anything else, true and false among it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def checked_config(file: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a config.json of `transformers` with values of the table's types. Raises ModelRefused."""
    checked = checked_fields(file, config, CONFIG_FIELDS)
    _check_kinds(file, checked)
    for name in ROPE_ENTRIES:
        if checked.get(name) is not None:
            checked[name] = _checked_rope(file, name, checked[name])
    for name in {"dtype", "torch_dtype"} & checked.keys():
        if checked[name] is not None:
            checked[name] = _dtype(file, name, checked[name])
    if "eos_token_id" in checked:
        ids = end_ids(file, checked["eos_token_id"])
        checked["eos_token_id"] = list(ids) if isinstance(checked["eos_token_id"], list) else next(iter(ids), None)
    _check_heads(file, checked)
    _check_buckets(file, checked)
    size, pad = checked.get("vocab_size"), checked.get("pad_token_id")
    if size is not None and pad is not None and pad >= size:
        raise refuse(file, "pad_token_id", pad, f"below vocab_size, {size}, or null")
    return checked


def checked_table_config(file: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of the config.json of a table model. Raises ModelRefused."""
    absent = next((name for name in ("positions_max", "end_token_ids") if name not in config), None)
    if absent is not None:
        raise refuse(file, absent, None, "present")
    checked = checked_fields(file, config, TABLE_MODEL_FIELDS)
    return checked | {"eos_token_id": list(end_ids(file, config["end_token_ids"]))}


def checked_fields(
    file: Path, entries: Mapping[str, Any], fields: Mapping[str, Field], prefix: str = ""
) -> dict[str, Any]:
    """Returns the entries, those of the table as integers where the table wants them. Raises ModelRefused."""
    checked = dict(entries)
    for name in fields.keys() & entries.keys():
        field, value = fields[name], entries[name]
        if not field.holds(value):
            raise refuse(file, prefix + name, value, field.limit)
        if field.is_integer and value is not None:
            checked[name] = whole(value)
    return checked


def end_ids(file: Path, value: object) -> tuple[int, ...]:
    """Returns the ids of an eos_token_id, one, a list or null, in their order. Raises ModelRefused."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = [whole(one) for one in values]
    if any(one is None or not 0 <= one <= TOKENS_MAX for one in ids) or len(set(ids)) > END_TOKENS_MAX:
        limit = f"a token id from 0 to {TOKENS_MAX}, a list of at most {END_TOKENS_MAX} different ones, or null"
        raise refuse(file, "eos_token_id", value, limit)
    return tuple(dict.fromkeys(one for one in ids if one is not None))


def served_positions(name: str, own: int, asked: int | None) -> int:
    """Returns the positions that a model with `own` ones is loaded for: those asked for, else all. Raises ConfigError
    if it has fewer."""
    if asked is not None and asked > own:
        raise ConfigError(f"--max-model-len is {asked}; {name} has {own} positions")
    return asked or own


def _check_kinds(file: Path, config: Mapping[str, Any]) -> None:
    """Checks the entries that are no numbers and that specdec reads itself."""
    model_type, ties, layer_types = (config.get(name) for name in ("model_type", "tie_word_embeddings", "layer_types"))
    if model_type is not None and not isinstance(model_type, str):
        raise refuse(file, "model_type", model_type, "a string")
    if "tie_word_embeddings" in config and not isinstance(ties, bool):
        raise refuse(file, "tie_word_embeddings", ties, "true or false")
    if layer_types is not None:
        if not isinstance(layer_types, list) or not all(isinstance(one, str) for one in layer_types):
            raise refuse(file, "layer_types", layer_types, "a list of strings or null")
        count = config.get("num_hidden_layers")
        if count is not None and len(layer_types) != count:
            raise refuse(file, "layer_types", layer_types, f"one for each of the {count} layers")


def _checked_rope(file: Path, name: str, value: object) -> dict[str, Any]:
    """Returns checked rotary parameters: of one kind, or one such object for each type of layer."""
    if not isinstance(value, dict):
        raise refuse(file, name, value, "an object or null")
    checked = checked_fields(file, value, ROPE_FIELDS, f"{name}.")
    for key in ("rope_type", "type"):
        if key in value and not isinstance(value[key], str):
            raise refuse(file, f"{name}.{key}", value[key], "a string")
    for key, entry in value.items():
        if isinstance(entry, dict):
            checked[key] = _checked_rope(file, f"{name}.{key}", entry)
        elif key.endswith("_attention") and entry is not None:
            raise refuse(file, f"{name}.{key}", entry, "an object or null")
    low, high = checked.get("low_freq_factor"), checked.get("high_freq_factor")
    if low is not None and high is not None and low >= high:
        raise refuse(file, f"{name}.low_freq_factor", low, f"below high_freq_factor, {high}")
    return checked


def _dtype(file: Path, name: str, value: object) -> str:
    dtype = value.removeprefix("torch.") if isinstance(value, str) else ""
    if dtype not in DTYPES:
        raise refuse(file, name, value, f"one of {', '.join(DTYPES)}")
    return dtype


def _check_heads(file: Path, config: Mapping[str, Any]) -> None:
    """Checks that heads divide what is divided among them."""
    heads = config.get("num_attention_heads", config.get("n_head"))
    width = config.get("hidden_size", config.get("n_embd"))
    key_heads = config.get("num_key_value_heads")
    if heads and key_heads and heads % key_heads:
        raise refuse(file, "num_key_value_heads", key_heads, f"a divisor of num_attention_heads, {heads}")
    if heads and width and config.get("head_dim") is None and width % heads:
        name = "hidden_size" if "hidden_size" in config else "n_embd"
        raise refuse(file, name, width, f"a multiple of the number of attention heads, {heads}")


def _check_buckets(file: Path, config: Mapping[str, Any]) -> None:
    """Checks that relative positions go beyond those with a bucket of their own, half of all in a decoder."""
    buckets, distance = (config.get(f"relative_attention_{name}") for name in ("num_buckets", "max_distance"))
    exact = (RELATIVE_BUCKETS if buckets is None else buckets) // 2
    if (RELATIVE_DISTANCE if distance is None else distance) <= exact:
        limit = f"above {exact}, half of relative_attention_num_buckets"
        raise refuse(file, "relative_attention_max_distance", distance, limit)
