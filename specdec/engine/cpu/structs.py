"""The structures of native/kernels.h, field for field, as `ctypes` lays them out.

Pointers are addresses: the owner of a structure keeps what it points to alive. Nothing is checked here.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p

SILU, GELU_TANH, GELU_ERF, RELU = range(4)  # SD_SILU ...
INT4, INT8, FLOAT8, NONE = 3, 4, 5, -1  # SD_INT4 ...
ROUND_ONCE, ROUND_FIRST = range(2)  # SD_ROUND_*
DONE, ABANDONED, EXCHANGE_FAILED, NO_MEMORY, OUT_OF_RANGE = range(5)  # what sd_step and sd_draft return

# sd_exchange: the sum over all ranks in place of these floats; called on the calling thread.
Exchange = ctypes.CFUNCTYPE(c_int32, POINTER(c_float), c_int64)


class WeightStruct(ctypes.Structure):
    """sd_weight."""

    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("out_size", c_int64),
        ("in_size", c_int64),
        ("type", c_int32),
        ("scale_type", c_int32),
        ("minimum_type", c_int32),
        ("group", c_int64),
    ]


class NormStruct(ctypes.Structure):
    """sd_norm. Of a layer, a norm whose gain is None is left out."""

    _fields_ = [
        ("gain", c_void_p),
        ("bias", c_void_p),
        ("epsilon", c_float),
        ("rounding", c_int32),
        ("is_centered", c_int32),
    ]


class CacheStruct(ctypes.Structure):
    """sd_cache."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_count", c_int64),
        ("block_size", c_int64),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("type", c_int32),
    ]


class RowsStruct(ctypes.Structure):
    """sd_rows."""

    _fields_ = [
        ("count", c_int64),
        ("sequence", c_void_p),
        ("position", c_void_p),
        ("slot", c_void_p),
        ("base", c_void_p),
        ("path_start", c_void_p),
        ("path", c_void_p),
        ("sequence_count", c_int64),
        ("table_start", c_void_p),
        ("table", c_void_p),
        ("first", c_void_p),
    ]


class RuleStruct(ctypes.Structure):
    """sd_rule."""

    _fields_ = [
        ("scaling", c_float),
        ("softcap", c_float),
        ("window", c_int64),
        ("bias", c_void_p),
        ("bias_reach", c_int64),
    ]


class LayerStruct(ctypes.Structure):
    """sd_layer."""

    _fields_ = [
        ("before_attention", NormStruct),
        ("after_attention", NormStruct),
        ("before_mlp", NormStruct),
        ("after_mlp", NormStruct),
        ("query", NormStruct),
        ("key", NormStruct),
        ("qkv", WeightStruct),
        ("out", WeightStruct),
        ("before_cross", NormStruct),
        ("cross_queries", WeightStruct),
        ("cross_out", WeightStruct),
        ("gate", WeightStruct),
        ("up", WeightStruct),
        ("down", WeightStruct),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("rule", RuleStruct),
        ("cross_rule", RuleStruct),
        ("cache", CacheStruct),
    ]


class ModelStruct(ctypes.Structure):
    """sd_model. `layers`: an array of LayerStruct."""

    _fields_ = [
        ("layers", POINTER(LayerStruct)),
        ("layer_count", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("rotated_size", c_int32),
        ("activation", c_int32),
        ("type", c_int32),
        ("embedding", c_void_p),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("second", NormStruct),
        ("last", NormStruct),
        ("output", WeightStruct),
        ("logit_scale", c_float),
        ("logit_softcap", c_float),
        ("vocabulary_size", c_int64),
        ("positions_max", c_int64),
    ]


class StepStruct(ctypes.Structure):
    """sd_step_arguments."""

    _fields_ = [
        ("ids", c_void_p),
        ("inputs", c_void_p),
        ("logit_rows", c_void_p),
        ("logit_count", c_int64),
        ("logits", c_void_p),
        ("hidden", c_void_p),
        ("is_finite", c_void_p),
        ("is_abandoned", c_void_p),
        ("exchange", Exchange),
        ("seconds", c_void_p),
        ("feature_layers", c_void_p),
        ("feature_count", c_int64),
        ("features", c_void_p),
    ]


class ChainStruct(ctypes.Structure):
    """sd_chain."""

    _fields_ = [
        ("count", c_int64),
        ("before", c_void_p),
        ("table", c_void_p),
        ("packed", c_void_p),
        ("table_count", c_int64),
        ("path", c_void_p),
        ("token_ids", c_void_p),
        ("keys", c_void_p),
        ("temperature", c_double),
        ("scratch", c_void_p),
        ("ids", c_void_p),
        ("shares", c_void_p),
        ("is_finite", c_void_p),
    ]


# By the name in kernels.h.
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "sd_weight": WeightStruct,
    "sd_norm": NormStruct,
    "sd_cache": CacheStruct,
    "sd_rows": RowsStruct,
    "sd_rule": RuleStruct,
    "sd_layer": LayerStruct,
    "sd_model": ModelStruct,
    "sd_step_arguments": StepStruct,
    "sd_chain": ChainStruct,
}
