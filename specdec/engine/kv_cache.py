"""Which cache block belongs to which sequence, and up to where its content is valid.

A sequence either reserves all blocks it may need at once, or is opened empty and takes blocks before it writes.
Rollback is `truncate`: a length. Blocks of committed tokens can be published: a sequence that begins with the same
tokens adopts them, and whoever writes into a shared block first gets a copy of it. When nobody holds them any more they
stay until their room is needed, the least recently used first. The module moves block ids, not numbers: what a block
holds is the model's storage. Not thread-safe: the engine thread owns it.

A published block is found by what it holds and by everything that came before it: its digest covers its parent's digest
and its own token ids, and the salt at the root keeps texts of different tenants apart. Digests are SHA-256, since a
collision would give one text another's cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from specdec.engine.block_table import BlockTable
from specdec.engine.interface import Storage
from specdec.errors import CacheExhausted

BLOCK_SIZE_MIN, BLOCK_SIZE_MAX = 8, 256
ZERO_BLOCK = 0  # all zero for ever, owned by nobody: stands in block tables where a sequence has no block


def root_digest(salt: str) -> bytes:
    """The parent of every first block of texts with this salt; "" is the common one."""
    return hashlib.sha256(b"specdec prefix " + salt.encode("utf-8")).digest()


def chain_digests(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """The digests of the full blocks in `token_ids`, which follow the block with digest `parent`; lazily, in order."""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hashlib.sha256(parent + array("Q", token_ids[start : start + block_size]).tobytes()).digest()
        yield parent


class PrefixIndex:
    """Which block holds the text of a digest. A block has one digest at most and a digest one block: the first."""

    def __init__(self) -> None:
        self._block_ids: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._digests

    def find(self, digest: bytes) -> int | None:
        """The block of a digest; None where there is none."""
        return self._block_ids.get(digest)

    def name_of(self, block_id: int) -> bytes | None:
        """The digest a block is found by; None where it is not published."""
        return self._digests.get(block_id)

    def add(self, digest: bytes, block_id: int) -> None:
        """Enters a block, unless the digest has one or the block another name: then nothing changes."""
        if digest not in self._block_ids and block_id not in self._digests:
            self._block_ids[digest] = block_id
            self._digests[block_id] = digest

    def remove(self, block_id: int) -> None:
        """The block is found no more; idempotent."""
        digest = self._digests.pop(block_id, None)
        if digest is not None:
            del self._block_ids[digest]

    def check(self) -> None:
        """Raises AssertionError unless both directions say the same."""
        assert {block_id: digest for digest, block_id in self._block_ids.items()} == self._digests


class KVCache:
    """Allocator of fixed-size blocks over a model's storage.

    Invariants (`check_integrity`):
    1. a block is free, kept (published, held by nobody) or held, one of the three; the zero block is none of them;
    2. a block's holder count equals the number of tables that name it;
    3. a table names at least the blocks its length needs and at most those of its capacity, none twice;
    4. what is kept is published, what is free is not; a table has digests for whole blocks of valid tokens only, and a
       block there that is published goes by the table's own digest: no text is found in another's blocks.
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
        self._kept: dict[int, None] = {}  # published blocks that nobody holds, least recently used first
        self._index = PrefixIndex()
        self._holders = [0] * block_count
        self._tables: set[BlockTable] = set()

    @property
    def free_block_count(self) -> int:
        """Blocks to be had, those kept included."""
        return len(self._free) + len(self._kept)

    @property
    def kept_block_count(self) -> int:
        """Published blocks that nobody holds: what a later sequence may find, and anybody may take."""
        return len(self._kept)

    @property
    def usage(self) -> float:
        """Share of usable blocks that is taken, 0 to 1."""
        return 1 - self.free_block_count / (self.block_count - 1)

    @property
    def table_count(self) -> int:
        return len(self._tables)

    @property
    def position_count(self) -> int:
        """Positions the whole cache holds."""
        return (self.block_count - 1) * self.block_size

    @property
    def is_decoding(self) -> bool:
        """Whether any sequence has given logits and holds its tokens still, so that it may ask again any moment."""
        return any(table.is_decoding for table in self._tables)

    def blocks_for(self, capacity: int) -> int:
        """Blocks that `capacity` positions need."""
        return -(-capacity // self.block_size)

    def open(self, capacity: int, salt: str = "") -> BlockTable:
        """An empty table that may grow to `capacity` and holds no block yet; it adopts from tables of its salt only."""
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1")
        table = BlockTable(capacity, root_digest(salt))
        self._tables.add(table)
        return table

    def reserve(self, capacity: int) -> BlockTable:
        """An empty table with all blocks of its capacity. Raises CacheExhausted; then nothing was allocated."""
        table = self.open(capacity)
        try:
            table.block_ids = self._take_run(self.blocks_for(capacity))
        except CacheExhausted:
            self.release(table)
            raise
        return table

    def adopt(self, table: BlockTable, token_ids: Sequence[int]) -> int:
        """Shares the longest chain of published blocks that the text `token_ids` begins with; the length it has then.

        The table must be empty: opened or vacated. What is adopted is in use again, and no other block is.
        """
        self._check_live(table)
        if table.block_ids or len(token_ids) > table.capacity:
            raise ValueError(f"{table!r} cannot adopt {len(token_ids)} tokens")
        for digest in chain_digests(table.root, token_ids, self.block_size):
            block_id = self._index.find(digest)
            if block_id is None:
                break
            self._kept.pop(block_id, None)
            self._holders[block_id] += 1
            table.block_ids.append(block_id)
            table.digests.append(digest)
        table.length = len(table.block_ids) * self.block_size
        return table.length

    def publish(self, table: BlockTable, token_ids: Sequence[int], length: int) -> None:
        """Lets others adopt the whole blocks of [0, length): valid, and holding the committed tokens `token_ids`.

        The caller answers for both; never for draft tokens. Idempotent, and cheap where nothing is new.
        """
        known = len(table.digests)
        if length // self.block_size <= known:
            return
        self._check_live(table)
        if length > min(table.length, len(token_ids)):
            raise ValueError(f"length is {length}; {table!r} and {len(token_ids)} tokens are published")
        parent = table.digests[-1] if known else table.root
        for digest in chain_digests(parent, token_ids[known * self.block_size : length], self.block_size):
            self._index.add(digest, table.block_ids[len(table.digests)])
            table.digests.append(digest)

    def truncate(self, table: BlockTable, length: int) -> None:
        """Forgets cached tokens from `length` on. Blocks stay reserved; idempotent."""
        self._check_live(table)
        if not 0 <= length <= table.length:
            raise ValueError(f"length is {length}; it must be from 0 to the cached length {table.length}")
        table.length = length
        del table.digests[length // self.block_size :]

    def prepare_write(self, table: BlockTable, end: int) -> None:
        """Makes the blocks of positions [table.length, end) this table's alone: takes those that it lacks, copies
        shared ones, and nobody finds by its old name what is about to be overwritten.

        Idempotent. Raises CacheExhausted when it lacks more blocks than are to be had; then nothing changed.
        """
        self._check_live(table)
        if not table.length <= end <= table.capacity:
            raise ValueError(f"end is {end}; it must be from the length {table.length} to {table.capacity}")
        first, last = table.length // self.block_size, self.blocks_for(end)
        held = range(first, min(last, len(table.block_ids)))
        shared = [index for index in held if self._holders[table.block_ids[index]] > 1]
        lacking_count = max(0, last - len(table.block_ids))
        taken = self._take(lacking_count + len(shared))
        table.block_ids += taken[:lacking_count]
        for index, own in zip(shared, taken[lacking_count:]):
            self._storage.copy_block(table.block_ids[index], own)
            self._drop(table.block_ids[index])
            table.block_ids[index] = own
        for block_id in table.block_ids[first:last]:
            self._index.remove(block_id)

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

    def vacate(self, table: BlockTable) -> None:
        """Gives the table's blocks back, those shared when their last holder goes; the table stays, empty. Idempotent.

        Published ones are kept. Of a chain the last blocks are given up first: without its beginning none is found.
        """
        for block_id in reversed(table.block_ids):
            self._drop(block_id)
        table.block_ids, table.length, table.digests, table.is_decoding = [], 0, [], False

    def release(self, table: BlockTable) -> None:
        """Gives the table's blocks back as `vacate` does, and the table itself. Idempotent."""
        if table.is_released:
            return
        self.vacate(table)
        table.is_released = True
        self._tables.remove(table)
        table.capacity = 0

    def check_integrity(self) -> None:
        """Raises AssertionError naming the broken invariant (numbered in the class docstring)."""
        held = [block_id for table in self._tables for block_id in table.block_ids]
        counted = [0] * self.block_count
        for block_id in held:
            counted[block_id] += 1
        free = set(self._free)
        assert len(free) == len(self._free), "invariant 1: a block is free twice"
        assert ZERO_BLOCK not in free | self._kept.keys() and counted[ZERO_BLOCK] == 0, "invariant 1: zero block"
        assert free.isdisjoint(held), f"invariant 1: blocks {sorted(free.intersection(held))} are free and held"
        assert self._kept.keys().isdisjoint(free.union(held)), "invariant 1: a kept block is free or held"
        assert len(free) + len(self._kept) + len(set(held)) == self.block_count - 1, "invariant 1: a block is lost"
        assert counted == self._holders, "invariant 2: holder counts differ from the tables"
        for table in self._tables:
            assert len(set(table.block_ids)) == len(table.block_ids), f"invariant 3: {table!r} names a block twice"
            assert 0 <= table.length <= table.capacity, f"invariant 3: {table!r} length"
            lowest, highest = self.blocks_for(table.length), self.blocks_for(table.capacity)
            assert lowest <= len(table.block_ids) <= highest, f"invariant 3: {table!r} block count"
        self._check_published()

    def _check_published(self) -> None:
        self._index.check()
        assert all(block_id in self._index for block_id in self._kept), "invariant 4: a kept block has no name"
        assert all(block_id not in self._index for block_id in self._free), "invariant 4: a free block has a name"
        for table in self._tables:
            assert len(table.digests) <= table.length // self.block_size, f"invariant 4: {table!r} digests"
            own = [*table.digests, *[None] * (table.length // self.block_size - len(table.digests))]
            for block_id, digest in zip(table.block_ids, own):
                assert self._index.name_of(block_id) in (None, digest), f"invariant 4: block {block_id} of {table!r}"

    def _take(self, count: int) -> list[int]:
        """Raises CacheExhausted before taking any."""
        if count > self.free_block_count:
            raise CacheExhausted(f"{count} cache blocks are needed, {self.free_block_count} are free")
        taken = [self._free.pop() if self._free else self._take_kept() for _ in range(count)]
        for block_id in taken:
            self._holders[block_id] = 1
        return taken

    def _take_run(self, count: int) -> list[int]:
        """`count` blocks, one after another where so many are, so that keys can be read where they lie."""
        free = sorted(self._free)
        for start in range(len(free) - count + 1):
            if free[start + count - 1] - free[start] == count - 1:
                self._free = [*free[:start], *free[start + count :]][::-1] + free[start : start + count][::-1]
                break
        return self._take(count)

    def _take_kept(self) -> int:
        """The least recently used block that is kept; nobody finds it from here on."""
        block_id = next(iter(self._kept))
        del self._kept[block_id]
        self._index.remove(block_id)
        return block_id

    def _drop(self, block_id: int) -> None:
        self._holders[block_id] -= 1
        if self._holders[block_id] > 0:
            return
        if block_id in self._index:
            self._kept[block_id] = None
        else:
            self._free.append(block_id)

    def _check_live(self, table: BlockTable) -> None:
        if table not in self._tables:
            raise ValueError(f"{table!r} is not a table of this cache")
