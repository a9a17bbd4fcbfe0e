"""Which query tiles are computed together, by their sizes alone."""

from __future__ import annotations

import numpy
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.attention import KEY_SPLIT
from specdec.engine.step_plan import QueryTile, group_tiles

WIDTHS = (4, 8, 16, 32)
TILES = st.lists(st.tuples(st.integers(1, 32), st.integers(0, 5000)), min_size=1, max_size=60)


@given(TILES, st.integers(1, 200))
def test_a_group_gathers_no_more_than_it_may(shapes: list[tuple[int, int]], splits_max: int):
    """Claim: every tile is in one group; a group of several gathers at most `splits_max` key splits, each tile counted
    as long as the longest; and none is twice as long as another of its group."""
    tiles = [QueryTile(numpy.empty(0), index, count, position) for index, (count, position) in enumerate(shapes)]
    groups = group_tiles(tiles, WIDTHS, splits_max)
    assert sorted(tile.first_row for group in groups for tile in group) == list(range(len(tiles)))
    for group in groups:
        lengths = [tile.split_count for tile in group]
        assert len(group) == 1 or len(group) * max(lengths) <= splits_max
        assert max(lengths) <= 2 * min(lengths)


def test_equal_tiles_are_one_group_within_the_bound():
    """Claim: the bound alone separates equal tiles: they are one group where it allows, and as few as it allows."""
    tiles = [QueryTile(numpy.empty(0), index, 1, 8 * KEY_SPLIT) for index in range(32)]
    assert [len(group) for group in group_tiles(tiles, WIDTHS, 9 * 32)] == [32]
    assert [len(group) for group in group_tiles(tiles, WIDTHS, 9 * 31)] == [31, 1]
    assert [len(group) for group in group_tiles(tiles, WIDTHS, 1)] == [1] * 32
