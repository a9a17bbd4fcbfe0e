"""The attention of a model's layers: what each asks for, and the function through which modules of `transformers` reach
a step's plan.

A layer passes a `ScoreRule`; the plan, a device's own, holds the rows and the positions they attend to. The parameters
of a model's layers are measured by calling the layers once with a recorder in place of a plan. A layer with an unknown
parameter is refused then, when the model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from specdec.errors import ModelRefused

NAME = "specdec_paged"
# Arguments of models to an attention function without effect here: positions are the plan's.
WITHOUT_EFFECT = frozenset({"position_ids", "use_cache", "dropout", "output_attentions", "cache_position"})


@dataclass(frozen=True, slots=True, eq=False)
class PositionBias:
    """What attention adds to a score, by the distance of the key from the query, key position - query position.

    `table` [heads, 2 reach + 1] float32: column reach + distance; distances beyond have the value of the nearest.
    """

    table: torch.Tensor

    @property
    def reach(self) -> int:
        return self.table.shape[1] // 2


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """One layer's rule for q k^T: times `scaling`, then softcap * tanh(score / softcap), then plus `bias`, within
    `window` positions.

    A row sees the last `window` positions, its own included; None is all of its past. `softcap` None leaves scores.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    bias: PositionBias | None = None


class AttentionMetadata(Protocol):
    """The attention of one step, for all its layers."""

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, rule: ScoreRule
    ) -> torch.Tensor:
        """Writes the step's keys and values to the cache of a layer, then attends to it.

        queries [rows, heads, head size], keys and values [rows, kv heads, head size], of one type; returns the
        queries' shape and type. Raises StepAbandoned before it writes, if the step's batch says so.
        """


class EncoderAttention(Protocol):
    """The attention of the encoders' rows of one step, each of which sees all rows of its own input.

    `index` [rows] int64: which rows of the step they are.
    """

    @property
    def index(self) -> torch.Tensor: ...

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
        """The attention of one of the encoder's layers; shapes as in `AttentionMetadata`. Raises StepAbandoned."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        """Writes the keys and values of a decoder layer's cross attention to the cells of the inputs."""


class DecoderAttention(AttentionMetadata, Protocol):
    """The attention of the decoder's rows of one step. `attend` sees the cells behind the input. `index`: see
    `EncoderAttention`."""

    @property
    def index(self) -> torch.Tensor: ...

    def attend_to_input(self, queries: torch.Tensor, layer: int, rule: ScoreRule) -> torch.Tensor:
        """Cross attention of a layer: queries [rows, heads, head size] to the cells of the row's input, written before;
        returns the queries' shape and type."""


class EncoderDecoderMetadata(Protocol):
    """The attention of one step of an encoder-decoder model. At least one of the two is there."""

    @property
    def encoder(self) -> EncoderAttention | None: ...

    @property
    def decoder(self) -> DecoderAttention | None: ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    plan: AttentionMetadata,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """The attention function for `transformers`: query [1, heads, rows, head size], key and value [1, kv heads, ...].

    Returns [1, rows, heads, head size]. Raises ModelRefused for an unknown argument that would change the result, such
    as attention sinks or position biases.
    """
    unknown = [name for name, given in others.items() if given is not None and name not in WITHOUT_EFFECT]
    if unknown or attention_mask is not None:
        asked = ", ".join(sorted(unknown)) or "attention_mask"
        raise ModelRefused(f"{type(module).__name__} asks for {asked} in its attention, which is not supported")
    layer: Any = module.layer_idx
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    rule = ScoreRule(scaling, sliding_window, softcap)
    return plan.attend(queries, keys, values, int(layer), rule)[None], None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's queries [rows, heads, head size], keys and values [rows, kv heads, head size], and its rule."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    layer: int
    rule: ScoreRule


class CallRecorder:
    """Records attention calls in place of an AttentionMetadata; returns the queries as the result of attention."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, rule: ScoreRule
    ) -> torch.Tensor:
        """Records the call. See `AttentionMetadata.attend`."""
        self.calls.append(AttentionCall(queries, keys, values, layer, rule))
        return queries


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of a model, or of one rank's share, for storage and planner: the same for all its layers; of an
    encoder-decoder model those of its decoder."""

    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    rules: tuple[ScoreRule, ...]  # distinct ones
    has_encoder: bool = False

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Distinct windows of the layers."""
        return tuple(dict.fromkeys(rule.window for rule in self.rules))


@torch.inference_mode()
def measure_shape(base: nn.Module, device: torch.device | None = None) -> AttentionShape:
    """Runs one token through a base model. Raises ModelRefused unless every layer attends once, all in one shape."""
    recorder = CallRecorder()
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    base(input_ids=token, position_ids=token, use_cache=False, plan=recorder)
    calls = recorder.calls
    shapes = {(call.queries.shape[1:], call.keys.shape[1:], call.values.shape[1:]) for call in calls}
    if [call.layer for call in calls] != list(range(len(calls))) or len(shapes) != 1:
        raise ModelRefused(f"{type(base).__name__} does not attend once in every layer in one shape: not supported")
    queries, keys, values = shapes.pop()
    if keys != values or queries[1] != keys[1] or queries[0] % keys[0]:
        raise ModelRefused(f"{type(base).__name__} has queries {queries}, keys {keys}, values {values}: not supported")
    rules = tuple(dict.fromkeys(call.rule for call in calls))
    return AttentionShape(len(calls), queries[0], keys[0], queries[1], rules)


AttentionInterface.register(NAME, paged_attention)
