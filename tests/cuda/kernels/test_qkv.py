"""Queries, keys and values in Triton's interpreter: norm, product, rotation, and the write to the cache."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from specdec.engine.cuda.kernels.configs import output_tile
from specdec.engine.cuda.kernels.products import RowNorm, alternated
from specdec.engine.cuda.kernels.qkv import qkv_rope, rope_write
from tests.support.interpreter import interpreted
from tests.support.kernel_inputs import (
    BEYOND,
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

POSITION_COUNT, SLOT_COUNT = 300, 400


@dataclass(frozen=True)
class Case:
    """The heads of a layer and its type. `special`: a bias in the fused kernel, norms of heads in the other.
    `rotated`: the part of a head that is rotated, absent: all."""

    rows: int
    heads: int
    kv_heads: int
    size: int
    inputs: int
    dtype: torch.dtype = torch.bfloat16
    special: bool = False
    rotated: int | None = None

    @property
    def outputs(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.size

    @property
    def turned(self) -> int:
        return self.size if self.rotated is None else self.rotated


CASES = (
    Case(5, 4, 2, 32, 128),
    Case(1, 3, 1, 48, 72, torch.float16, special=True),  # a tail of inputs
    Case(17, 2, 2, 16, 64, special=True),  # a second tile of rows
    Case(3, 2, 1, 64, 64, rotated=16, special=True),  # as GPT-NeoX: a quarter; a tile with both kinds of pairs
    Case(2, 2, 1, 32, 64, torch.float16, rotated=24),  # as Phi-4: three quarters
    Case(2, 1, 1, 32, 64, rotated=0),  # as SmolLM3 in every fourth layer, and GPT-2
)


class Layer:
    """A layer's tensors: those of a case, [rows + 3, ...] where there are rows."""

    def __init__(self, case: Case):
        self.case = case
        self.x = rows_of(case.rows, case.inputs, case.dtype)
        self.weight = weight_of(case.outputs, case.inputs, case.dtype)
        self.bias = vector_of(case.outputs, case.dtype) if case.special else None
        self.gain = vector_of(case.inputs, torch.float32, seed=5)
        self.head_gains = tuple(vector_of(case.size, case.dtype, seed=seed) for seed in (6, 7))
        angles = torch.randn(POSITION_COUNT, case.turned // 2, generator=torch.Generator().manual_seed(8))
        self.angles = (angles.cos().to(case.dtype), angles.sin().to(case.dtype)) if case.turned else (None, None)
        order = torch.randperm(SLOT_COUNT, generator=torch.Generator().manual_seed(9))
        # Beyond the step's rows are places that must not be read, and slots that must not be written.
        beyond = torch.full((BEYOND,), 2**62)
        self.positions = torch.cat((order[: case.rows] % POSITION_COUNT, beyond))
        self.slots = torch.cat((order[: case.rows], beyond))

    def outputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, key cache and value cache that nothing has written."""
        case = self.case
        caches = (unwritten(SLOT_COUNT, case.kv_heads, case.size, dtype=case.dtype) for _ in range(2))
        return unwritten(rows + BEYOND, case.heads, case.size, dtype=case.dtype), *caches

    def product(self) -> torch.Tensor:
        """[rows, heads, size]: the product of the normalized rows, rounded, as float32."""
        case = self.case
        y = normalized(self.x[: case.rows], self.gain) @ self.weight.float().t()
        y = y if self.bias is None else y + self.bias.float()
        return y.to(case.dtype).float().view(case.rows, -1, case.size)

    def rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """Heads of rows after the rotation by the angles of the rows' positions."""
        at = self.positions[: self.case.rows]
        if not self.case.turned:
            return heads
        cos, sin = (each[at].float()[:, None] for each in self.angles)
        a, b = heads[..., : self.case.turned].chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, heads[..., self.case.turned :]), -1)

    def check(self, written: tuple[torch.Tensor, torch.Tensor, torch.Tensor], heads: torch.Tensor) -> None:
        """What was written is `heads`, queries and keys rotated; nothing else was written."""
        case = self.case
        queries, keys, values = written
        slots, others = self.slots[: case.rows], torch.ones(SLOT_COUNT, dtype=torch.bool)
        others[slots] = False
        turned = self.rotated(heads[:, : case.heads + case.kv_heads])
        assert_near(queries[: case.rows], turned[:, : case.heads], case.dtype)
        assert_near(keys[slots], turned[:, case.heads :], case.dtype)
        assert_near(values[slots], heads[:, case.heads + case.kv_heads :], case.dtype)
        for tensor in (queries[case.rows :], keys[others], values[others]):
            assert_unwritten(tensor)

    def run(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs `qkv_rope` on these rows alone, NaN and places that are none behind them."""
        case = self.case
        x, positions, slots = (torch.cat((t[: case.rows][rows], t[case.rows :])) for t in self._rows())
        count = len(x) - BEYOND
        written = self.outputs(count)
        norm = RowNorm(sums_of(x, output_tile(case.inputs)), self.gain, EPSILON)
        weight = alternated(self.weight, case.size, case.rotated)
        bias = None if self.bias is None else alternated(self.bias, case.size, case.rotated)
        qkv_rope(x, weight, *self.angles, positions, slots, *written, count, norm=norm, bias=bias)
        return written

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x, self.positions, self.slots


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_fused_kernel_is_norm_product_rotation_and_write(case: Case) -> None:
    """Claim: `qkv_rope` writes rotated queries, and rotated keys and plain values to the rows' slots, and nothing else.

    Conclusive: plain arithmetic beside it; every other slot and row is still unwritten; rows beyond the step's have
    positions and slots far outside every tensor.
    """
    layer = Layer(case)
    layer.check(layer.run(slice(None)), layer.product())


@interpreted
def test_queries_and_keys_have_the_same_bits_at_every_width() -> None:
    """Claim: what a row writes has the same bits in steps of 1, 2, 5, 8, 16, 17 and 40 rows. Conclusive: compared bit
    for bit, at other places in the tile and with NaN behind."""
    layer = Layer(Case(40, 1, 1, 32, 64, special=True))
    queries, keys, values = layer.run(slice(None))
    for first, count in ((39, 1), (3, 2), (11, 5), (8, 8), (20, 16), (1, 17)):
        part_queries, part_keys, part_values = layer.run(slice(first, first + count))
        assert torch.equal(part_queries[:count], queries[first : first + count]), (first, count)
        slots = layer.slots[first : first + count]
        assert torch.equal(part_keys[slots], keys[slots]) and torch.equal(part_values[slots], values[slots])


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_single_kernel_norms_heads_rotates_and_writes(case: Case) -> None:
    """Claim: `rope_write` does with a product what `qkv_rope` does, with norms of heads before the rotation where a
    model has them. Conclusive: as for `qkv_rope`; heads sizes include one whose half is no power of two."""
    layer = Layer(case)
    qkv = layer.product()
    written = layer.outputs(case.rows)
    gains = layer.head_gains if case.special else None
    rows = torch.cat((qkv, torch.full((BEYOND, *qkv.shape[1:]), torch.nan))).to(case.dtype)
    rope_write(rows, *layer.angles, layer.positions, layer.slots, *written, case.rows, gains=gains, epsilon=EPSILON)
    if gains is not None:
        for gain, of in zip(gains, (slice(0, case.heads), slice(case.heads, case.heads + case.kv_heads))):
            flat = qkv[:, of].reshape(-1, case.size).to(case.dtype)
            qkv[:, of] = normalized(flat, gain).view(case.rows, -1, case.size)
    layer.check(written, qkv)
