"""Products of packed weights: their accuracy, and the bits of a row, in every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.engine.cpu.compile_kernels import LIBRARY
from specdec.engine.cpu.kernels import CHOICES, Kernels
from specdec.engine.packed import FLOAT8, PackedWeight
from specdec.errors import ConfigError
from tests.support.exact_sums import fused
from tests.support.packed import CASES, random_packed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNIT_ROUNDOFF, SMALLEST_NORMAL = 2.0**-24, 2.0**-126
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 23, 31, 140)
# Group and inputs: of one block of k, of several, of groups longer than a block that end inside the next.
SHAPES = ((32, 32), (32, 1184), (64, 576), (128, 1408), (24, 72), (1536, 1536))
OUT_SIZE = 90  # ends inside a panel, in several tiles


@pytest.fixture(params=[choice for choice in CHOICES if choice != "off"])
def own(request: pytest.FixtureRequest) -> Kernels:
    """The kernels of one instruction set."""
    if not LIBRARY.exists():
        pytest.skip("no native kernels were compiled here")
    try:
        return Kernels(LIBRARY, request.param)
    except ConfigError as error:
        pytest.skip(str(error))


def inputs(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("kind, has_minima", CASES)
def test_a_product_is_that_of_the_dense_weight_in_float64(own: Kernels, kind: str, has_minima: bool) -> None:
    """Claim: each output is the sum of x times `PackedWeight.dense`, to the accuracy of running sums in float32.

    A term x * scale * value passes through at most n + n / group + 8 roundings, each of at most u = 2^-24 (Higham 2002,
    section 3.1); where there are minima so does x * minimum, and 8 bits with minima are stored less 128 scales.
    vdpbf16ps takes denormal numbers as zero. Conclusive: the bound is a theorem, and one lost or doubled term, or a
    neighbour's scale, exceeds it.
    """
    for group, size in SHAPES:
        weight = random_packed(kind, group, OUT_SIZE, size, has_minima)
        bias = torch.randn(OUT_SIZE)
        packed = own.pack(weight, bias)
        scales = weight.scales.double().abs().repeat_interleave(group, 1)
        magnitude = scales * weight.values.double().abs()
        if weight.minima is not None:
            shift = 128 * scales if kind == "int8" else 0
            magnitude += weight.minima.double().abs().repeat_interleave(group, 1) + 2 * shift
        for dtype in DTYPES:
            x = inputs(13, size, dtype)
            expected = x.double() @ weight.dense().double().T + bias
            roundings = (size + size / 8 + 8) * UNIT_ROUNDOFF
            bound = roundings / (1 - roundings) * (x.double().abs() @ magnitude.T + bias.abs())
            error = (own.product(packed, x, torch.float32).double() - expected).abs()
            assert (error <= bound + size * SMALLEST_NORMAL * 16).all(), (group, size, dtype)


@pytest.mark.parametrize("kind, has_minima", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_at_every_number_of_rows_and_threads(
    own: Kernels, kind: str, has_minima: bool, dtype: torch.dtype
) -> None:
    """Claim: the bits of a row depend on neither the rows beside it, nor their number, nor the number of threads; rows
    that are not numbers are no part of it.

    Conclusive: every row of every count is compared, bit for bit, with the row alone; every other row is then spoilt.
    """
    for group, size in SHAPES:
        packed = own.pack(random_packed(kind, group, OUT_SIZE, size, has_minima), torch.randn(OUT_SIZE))
        x = inputs(max(ROW_COUNTS), size, dtype)
        alone = torch.cat([own.product(packed, row[None], torch.float32) for row in x])
        for turn, count in enumerate(ROW_COUNTS):
            torch.set_num_threads(turn % 3 + 1)
            assert torch.equal(own.product(packed, x[:count], torch.float32), alone[:count]), (group, size, count)
        spoilt = x.clone()
        spoilt[::2] = torch.nan
        got = own.product(packed, spoilt, torch.float32)
        assert torch.equal(got[1::2], alone[1::2]) and got[::2].isnan().all()


@pytest.mark.parametrize("kind, has_minima", CASES)
def test_outputs_are_those_of_the_dense_weight(own: Kernels, kind: str, has_minima: bool) -> None:
    """Claim: an output that is looked up in the panels is the dense weight's, rounded to the type that is asked for.

    Conclusive: every number is compared; of 8 bits with minima within the roundings of the stored minimum.
    """
    weight = random_packed(kind, 32, OUT_SIZE, 64, has_minima)
    packed, chosen = own.pack(weight), torch.tensor([[89, 0], [17, 17]])
    for dtype in DTYPES:
        got, expected = own.unpack(packed, chosen, dtype), weight.dense()[chosen].to(dtype)
        if kind == "int8" and has_minima:
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-4)
        else:
            assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="outputs is from 90 to 90; it must be from 0 to 89"):
        own.unpack(packed, torch.tensor([90]), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_fp8_is_widened_exactly(own: Kernels, dtype: torch.dtype) -> None:
    """Claim: each of the 254 bytes that are numbers has torch's number, of one row, of several and of many, which are
    widened once for all of them, at every place of a group and for rows of every type.

    Conclusive: an input of one 1 selects one weight, and every byte comes to every place of 8 inputs; the numbers,
    denormal ones among them, are those that torch and the kernels' own lookup have of the bytes.
    """
    numbers = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
    values = torch.stack([numbers.roll(place) for place in range(32)], 1).view(FLOAT8)  # [254, 32]
    packed = own.pack(PackedWeight(8, 32, values, torch.ones(254, 1)))
    expected = values.float().T
    assert torch.equal(own.unpack(packed, torch.arange(254), torch.float32), expected.T)
    for count in (1, 3, 8, 32):
        for first in range(0, 32, count):
            x = torch.eye(32, dtype=dtype)[first : first + count]
            assert torch.equal(own.product(packed, x, torch.float32), expected[first : first + count]), (count, first)


def in_stated_order(x: np.ndarray, weight: PackedWeight, group: int) -> np.ndarray:
    """The products as groups.h states their order, in the family fma, of a weight whose groups have this size."""
    values, scales = weight.values.float().numpy(), weight.scales.float().numpy()
    minima = None if weight.minima is None else weight.minima.float().numpy()
    parts = weight.group // group
    sums = np.zeros((len(x), weight.out_size), np.float32)
    for start in range(0, weight.in_size, group):
        part, own = np.zeros_like(sums), start // group // parts
        for k in range(start, start + group):
            part = fused(x[:, k : k + 1], values[None, :, k], part)
        if minima is not None:
            eight = np.zeros((len(x), 8), np.float32)
            for k in range(start, start + group, 8):
                eight += x[:, k : k + 8]
            for width in (4, 2, 1):
                eight = eight[:, :width] + eight[:, width : 2 * width]
            sums = fused(minima[None, :, own], eight, sums)
        sums = fused(scales[None, :, own], part, sums)
    return sums


@pytest.mark.parametrize("kind, has_minima", [case for case in CASES if case != ("int8", True)])
def test_the_family_fma_adds_in_the_stated_order(own: Kernels, kind: str, has_minima: bool) -> None:
    """Claim: all instruction sets have the bits of the order that groups.h states for rows of float32, so each other's.

    Conclusive: the order is written again in numpy, with an exact fused multiply-add, and every bit is compared.
    """
    for group, size, cut in ((32, 96, 32), (96, 288, 32), (640, 640, 128)):
        weight = random_packed(kind, group, 37, size, has_minima)
        x = inputs(9, size, torch.float32)
        got = own.product(own.pack(weight), x, torch.float32)
        assert (got.numpy() == in_stated_order(x.numpy(), weight, cut)).all(), (group, size)
