"""Each rank's part of each weight: from a model's own `tp_plan`, before any weight is read.

Column-wise products are cut along their outputs and row-wise ones along their inputs, attention between heads; several
ranks hold the same key and value head if there are fewer heads than ranks. The vocabulary is cut alike for the
embedding and the output layer, so that both can be one tensor; every rank holds all other weights whole. A model that
cannot be cut is refused with the field that prevents it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec.engine.loading.weights import Cut
from specdec.errors import ModelRefused

COLUMN, ROW = "colwise", "rowwise"
NORM = "norm over all heads"  # ours: weights cut like the heads, sums of squares added over ranks
CUT = (COLUMN, ROW, NORM)
WHOLE = ("replicated_with_grad_allreduce",)  # every rank holds all of it

QUERY, KEY = "num_attention_heads", "num_key_value_heads"
# The concatenated parts of the outputs of an attention projection, by its name in every architecture.
HEAD_PARTS: Mapping[str, tuple[str, ...]] = {
    "q_proj": (QUERY,),
    "k_proj": (KEY,),
    "v_proj": (KEY,),
    "q_norm": (QUERY,),
    "k_norm": (KEY,),
    "qkv_proj": (QUERY, KEY, KEY),
    "query_key_value": (QUERY,),  # queries, keys and values of one head lie together
    "c_attn": (QUERY, QUERY, QUERY),
}
PACKED_COUNTS: Mapping[str, int] = {"gate_up_proj": 2}

# Plans of classes without a plan, or with a plan that computes all attention on every rank.
OWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "GPT2LMHeadModel": {
        "h.*.attn.c_attn": COLUMN,
        "h.*.attn.c_proj": ROW,
        "h.*.mlp.c_fc": COLUMN,
        "h.*.mlp.c_proj": ROW,
    },
    "Olmo2ForCausalLM": {
        "layers.*.self_attn.q_proj": COLUMN,
        "layers.*.self_attn.k_proj": COLUMN,
        "layers.*.self_attn.v_proj": COLUMN,
        "layers.*.self_attn.o_proj": ROW,
        "layers.*.self_attn.q_norm": NORM,
        "layers.*.self_attn.k_norm": NORM,
        "layers.*.mlp.gate_proj": COLUMN,
        "layers.*.mlp.up_proj": COLUMN,
        "layers.*.mlp.down_proj": ROW,
    },
    "Phi3ForCausalLM": {
        "layers.*.self_attn.qkv_proj": COLUMN,
        "layers.*.self_attn.o_proj": ROW,
        "layers.*.mlp.gate_up_proj": COLUMN,
        "layers.*.mlp.down_proj": ROW,
    },
}


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's share of a model: cuts by parameter name, and the modules of the base model whose results are sums
    over ranks, or that norm all heads together. `vocabulary_part` counts the ids of one rank's part of the vocabulary,
    padding included."""

    rank: int
    cuts: Mapping[str, Cut]
    summed: tuple[str, ...]
    normed: tuple[str, ...]
    vocabulary_part: int


def plan_split(name: str, model: transformers.PreTrainedModel, rank: int, rank_count: int) -> Split:
    """Returns the share of one rank. `model` may be on the meta device. Raises ModelRefused with field and value."""
    cuts: dict[str, Cut] = {}
    summed: list[str] = []
    share = _Share(name, model.config, rank, rank_count)
    entries = list(_entries(name, model))
    columns = [path.rpartition(".") for path, _, style in entries if style == COLUMN]
    attentions = {parent for parent, _, attribute in columns if attribute in HEAD_PARTS}
    for path, module, style in entries:
        parent, _, attribute = path.rpartition(".")
        is_row = style == ROW
        inputs_at = 0 if isinstance(module, Conv1D) else 1
        dimension = 0 if style == NORM else inputs_at if is_row else 1 - inputs_at
        size = module.get_parameter("weight").shape[dimension]
        if parent in attentions:
            cut = share.heads(dimension, size, (QUERY,) if is_row else HEAD_PARTS[attribute])
        else:
            cut = share.evenly(dimension, size, 1 if is_row else PACKED_COUNTS.get(attribute, 1))
        full = f"{model.base_model_prefix}.{path}"
        cuts[f"{full}.weight"] = cut
        if is_row:
            summed.append(path)
        elif module._parameters.get("bias") is not None:
            cuts[f"{full}.bias"] = Cut(0, cut.ranges, cut.size)
    vocabulary = share.vocabulary(len(model.get_input_embeddings().get_parameter("weight")))
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        path = next(path for path, each in model.named_modules() if each is module)
        cuts.update({f"{path}.{kind}": vocabulary for kind, each in module.named_parameters() if each is not None})
    normed = tuple(path for path, _, style in entries if style == NORM)
    return Split(rank, cuts, tuple(summed), normed, vocabulary.size)


