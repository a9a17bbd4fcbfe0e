"""Each rank's part of each weight, from the products of a model that has no weights yet.

A product that reads the hidden states is cut along its outputs, one that returns to them along its inputs, attention
between heads; several ranks hold the same key and value head if there are fewer heads than ranks. The vocabulary is cut
alike for the embedding and the output layer, so that both can be one tensor; every rank holds all other weights whole.
What the weights are made of, dense or packed, is the loader's: it cuts either (`loading.weights.Cut`). A model that
cannot be cut is refused with the field or the product that prevents it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec.engine.loading.weights import Cut
from specdec.errors import ModelRefused

QUERY, KEY = "num_attention_heads", "num_key_value_heads"
# The concatenated parts of the outputs of an attention projection, by its name in every architecture.
HEAD_PARTS: Mapping[str, tuple[str, ...]] = {
    "q_proj": (QUERY,),
    "k_proj": (KEY,),
    "v_proj": (KEY,),
    "qkv_proj": (QUERY, KEY, KEY),
    "query_key_value": (QUERY,),  # queries, keys and values of one head lie together
    "c_attn": (QUERY, QUERY, QUERY),
}
HEAD_NORMS = {"q_norm": (QUERY,), "k_norm": (KEY,)}
# The number of equal runs of the outputs of an MLP's first products.
RUN_COUNTS: Mapping[str, int] = {
    "gate_proj": 1,
    "up_proj": 1,
    "gate_up_proj": 2,
    "fc1": 1,
    "c_fc": 1,
    "dense_h_to_4h": 1,
}
SUMMED = frozenset(("o_proj", "dense", "down_proj", "fc2", "c_proj", "dense_4h_to_h"))  # cut along their inputs


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
    share = _Share(name, model.config, rank, rank_count)
    products = dict(_products(name, model))
    attentions = {path.rpartition(".")[0] for path in products if path.rpartition(".")[2] in HEAD_PARTS}
    summed = [path for path in products if path.rpartition(".")[2] in SUMMED]
    for path, module in products.items():
        parent, _, attribute = path.rpartition(".")
        inputs_at = 0 if isinstance(module, Conv1D) else 1
        dimension = inputs_at if path in summed else 1 - inputs_at
        size = module.get_parameter("weight").shape[dimension]
        if parent in attentions:
            cut = share.heads(dimension, size, HEAD_PARTS.get(attribute, (QUERY,)))
        else:
            cut = share.evenly(dimension, size, RUN_COUNTS.get(attribute, 1))
        full = f"{model.base_model_prefix}.{path}"
        cuts[f"{full}.weight"] = cut
        if path not in summed and module._parameters.get("bias") is not None:
            cuts[f"{full}.bias"] = Cut(0, cut.ranges, cut.size)
    normed = tuple(_norms_of_all_heads(name, model))
    for path in normed:
        size = len(model.base_model.get_submodule(path).get_parameter("weight"))
        fields = HEAD_NORMS[path.rpartition(".")[2]]
        cuts[f"{model.base_model_prefix}.{path}.weight"] = share.heads(0, size, fields)
    vocabulary = share.vocabulary(len(model.get_input_embeddings().get_parameter("weight")))
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        path = next(path for path, each in model.named_modules() if each is module)
        cuts.update({f"{path}.{kind}": vocabulary for kind, each in module.named_parameters() if each is not None})
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


def _products(name: str, model: transformers.PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yields (path in the base model, product) of every matrix product. Raises ModelRefused for an unknown one."""
    for path, module in model.base_model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            if path.rpartition(".")[2] not in (*HEAD_PARTS, *RUN_COUNTS, *SUMMED):
                raise ModelRefused(f"{name}: {path} is a product that ranks cannot split: it has no known name")
            yield path, module


def _norms_of_all_heads(name: str, model: transformers.PreTrainedModel) -> Iterator[str]:
    """Yields the paths in the base model of norms of all heads together; those of each head are whole on every rank.
    Raises ModelRefused for one of another shape."""
    config = model.config
    for path, module in model.base_model.named_modules():
        fields = HEAD_NORMS.get(path.rpartition(".")[2])
        if fields is None:
            continue
        count = getattr(config, fields[0], None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = module.get_parameter("weight").shape
        if shape == (count * head_size,) and count > 1:
            yield path
        elif shape != (head_size,):
            raise ModelRefused(f"{name}: {path} has a weight of shape {list(shape)}, which ranks cannot split")


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
