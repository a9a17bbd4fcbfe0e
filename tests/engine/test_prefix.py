"""Published blocks against a model of them: who may find what, in which order room is taken, and that contents agree.

Cells hold (salt, position, token), so a block found under the wrong text, at the wrong place or by another tenant shows
in what is read back. Beside the cache stands a plain model: the set of published prefixes and when each was last used.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.engine.block_table import BlockTable
from specdec.engine.kv_cache import KVCache
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

    def copy_block(self, source: int, destination: int) -> None:
        self.blocks[destination] = list(self.blocks[source])

    def scrub(self, block_id: int, start: int, end: int) -> None:
        self.blocks[block_id][start:end] = [None] * (end - start)


def make_cache() -> tuple[KVCache, CellStorage]:
    storage = CellStorage()
    return KVCache(BLOCK_COUNT, BLOCK_SIZE, storage), storage


def write(cache: KVCache, storage: CellStorage, table: BlockTable, text: list[int], end: int, salt: str = "") -> None:
    """What a step does: prepare, write every position, advance."""
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
    """Any order of opening, adopting, growing, publishing, rolling back, evicting and leaving."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.storage = make_cache()
        self.sessions: dict[BlockTable, tuple[list[int], str]] = {}
        self.published: set[tuple[str, tuple[int, ...]]] = set()  # every prefix that was ever published

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
    def adopt(self, data: st.DataObject) -> None:
        table = self.table(data)
        text, salt = self.sessions[table]
        if table.block_ids:
            with pytest.raises(ValueError):
                self.cache.adopt(table, text)
            return
        length = self.cache.adopt(table, text)
        assert length % BLOCK_SIZE == 0 and length == table.length
        assert not length or (salt, tuple(text[:length])) in self.published, "found what nobody published"

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
            assert needed > free, "there was room"
            return
        assert needed <= free
        assert len(table.block_ids) == max(len(before[0]), -(-end // BLOCK_SIZE))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        table = self.table(data)
        text, salt = self.sessions[table]
        length = data.draw(st.sampled_from([table.length, table.length // 2]), label="length")
        self.cache.publish(table, text, length)
        for end in range(BLOCK_SIZE, length + 1, BLOCK_SIZE):
            self.published.add((salt, tuple(text[:end])))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), text=st.sampled_from(TEXTS))
    def roll_back(self, data: st.DataObject, text: list[int]) -> None:
        """Back to any length, to go on with any text that agrees up to there."""
        table = self.table(data)
        old, salt = self.sessions[table]
        agreed = next((i for i, pair in enumerate(zip(old, text)) if pair[0] != pair[1]), CAPACITY)
        length = data.draw(st.integers(0, min(agreed, table.length)), label="length")
        self.cache.truncate(table, length)
        self.sessions[table] = text, salt

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), leaves=st.booleans())
    def give_way(self, data: st.DataObject, leaves: bool) -> None:
        table = self.table(data)
        if leaves:
            self.cache.release(table)
            del self.sessions[table]
        else:
            self.cache.vacate(table)
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
    """A sequence that feeds a whole text, publishes it and leaves; how much of it was found."""
    table = cache.open(CAPACITY, salt)
    found = cache.adopt(table, text)
    write(cache, storage, table, text, len(text), salt)
    cache.publish(table, text, len(text))
    cache.release(table)
    return found


def text_of(token: int, block_count: int) -> list[int]:
    return [token] * (block_count * BLOCK_SIZE)


def test_the_least_recently_used_prefix_gives_way_first() -> None:
    """Claim: when free blocks run out, those of the prefix longest unused are taken, the last of its chain first.

    Source: issue 3, "LRU eviction". Conclusive: three prefixes of three blocks fill the cache; using the first again
    makes the second the oldest, and after one more block exactly its last block is gone, after three all of it.
    """
    cache, storage = make_cache()
    texts = [text_of(token, 3) for token in (1, 2, 3)]
    assert [run_through(cache, storage, text) for text in texts] == [0, 0, 0]
    assert cache.kept_block_count == BLOCK_COUNT - 1 and cache.free_block_count == BLOCK_COUNT - 1
    assert run_through(cache, storage, texts[0]) == 24
    assert run_through(cache, storage, text_of(4, 1)) == 0
    table = cache.open(CAPACITY)
    assert cache.adopt(table, texts[1]) == 16, "its last block was taken, and nothing else"
    cache.release(table)
    assert [run_through(cache, storage, text) for text in (texts[0], texts[2], texts[1])] == [24, 24, 16]
    cache.check_integrity()


def test_a_text_is_found_by_all_of_what_came_before() -> None:
    """Claim: equal blocks behind different beginnings, and equal texts with different salts, are not shared.

    Source: issue 3, "by block hash ... with cache_salt separating tenants". Conclusive: the second blocks of the two
    texts are equal token for token, as are the texts of the two salts; and each is found by its own kind.
    """
    cache, storage = make_cache()
    one, other = text_of(1, 1) + text_of(7, 1), text_of(2, 1) + text_of(7, 1)
    assert run_through(cache, storage, one) == 0 and run_through(cache, storage, other) == 0
    assert run_through(cache, storage, one, "tenant") == 0
    assert run_through(cache, storage, one, "tenant") == 16 and run_through(cache, storage, other) == 16


def test_what_is_overwritten_or_taken_is_not_found_by_its_old_name() -> None:
    """Claim: a published block is found no more once its only holder goes on with another text in it, or once another
    sequence takes it for itself.

    Source: kv_cache.py, invariant 4. Conclusive: the old text is looked up after both.
    """
    cache, storage = make_cache()
    one, other = text_of(1, 1), text_of(2, 1)
    table = cache.open(CAPACITY)
    write(cache, storage, table, one, 8)
    cache.publish(table, one, 8)
    cache.truncate(table, 0)
    write(cache, storage, table, other, 8)
    assert run_through(cache, storage, one) == 0
    cache.release(table)
    cache.release(cache.reserve((BLOCK_COUNT - 1) * BLOCK_SIZE))
    assert run_through(cache, storage, one) == 0
    cache.check_integrity()


def test_a_refusal_changes_nothing() -> None:
    """Claim: where a block to write to and a copy of a shared one are needed and one is to be had, neither is taken.

    Source: kv_cache.py. Conclusive: the table and the free count are as before, and with one more free it goes on.
    """
    cache, storage = make_cache()
    text = text_of(1, 3)
    one, other = cache.open(CAPACITY), cache.open(CAPACITY)
    write(cache, storage, one, text, 16)
    cache.publish(one, text, 16)
    cache.adopt(other, text)
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
    """Claim: only whole blocks of what was published are shared, whatever else the table holds.

    Source: issue 3, "over committed tokens only". Conclusive: the table holds three blocks, 15 tokens are committed.
    """
    cache, storage = make_cache()
    text = text_of(1, 3)
    table = cache.open(CAPACITY)
    write(cache, storage, table, text, 24)
    cache.publish(table, text, 15)
    second = cache.open(CAPACITY)
    assert cache.adopt(second, text) == 8 and second.block_ids == table.block_ids[:1]
    with pytest.raises(ValueError):
        cache.publish(table, text, 25)
    cache.check_integrity()


def test_feeding_the_last_token_again_takes_no_block_from_anybody() -> None:
    """Claim: a sequence whose whole prompt is found feeds its last token again: into a copy where the block is shared,
    in its place where nobody else holds it, and afterwards it is found again.

    Source: issue 3, "at least the last token is always fed again". Conclusive: what the other holder reads stays.
    """
    cache, storage = make_cache()
    text = text_of(1, 2)
    run_through(cache, storage, text)
    alone, beside = cache.open(CAPACITY), cache.open(CAPACITY)
    for table in (alone, beside):
        assert cache.adopt(table, text) == 16
        cache.truncate(table, 15)
    assert alone.block_ids == beside.block_ids
    write(cache, storage, beside, text, 16)
    assert beside.block_ids[0] == alone.block_ids[0] and beside.block_ids[1] != alone.block_ids[1]
    free = cache.free_block_count
    write(cache, storage, alone, text, 16)
    assert cache.free_block_count == free, "the only holder writes in place"
    cache.publish(alone, text, 16)
    assert run_through(cache, storage, text) == 16
    cache.check_integrity()
