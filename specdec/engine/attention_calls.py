"""What the layers of a model ask of attention, found by calling them once instead of reading their classes.

A recorder stands in for a step's plan: it notes the shapes and the rule each layer asks for and attends to nothing. A
layer that asks for what is not known here is refused then, when the model is loaded, and not in the middle of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from specdec.engine.attention import ScoreRule
from specdec.errors import ModelRefused


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's queries [rows, heads, head size], keys and values [rows, kv heads, head size], and its rule."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    layer: int
    rule: ScoreRule


class CallRecorder:
    """Stands where modules expect an AttentionPlan; the result of attention is the queries themselves."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int, rule: ScoreRule
    ) -> torch.Tensor:
        """Notes the call. See `AttentionPlan.attend`."""
        self.calls.append(AttentionCall(queries, keys, values, layer, rule))
        return queries


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What storage and planner need to know of a model, or of one rank's share of it: the same for all its layers."""

    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    rules: tuple[ScoreRule, ...]  # distinct ones

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
        raise ModelRefused(f"{type(base).__name__} does not attend once in every layer in one shape: not proven yet")
    queries, keys, values = shapes.pop()
    if keys != values or queries[1] != keys[1] or queries[0] % keys[0]:
        raise ModelRefused(f"{type(base).__name__} has queries {queries}, keys {keys}, values {values}: not proven yet")
    rules = tuple(dict.fromkeys(call.rule for call in calls))
    return AttentionShape(len(calls), queries[0], keys[0], queries[1], rules)
