"""Inputs for tests of kernels: rows beyond those of a step are NaN, outputs are NaN where nothing was written."""

from __future__ import annotations

import mmap

import torch

BEYOND = 3  # rows beyond the step's, which no kernel may read or write
EPSILON = 1e-5
# Roundings of the inputs and the result of one kernel, relative to the element and to the deviation of all.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


def rows_of(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """[count + 3, width]: random rows of very different sizes, then rows of NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, width, generator=generator) * torch.logspace(-1, 1, count)[:, None]
    return torch.cat((rows, torch.full((BEYOND, width), torch.nan))).to(dtype)


def weight_of(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """[outputs, inputs], so that outputs are of the size of inputs."""
    return (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * inputs**-0.5).to(dtype)


def vector_of(size: int, dtype: torch.dtype, seed: int = 2) -> torch.Tensor:
    """[size]: numbers around 1, as gains and biases."""
    return (1 + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output that nothing has written: NaN, or the lowest integer."""
    poison = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full(shape, poison, dtype=dtype)


def assert_unwritten(tensor: torch.Tensor) -> None:
    """Nothing was written here since `unwritten`."""
    assert torch.equal(tensor, unwritten(*tensor.shape, dtype=tensor.dtype)) or bool(tensor.isnan().all())


def sums_of(rows: torch.Tensor, tile: int) -> torch.Tensor:
    """[rows, tiles] float32: the sums of squares of a row, tile by tile; the last tile may be short."""
    squares = torch.nn.functional.pad(rows.float() ** 2, (0, -rows.shape[1] % tile))
    return squares.unflatten(1, (-1, tile)).sum(2)


def normalized(rows: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x^2) + EPSILON) * gain in float64, rounded once to the type of x, as float32."""
    x = rows.double()
    y = x * (x.square().mean(1, keepdim=True) + EPSILON).rsqrt() * gain.double()
    return y.to(rows.dtype).float()


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, roundings: int = 2) -> None:
    """Equal but for roundings to `dtype`: a product that lacks one input or has one twice is not."""
    unit = ROUNDING[dtype] * roundings
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=unit, atol=unit * float(theirs.float().std()))


def reserved(count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count] zeros of which only those that are touched take memory: a tensor too large for the machine."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python 3.13 names first
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype=dtype)
