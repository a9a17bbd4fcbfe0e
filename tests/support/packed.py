"""Packed weights for tests: of random integers, and rounded from a dense weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from specdec.engine import transformers_model
from specdec.engine.packed import PackedLinear, PackedWeight


def random_packed(bits: int, group: int, out_size: int, in_size: int, has_minima: bool) -> PackedWeight:
    """Every integer of the range, scales of both signs, minima of the size of the integers' part."""
    generator = torch.Generator().manual_seed(bits * group + in_size)
    low, dtype = (0, torch.uint8) if has_minima else (-(2 ** (bits - 1)), torch.int8)
    values = torch.randint(low, low + 2**bits, (out_size, in_size), generator=generator).to(dtype)
    scales, minima = (torch.randn(out_size, in_size // group, generator=generator) for _ in range(2))
    dtype = {24: torch.float32, 64: torch.bfloat16}.get(group, torch.float16)
    if has_minima and group == 24:  # of no more bits than they may have
        scales = scales.bfloat16().float()
        dtype = torch.float32 if bits == 4 else torch.bfloat16
    return PackedWeight(bits, group, values, scales.to(dtype), minima.mul(2**bits).to(dtype) if has_minima else None)


def rounded(weight: torch.Tensor, bits: int, group: int = 32, dtype: torch.dtype = torch.float16) -> PackedWeight:
    """The nearest weight whose scales are a group's largest magnitude over the largest integer."""
    largest = 2 ** (bits - 1) - 1
    groups = weight.detach().float().reshape(weight.shape[0], -1, group)
    scales = groups.abs().amax(-1).div(largest).to(dtype)
    values = groups.div(scales.float().clamp_min(torch.finfo(dtype).tiny)[:, :, None]).round().clamp(-largest, largest)
    return PackedWeight(bits, group, values.to(torch.int8).view(weight.shape), scales)


def pack_linears(module: nn.Module, bits: int, group: int = 32) -> None:
    """Replaces every linear layer within a module by its rounded one."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            read = partial(rounded, child.weight, bits, group)
            setattr(module, name, PackedLinear((child.out_features, child.in_features), read, child.bias))
        else:
            pack_linears(child, bits, group)


def unpack_linears(module: nn.Module, dtype: torch.dtype) -> None:
    """Replaces every packed layer within a module by a dense one of this type."""
    for name, child in list(module.named_children()):
        if isinstance(child, PackedLinear):
            linear = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None, dtype=dtype)
            linear.weight = nn.Parameter(child.read().dense().to(dtype), requires_grad=False)
            if child.bias is not None:
                linear.bias = nn.Parameter(child.bias.to(dtype), requires_grad=False)
            setattr(module, name, linear)
        else:
            unpack_linears(child, dtype)


@contextmanager
def packed_weights(bits: int, group: int = 8) -> Iterator[None]:
    """Models that are loaded meanwhile have linear layers of this number of bits; 0: as they are stored."""
    read = transformers_model.read_weights

    def read_packed(*arguments, **options):
        model = read(*arguments, **options)
        if model.get_output_embeddings().weight is model.get_input_embeddings().weight:  # two modules from here on
            model.config.tie_word_embeddings = False
        pack_linears(model, bits, group)
        return model

    with pytest.MonkeyPatch.context() as patch:
        if bits:
            patch.setattr(transformers_model, "read_weights", read_packed)
        yield
