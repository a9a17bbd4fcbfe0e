"""The features of a target that an EAGLE-3 head reads, from a model of `transformers`: hidden states of the residual
stream as they enter layers, or leave the last one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def layers_of(base: nn.Module) -> nn.ModuleList:
    """Returns the decoder layers of a base model: the one list of layers that every supported class has."""
    (found,) = [child for child in base.children() if isinstance(child, nn.ModuleList)]
    return found


def final_norm_of(base: nn.Module) -> nn.Module:
    """Returns the norm behind the last layer."""
    weights = {child: child._parameters.get("weight") for child in base.children()}
    (found,) = [child for child, weight in weights.items() if weight is not None and weight.dim() == 1]
    return found


@contextmanager
def states_entering(base: nn.Module, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Within, every forward of a base model leaves in the given mapping, by layer id, the states that enter the layer;
    under the number of layers those that leave the last one, before the final norm.  # [texts, length, hidden]"""
    found = dict[int, Tensor]()
    hooks = keep_states(base, layer_ids, found)
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def keep_states(base: nn.Module, layer_ids: Sequence[int], found: dict[int, Tensor]) -> list[RemovableHandle]:
    """Makes every later forward of a base model leave in `found` what `states_entering` says; returns its hooks."""
    layers = layers_of(base)

    def entering(layer_id: int) -> Any:
        def keep(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            found[layer_id] = arguments[0] if arguments else named["hidden_states"]

        return keep

    def leaving(_module: nn.Module, _arguments: object, result: Any) -> None:
        found[len(layers)] = result if isinstance(result, Tensor) else result[0]

    hooks = [
        layers[layer_id].register_forward_pre_hook(entering(layer_id), with_kwargs=True)
        for layer_id in layer_ids
        if layer_id < len(layers)
    ]
    if len(layers) in layer_ids:
        hooks.append(layers[-1].register_forward_hook(leaving))
    return hooks


def gain_of(norm: nn.Module, hidden_size: int) -> Tensor:
    """Returns what a norm multiplies rows of mean 0 and square mean 1 by: its weight, or that and 1, whatever the class
    calls it.  # [hidden] float32"""
    signs = torch.ones(hidden_size)
    signs[1::2] = -1
    with torch.no_grad():
        weight = next(norm.parameters())
        rows = torch.stack([signs, -signs]).to(weight)
        result: Tensor = norm(rows).float().cpu()
    return signs * (result[0] - result[1]) / 2
