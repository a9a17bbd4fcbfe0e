"""The norm alone and the lookup of embeddings in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from specdec.engine.cuda.kernels.configs import output_tile, sum_parts
from specdec.engine.cuda.kernels.norms import embed, rms_norm
from tests.support.interpreter import interpreted
from tests.support.kernel_inputs import (
    EPSILON,
    assert_near,
    assert_unwritten,
    normalized,
    rows_of,
    sums_of,
    unwritten,
    vector_of,
)

ROWS = 4


@interpreted
@pytest.mark.parametrize("width", (64, 200), ids=str)
@pytest.mark.parametrize("dtype, gain_type", ((torch.bfloat16, torch.float32), (torch.float16, torch.float16)), ids=str)
def test_a_norm_is_that_of_plain_arithmetic(width: int, dtype: torch.dtype, gain_type: torch.dtype) -> None:
    """Claim: `rms_norm` rounds once, adds a residual, tells sums of squares and flags, and reads the rows of `index`.

    Conclusive: float64 arithmetic beside it; a width that is no multiple of a tile; one row with an infinity is flagged
    alone; rows beyond the step's are NaN and stay unwritten.
    """
    x, residual, gain = rows_of(ROWS, width, dtype), rows_of(ROWS, width, dtype, seed=3), vector_of(width, gain_type)
    out, sums = unwritten(*x.shape, dtype=dtype), unwritten(len(x), sum_parts(width))
    finite = unwritten(len(x), dtype=torch.int32)
    rms_norm(x, gain, out, ROWS, EPSILON, residual=residual, sums=sums, finite=finite)
    expected = normalized(x[:ROWS], gain) + residual[:ROWS].float()
    assert_near(out[:ROWS], expected, dtype, roundings=1)
    torch.testing.assert_close(sums[:ROWS], sums_of(out[:ROWS], output_tile(width)), rtol=1e-6, atol=0)
    assert finite[:ROWS].tolist() == [1] * ROWS
    for tensor in (out, sums, finite):
        assert_unwritten(tensor[ROWS:])
    again = unwritten(*x.shape, dtype=dtype)
    x[1, -1] = torch.inf
    rms_norm(x, gain, again, 3, EPSILON, finite=finite, index=torch.tensor([2, 1, 0]))
    assert finite[:3].tolist() == [1, 0, 1]
    assert_near(again[:3:2], normalized(x[[2, 0]], gain), dtype, roundings=1)
    assert_unwritten(again[3:])


@interpreted
@pytest.mark.parametrize("width", (64, 200, 2080), ids=str)
def test_a_lookup_gives_rows_and_their_sums(width: int) -> None:
    """Claim: `embed` copies rows of the table bit for bit, or scales and rounds them once, with their sums of squares.

    Conclusive: compared with the table; widths of one program, of a tail, and of several programs a row.
    """
    dtype = torch.bfloat16
    table = rows_of(9, width, dtype)
    ids = torch.tensor([8, 0, 5, 5, 2**62])
    for scale in (1.0, 33.5):
        out, sums = unwritten(5, width, dtype=dtype), unwritten(5, sum_parts(width))
        embed(ids, table, out, sums, ROWS, scale=scale)
        assert torch.equal(out[:ROWS], (table[ids[:ROWS]].float() * scale).to(dtype))
        torch.testing.assert_close(sums[:ROWS], sums_of(out[:ROWS], output_tile(width)), rtol=1e-6, atol=0)
        assert_unwritten(out[ROWS:])
        assert_unwritten(sums[ROWS:])
