"""Cached prefixes against a model: which prefix matches, in which order blocks are taken, and that contents agree.

Cells hold (salt, position, token), so a block found under the wrong text, at the wrong position or by another tenant
shows in the cells read back. Beside the cache stands a plain model: the set of cached prefixes.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.engine.cache.kv_cache import BlockTable, KVCache
from specdec.errors import CacheExhausted

BLOCK_COUNT = 10
BLOCK_SIZE = 8
CAPACITY = 40
# Texts that part in the middle of a block, at a border, and not at all.
TEXTS = tuple(
    [first] * 8 + [second] * 5 + [third] * (CAPACITY - 13) for first in (1, 2) for second in (1, 2) for third in (1, 2)
)


class CellStorage:
    """Any value per position."""

    def __init__(self) -> None:
        self.blocks: list[list[object]] = [[None] * BLOCK_SIZE for _ in range(BLOCK_COUNT)]

    def copy_slots(self, sources: list[int], destinations: list[int]) -> None:
        values = [self.blocks[slot // BLOCK_SIZE][slot % BLOCK_SIZE] for slot in sources]
        for slot, value in zip(destinations, values):
            self.blocks[slot // BLOCK_SIZE][slot % BLOCK_SIZE] = value

    def scrub(self, block_id: int, start: int, end: int) -> None:
        self.blocks[block_id][start:end] = [None] * (end - start)


def make_cache() -> tuple[KVCache, CellStorage]:
    storage = CellStorage()
    return KVCache(BLOCK_COUNT, BLOCK_SIZE, storage), storage


def write(cache: KVCache, storage: CellStorage, table: BlockTable, text: list[int], end: int, salt: str = "") -> None:
    """Writes as a step does: prepare, write every position, advance."""
    start = table.length
    cache.prepare_write(table, end)
    for position in range(start, end):
        block = storage.blocks[table.block_ids[position // BLOCK_SIZE]]
        block[position % BLOCK_SIZE] = (salt, position, text[position])
    cache.advance(table, end)


def read(storage: CellStorage, table: BlockTable) -> list[object]:
    return [
        storage.blocks[table.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE]
        for position in range(table.length)
    ]


class PrefixMachine(RuleBasedStateMachine):
    """Any order of opening, matching and caching prefixes, growing, rolling back, preempting and releasing."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.storage = make_cache()
        self.sessions: dict[BlockTable, tuple[list[int], str]] = {}
        self.cached: set[tuple[str, tuple[int, ...]]] = set()  # every prefix that was ever cached

    def table(self, data: st.DataObject) -> BlockTable:
        return data.draw(st.sampled_from(list(self.sessions)), label="table")

    @rule(text=st.sampled_from(TEXTS), salt=st.sampled_from(["", "a"]))
    def open(self, text: list[int], salt: str) -> None:
        free = self.cache.free_block_count
        table = self.cache.open(CAPACITY, salt)
        assert self.cache.free_block_count == free and not table.block_ids
        self.sessions[table] = text, salt

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def match_prefix(self, data: st.DataObject) -> None:
        table = self.table(data)
        text, salt = self.sessions[table]
        if table.block_ids:
            with pytest.raises(ValueError):
                self.cache.match_prefix(table, text)
            return
        length = self.cache.match_prefix(table, text)
        assert length % BLOCK_SIZE == 0 and length == table.length
        assert not length or (salt, tuple(text[:length])) in self.cached, "matched a prefix that was never cached"

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), count=st.integers(1, 20))
    def grow(self, data: st.DataObject, count: int) -> None:
        table = self.table(data)
        text, salt = self.sessions[table]
        end = min(table.length + count, CAPACITY)
        free, before = self.cache.free_block_count, (list(table.block_ids), table.length)
        lacking = max(0, -(-end // BLOCK_SIZE) - len(table.block_ids))
        written = table.block_ids[table.length // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
        others = {block_id for other in self.sessions if other is not table for block_id in other.block_ids}
        needed = lacking + len(others.intersection(written))
        try:
            write(self.cache, self.storage, table, text, end, salt)
        except CacheExhausted:
            assert (list(table.block_ids), table.length) == before, "a refusal changed something"
            assert needed > free, "there were free blocks"
            return
        assert needed <= free
        assert len(table.block_ids) == max(len(before[0]), -(-end // BLOCK_SIZE))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def cache_prefix(self, data: st.DataObject) -> None:
        table = self.table(data)
        text, salt = self.sessions[table]
        length = data.draw(st.sampled_from([table.length, table.length // 2]), label="length")
        self.cache.cache_prefix(table, text, length)
        for end in range(BLOCK_SIZE, length + 1, BLOCK_SIZE):
            self.cached.add((salt, tuple(text[:end])))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), text=st.sampled_from(TEXTS))
    def roll_back(self, data: st.DataObject, text: list[int]) -> None:
        """Truncates to any length, to go on with any text that agrees up to it."""
        table = self.table(data)
        old, salt = self.sessions[table]
        agreed = next((i for i, pair in enumerate(zip(old, text)) if pair[0] != pair[1]), CAPACITY)
        length = data.draw(st.integers(0, min(agreed, table.length)), label="length")
        self.cache.truncate(table, length)
        self.sessions[table] = text, salt

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), is_release=st.booleans())
    def preempt_or_release(self, data: st.DataObject, is_release: bool) -> None:
        table = self.table(data)
        if is_release:
            self.cache.release(table)
            del self.sessions[table]
        else:
            self.cache.free(table)
            assert table.length == 0 and not table.block_ids and not table.is_released

    @invariant()
    def contents_and_integrity(self) -> None:
        self.cache.check_integrity()
        for table, (text, salt) in self.sessions.items():
            expected = [(salt, position, text[position]) for position in range(table.length)]
            assert read(self.storage, table) == expected
        if not any(table.block_ids for table in self.sessions):
            assert self.cache.free_block_count == BLOCK_COUNT - 1 and self.cache.usage == 0


PrefixMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_any_order_of_operations = PrefixMachine.TestCase


def run_through(cache: KVCache, storage: CellStorage, text: list[int], salt: str = "") -> int:
    """Feeds a whole text as one sequence, caches and releases it; returns the length of its match."""
    table = cache.open(CAPACITY, salt)
    found = cache.match_prefix(table, text)
    write(cache, storage, table, text, len(text), salt)
    cache.cache_prefix(table, text, len(text))
    cache.release(table)
    return found


def text_of(token: int, block_count: int) -> list[int]:
    return [token] * (block_count * BLOCK_SIZE)


def test_the_least_recently_used_prefix_loses_its_blocks_first() -> None:
    """Claim: when free blocks run out, the cache takes those of the least recently used prefix, the last block first.

    Source: "LRU". Conclusive: three prefixes of three blocks fill the cache; a use of the first makes the second the
    oldest, and after one more block exactly its last block is gone.
    """
    cache, storage = make_cache()
    texts = [text_of(token, 3) for token in (1, 2, 3)]
    assert [run_through(cache, storage, text) for text in texts] == [0, 0, 0]
    assert cache.evictable_block_count == BLOCK_COUNT - 1 and cache.free_block_count == BLOCK_COUNT - 1
    assert run_through(cache, storage, texts[0]) == 24
    assert run_through(cache, storage, text_of(4, 1)) == 0
    table = cache.open(CAPACITY)
    assert cache.match_prefix(table, texts[1]) == 16, "its last block was taken, and no other"
    cache.release(table)
    assert [run_through(cache, storage, text) for text in (texts[0], texts[2], texts[1])] == [24, 24, 16]
    cache.check_integrity()


def test_a_text_is_found_by_all_of_what_came_before() -> None:
    """Claim: equal blocks behind different beginnings, and equal texts with different salts, are not shared.

    Source: "by block hash ... with cache_salt separating tenants". Conclusive: the second blocks of the two texts are
    equal token for token, as are the texts of the two salts; and each text matches its own blocks.
    """
    cache, storage = make_cache()
    one, other = text_of(1, 1) + text_of(7, 1), text_of(2, 1) + text_of(7, 1)
    assert run_through(cache, storage, one) == 0 and run_through(cache, storage, other) == 0
    assert run_through(cache, storage, one, "tenant") == 0
    assert run_through(cache, storage, one, "tenant") == 16 and run_through(cache, storage, other) == 16


def test_an_overwritten_or_reused_block_does_not_match_its_old_text() -> None:
    """Claim: a cached block matches no more once its only holder writes another text to it, or another sequence takes
    it.

    Source: kv_cache.py, invariant 4. Conclusive: the old text is looked up after both.
    """
    cache, storage = make_cache()
    one, other = text_of(1, 1), text_of(2, 1)
    table = cache.open(CAPACITY)
    write(cache, storage, table, one, 8)
    cache.cache_prefix(table, one, 8)
    cache.truncate(table, 0)
    write(cache, storage, table, other, 8)
    assert run_through(cache, storage, one) == 0
    cache.release(table)
    cache.release(cache.reserve((BLOCK_COUNT - 1) * BLOCK_SIZE))
    assert run_through(cache, storage, one) == 0
    cache.check_integrity()


def test_a_refusal_changes_nothing() -> None:
    """Claim: where a write needs a new block and a copy of a shared one, and one block is free, neither is taken.

    Source: kv_cache.py. Conclusive: the table and the free count are unchanged, and with one more free block it writes.
    """
    cache, storage = make_cache()
    text = text_of(1, 3)
    one, other = cache.open(CAPACITY), cache.open(CAPACITY)
    write(cache, storage, one, text, 16)
    cache.cache_prefix(one, text, 16)
    cache.match_prefix(other, text)
    cache.truncate(other, 12)
    taken = [cache.reserve(1) for _ in range(cache.free_block_count - 1)]
    before = list(other.block_ids)
    with pytest.raises(CacheExhausted):
        cache.prepare_write(other, 20)
    assert other.block_ids == before and cache.free_block_count == 1
    cache.release(taken.pop())
    write(cache, storage, other, text, 20)
    assert cache.free_block_count == 0 and one.block_ids[1] == before[1] != other.block_ids[1]
    cache.check_integrity()


def test_drafts_and_half_blocks_are_never_found() -> None:
    """Claim: only whole blocks of the cached prefix are shared, whatever else the table holds.

    Source: "over committed tokens only". Conclusive: the table holds three blocks, 15 tokens are committed.
    """
    cache, storage = make_cache()
    text = text_of(1, 3)
    table = cache.open(CAPACITY)
    write(cache, storage, table, text, 24)
    cache.cache_prefix(table, text, 15)
    second = cache.open(CAPACITY)
    assert cache.match_prefix(second, text) == 8 and second.block_ids == table.block_ids[:1]
    with pytest.raises(ValueError):
        cache.cache_prefix(table, text, 25)
    cache.check_integrity()


def test_feeding_the_last_token_again_takes_no_block_of_another_sequence() -> None:
    """Claim: a sequence whose whole prompt matches feeds its last token again: into a copy where the block is shared,
    in place where it is the only holder, and afterwards the prompt matches again.

    Source: "at least the last token is always fed again". Conclusive: the other holder's block stays the same.
    """
    cache, storage = make_cache()
    text = text_of(1, 2)
    run_through(cache, storage, text)
    alone, beside = cache.open(CAPACITY), cache.open(CAPACITY)
    for table in (alone, beside):
        assert cache.match_prefix(table, text) == 16
        cache.truncate(table, 15)
    assert alone.block_ids == beside.block_ids
    write(cache, storage, beside, text, 16)
    assert beside.block_ids[0] == alone.block_ids[0] and beside.block_ids[1] != alone.block_ids[1]
    free = cache.free_block_count
    write(cache, storage, alone, text, 16)
    assert cache.free_block_count == free, "the only holder writes in place"
    cache.cache_prefix(alone, text, 16)
    assert run_through(cache, storage, text) == 16
    cache.check_integrity()
