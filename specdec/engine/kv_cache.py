"""Which cache block belongs to which sequence, and up to where its content is valid.

A sequence reserves all blocks it may need when it is admitted, so a step never runs out of room half-way. Rollback is
`truncate`: a length. A fork shares the blocks before it; whoever writes into a shared block first gets a copy of it.
The module moves block ids, not numbers: what a block holds is the model's storage. Not thread-safe: the engine thread
owns it.
"""

from __future__ import annotations

from specdec.engine.interface import Storage
from specdec.errors import CacheExhausted

BLOCK_SIZE_MIN, BLOCK_SIZE_MAX = 8, 128
ZERO_BLOCK = 0  # all zero for ever, owned by nobody: stands in block tables where a sequence has no block


class BlockTable:
    """One sequence's place in the cache; made by `KVCache.reserve` and `KVCache.fork` only.

    Cached tokens are valid in [0, length); it may grow to `capacity`. Block i holds positions
    [i * block_size, (i + 1) * block_size).
    """

    __slots__ = ("block_ids", "length", "capacity", "is_released")

    def __init__(self, block_ids: list[int], length: int, capacity: int):
        self.block_ids = block_ids
        self.length = length
        self.capacity = capacity
        self.is_released = False

    def __repr__(self) -> str:
        state = "released" if self.is_released else f"{self.length}/{self.capacity} tokens"
        return f"BlockTable({state}, blocks {self.block_ids})"


