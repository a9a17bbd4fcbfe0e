"""Sums over ranks in Triton's interpreter: buffers of one process, or of several, are the ranks' memory."""

from __future__ import annotations

import pytest
import torch

from specdec.engine.cuda.kernels.ranks import meet, rank_sum
from specdec.engine.parallel.modules import add_in_rank_order
from tests.support.interpreter import interpreted
from tests.support.kernel_inputs import assert_unwritten, unwritten

WIDTH = 1100  # more than one program a row, the last one short


def parts_of(rank_count: int, rows: int) -> list[torch.Tensor]:
    """Each rank's [rows, width] float32, of very different sizes: the order of additions shows in most elements."""
    generator = torch.Generator().manual_seed(rank_count)
    sizes = torch.logspace(-4, 4, WIDTH)
    return [torch.randn(rows, WIDTH, generator=generator) * sizes.roll(400 * rank) for rank in range(rank_count)]


def table_of(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([part.data_ptr() for part in parts])


@interpreted
@pytest.mark.parametrize("rank_count, dtype", [(2, torch.bfloat16), (3, torch.float16), (5, torch.float32)])
def test_parts_are_added_in_rank_order(rank_count: int, dtype: torch.dtype) -> None:
    """Claim: the kernel adds parts in rank order in float32, then the bias, and rounds once: the sum of the ranks over
    NCCL, bit for bit; it writes the step's rows and no other.

    Conclusive: equal bits with `add_in_rank_order`. The table in another order, a planted mistake, has other bits, for
    more ranks than two, where additions commute.
    """
    parts = parts_of(rank_count, 4)
    bias = torch.linspace(-1, 1, WIDTH).to(dtype)
    out = unwritten(6, WIDTH, dtype=dtype)
    rank_sum(table_of(parts), out[:4], bias=bias)
    assert torch.equal(out[:4], add_in_rank_order(parts).add_(bias).to(dtype))
    assert_unwritten(out[4:])
    plain, reversed_order = torch.empty(4, WIDTH), torch.empty(4, WIDTH)
    rank_sum(table_of(parts), plain)
    rank_sum(table_of(parts[::-1]), reversed_order)
    assert torch.equal(plain, add_in_rank_order(parts))
    assert torch.equal(plain, reversed_order) == (rank_count == 2)


@interpreted
def test_a_rank_that_does_not_come_is_an_error() -> None:
    """Claim: a rank waits for the round of every other, however late, and not for the one before; one that does not
    come within the bound is an error of the device, and no sum follows.

    Conclusive: the other's flag holds the round before, that round, or a later one.
    """
    flags = torch.zeros(2, 2, dtype=torch.int64)
    table, round_of = torch.tensor([row.data_ptr() for row in flags]), torch.full((1,), 6)
    flags[0, 1] = 6
    with pytest.raises(Exception, match="AssertionError.*a rank did not come to a sum"):
        meet(table, round_of, 0, turns_max=3)
    for others in (7, 8):
        flags[0, 1], round_of[0], flags[1] = others, 6, 0
        meet(table, round_of, 0, turns_max=3)
        assert round_of.tolist() == [7] and flags.tolist() == [[7, others], [7, 0]]
