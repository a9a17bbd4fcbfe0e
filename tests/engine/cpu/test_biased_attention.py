"""Attention from a first position on, with a bias of scores by distance: near float64, and a row's bits are its own.

The world and the derived bound are those of `test_attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import pytest
import torch
from torch import Tensor

from specdec.engine.cpu.kernels import Kernels, Rows, ScoreRule, kernels
from tests.engine.cpu.test_attention import DTYPES, UNIT_ROUNDOFF, World, make_world

REACH = 40
# Of a row: its position, the first that it sees, and the end of those. An encoder's rows see behind themselves; rows of
# cross attention see positions before their own only; first positions lie on both sides of panels and splits.
SPANS = [(0, 0, 530), (529, 0, 530), (300, 0, 530), (520, 513, 521), (520, 512, 521), (520, 511, 521)]
SPANS += [(200, 7, 201), (200, 16, 201), (17, 17, 18), (500, 0, 33), (520, 3, 513), (60, 61, 530), (528, 500, 530)]

pytestmark = pytest.mark.skipif(kernels() is None, reason="native kernels are off")


def rule_of(world: World, scaling: float = 0.3, softcap: float = 0.0) -> ScoreRule:
    heads = world.queries[0].shape[1]
    bias = 2 * torch.randn(heads, 2 * REACH + 1, generator=torch.Generator().manual_seed(3))
    return ScoreRule(scaling, softcap, bias=bias)


def rows_of(world: World, spans: Sequence[tuple[int, int, int]], paths: Sequence[Sequence[int]] = ()) -> Rows:
    """Rows of sequence 0; with paths, the last positions of each are in these slots."""
    paths = paths or [()] * len(spans)
    lengths = [len(path) for path in paths]
    arrays = {
        "sequence": [0] * len(spans),
        "position": [position for position, _, _ in spans],
        "slot": [world.slot(0, 0)] * len(spans),  # nothing is written
        "base": [end - length for (_, _, end), length in zip(spans, lengths)],
        "path_start": numpy.cumsum([0, *lengths]),
        "path": [slot for path in paths for slot in path],
        "table_start": [0, len(world.tables[0])],
        "table": world.tables[0],
        "first": [first for _, first, _ in spans],
    }
    types = {name: numpy.int64 if name.endswith("_start") else numpy.int32 for name in arrays}
    return world.native.rows(
        block_count=world.cache.keys.shape[0],
        block_size=world.block_size,
        **{name: numpy.asarray(values, dtype=types[name]) for name, values in arrays.items()},
    )


def attend(world: World, rule: ScoreRule, spans: Sequence[tuple[int, int, int]]) -> Tensor:
    queries = torch.stack([world.queries[0][position] for position, _, _ in spans])
    return world.native.attend(world.cache, rows_of(world, spans), rule, queries)


def float64_of(world: World, rule: ScoreRule, span: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """As `test_attention.float64_of`; the addition of a bias errs by one rounding of its result."""
    position, first, end = span
    query = world.queries[0][position].double()
    group = query.shape[0] // world.cache.kv_heads
    keys, values = (side[0][first:end].double().repeat_interleave(group, 1) for side in (world.keys, world.values))
    bias = rule.bias.double()[:, (torch.arange(first, end) - position).clamp(-REACH, REACH) + REACH]
    scores = torch.einsum("hd,phd->hp", query, keys) * rule.scaling
    sizes = torch.einsum("hd,phd->hp", query.abs(), keys.abs()) * abs(rule.scaling)
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores + bias
    weights = scores.softmax(-1)
    u, count = UNIT_ROUNDOFF[torch.float32], end - first
    score_error = ((query.shape[1] + 4) * sizes.amax(-1) + 8 * rule.softcap + scores.abs().amax(-1)) * u
    spread = (scores.amax(-1) - scores.amin(-1)) * u
    relative = 2 * (score_error + spread) + (2 * count + 20) * u
    result = torch.einsum("hp,phd->hd", weights, values)
    bound = 1.01 * relative[:, None] * torch.einsum("hp,phd->hd", weights, values.abs())
    return result, bound + UNIT_ROUNDOFF[world.cache.dtype] * (result.abs() + bound) + 1e-7


@pytest.mark.parametrize("block_size", (8, 64))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_biased_rows_are_near_float64(native: Kernels, dtype: torch.dtype, block_size: int) -> None:
    """Rows that see positions before, around and behind their own, in one call and alone, with and without a soft cap.

    Conclusive: the bound is derived from the stated order, and a bias is drawn from a normal distribution with standard
    deviation 2, so a missing key, or a bias of the next distance or another head, is outside it."""
    for shape in ((4, 4, 20), (9, 3, 64)):
        world = make_world(native, (530,), shape, dtype, block_size)
        for softcap in (0.0, 3.0):
            rule = rule_of(world, softcap=softcap)
            found = attend(world, rule, SPANS)
            for index, span in enumerate(SPANS):
                result, bound = float64_of(world, rule, span)
                assert bool(((found[index].double() - result).abs() <= bound).all()), span
                assert torch.equal(attend(world, rule, [span])[0], found[index]), span


def test_a_row_has_its_bits_beside_any_others(native: Kernels) -> None:
    """An encoder's 300 rows, and rows of a chain that see from position 300 on, in batches of many sizes on 1 to 4
    threads, in blocks of 8 and 32.

    Conclusive: bits are compared with those of each row alone."""
    spans = [(p, 0, 300) for p in range(300)] + [(p, 300, p + 1) for p in range(300, 530)]
    alone = None
    for block_size in (8, 32):
        world = make_world(native, (530,), (3, 1, 16), block_size=block_size)
        rule = rule_of(world)
        torch.set_num_threads(1)
        if alone is None:
            alone = torch.cat([attend(world, rule, [span]) for span in spans])
        for turn, width in enumerate((1, 2, 3, 5, 8, 31, 33, 64, 127, 530)):
            torch.set_num_threads(1 + turn % 4)
            for start in (0, 290, 299, 400):
                own = slice(start, min(start + width, 530))
                assert torch.equal(attend(world, rule, spans[own]), alone[own]), (width, start)


def test_what_a_row_does_not_see_changes_no_bit(native: Kernels) -> None:
    """Positions before the first, behind the end, and a row's own where it does not see it, become not-a-number.

    Conclusive: a key or value that is multiplied, even by zero, makes the result not a number."""
    world = make_world(native, (530,), block_size=8)
    rule = rule_of(world)
    before = attend(world, rule, SPANS)
    for index, span in enumerate(SPANS):
        hidden = [(0, p) for p in range(530) if not span[1] <= p < span[2]]
        copies = make_world(native, (530,), block_size=8)
        if hidden:
            nothing = torch.full((len(hidden), 3, 64), float("nan"))
            native.write(copies.cache, copies.rows(hidden), nothing, nothing)
        assert torch.equal(attend(copies, rule, [span])[0], before[index]), span


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_path_has_the_bits_of_a_chain(native: Kernels, dtype: torch.dtype) -> None:
    """Rows whose last 1 to 20 keys lie in scattered slots have the bits of rows whose keys lie in place.

    Conclusive: first positions and paths lie on both sides of a split; the slots' own places hold not-a-number."""
    world = make_world(native, (530,), (4, 2, 24), dtype, 8)
    rule = rule_of(world)
    used = {block for table in world.tables for block in table}
    spare = [b * 8 + o for o in range(8) for b in range(world.cache.keys.shape[0]) if b not in used]
    for first, end, length in ((0, 30, 3), (17, 60, 20), (505, 520, 8), (100, 515, 20), (513, 514, 1)):
        span = (end - 1, first, end)
        expected = attend(world, rule, [span])
        path = [spare[(7 * i) % len(spare)] for i in range(length)]
        keys, values = (side[0][end - length : end] for side in (world.keys, world.values))
        native.write(
            world.cache, world.rows([(0, p) for p in range(end - length, end)], [[s] for s in path]), keys, values
        )
        queries = world.queries[0][end - 1][None]
        found = native.attend(world.cache, rows_of(world, [span], [path]), rule, queries)
        assert torch.equal(found, expected), span


def test_no_first_position_and_no_bias_are_the_plain_ones(native: Kernels) -> None:
    """Rows that see from 0 on, and a bias of zeros, have the bits of rows without either.

    Conclusive: bits, over a split."""
    world = make_world(native, (530,))
    nodes = [0, 1, 15, 16, 200, 511, 512, 529]
    plain = world.attend(ScoreRule(0.3), [(0, p) for p in nodes])
    spans = [(p, 0, p + 1) for p in nodes]
    assert torch.equal(attend(world, ScoreRule(0.3), spans), plain)
    assert torch.equal(attend(world, ScoreRule(0.3, bias=torch.zeros(9, 2 * REACH + 1)), spans), plain)