def fit_attention(model: transformers.PreTrainedModel, rank_count: int) -> None:
    """Sets the rank's head counts on attention modules that do not derive them from the weights."""
    config = model.config
    heads = config.num_attention_heads
    key_heads = getattr(config, KEY, None) or heads
    for module in model.modules():
        if not hasattr(module, "layer_idx") or not hasattr(module, "config"):
            continue
        if hasattr(module, "split_size"):  # GPT-2: the width of queries, keys and values each
            split_size: Any = module.split_size
            vars(module).update(split_size=int(split_size) // rank_count)
        if hasattr(module, "qkv_proj"):  # Phi-3: counts heads by its config and its own attribute
            own = type(config).from_dict(config.to_dict() | {QUERY: heads // rank_count})
            own._attn_implementation = config._attn_implementation
            vars(module).update(config=own, num_key_value_heads=max(1, key_heads // rank_count))


def _entries(name: str, model: transformers.PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields (path in the base model, module, style) of every module that the plan cuts."""
    class_name = type(model).__name__
    plan = OWN_PLANS.get(class_name) or model.config.base_model_tp_plan
    if not plan:
        raise ModelRefused(f"{name}: {class_name} has no tensor-parallel plan, so it cannot be split over ranks")
    patterns = {re.compile(re.escape(key).replace(r"\*", r"\d+")): style for key, style in plan.items()}
    for key, style in plan.items():
        if style not in (*CUT, *WHOLE):
            raise ModelRefused(f"{name}: its plan asks for {style!r} at {key}, which ranks cannot do yet")
    for path, module in model.base_model.named_modules():
        for pattern, style in patterns.items():
            if style in CUT and pattern.fullmatch(path):
                if style != NORM and not isinstance(module, (nn.Linear, Conv1D)):
                    raise ModelRefused(f"{name}: {path} is a {type(module).__name__}, which cannot be split yet")
                yield path, module, style


class _Share:
    """Ranges of one rank; every method raises ModelRefused for an indivisible size."""

    def __init__(self, name: str, config: transformers.PretrainedConfig, rank: int, rank_count: int):
        self._name = name
        self._config = config
        self._rank = rank
        self._rank_count = rank_count

    def heads(self, dimension: int, size: int, fields: tuple[str, ...]) -> Cut:
        """Returns concatenated parts of whole heads; ranks share a key head if there are fewer key heads than ranks."""
        counts = [getattr(self._config, field, None) or getattr(self._config, QUERY) for field in fields]
        head_size = size // sum(counts)
        ranges, start = [], 0
        for field, count in zip(fields, counts):
            if count % self._rank_count == 0:
                own = count // self._rank_count
                first = self._rank * own
            elif field == KEY and self._rank_count % count == 0:
                own = 1
                first = self._rank * count // self._rank_count
            else:
                self._refuse(field, count)
            ranges.append((start + first * head_size, start + (first + own) * head_size))
            start += count * head_size
        return _cut(dimension, ranges)

    def evenly(self, dimension: int, size: int, packed_count: int) -> Cut:
        """Returns an equal part of each of `packed_count` equal runs."""
        run = size // packed_count
        if run % self._rank_count:
            self._refuse("intermediate_size", run)
        own = run // self._rank_count
        starts = [index * run + self._rank * own for index in range(packed_count)]
        return _cut(dimension, [(start, start + own) for start in starts])

    def vocabulary(self, size: int) -> Cut:
        """Returns an equal part, the last ones padded."""
        part = -(-size // self._rank_count)
        start = min(self._rank * part, size)
        return Cut(0, ((start, min(start + part, size)),), part)

    def _refuse(self, field: str, value: int) -> None:
        also = " or divide it" if field == KEY else ""
        raise ModelRefused(
            f"{self._name}: {field} is {value}; to be split over {self._rank_count} ranks "
            f"(--tensor-parallel-size {self._rank_count}) it must be a multiple of that{also}"
        )


def _cut(dimension: int, ranges: list[tuple[int, int]]) -> Cut:
    return Cut(dimension, tuple(ranges), sum(end - start for start, end in ranges))
