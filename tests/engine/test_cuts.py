"""Parts of weights, dense and packed: what a rank multiplies is its part of the weight that the format means."""

from __future__ import annotations

import pytest
import torch

from specdec.engine.loading.weights import Cut
from specdec.engine.packed import PackedWeight
from specdec.errors import ModelRefused
from tests.support.packed import CASES, KINDS, random_values

ROWS, WIDTH = 6, 64
CUTS = {
    "outputs": Cut(0, ((1, 3), (4, 6)), 4),
    "padded outputs": Cut(0, ((4, 6),), 3),
    "whole groups": Cut(1, ((32, 64),), 32),
    "parts of groups": Cut(1, ((8, 24), (48, 64)), 32),
}


def weight_of(kind: str, has_minima: bool, group: int) -> PackedWeight:
    """A random packed weight [ROWS, WIDTH]."""
    made = torch.Generator().manual_seed(KINDS[kind] + group)
    values = random_values(kind, (ROWS, WIDTH), has_minima, made)
    scales, minima = (torch.randn(ROWS, WIDTH // group, generator=made).to(torch.float16) for _ in range(2))
    return PackedWeight(KINDS[kind], group, values, scales, minima if has_minima else None)


@pytest.mark.parametrize("group", [16, 32, WIDTH])
@pytest.mark.parametrize(("kind", "has_minima"), CASES)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_the_part_of_a_packed_weight_is_that_of_the_weight(cut: Cut, kind: str, has_minima: bool, group: int) -> None:
    """Claim: cut and unpacked in either order gives the same bits, zeros of padding included.

    Source: `PackedWeight.dense`, what a packed weight means. Conclusive: all numbers are random, so that a group's
    scale at another one's inputs changes some.
    """
    weight = weight_of(kind, has_minima, group)
    assert torch.equal(cut.of_packed(weight).dense(), cut.of(weight.dense()))


def test_a_part_of_other_inputs_than_whole_groups_of_eight_is_refused() -> None:
    """Claim: a part whose groups would have fewer than 8 inputs is refused with its ranges and the limit.

    Source: `PackedWeight.group`. Conclusive: the kernels would read a word of two groups.
    """
    with pytest.raises(ModelRefused, match=r"inputs \(\(0, 12\),\); they can be only at multiples of 8"):
        Cut(1, ((0, 12),), 12).of_packed(weight_of("int4", False, 32))
