"""Features: the residual of a base model's rows as it enters chosen layers, for a head that drafts from them (EAGLE-3,
Li et al. 2025, arXiv 2503.01840). Recorded by hooks on the layers of `transformers`; a step in one native call copies
them itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from specdec.errors import ModelRefused


class FeatureRecorder:
    """Records the residual of each run of a base model as it enters the layers `layer_ids`; the number of layers stands
    for that after the last, before the last norm."""

    def __init__(self, base: nn.Module, layer_count: int, layer_ids: Sequence[int]) -> None:
        """Raises ModelRefused for a base model whose layers are in no list."""
        lists = [child for child in base.children() if isinstance(child, nn.ModuleList) and len(child) == layer_count]
        if len(lists) != 1:
            raise ModelRefused(f"{type(base).__name__} has no list of its {layer_count} layers: it gives no features")
        layers = lists[0]
        self._found: list[torch.Tensor | None] = [None] * len(layer_ids)
        for place, index in enumerate(layer_ids):
            if index < layer_count:
                layers[index].register_forward_pre_hook(partial(self._entered, place), with_kwargs=True)
            else:
                layers[layer_count - 1].register_forward_hook(partial(self._left, place))

    def take(self) -> torch.Tensor:
        """Returns the features of the rows of the last run.  # [rows, layers * hidden], of the model's type"""
        found = [each for each in self._found if each is not None]
        self._found = [None] * len(found)
        return torch.cat(found, -1)

    def _entered(self, place: int, _layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden: torch.Tensor = arguments[0] if arguments else named["hidden_states"]
        self._found[place] = hidden[0]

    def _left(self, place: int, _layer: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        hidden: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
        self._found[place] = hidden[0]
