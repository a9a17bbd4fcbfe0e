"""Packed weights: what their numbers mean, and which are refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from specdec.engine.packed import FLOAT8, PackedWeight
from tests.support.packed import CASES, KINDS, random_values

GROUPS = (32, 64)


def random_weight(kind: str, group: int, has_minima: bool, is_long: bool = False) -> PackedWeight:
    """A weight of random values, scales and minima; `is_long`: of all the bits that they may have."""
    generator = torch.Generator().manual_seed(KINDS[kind] * group)
    values = random_values(kind, (5, 2 * group), has_minima, generator)
    scales, minima = (torch.randn(5, 2, generator=generator).half() for _ in range(2))
    if is_long:
        scales, minima = (torch.randn(5, 2, generator=generator) for _ in range(2))
        scales = (scales.view(torch.int32) & (-16 if has_minima else -1)).view(torch.float32)
    return PackedWeight(KINDS[kind], group, values, scales, minima if has_minima else None)


LONG = [("int4", False), ("int4", True), ("int8", False), ("float8", False)]


@pytest.mark.parametrize(
    "kind, has_minima, is_long", [*((*case, False) for case in CASES), *((*case, True) for case in LONG)]
)
@pytest.mark.parametrize("group", GROUPS)
def test_a_weight_is_its_definition_rounded_once(kind: str, group: int, has_minima: bool, is_long: bool) -> None:
    """Claim: each number is scale * value + minimum of its own group, rounded once to float32, also where scales and
    minima are of float32.

    Conclusive: computed again in fractions, which are exact; torch rounds a fraction's float64 quotient, exact here
    since scale, value and minimum of these magnitudes span fewer than 53 bits.
    """
    weight = random_weight(kind, group, has_minima, is_long)
    dense = weight.dense()
    for n in range(weight.out_size):
        for k in range(weight.in_size):
            g = k // group
            exact = Fraction(weight.scales[n, g].item()) * Fraction(weight.values[n, k].item())
            exact += Fraction(weight.minima[n, g].item()) if weight.minima is not None else 0
            assert dense[n, k] == torch.tensor(float(exact), dtype=torch.float64).float()
    some = torch.tensor([3, 0])
    assert torch.equal(weight.chosen(some).dense(), dense[some])


VALUES = torch.zeros(2, 64, dtype=torch.int8)
SCALES = torch.ones(2, 2)
FLOATS = VALUES.to(FLOAT8)
WRONG = {
    "bits is 5": lambda: PackedWeight(5, 32, VALUES, SCALES),
    "group is 48": lambda: PackedWeight(8, 48, VALUES, SCALES),
    "group is 4": lambda: PackedWeight(4, 4, VALUES, torch.ones(2, 16)),
    "values are from 8 to 8; they must be in [-8, 8)": lambda: PackedWeight(4, 32, VALUES + 8, SCALES),
    "values.dtype is torch.int8; it must be torch.uint8": lambda: PackedWeight(4, 32, VALUES, SCALES.half(), SCALES),
    "values.shape is [64]": lambda: PackedWeight(4, 32, VALUES[0], SCALES),
    "scales.shape is [2, 1]; it must be [2, 2]": lambda: PackedWeight(4, 32, VALUES, SCALES[:, :1]),
    "scales.dtype is torch.float32; it must be": lambda: PackedWeight(8, 32, VALUES.byte(), SCALES, SCALES),
    "scales have more than 20 significant bits": lambda: PackedWeight(4, 32, VALUES.byte(), SCALES * 1.1, SCALES),
    "bits is 4; it must be 8 of torch.float8_e4m3fn": lambda: PackedWeight(4, 32, FLOATS, SCALES),
    "minima is a tensor; it must be None": lambda: PackedWeight(8, 32, FLOATS, SCALES.half(), SCALES),
    "values are nan at some places": lambda: PackedWeight(8, 32, (VALUES + 127).view(FLOAT8), SCALES),
    "minima.dtype is torch.float64": lambda: PackedWeight(8, 32, VALUES.byte(), SCALES.half(), SCALES.double()),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_weight_is_refused(message: str) -> None:
    """Claim: a weight that the kernels cannot hold is refused, naming field, value and limit.

    Conclusive: one field of a good weight is changed each time, and the message begins with it.
    """
    with pytest.raises(ValueError) as told:
        WRONG[message]()
    assert str(told.value).startswith(message)
