"""Packed weights for tests: of random values, and rounded from a dense weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from specdec.engine import transformers_model
from specdec.engine.packed import FLOAT8, PackedLinear, PackedWeight

KINDS = {"int4": 4, "int8": 8, "float8": 8}  # of values, with their bits
# A kind, and whether it has minima.
CASES = [*((kind, has_minima) for kind in ("int4", "int8") for has_minima in (False, True)), ("float8", False)]
FLOAT8_MAX = 448


def random_values(kind: str, shape: tuple[int, ...], has_minima: bool, generator: torch.Generator) -> torch.Tensor:
    """Every value of a kind, as `PackedWeight` has them."""
    if kind == "float8":
        numbers = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
        return numbers[torch.randint(len(numbers), shape, generator=generator)].view(FLOAT8)
    low, dtype = (0, torch.uint8) if has_minima else (-(2 ** (KINDS[kind] - 1)), torch.int8)
    return torch.randint(low, low + 2 ** KINDS[kind], shape, generator=generator).to(dtype)


def random_packed(kind: str, group: int, out_size: int, in_size: int, has_minima: bool) -> PackedWeight:
    """Every value of the kind, scales of both signs, minima of the size of the integers' part."""
    bits = KINDS[kind]
    generator = torch.Generator().manual_seed(bits * group + in_size)
    values = random_values(kind, (out_size, in_size), has_minima, generator)
    scales, minima = (torch.randn(out_size, in_size // group, generator=generator) for _ in range(2))
    dtype = {24: torch.float32, 64: torch.bfloat16}.get(group, torch.float16)
    if has_minima and group == 24:  # of no more bits than they may have
        scales = scales.bfloat16().float()
        dtype = torch.float32 if bits == 4 else torch.bfloat16
    return PackedWeight(bits, group, values, scales.to(dtype), minima.mul(2**bits).to(dtype) if has_minima else None)


def rounded(weight: torch.Tensor, kind: str, group: int = 32, dtype: torch.dtype = torch.float16) -> PackedWeight:
    """The nearest weight whose scales are a group's largest magnitude over the largest value."""
    largest = FLOAT8_MAX if kind == "float8" else 2 ** (KINDS[kind] - 1) - 1
    groups = weight.detach().float().reshape(weight.shape[0], -1, group)
    scales = groups.abs().amax(-1).div(largest).to(dtype)
    values = groups.div(scales.float().clamp_min(torch.finfo(dtype).tiny)[:, :, None]).clamp(-largest, largest)
    own = values.to(FLOAT8) if kind == "float8" else values.round().to(torch.int8)
    return PackedWeight(KINDS[kind], group, own.view(weight.shape), scales)


def pack_linears(module: nn.Module, kind: str, group: int = 32) -> None:
    """Replaces every linear layer within a module by its rounded one."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            read = partial(rounded, child.weight, kind, group)
            setattr(module, name, PackedLinear((child.out_features, child.in_features), read, child.bias))
        else:
            pack_linears(child, kind, group)


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
def packed_weights(kind: str, group: int = 8) -> Iterator[None]:
    """Models that are loaded meanwhile have linear layers of a kind; "": as they are stored."""
    read = transformers_model.read_weights

    def read_packed(*arguments, **options):
        model = read(*arguments, **options)
        if model.get_output_embeddings().weight is model.get_input_embeddings().weight:  # two modules from here on
            model.config.tie_word_embeddings = False
        pack_linears(model, kind, group)
        return model

    with pytest.MonkeyPatch.context() as patch:
        if kind:
            patch.setattr(transformers_model, "read_weights", read_packed)
        yield
