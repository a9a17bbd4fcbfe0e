"""The output layer in Triton's interpreter: logits in float32, and what is found in them on the way."""

from __future__ import annotations

import pytest
import torch

from specdec.engine.cuda.kernels.configs import head_tiles
from specdec.engine.cuda.kernels.products import head, pick
from tests.support.interpreter import interpreted
from tests.support.kernel_inputs import BEYOND, assert_near, assert_unwritten, rows_of, unwritten, vector_of, weight_of

VOCAB, INPUTS = 150, 72  # neither is a multiple of its tile


class Run:
    """One run of `head` and `pick` on rows of which the first `rows` count."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, rows: int, **more: object):
        count, tiles = len(x), head_tiles(len(weight))
        self.logits, self.best = unwritten(count, len(weight)), unwritten(count, tiles)
        self.ids, self.finite = (unwritten(count, tiles, dtype=torch.int32) for _ in range(2))
        self.tokens, self.flags = (unwritten(count, dtype=torch.int32) for _ in range(2))
        head(x, weight, self.logits, self.best, self.ids, self.finite, rows, **more)
        pick(self.best, self.ids, self.finite, self.tokens, self.flags, rows)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that was written."""
        return self.logits, self.best, self.ids, self.finite, self.tokens, self.flags


@interpreted
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("scale, softcap, with_bias", ((1.0, None, False), (0.25, 30.0, True)), ids=str)
def test_logits_and_their_largest_are_those_of_plain_arithmetic(
    dtype: torch.dtype, scale: float, softcap: float | None, with_bias: bool
) -> None:
    """Claim: logits are float32 sums with bias, scale and softcap, and the token is the lowest id of the largest.

    Conclusive: float32 arithmetic beside it; three ids, two of one tile, have equal weights that make them the largest
    of every row; neither the vocabulary nor the inputs are a multiple of a tile; rows beyond the step's stay unwritten.
    """
    rows = 5
    x = rows_of(rows, INPUTS, dtype)
    weight = weight_of(VOCAB, INPUTS, dtype)
    x[:rows, 0] = 8.0
    weight[[140, 70, 75], :] = 0.0
    weight[[140, 70, 75], 0] = 4.0
    bias = vector_of(VOCAB, dtype) if with_bias else None
    if bias is not None:
        bias[[140, 70, 75]] = 2.0
    run = Run(x, weight, rows, bias=bias, scale=scale, softcap=softcap)
    expected = x[:rows].float() @ weight.float().t()
    expected = scale * (expected if bias is None else expected + bias.float())
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    assert_near(run.logits[:rows], expected, torch.float32, roundings=2 if softcap is None else 8)
    assert run.tokens[:rows].tolist() == run.logits[:rows].argmax(1).tolist() == [70] * rows
    assert run.flags[:rows].tolist() == [1] * rows
    for tensor in run.tensors():
        assert_unwritten(tensor[rows:])


@interpreted
def test_a_row_that_is_not_finite_is_flagged_alone() -> None:
    """Claim: a row with an infinite or undefined value has flag 0, also behind a softcap, which would hide infinities,
    and no other row changes. Conclusive: the other rows' bits are those of a step without such values."""
    rows = 6
    x, weight = rows_of(rows, INPUTS, torch.bfloat16), weight_of(VOCAB, INPUTS, torch.bfloat16)
    before = Run(x, weight, rows, softcap=30.0)
    assert before.flags[:rows].tolist() == [1] * rows
    x[1, 5], x[4, 71] = torch.inf, torch.nan
    after = Run(x, weight, rows, softcap=30.0)
    assert after.flags[:rows].tolist() == [1, 0, 1, 1, 0, 1]
    others = [0, 2, 3, 5]
    assert torch.equal(after.logits[others], before.logits[others])
    assert torch.equal(after.tokens[others], before.tokens[others])
    assert after.tokens[4] == 0
    assert all(0 <= token < VOCAB for token in after.tokens[:rows].tolist())


@interpreted
def test_logits_of_a_row_have_the_same_bits_at_every_width() -> None:
    """Claim: a row's logits, token and flag have the same bits in steps of 1, 2, 5, 8, 16, 17 and 40 rows. Conclusive:
    compared bit for bit, at other places in the tile and with NaN behind."""
    rows = 40
    x, weight = rows_of(rows, 64, torch.bfloat16), weight_of(70, 64, torch.bfloat16)
    whole = Run(x, weight, rows)
    for first, count in ((39, 1), (3, 2), (11, 5), (8, 8), (20, 16), (1, 17)):
        part = Run(torch.cat((x[first : first + count], x[-BEYOND:])), weight, count)
        for ours, theirs in zip(part.tensors(), whole.tensors()):
            assert torch.equal(ours[:count], theirs[first : first + count]), (first, count)
