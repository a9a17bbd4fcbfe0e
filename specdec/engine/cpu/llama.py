"""A model of the Llama family as one native call a step (native/step.h), made from the modules that run on kernels.

The call uses the packed weights, norms and tables of these modules as they are, so that both exist beside each other.
A model is known by its parts, never by its architecture's name; and modules and call run the same tokens at loading:
the call serves only where every bit of their hidden states is the same. Else the modules serve.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from ctypes import c_int32
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from specdec.engine.attention import AttentionShape, ScoreRule
from specdec.engine.cpu import arguments, structs
from specdec.engine.cpu.arguments import LayerCache, Rows
from specdec.engine.cpu.kernels import Kernels
from specdec.engine.cpu.llama_parts import ModelParts, UnknownPart, model_parts
from specdec.engine.cpu.step_arguments import StepArguments, StepModel
from specdec.engine.interface import StepAbandoned

logger = logging.getLogger("specdec.engine")

PROBED_TOKENS = 4
PROBED_BLOCK = 16
SumOverRanks = Callable[[Tensor], Tensor]  # a rank's part [count] float32 -> the sum of all ranks' parts, in rank order


@dataclass(frozen=True, slots=True)
class LlamaStep:
    """The result of a call. `is_finite` [rows] bool: whether a row's last hidden state, and its logits, are finite."""

    logits: Tensor  # [logits, vocab] float32
    is_finite: Tensor
    hidden: Tensor | None  # [logits, hidden] of the model's type
    features: Tensor | None  # [rows, feature layers * hidden] of the model's type


class LlamaModel:
    """A model of the family. `struct` is complete but for the caches, which `attach` sets. One thread at a time."""

    def __init__(self, kernels: Kernels, parts: ModelParts, sum_over_ranks: SumOverRanks | None = None):
        self._kernels = kernels
        self._parts = parts
        self._sum_over_ranks = sum_over_ranks
        self._model: StepModel | None = None
        self._failure: BaseException | None = None

    def attach(self, caches: Sequence[LayerCache]) -> None:
        """Sets the layers' caches, for all later steps."""
        for layer, cache in zip(self._parts.layers, caches, strict=True):
            layer.cache = cache.struct
        self._model = StepModel(self._parts.struct, (self._parts, *caches))

    def step(
        self,
        rows: Rows,
        ids: Tensor,
        logit_rows: Tensor,
        is_abandoned: c_int32 | None = None,
        keeps_hidden: bool = False,
        feature_layers: Sequence[int] = (),
    ) -> LlamaStep:
        """Runs a step: ids [..., rows] int64, logit_rows [logits] int64. Without an output layer (a rank's share) the
        logits have no columns. `feature_layers`: see `StepArguments`. Raises StepAbandoned where the flag is set before
        a layer's keys are written."""
        if self._model is None:
            raise RuntimeError("step was called before attach")
        parts = self._parts
        arguments = StepArguments(
            self._model,
            ids,
            logit_rows,
            keeps_hidden=keeps_hidden,
            is_abandoned=is_abandoned,
            exchange=self._exchange if self._sum_over_ranks else None,
            inputs=None if parts.embed is None else parts.embed(ids),
            feature_layers=feature_layers,
        )
        code = self._kernels.step(self._model, rows, arguments)
        if code == structs.ABANDONED:
            raise StepAbandoned
        if code == structs.EXCHANGE_FAILED and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if code != structs.DONE:
            raise MemoryError("no memory for a step's buffers")
        return LlamaStep(arguments.logits, arguments.is_finite, arguments.hidden, arguments.features)

    def _exchange(self, start: Any, count: int) -> int:
        """See sd_exchange."""
        try:
            part = torch.from_numpy(numpy.ctypeslib.as_array(start, (count,)))
            assert self._sum_over_ranks is not None
            part.copy_(self._sum_over_ranks(part))
        except BaseException as error:  # noqa: BLE001  # raised again by `step`: it cannot pass through native code
            self._failure = error
            return 1
        return 0


