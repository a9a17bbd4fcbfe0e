"""The measurement that picks stable tile sizes, on products that are known to be safe or not.

The engine's promise rests on it: on another processor other kernels run, and the probe must exclude those that add in
another order. Here the kernels are ours, so the widths to exclude are known.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec.engine import tiled_modules
from specdec.engine.cpu_backend import OUTPUT_ROWS_MAX
from specdec.engine.model import load_model
from specdec.engine.tile_sizes import ALONE, CANDIDATE_WIDTHS, AlignedActivation, TileSizes, cancelling, probe
from specdec.engine.tiled_modules import Layout, TiledLinear, Weight, probe_widths
from specdec.engine.transformers_model import TransformersModel
from specdec.folders import EMBEDDED_MODELS
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
    """Claim: widths that add in another order than most are dropped, and so are those unequal from row to row.

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


def test_probe_sees_the_order_of_a_sum_that_is_rounded_to_bfloat16() -> None:
    """Claim: a product that adds in another order is dropped although its result has 8 bits only.

    Source: measured, bfloat16 products of 2048 columns differ between 8 and 12 rows in one result of 8,000, and random
    rows did not show it. Conclusive: the planted order differs from the other in nothing else.
    """
    weight, rows = cancelling(256, 64, torch.bfloat16)
    wide = weight.float()

    def product(rows: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(rows), 64)
        for place in range(255, -1, -1) if len(rows) == 12 else range(256):
            total += rows.float()[:, place, None] * wide[:, place]
        return total.to(torch.bfloat16)

    assert probe(product, 256, torch.bfloat16, (4, 8, 12, 16), rows) == (4, 8, 16)
    exactly = rows.double() @ weight.double().t()
    assert exactly.abs().max() < 1e-9 and product(rows).count_nonzero() > 0.7 * exactly.numel()


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(704, 256), (2048, 512)])
def test_bfloat16_rows_agree_at_all_stable_tile_sizes(
    shape: tuple[int, int], threads: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: at the widths measured, rows of real products are equal bit for bit, natively multiplied or not, by packed
    weights and, where the library cannot pack, by plain ones.

    Conclusive: half a million results at every width against those at the least width; two kernels known to differ here
    differ in 30 to 60 results.
    """
    torch.set_num_threads(threads)
    if not is_packed:
        monkeypatch.setattr(tiled_modules, "_packed", lambda weight: None)
    generator = torch.Generator().manual_seed(3)
    linear = TiledLinear(Weight((torch.randn(shape[::-1], generator=generator) / 16).to(torch.bfloat16)), None)
    sizes = probe_widths([linear]).widths
    rows = torch.randn(2**19 // shape[1], shape[0], generator=generator).to(torch.bfloat16)
    results = [torch.cat([linear.tile(part) for part in rows.split(width) if len(part) == width]) for width in sizes]
    for result in results:
        shared = min(len(result), len(results[0]))
        assert torch.equal(result[:shared], results[0][:shared])


def test_tiles_cover_every_padded_count() -> None:
    """Claim: for every row count, tiles of stable widths cover the padded count exactly, which holds all rows.

    Source: `TileSizes`. Conclusive: every count to three times the widest, for two tile sizes and the last resort.
    """
    for widths in (CANDIDATE_WIDTHS, (4, 16), ALONE):
        sizes = TileSizes(tuple(widths))
        for count in range(1, 3 * widths[-1] + 3):
            padded = sizes.padded(count)
            tiles = sizes.tiles(padded)
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
        linear = TiledLinear(Weight(torch.randn(40, 96, generator=generator)), bias)
        linear.set_widths(TileSizes((64, 128)))
        whole = linear(x)
        for start in range(0, 384, 64):
            assert torch.equal(linear(x[:, start : start + 64]), whole[:, start : start + 64])


@pytest.mark.parametrize("function", [torch.nn.SiLU(), torch.nn.GELU(), torch.nn.Tanh()])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_activation_does_not_depend_on_place(function: torch.nn.Module, threads: int) -> None:
    """Claim: an element's activation is the same bits at any index, for any size and thread count.

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

    Source: `tile_sizes`, width 1 is correct by construction. Conclusive: all stable tile sizes are set to it, and a
    verification among neighbours still equals single steps bit for bit.
    """
    driver = driver_of("llama")
    measured = driver.model.backend.stable_tiles
    driver.model.backend.use_stable_tiles(TileSizes(ALONE), ALONE)
    token_ids = random_tokens(30, 6)
    table, other = driver.open(), driver.open()
    alone = torch.cat([driver.feed(table, [token_id]) for token_id in token_ids])
    driver.cache.truncate(table, 20)
    driver.feed(other, token_ids[:20])
    both = driver.step([(table, token_ids[20:25], 5), (other, token_ids[20:30], 10)]).logits
    driver.model.backend.use_stable_tiles(*measured)
    for each in (table, other):
        driver.cache.release(each)
    assert torch.equal(both, torch.cat([alone[20:25], alone[20:30]]))


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Layout, int]]:
    """The layouts and numbers of rows of products for which the library makes kernels."""
    found: set[tuple[Layout, int]] = set()
    multiply = Weight.multiply

    def recorded(self: Weight, rows: torch.Tensor) -> torch.Tensor:
        if self.has_kernels:
            found.add((self.layout, len(rows)))
        return multiply(self, rows)

    monkeypatch.setattr(Weight, "multiply", recorded)
    return found


def test_no_later_step_of_a_target_makes_a_kernel(multiplied: set[tuple[Layout, int]]) -> None:
    """Claim: what the first step of a model multiplied, by layout and number of rows, is all that later steps multiply,
    of any size. Source: each of them has a kernel, which takes milliseconds and 0.6 MB when it is first needed: a
    service grew by 2.5 MB after 40 minutes. Conclusive: every product is recorded, and steps have all numbers of rows
    up to beyond the largest tile."""
    driver = Driver.load(EMBEDDED_MODELS / "target", "bfloat16")
    table = driver.open(200)
    driver.feed(table, [1, 2, 3])
    first = set(multiplied)
    if not first:
        pytest.skip("products are not packed here")
    for count in range(1, 140):
        driver.cache.truncate(table, 3)
        driver.feed(table, [1] * count, min(count, OUTPUT_ROWS_MAX))
    assert multiplied == first, sorted({rows for _, rows in multiplied - first})


def test_no_step_of_a_draft_makes_a_kernel(multiplied: set[tuple[Layout, int]]) -> None:
    """Claim: the same for a draft, whose kernels are made when it allocates its cache. Conclusive: as above, every
    layer multiplies every number of rows itself."""
    model = load_model(str(EMBEDDED_MODELS / "draft"), "bfloat16", has_stable_rows=False)
    assert isinstance(model, TransformersModel)
    model.allocate(4, 64)
    first = set(multiplied)
    if not first:
        pytest.skip("products are not packed here")
    layers = [module for module in model._base.modules() if isinstance(module, TiledLinear)]
    for linear in [*layers, model._output]:
        for count in range(1, 140 if linear is not model._output else OUTPUT_ROWS_MAX + 1):
            linear(torch.zeros(1, count, linear.weight.in_size))
    assert multiplied == first, sorted({rows for _, rows in multiplied - first})
