"""The modules of a `transformers` model that run as fewer kernels on a GPU, and the float32 output layer.

A step of few rows is a long sequence of short kernels around a few matrix products, so each kernel saved is time saved.
A replacement agrees with its module up to the order of roundings; other modules stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from specdec.engine.norms import TRIED_ROW_COUNT, is_near, norm_like
from specdec.engine.rotary_attention import RotaryAttention, has_projections, joined, table_angles

MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class DeviceRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * gain in float32, rounded once: one kernel if the gain has the type of x.
    `compute`: what computes it in torch's place."""

    gain: torch.Tensor
    compute: Callable[[DeviceRMSNorm, torch.Tensor], torch.Tensor] | None = None

    def __init__(self, gain: torch.Tensor, epsilon: float):
        super().__init__()
        self.register_buffer("gain", gain)
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.by_library(x) if self.compute is None else self.compute(self, x)

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm of x as torch computes it, whatever `compute` is."""
        gain = self.gain
        return functional.rms_norm(x.to(gain.dtype), gain.shape, gain, self.epsilon).to(x.dtype)


class JoinedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up as one product; the last projection keeps its name."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.gate_up = joined([cast(nn.Linear, module.get_submodule(name)) for name in ("gate_proj", "up_proj")])
        self.act_fn = module.get_submodule("act_fn")
        self.down_proj = module.get_submodule("down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        output: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
        return output


def replace_modules(base: nn.Module, dtype: torch.dtype, positions_max: int) -> None:
    """Replaces modules in place, each if its replacement agrees with it on random rows."""
    _replace_children(base, table_angles(base, positions_max, dtype))


def _replace_children(module: nn.Module, is_fused: bool) -> None:
    """Replaces one module after another, so that the memory of each is free before the next is read."""
    for name, child in list(module.named_children()):
        stand_in: nn.Module | None = None
        if is_fused and has_projections(child):
            stand_in = child = RotaryAttention(child)
            _replace_children(child, is_fused)
        elif {part for part, _ in child.named_children()} == MLP_PARTS:
            stand_in = _mlp(child)
        else:
            stand_in = _norm(child)
        if stand_in is not None:
            setattr(module, name, stand_in)
        else:
            _replace_children(child, is_fused)


@torch.inference_mode()
def _mlp(module: nn.Module) -> nn.Module | None:
    weight = module.get_submodule("gate_proj").get_parameter("weight")
    joined_mlp = JoinedMLP(module)
    width = weight.shape[1]
    rows = torch.randn(TRIED_ROW_COUNT, width, generator=torch.Generator().manual_seed(width)).to(weight)
    return joined_mlp if is_near(joined_mlp(rows), module(rows)) else None


def _norm(module: nn.Module) -> nn.Module | None:
    if module._parameters.get("bias") is not None:
        return None
    return norm_like(module, [lambda gain, _bias, epsilon: DeviceRMSNorm(gain, epsilon)])


class DeviceOutput(nn.Module):
    """The output layer with scale and softcap, in float32: softcap * tanh(scale * x @ weight / softcap).

    Products of 16-bit numbers are exact in float32, so 16-bit weights stay 16-bit if the library can sum and return
    their products in float32; otherwise they are widened once. weight [vocab, in]. `compute`: what computes it in
    torch's place.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    compute: Callable[[DeviceOutput, torch.Tensor], torch.Tensor] | None = None

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: float = 1.0, softcap: float | None = None
    ):
        super().__init__()
        self.is_mixed = weight.dtype != torch.float32 and can_answer_wider(weight)
        self.register_buffer("weight", (weight if self.is_mixed else weight.float()).t())
        self.register_buffer("bias", None if bias is None else bias.float())
        self.scale = scale
        self.softcap = softcap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, vocab] float32."""
        return self.by_library(x) if self.compute is None else self.compute(self, x)

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        """See `forward`."""
        logits = wider_product(x, self.weight) if self.is_mixed else x.float() @ self.weight
        if self.bias is not None:
            logits = logits.add_(self.bias)
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)


def wider_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x [rows, in] @ weight [in, out], both 16-bit, summed in float32."""
    return torch.mm(x, weight, out_dtype=torch.float32)


def can_answer_wider(weight: torch.Tensor) -> bool:
    """Whether this torch, on the weight's device, multiplies 16-bit numbers into float32 correctly."""
    try:
        rows = torch.ones(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        part = weight[:8]
        return torch.allclose(wider_product(rows, part.t()), rows.float() @ part.float().t(), rtol=1e-3, atol=1e-3)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
