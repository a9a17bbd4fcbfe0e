"""Elementwise functions whose results do not depend on where an element stands.

Kernels for exp and tanh round the elements left over at the end of a run in scalar code, which differs from the vector
code before it, and torch cuts long runs among threads as it sees fit. So a function is applied to runs of whole vector
registers, each small enough to stay with one thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

RUN_ELEMENTS = 32768  # torch gives runs up to this to one thread whole
REGISTER_ELEMENTS = 64  # float32 values that fill any register, or pair of them


def aligned(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x), elementwise, of any shape; an element's result is the same bits wherever it stands."""
    count = x.numel()
    if count <= RUN_ELEMENTS and count % REGISTER_ELEMENTS == 0:
        return function(x)
    flat = x.reshape(-1)
    padding = -count % REGISTER_ELEMENTS
    if padding:
        flat = nn.functional.pad(flat, (0, padding))
    runs = [function(run) for run in flat.split(RUN_ELEMENTS)]
    return torch.cat(runs)[:count].view(x.shape)


class AlignedActivation(nn.Module):
    """An activation module applied as `aligned` says."""

    def __init__(self, function: nn.Module):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return aligned(self.function, x)