class KVCache:
    """Allocator of fixed-size blocks over a model's storage.

    Invariants (`check_integrity`):
    1. a block is free or held, never both; the zero block is neither;
    2. a block's holder count equals the number of tables that name it;
    3. a table names exactly the blocks its capacity needs, none twice, and length <= capacity;
    4. copies promised for a block are fewer than its holders, and all promised copies fit into the free blocks.
    """

    def __init__(self, block_count: int, block_size: int, storage: Storage):
        if not BLOCK_SIZE_MIN <= block_size <= BLOCK_SIZE_MAX or block_size & (block_size - 1):
            limits = f"{BLOCK_SIZE_MIN} to {BLOCK_SIZE_MAX}"
            raise ValueError(f"block_size is {block_size}; it must be a power of two, {limits}")
        if block_count < 2:
            raise ValueError(f"block_count is {block_count}; it must be at least 2, the zero block included")
        self.block_count = block_count
        self.block_size = block_size
        self._storage = storage
        self._free = list(range(block_count - 1, ZERO_BLOCK, -1))  # popped from the end: lowest ids first
        self._holders = [0] * block_count
        self._promised: dict[int, int] = {}  # shared block -> copies its holders may still need, paid for at the fork
        self._tables: set[BlockTable] = set()

    @property
    def free_block_count(self) -> int:
        """Blocks a new reservation may take; copies promised to forks are not among them."""
        return len(self._free) - sum(self._promised.values())

    @property
    def usage(self) -> float:
        """Share of usable blocks that is taken or promised, 0 to 1."""
        return 1 - self.free_block_count / (self.block_count - 1)

    @property
    def table_count(self) -> int:
        return len(self._tables)

    def blocks_for(self, capacity: int) -> int:
        """Blocks that `capacity` positions need."""
        return -(-capacity // self.block_size)

    def reserve(self, capacity: int) -> BlockTable:
        """An empty table that can grow to `capacity`. Raises CacheExhausted; then nothing was allocated."""
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1")
        table = BlockTable(self._take(self.blocks_for(capacity)), 0, capacity)
        self._tables.add(table)
        return table

    def truncate(self, table: BlockTable, length: int) -> None:
        """Forgets cached tokens from `length` on. Blocks stay reserved; idempotent."""
        self._check_live(table)
        if not 0 <= length <= table.length:
            raise ValueError(f"length is {length}; it must be from 0 to the cached length {table.length}")
        table.length = length

    def prepare_write(self, table: BlockTable, end: int) -> None:
        """Makes the blocks of positions [table.length, end) this table's alone, copying shared ones.

        Idempotent. Raises CacheExhausted only when no block is left and some table was truncated below a fork of it:
        every other copy was paid for by the fork.
        """
        self._check_live(table)
        if not table.length <= end <= table.capacity:
            raise ValueError(f"end is {end}; it must be from the length {table.length} to {table.capacity}")
        for index in range(table.length // self.block_size, self.blocks_for(end)):
            if self._holders[table.block_ids[index]] > 1:
                self._copy_on_write(table, index)

    def advance(self, table: BlockTable, length: int) -> None:
        """Declares [table.length, length) valid, after a forward wrote it."""
        self._check_live(table)
        if not table.length <= length <= table.capacity:
            raise ValueError(f"length is {length}; it must be from the length {table.length} to {table.capacity}")
        table.length = length

    def scrub(self, table: BlockTable, start: int, end: int) -> None:
        """Zeroes positions [start, end), which must be this table's alone and not valid: see `prepare_write`."""
        for index in range(start // self.block_size, self.blocks_for(end)):
            first = index * self.block_size
            self._storage.scrub(table.block_ids[index], max(start - first, 0), min(end - first, self.block_size))

    def fork(self, table: BlockTable, length: int, capacity: int) -> BlockTable:
        """A second sequence that begins with the first `length` cached tokens of `table`, sharing their blocks.

        Takes the blocks beyond, and pays for one copy of a block that is shared half-full. Raises CacheExhausted;
        then nothing was allocated.
        """
        self._check_live(table)
        if not 0 <= length <= table.length or capacity < max(length, 1):
            raise ValueError(f"cannot fork {table!r} at length {length} with capacity {capacity}")
        shared = table.block_ids[: self.blocks_for(length)]
        is_split = length % self.block_size != 0
        own_count = self.blocks_for(capacity) - len(shared)
        own = self._take(own_count, spare=1 if is_split else 0)
        for block_id in shared:
            self._holders[block_id] += 1
        if is_split:
            self._promised[shared[-1]] = self._promised.get(shared[-1], 0) + 1
        fork = BlockTable(shared + own, length, capacity)
        self._tables.add(fork)
        return fork

    def release(self, table: BlockTable) -> None:
        """Gives the table's blocks back, those shared when their last holder goes. Idempotent."""
        if table.is_released:
            return
        table.is_released = True
        self._tables.remove(table)
        for block_id in reversed(table.block_ids):
            self._drop(block_id)
        table.block_ids, table.length, table.capacity = [], 0, 0

    def check_integrity(self) -> None:
        """Raises AssertionError naming the broken invariant (numbered in the class docstring)."""
        held = [block_id for table in self._tables for block_id in table.block_ids]
        counted = [0] * self.block_count
        for block_id in held:
            counted[block_id] += 1
        free = set(self._free)
        assert len(free) == len(self._free), "invariant 1: a block is free twice"
        assert ZERO_BLOCK not in free and counted[ZERO_BLOCK] == 0, "invariant 1: the zero block was given out"
        assert free.isdisjoint(held), f"invariant 1: blocks {sorted(free.intersection(held))} are free and held"
        assert len(free) + len(set(held)) == self.block_count - 1, "invariant 1: a block is neither free nor held"
        assert counted == self._holders, "invariant 2: holder counts differ from the tables"
        for table in self._tables:
            assert len(set(table.block_ids)) == len(table.block_ids), f"invariant 3: {table!r} names a block twice"
            assert len(table.block_ids) == self.blocks_for(table.capacity), f"invariant 3: {table!r} block count"
            assert 0 <= table.length <= table.capacity, f"invariant 3: {table!r} length"
        for block_id, copies in self._promised.items():
            assert 0 < copies < counted[block_id], f"invariant 4: {copies} copies promised for block {block_id}"
        assert self.free_block_count >= 0, "invariant 4: promised copies exceed the free blocks"

    def _take(self, count: int, spare: int = 0) -> list[int]:
        """`count` free blocks, leaving `spare` more for a promise. Raises CacheExhausted before taking any."""
        if count + spare > self.free_block_count:
            raise CacheExhausted(f"{count + spare} cache blocks are needed, {self.free_block_count} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._holders[block_id] = 1
        return taken

    def _copy_on_write(self, table: BlockTable, index: int) -> None:
        shared = table.block_ids[index]
        if self.free_block_count == 0 and shared in self._promised:
            self._set_promised(shared, self._promised[shared] - 1)
        (own,) = self._take(1)
        self._storage.copy_block(shared, own)
        table.block_ids[index] = own
        self._drop(shared)

    def _drop(self, block_id: int) -> None:
        """One holder fewer; a copy promised to a holder that is gone is promised no more."""
        self._holders[block_id] -= 1
        holders = self._holders[block_id]
        if block_id in self._promised:
            self._set_promised(block_id, min(self._promised[block_id], max(holders - 1, 0)))
        if holders == 0:
            self._free.append(block_id)

    def _set_promised(self, block_id: int, copies: int) -> None:
        if copies:
            self._promised[block_id] = copies
        else:
            self._promised.pop(block_id, None)

    def _check_live(self, table: BlockTable) -> None:
        if table not in self._tables:
            raise ValueError(f"{table!r} is not a table of this cache")