def llama_model(
    kernels: Kernels,
    base: nn.Module,
    output: nn.Module | None,
    shape: AttentionShape,
    dtype: torch.dtype,
    positions_max: int,
    ids_end: int,
    sum_over_ranks: SumOverRanks | None = None,
) -> LlamaModel | None:
    """Returns the call for a base model whose modules run on kernels; None if it has a part that is not known.

    `output`: None where another computes the logits. `ids_end`: the ids of all steps lie below. A table of embeddings
    that is tied to the output layer is replaced by a lookup in it.
    """
    try:
        probe = Probe(kernels, shape, dtype, min(PROBED_TOKENS, positions_max, ids_end))
        expected = probe.run_modules(base)
        parts = model_parts(base, output, shape, dtype, positions_max, ids_end, probe.rules)
        model = LlamaModel(kernels, parts, sum_over_ranks)
        if not probe.agrees(model, expected):
            raise UnknownPart("its hidden states differ from those of the modules")
    except UnknownPart as unknown:
        logger.info("a step of %s runs module by module: %s", type(base).__name__, unknown)
        return None
    return model


class Probe:
    """A few tokens of one sequence, on which modules and call are compared. In place of a plan it attends for the
    modules, and records the rules of the layers."""

    def __init__(self, kernels: Kernels, shape: AttentionShape, dtype: torch.dtype, count: int):
        self._kernels, self._shape, self._dtype = kernels, shape, dtype
        self.rules: list[ScoreRule] = []
        self.ids = torch.arange(count)
        self._caches: list[LayerCache] = []
        first = numpy.arange(count, dtype=numpy.int32)
        none = numpy.zeros(0, numpy.int32)
        self.rows = kernels.rows(
            block_count=1,
            block_size=PROBED_BLOCK,
            sequence=numpy.zeros(count, numpy.int32),
            position=first,
            slot=first.copy(),
            base=first + numpy.int32(1),
            path_start=numpy.zeros(count + 1, numpy.int64),
            path=none,
            table_start=numpy.array([0, 1], numpy.int64),
            table=numpy.zeros(1, numpy.int32),
        )

    @torch.inference_mode()
    def run_modules(self, base: nn.Module) -> Tensor:
        """Returns the last hidden states of the modules. [tokens, hidden]"""
        self._caches, ids = new_caches(self._shape, self._dtype), self.ids[None]
        hidden: Tensor = base(input_ids=ids, position_ids=ids, use_cache=False, plan=self).last_hidden_state[0]
        return hidden

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, layer: int, rule: ScoreRule) -> Tensor:
        """See `AttentionMetadata`."""
        if layer != len(self.rules):
            raise UnknownPart("its layers do not attend once each, in order")
        self.rules.append(rule)
        self._kernels.write(self._caches[layer], self.rows, keys, values)
        its_rule = arguments.ScoreRule(rule.scaling, rule.softcap or 0.0, rule.window or 0)
        return self._kernels.attend(self._caches[layer], self.rows, its_rule, queries)

    @torch.inference_mode()
    def agrees(self, model: LlamaModel, expected: Tensor) -> bool:
        """Whether the call gives the same bits. Leaves the model without caches."""
        model.attach(new_caches(self._shape, self._dtype))
        hidden = model.step(self.rows, self.ids, self.ids, keeps_hidden=True).hidden
        return hidden is not None and are_same(hidden, expected)


def new_caches(shape: AttentionShape, dtype: torch.dtype) -> list[LayerCache]:
    """Returns caches of one block for a probe, zeroed."""
    sizes = (
        (1, shape.kv_head_count, shape.head_size, PROBED_BLOCK),
        (1, shape.kv_head_count, PROBED_BLOCK, shape.head_size),
    )
    pairs = [[torch.zeros(size, dtype=dtype) for size in sizes] for _ in range(shape.layer_count)]
    return [LayerCache(*pair) for pair in pairs]


def are_same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors of one type have the same bits."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
