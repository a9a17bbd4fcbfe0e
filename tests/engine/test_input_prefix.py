"""Cached inputs of encoders against a plain model: an input is found whole or not at all, with whatever output follows.

Cells hold (input, position, token), so an input found under another one, in part, or overwritten shows in the cells
that are read back.
"""

from __future__ import annotations

import random

import pytest

from specdec.engine.cache.kv_cache import BlockTable, KVCache
from specdec.errors import CacheExhausted
from tests.engine.test_prefix import BLOCK_SIZE, CAPACITY, CellStorage, make_cache, read

STEP_COUNT = 4000
ACTS = "open", "match", "match", "write", "write", "cache", "cache", "truncate", "free", "release", "other"
# Within a block, its end at a border, within the second; two share their first block, and two differ in a last token.
INPUTS = tuple(
    tuple(tokens) for tokens in ([1] * 5, [1] * 5 + [2] * 3, [1] * 8 + [2] * 5, [1] * 8 + [2] * 4 + [3], [3] * 16)
)


class Sequence:
    """A table, its input, and its whole text."""

    def __init__(self, cache: KVCache, given: tuple[int, ...], outputs: random.Random) -> None:
        self.table: BlockTable = cache.open(CAPACITY)
        self.begin(cache, given, outputs)

    def begin(self, cache: KVCache, given: tuple[int, ...], outputs: random.Random) -> None:
        """Its tokens are others from now on, as where a coordinator's tokens disagree with a session's."""
        cache.truncate(self.table, 0)
        cache.give_input(self.table, given)
        self.given = given
        self.text = [*given, *(outputs.randrange(2) for _ in range(CAPACITY - len(given)))]

    def write(self, cache: KVCache, storage: CellStorage, end: int) -> None:
        """Writes as a step does."""
        start = self.table.length
        cache.prepare_write(self.table, end)
        for position in range(start, end):
            block = storage.blocks[self.table.block_ids[position // BLOCK_SIZE]]
            block[position % BLOCK_SIZE] = (self.given, position, self.text[position])
        cache.advance(self.table, end)

    def check(self, storage: CellStorage) -> None:
        """Its valid cells hold its own text."""
        expected = [(self.given, position, self.text[position]) for position in range(self.table.length)]
        assert read(storage, self.table) == expected


@pytest.mark.parametrize("seed", range(4))
def test_random_lives_of_inputs_keep_their_cells(seed: int) -> None:
    """Claim: whatever sequences with inputs open, match, write, cache, roll back, are preempted, get another input and
    end, in a cache that is too small for them, each reads its own cells back; a match is no part of an input, and the
    end of one that fills no block is found too.

    Conclusive: cells know whose they are, all sequences are read after each of 4,000 steps, and matches that end
    inside a block, which only a copied end gives, are counted.
    """
    chance = random.Random(seed)
    cache, storage = make_cache()
    live: list[Sequence] = []
    ends = 0
    for _ in range(STEP_COUNT):
        act = chance.choice(ACTS)
        if act == "open" and len(live) < 4:
            live.append(Sequence(cache, chance.choice(INPUTS), chance))
        if not live:
            continue
        one = chance.choice(live)
        table, length = one.table, len(one.given)
        if act == "match" and not table.block_ids:
            found = cache.match_prefix(table, one.text[: chance.choice((length - 1, length + 1, CAPACITY))])
            assert found == table.length and (found == 0 or found >= length)
            ends += found % BLOCK_SIZE > 0
        elif act == "write":
            end = chance.randint(max(table.length, length), CAPACITY)
            try:
                one.write(cache, storage, end)
            except CacheExhausted:
                pass
        elif act == "cache":
            cache.cache_prefix(table, one.text, table.length)
        elif act == "truncate" and table.length:
            cache.truncate(table, chance.randint(0, table.length))
        elif act == "free":
            cache.free(table)
        elif act == "release":
            cache.release(table)
            live.remove(one)
        elif act == "other":
            one.begin(cache, chance.choice(INPUTS), chance)
        for each in live:
            each.check(storage)
        cache.check_integrity()
    assert ends > 5
