"""The measurement that picks safe widths, on products that are known to be safe or not.

The engine's promise rests on it: on another processor other kernels run, and the probe must exclude those that add in
another order. Here the kernels are ours, so what must be excluded is known.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec.engine.row_widths import ALONE, CANDIDATE_WIDTHS, RowWidths, probe
from specdec.engine.tiled_modules import AlignedActivation, TiledLinear
from tests.support.engine_models import Driver, random_tokens

WEIGHT = torch.randn(64, 300, generator=torch.Generator().manual_seed(2))  # [out, in]


def exact(rows: torch.Tensor) -> torch.Tensor:
    """A product [rows, 64] whose rows cannot depend on each other: rounded once from float64."""
    return (rows.double() @ WEIGHT.double().t()).float()


def other_kernel(rows: torch.Tensor) -> torch.Tensor:
    """The same product but for one result, which is off by one unit in the last place."""
    product = exact(rows)
    product[:, 40] = torch.nextafter(product[:, 40], torch.tensor(torch.inf))
    return product


def test_probe_keeps_the_widths_that_agree() -> None:
    """Claim: widths that add in another order than most are dropped, and so are those unequal from place to place.

    Source: measured, float32 products of 1 to 3 rows differ from wider ones. Conclusive: the unsafe widths are planted,
    off by one unit in the last place of one result.
    """

    def product(rows: torch.Tensor) -> torch.Tensor:
        if len(rows) < 4:
            return other_kernel(rows)
        if len(rows) == 12:
            return torch.cat([exact(rows[:8]), other_kernel(rows[8:])])
        return exact(rows)

    assert probe(product, 300, torch.float32, (1, 2, 3, 4, 8, 12, 16)) == (4, 8, 16)


def test_tiles_cover_every_padded_count() -> None:
    """Claim: for every row count, tiles of family widths cover the padded count exactly, at least the rows asked.

    Source: `RowWidths`. Conclusive: every count to three times the widest, for two families and the last resort.
    """
    for widths in (CANDIDATE_WIDTHS, (4, 16), ALONE):
        family = RowWidths(tuple(widths))
        for count in range(1, 3 * widths[-1] + 3):
            padded = family.padded(count)
            tiles = family.tiles(padded)
            assert count <= padded and padded % 4 == 0
            assert [start for start, _ in tiles] == [0, *[end for _, end in tiles[:-1]]] and tiles[-1][1] == padded
            assert all(end - start in widths for start, end in tiles)


def test_linear_equals_itself_in_tiles() -> None:
    """Claim: a batch wider than the widest width gives the rows it gives in single tiles.

    Source: design section 7, products in fixed row tiles. Conclusive: 300 rows, bit for bit, with and without bias.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 384, 96, generator=generator)
    for bias in (None, torch.randn(40, generator=generator)):
        linear = TiledLinear(torch.randn(96, 40, generator=generator), bias)
        linear.set_widths(RowWidths((64, 128)))
        whole = linear(x)
        for start in range(0, 384, 64):
            assert torch.equal(linear(x[:, start : start + 64]), whole[:, start : start + 64])


@pytest.mark.parametrize("function", [torch.nn.SiLU(), torch.nn.GELU(), torch.nn.Tanh()])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_activation_does_not_depend_on_place(function: torch.nn.Module, threads: int) -> None:
    """Claim: an element's activation is the same bits wherever it stands, for any size and thread count.

    Source: measured, vector code and the scalar code for left-over elements round exp and tanh differently.
    Conclusive: sizes that are no multiple of a register, beyond one run, and the same values shifted by one.
    """
    torch.set_num_threads(threads)
    activation = AlignedActivation(function)
    values = torch.randn(100_001, generator=torch.Generator().manual_seed(1))
    whole = activation(values)
    assert torch.equal(activation(values[1:]), whole[1:])
    for count in (1, 7, 63, 75, 300, 33_000):
        assert torch.equal(activation(values[:count]), whole[:count])
        assert torch.equal(activation(values[count : 2 * count]), whole[count : 2 * count])


def test_the_last_resort_still_answers_the_same(driver_of: Callable[..., Driver]) -> None:
    """Claim: on a machine where no widths agree, products of one row each keep every promise, only slowly.

    Source: `row_widths`, width 1 is correct by construction. Conclusive: both families are set to it, and a
    verification among neighbours still equals single steps bit for bit.
    """
    driver = Driver(driver_of("llama").model, 64)
    measured = driver.model.families
    driver.model.use_families(RowWidths(ALONE), ALONE)
    token_ids = random_tokens(30, 6)
    table, other = driver.open(), driver.open()
    alone = torch.cat([driver.feed(table, [token_id]) for token_id in token_ids])
    driver.cache.truncate(table, 20)
    driver.feed(other, token_ids[:20])
    both = driver.step([(table, token_ids[20:25], 5), (other, token_ids[20:30], 10)]).logits
    driver.model.use_families(*measured)
    assert torch.equal(both, torch.cat([alone[20:25], alone[20:30]]))
