"""The cache against a model of it: contents, lengths and free blocks, after any order of operations.

Hypothesis draws reserve, grow, write, truncate and release; beside the cache stands a plain list of values per table.
What is read back through the block tables must equal it, so a block shared or freed wrongly shows in the contents.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.engine.cache.kv_cache import BlockTable, KVCache
from specdec.errors import CacheExhausted

BLOCK_COUNT = 12
BLOCK_SIZE = 8


class ListStorage:
    """Storage of plain numbers, one per position."""

    def __init__(self) -> None:
        self.blocks = [[0] * BLOCK_SIZE for _ in range(BLOCK_COUNT)]

    def copy_block(self, source: int, destinations: list[int]) -> None:
        for destination in destinations:
            self.blocks[destination] = list(self.blocks[source])

    def scrub(self, block_id: int, start: int, end: int) -> None:
        self.blocks[block_id][start:end] = [0] * (end - start)


def make_cache() -> tuple[KVCache, ListStorage]:
    storage = ListStorage()
    return KVCache(BLOCK_COUNT, BLOCK_SIZE, storage), storage


def write(cache: KVCache, storage: ListStorage, table: BlockTable, values: list[int]) -> None:
    """Writes as a forward does: prepare, write every position, advance."""
    start, end = table.length, table.length + len(values)
    cache.prepare_write(table, end)
    for position, value in zip(range(start, end), values):
        storage.blocks[table.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE] = value
    cache.advance(table, end)


def read(storage: ListStorage, table: BlockTable) -> list[int]:
    places = [divmod(position, BLOCK_SIZE) for position in range(table.length)]
    return [storage.blocks[table.block_ids[index]][offset] for index, offset in places]


class CacheMachine(RuleBasedStateMachine):
    """Any order of operations; `expected` holds what each live table must contain."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.storage = make_cache()
        self.expected: dict[BlockTable, list[int]] = {}
        self.next_value = 1

    def table(self, data: st.DataObject) -> BlockTable:
        return data.draw(st.sampled_from(list(self.expected)), label="table")

    @rule(capacity=st.integers(1, 40))
    def reserve(self, capacity: int) -> None:
        free = self.cache.free_block_count
        needed = -(-capacity // BLOCK_SIZE)
        if needed > free:
            with pytest.raises(CacheExhausted):
                self.cache.reserve(capacity)
            assert self.cache.free_block_count == free
            return
        table = self.cache.reserve(capacity)
        assert (table.length, table.capacity, self.cache.free_block_count) == (0, capacity, free - needed)
        self.expected[table] = []

    @rule(data=st.data(), capacity=st.integers(1, 40))
    def open_and_grow(self, data: st.DataObject, capacity: int) -> None:
        table = self.cache.open(capacity)
        self.expected[table] = []
        for end in data.draw(st.lists(st.integers(1, capacity), max_size=3), label="ends"):
            free, held = self.cache.free_block_count, len(table.block_ids)
            needed = -(-end // BLOCK_SIZE) - held
            if needed > free:
                with pytest.raises(CacheExhausted):
                    self.cache.grow(table, end)
                needed = 0
            else:
                self.cache.grow(table, end)
            assert len(table.block_ids) - held == max(0, needed) == free - self.cache.free_block_count

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), count=st.integers(1, 20))
    def write(self, data: st.DataObject, count: int) -> None:
        table = self.table(data)
        count = min(count, table.capacity - table.length)
        if self.cache.blocks_for(table.length + count) - len(table.block_ids) > self.cache.free_block_count:
            return
        values = list(range(self.next_value, self.next_value + count))
        self.next_value += count
        write(self.cache, self.storage, table, values)
        self.expected[table] += values

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        table = self.table(data)
        length = data.draw(st.integers(0, table.length), label="length")
        self.cache.truncate(table, length)
        del self.expected[table][length:]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.table(data)
        self.cache.release(table)
        self.cache.release(table)  # idempotent
        del self.expected[table]

    @invariant()
    def contents_and_integrity(self) -> None:
        self.cache.check_integrity()
        assert self.cache.table_count == len(self.expected)
        for table, values in self.expected.items():
            assert read(self.storage, table) == values
        assert not any(self.storage.blocks[0]), "the zero block was written"
        if not self.expected:
            assert self.cache.free_block_count == BLOCK_COUNT - 1 and self.cache.usage == 0


CacheMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_any_order_of_operations = CacheMachine.TestCase


def test_scrub_zeroes_exactly_its_range() -> None:
    """Claim: `scrub` zeroes positions [start, end) over block borders and nothing before them.

    Source: not-a-number of one request must not reach a later owner of its blocks. Conclusive: the values on both sides
    of the range are compared.
    """
    cache, storage = make_cache()
    table = cache.reserve(3 * BLOCK_SIZE)
    write(cache, storage, table, list(range(1, 25)))
    cache.truncate(table, 6)
    cache.prepare_write(table, 18)
    cache.scrub(table, 6, 18)
    cache.advance(table, 24)
    assert read(storage, table) == [1, 2, 3, 4, 5, 6] + [0] * 12 + [19, 20, 21, 22, 23, 24]


def test_tables_that_grow_together_keep_adjacent_blocks() -> None:
    """Claim: tables that take their blocks one by one, in turn, each have adjacent ones while their sum is a part of
    the cache: their keys are read in place. Conclusive: the ids of all blocks; in the order of taking they alternate.
    """
    cache = KVCache(1 + 64, BLOCK_SIZE, ListStorage())
    tables = [cache.open(16 * BLOCK_SIZE) for _ in range(4)]
    for end in range(BLOCK_SIZE, 16 * BLOCK_SIZE + 1, BLOCK_SIZE):
        for table in tables:
            cache.grow(table, end)
    for table in tables:
        assert table.block_ids == list(range(table.block_ids[0], table.block_ids[0] + 16))
    assert cache.free_block_count == 0
    cache.check_integrity()


def test_misuse_is_refused() -> None:
    """Claim: lengths out of range, released tables and impossible sizes raise, and change nothing.

    Source: style.md, bound everything. Conclusive: integrity and the free count are as before.
    """
    cache, _ = make_cache()
    table = cache.reserve(10)
    for call in (
        lambda: cache.truncate(table, 1),
        lambda: cache.advance(table, 11),
        lambda: cache.prepare_write(table, 11),
        lambda: cache.grow(table, 11),
        lambda: cache.reserve(0),
        lambda: KVCache(BLOCK_COUNT, 12, ListStorage()),
        lambda: KVCache(1, BLOCK_SIZE, ListStorage()),
    ):
        with pytest.raises(ValueError):
            call()
    assert cache.free_block_count == BLOCK_COUNT - 3
    cache.release(table)
    with pytest.raises(ValueError):
        cache.truncate(table, 0)
    cache.check_integrity()
