"""Replacements for a model's norms, found by trying them: which formula a module computes, and where it rounds, is read
from its results on random rows, never from its class."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

TRIED_ROW_COUNT = 4
# Relative to the largest value: one rounding in 16 bits, another order of additions in 32.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}

MakeNorm = Callable[[torch.Tensor, torch.Tensor | None, float], nn.Module]  # (gain, bias, epsilon) -> a norm


@torch.inference_mode()
def norm_like(module: nn.Module, kinds: Iterable[MakeNorm]) -> nn.Module | None:
    """Returns the norm of these kinds, its gain `weight` or 1 + `weight`, that agrees best with a module on random
    rows; None if none agrees but for roundings."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    rows = 0.5 + torch.randn(TRIED_ROW_COUNT, len(weight), generator=torch.Generator().manual_seed(0))
    expected = module(rows.to(weight))
    least, best = expected.numel() + 1, None
    for gain in (weight.detach(), 1 + weight.detach().float()):  # in 16 bits the sum would round the weight away
        for kind in kinds:
            norm = kind(gain, None if bias is None else bias.detach(), epsilon)
            differing = difference(norm(rows.to(weight)), expected)
            if differing is not None and differing < least:
                least, best = differing, norm
    return best


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> int | None:
    """Returns how many of two results' elements differ; None if they differ by more than roundings."""
    return int((ours != theirs).sum()) if is_near(ours, theirs) else None


def is_near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two results of one type agree but for roundings."""
    largest = theirs.float().abs().max()
    return bool((ours.float() - theirs.float()).abs().max() <= TOLERANCES[theirs.dtype] * largest)
