"""Products of a layer in Triton's interpreter, against the same arithmetic in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from specdec.engine.cuda.kernels.configs import output_tile, product_config, sum_parts
from specdec.engine.cuda.kernels.products import Activation, RowNorm, alternated, product
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
    weight_of,
)

BF16, FP16 = torch.bfloat16, torch.float16
ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}


@dataclass(frozen=True)
class Case:
    """One product: its shape, and what stands before and after it. `gain`: the type of the norm's gain."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype = BF16
    gain: torch.dtype | None = None
    bias: bool = False
    residual: bool = False
    activation: Activation | None = None

    def __str__(self) -> str:
        marks = [name for name in ("bias", "residual") if getattr(self, name)]
        names = [*marks, self.activation, self.gain and "norm", str(self.dtype).removeprefix("torch.")]
        return "-".join([f"{self.rows}x{self.outputs}x{self.inputs}", *filter(None, names)])


CASES = (
    Case(5, 48, 128),
    Case(1, 40, 72, FP16, bias=True),  # neither is a multiple of its tile
    Case(16, 32, 600, residual=True),  # more than one step, the last one short
    Case(17, 48, 64, gain=BF16, residual=True),  # a second tile of rows
    Case(3, 40, 40, gain=torch.float32, bias=True, residual=True),
    Case(5, 96, 128, gain=BF16, activation="silu"),
    Case(2, 44, 128, FP16, gain=FP16, bias=True, activation="gelu_tanh"),
)


@dataclass
class Inputs:
    """The tensors of a case, [rows + 3, ...] where there are rows."""

    case: Case

    def __post_init__(self) -> None:
        case = self.case
        self.x = rows_of(case.rows, case.inputs, case.dtype)
        self.weight = weight_of(case.outputs, case.inputs, case.dtype)
        self.bias = vector_of(case.outputs, case.dtype) if case.bias else None
        self.residual = rows_of(case.rows, case.outputs, case.dtype, seed=3) if case.residual else None
        self.gain = None if case.gain is None else vector_of(case.inputs, case.gain, seed=4)

    def run(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the kernel on these rows alone, NaN behind them; returns all of its output and sums."""
        case = self.case
        count = len(range(*rows.indices(case.rows)))

        def taken(rows_: torch.Tensor) -> torch.Tensor:
            return torch.cat((rows_[rows], rows_[case.rows :]))

        paired = case.activation is not None
        x = taken(self.x)
        out = unwritten(len(x), case.outputs // (2 if paired else 1), dtype=case.dtype)
        sums = unwritten(len(x), sum_parts(case.outputs))
        more: dict[str, Any] = {"activation": case.activation}
        if self.gain is not None:
            more["norm"] = RowNorm(sums_of(x, output_tile(case.inputs)), self.gain, EPSILON)
        if self.residual is not None:
            more |= {"residual": taken(self.residual), "sums": sums}
        if self.bias is not None:
            more["bias"] = alternated(self.bias, case.outputs) if paired else self.bias
        weight = alternated(self.weight, case.outputs) if paired else self.weight
        product(x, weight, out, count, **more)
        return out, sums

    def expected(self) -> torch.Tensor:
        """[rows, outputs] float32."""
        case = self.case
        x = self.x[: case.rows]
        x = x.float() if self.gain is None else normalized(x, self.gain)
        y = x @ self.weight.float().t()
        y = (y if self.bias is None else y + self.bias.float()).to(case.dtype).float()
        if case.activation is not None:
            gate, up = y.chunk(2, 1)
            return ACTIVATIONS[case.activation](gate).to(case.dtype).float() * up
        return y if self.residual is None else y + self.residual[: case.rows].float()


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_is_that_of_plain_arithmetic(case: Case) -> None:
    """Claim: `product` computes what its contract says, for shapes with tails, and writes no other row.

    Conclusive: float32 arithmetic with the roundings of the kernel's inputs beside it; a lost or doubled input or
    output is off by more than the roundings; rows beyond the step's are NaN in every input and in the output.
    """
    inputs = Inputs(case)
    out, sums = inputs.run(slice(None))
    assert_near(out[: case.rows], inputs.expected(), case.dtype)
    assert_unwritten(out[case.rows :])
    if case.residual:
        written = sums_of(out[: case.rows], output_tile(case.outputs))
        torch.testing.assert_close(sums[: case.rows], written, rtol=1e-6, atol=0)
        assert_unwritten(sums[case.rows :])
    else:
        assert_unwritten(sums)


@interpreted
@pytest.mark.parametrize(
    "case", [Case(40, 32, 192, gain=BF16, bias=True, residual=True), Case(40, 32, 64, activation="silu")], ids=str
)
def test_a_row_has_the_same_bits_at_every_width(case: Case) -> None:
    """Claim: a row's output and sums have the same bits in steps of 1, 2, 5, 8, 16, 17 and 40 rows, at any place in
    them, beside any neighbours. Conclusive: the rows of one step are compared, bit for bit, with those of narrower
    steps that begin at different rows, each with NaN behind it."""
    inputs = Inputs(case)
    whole, whole_sums = inputs.run(slice(None))
    for first, count in ((0, 1), (39, 1), (3, 2), (11, 5), (8, 8), (20, 16), (1, 17)):
        out, sums = inputs.run(slice(first, first + count))
        assert torch.equal(out[:count], whole[first : first + count]), (first, count)
        if case.residual:
            assert torch.equal(sums[:count], whole_sums[first : first + count]), (first, count)


def test_the_cut_of_a_product_is_one_of_tiles() -> None:
    """Claim: every shape of weights has a configuration that the kernel can run: powers of two, slices of 16 inputs at
    least, as tensor cores take them, and sums of squares per tile whatever the inputs. Conclusive: all shapes up to
    600 and those of models are looked at."""
    sizes = (*range(2, 600, 2), 896, 1536, 4096, 8192, 11008, 14336, 28672)
    for size in sizes:
        config = product_config(4096, size)
        assert config.step & (config.step - 1) == 0 and config.step % config.slices == 0
        assert config.step // config.slices >= 16
        assert config.step < 2 * max(size, 16)
        assert product_config(size, 64).tile == product_config(size, 4096).tile == output_tile(size)
