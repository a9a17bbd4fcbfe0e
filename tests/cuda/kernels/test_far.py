"""Offsets beyond 2^31 elements in Triton's interpreter: large caches, large vocabularies.

Each large tensor is the upper half of memory that is reserved and hardly touched, so that an offset that wraps around
in 32 bits lands in the lower half, which stays zero, instead of outside.
"""

from __future__ import annotations

import math

import torch
from triton.runtime.interpreter import interpreter_builder

from specdec.engine.cuda.kernels import norms, products, qkv
from specdec.engine.cuda.kernels.configs import head_tiles, sum_parts
from tests.support.interpreter import interpreted
from tests.support.kernel_inputs import assert_near, reserved, rows_of, unwritten, weight_of

DTYPE = torch.bfloat16
FAR = 2**31


def upper(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Zeros of this shape behind 2^31 elements that no test touches."""
    return reserved(FAR + math.prod(shape), dtype)[FAR:].view(shape)


@interpreted
def test_slots_and_ids_may_be_far() -> None:
    """Claim: keys and values are written to, and embeddings read from, places more than 2^31 elements behind the first.

    Conclusive: what stands there is compared, for the fused and the single kernel.
    """
    size, inputs, slot = 32, 64, FAR // 64 + 7
    x, weight = rows_of(1, inputs, DTYPE), weight_of(4 * size, inputs, DTYPE)
    turn = torch.ones(1, size // 2), torch.zeros(1, size // 2)  # rotates nothing
    positions, slots = torch.zeros(1, dtype=torch.int64), torch.tensor([slot])
    expected = (x[:1].float() @ weight.float().t()).view(4, size)
    for fused in (True, False):
        keys, values, queries = upper(slot + 1, 1, size * 2), upper(slot + 1, 1, size * 2), unwritten(4, 2, size)
        queries = queries.to(DTYPE)
        keys, values = (cache.view(-1, 1, size) for cache in (keys, values))
        slots[0] = 2 * slot
        if fused:
            both = products.alternated(weight, size)
            qkv.qkv_rope(x, both, *turn, positions, slots, queries, keys, values, 1)
        else:
            rows = expected[None].to(DTYPE).contiguous()
            qkv.rope_write(rows, *turn, positions, slots, queries, keys, values, 1)
        assert_near(keys[slots[0], 0], expected[2], DTYPE)
        assert_near(values[slots[0], 0], expected[3], DTYPE)
    table = upper(slot + 1, size * 2)
    table[slot] = rows_of(1, size * 2, DTYPE)[0]
    out, sums = unwritten(1, size * 2, dtype=DTYPE), unwritten(1, sum_parts(size * 2))
    norms.embed(torch.tensor([slot]), table, out, sums, 1)
    assert torch.equal(out[0], table[slot])


@interpreted
def test_tiles_of_a_weight_may_be_far() -> None:
    """Claim: products read weights, and the output layer writes logits, more than 2^31 elements behind the first.

    Conclusive: of a grid of millions of tiles the last is run alone, that of the last rows and the last outputs, and
    what it computes is compared.
    """
    inputs, rows = 64, 66
    outputs = FAR // inputs + 128
    weight = upper(outputs, inputs)
    weight[-64:] = weight_of(64, inputs, DTYPE)
    x = rows_of(rows, inputs, DTYPE)
    expected = x[64:rows].float() @ weight[-64:].float().t()
    out = upper(rows, outputs)
    with last_tile_alone():
        products.product(x, weight, out, rows)
    assert_near(out[64:, -16:], expected[:, -16:], DTYPE)
    tiles = head_tiles(outputs)
    logits = upper(rows, outputs, dtype=torch.float32)
    best, ids, finite = (upper(rows, tiles, dtype=kind) for kind in (torch.float32, torch.int32, torch.int32))
    with last_tile_alone():
        products.head(x, weight, logits, best, ids, finite, rows)
    assert_near(logits[64:, -64:], expected, torch.float32)
    assert ids[64:, -1].tolist() == (outputs - 64 + expected.argmax(1)).tolist()


class last_tile_alone:
    """Grids [row tiles, tiles] have one program: that of the last tile of the last rows."""

    def __enter__(self) -> None:
        self._dim, self._index = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
        self._launch = products.launch

        def launch(kernel: object, grid: tuple[int, int], *arguments: object, **more: object) -> None:
            interpreter_builder.set_grid_dim = lambda *_: self._dim(*grid, 1)
            interpreter_builder.set_grid_idx = lambda *_: self._index(grid[0] - 1, grid[1] - 1, 0)
            self._launch(kernel, (1, 1), *arguments, **more)

        products.launch = launch

    def __exit__(self, *_: object) -> None:
        products.launch = self._launch
        interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx = self._dim, self._index
