"""The cache blocks of each sequence, and the length up to which they are valid.

A sequence is opened empty and takes blocks before it writes; one that knows its length may reserve all at once.
Rollback is `truncate`: a length. Blocks of committed tokens can be cached as a prefix: a sequence that begins with the
same tokens shares them, and copies a shared block before it writes to it. The end of an encoder's input that does not
fill its block is copied from a sequence with the same input. Blocks without a holder are evictable: the least recently
used one is taken when no block is free. The module moves block ids; the model's storage holds the
values. Not thread-safe: the engine thread owns it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.engine.cache.prefix_index import PrefixIndex
from specdec.engine.interface import Storage
from specdec.errors import CacheExhausted
from specdec.protocol.prefix_digests import chain_digests, root_digest

BLOCK_SIZE_MIN, BLOCK_SIZE_MAX = 8, 256
ZERO_BLOCK = 0  # always zero, owned by no sequence: stands in block tables where a sequence has no block


def start_of_run(free: list[int], count: int) -> int:
    """Returns the index in ascending `free` blocks at which a table best takes its first `count`: in the longest run,
    whose first half is left to the table before it."""
    starts = [index for index in range(len(free)) if index == 0 or free[index] != free[index - 1] + 1]
    start, end = max(zip(starts, [*starts[1:], len(free)]), key=lambda run: run[1] - run[0])
    return start if free[start] == ZERO_BLOCK + 1 else max(start, min((start + end) // 2, end - count))


@dataclass(slots=True, eq=False, repr=False)
class BlockTable:
    """The cache blocks of one sequence; made by `KVCache.open` and `reserve` only.

    Cells [0, length) hold valid tokens, each in the cell of its position; it may grow to `capacity`. Block i has cells
    [i * block_size, (i + 1) * block_size). `digests` are those of its first blocks, matched or cached as a prefix,
    below `root`, the digest of its salt and encoder's input. The cells [0, encoder_length) of an encoder-decoder model
    hold what its decoder sees of the input: all of them are valid, or none. `is_decoding`: it has produced logits since
    it was last empty (set by the scheduler).
    """

    capacity: int
    root: bytes
    length: int = 0
    block_ids: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    is_decoding: bool = False
    is_released: bool = False
    encoder_length: int = 0
    salt: str = ""

    def __repr__(self) -> str:
        state = "released" if self.is_released else f"{self.length}/{self.capacity} tokens"
        return f"BlockTable({state}, blocks {self.block_ids})"


class KVCache:
    """Allocator of fixed-size blocks over a model's storage.

    Invariants (`check_integrity`):
    1. a block is free, evictable (in an index, without a holder) or held; the zero block is none of these;
    2. a block's holder count equals the number of tables that contain it;
    3. a table contains at least the blocks of its length and at most those of its capacity, none twice; its length does
       not lie inside its encoder's input;
    4. evictable blocks are in an index, free blocks are not; a table has digests for whole blocks of valid tokens
       only, and an indexed block among them has the table's own digest: no text matches another's blocks. A block
       with the end of an input that a table holds has the table's root, or no name.
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
        self._evictable: dict[int, None] = {}  # indexed blocks without a holder, least recently used first
        self._index = PrefixIndex()
        self._ends = PrefixIndex()  # by the root: the block with the end of its input, and with whatever follows it
        self._holders = [0] * block_count
        self._tables: set[BlockTable] = set()

    @property
    def free_block_count(self) -> int:
        """Blocks that can be taken, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def evictable_block_count(self) -> int:
        """Blocks in the prefix index without a holder: a later sequence may match them, any sequence may take them."""
        return len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of usable blocks in use, 0 to 1."""
        return 1 - self.free_block_count / (self.block_count - 1)

    @property
    def table_count(self) -> int:
        return len(self._tables)

    @property
    def position_count(self) -> int:
        """Positions of the whole cache."""
        return (self.block_count - 1) * self.block_size

    @property
    def is_decoding(self) -> bool:
        """Whether any sequence has produced logits and still holds its tokens, so that it may decode again soon."""
        return any(table.is_decoding for table in self._tables)

    def blocks_for(self, capacity: int) -> int:
        """Returns the number of blocks for `capacity` positions."""
        return -(-capacity // self.block_size)

    def open(self, capacity: int, salt: str = "", encoder_input: Sequence[int] = ()) -> BlockTable:
        """Returns an empty table without blocks that may grow to `capacity`; it matches prefixes of its salt only, and
        of its `encoder_input`, with which its tokens begin (empty: of a decoder alone)."""
        if capacity < max(1, len(encoder_input)):
            raise ValueError(f"capacity is {capacity}; it must be at least {max(1, len(encoder_input))}")
        table = BlockTable(capacity, root_digest(salt), salt=salt)
        self._tables.add(table)
        self.give_input(table, encoder_input)
        return table

    def give_input(self, table: BlockTable, encoder_input: Sequence[int]) -> None:
        """The tokens of an empty table begin with this encoder's input from now on."""
        if table.length:
            raise ValueError(f"{table!r} is given an input; it must be empty")
        table.root, table.encoder_length = root_digest(table.salt, encoder_input), len(encoder_input)

    def reserve(self, capacity: int, encoder_input: Sequence[int] = ()) -> BlockTable:
        """Returns an empty table with all blocks of its capacity. Raises CacheExhausted and allocates nothing."""
        table = self.open(capacity, encoder_input=encoder_input)
        try:
            self.grow(table, capacity)
        except CacheExhausted:
            self.release(table)
            raise
        return table

    def grow(self, table: BlockTable, end: int) -> None:
        """Takes the blocks that a table lacks for positions [0, end), adjacent ones if possible: these are read in
        place. Idempotent. Raises CacheExhausted and takes none."""
        self._check_live(table)
        if end > table.capacity:
            raise ValueError(f"end is {end}; it must be at most {table.capacity}")
        count = self.blocks_for(end) - len(table.block_ids)
        if 0 < count <= len(self._free):
            free = sorted(self._free)
            following = table.block_ids[-1] + 1 if table.block_ids else ZERO_BLOCK
            first = bisect.bisect_left(free, following)
            if first == len(free) or free[first] != following:
                first = start_of_run(free, count)
            self._free = (free[first:] + free[:first])[::-1]
        table.block_ids += self._take(max(0, count))

    def match_prefix(self, table: BlockTable, token_ids: Sequence[int]) -> int:
        """Shares the longest cached prefix of the text `token_ids`; returns the table's new length. A part of an
        encoder's input is none; for its end, which more follows in its block, a block is taken, and the end copied.

        The table must be empty: opened or freed. Matched blocks are in use again; no other block is taken.
        """
        self._check_live(table)
        if table.block_ids or len(token_ids) > table.capacity:
            raise ValueError(f"{table!r} cannot take up {len(token_ids)} tokens")
        found: list[tuple[int, bytes]] = []
        for digest in chain_digests(table.root, token_ids, self.block_size):
            block_id = self._index.find(digest)
            if block_id is None:
                break
            found.append((block_id, digest))
        lacking = table.encoder_length - len(found) * self.block_size
        end = self._ends.find(table.root) if len(token_ids) >= table.encoder_length else None
        if lacking > 0 and (lacking >= self.block_size or end is None):
            return 0
        for block_id, digest in found:
            self._evictable.pop(block_id, None)
            self._holders[block_id] += 1
            table.block_ids.append(block_id)
            table.digests.append(digest)
        table.length = len(table.block_ids) * self.block_size
        if lacking > 0 and end is not None:
            self._copy_end(table, end, lacking)
        return table.length

    def _copy_end(self, table: BlockTable, source: int, count: int) -> None:
        """Copies the last `count` cells of an input, from the first of a block on, behind those that a table shares; it
        is freed if no block can be taken."""
        if not self.free_block_count:
            self.free(table)
            return
        (own,) = self._take(1)
        if own != source:
            sources, places = (
                range(block * self.block_size, block * self.block_size + count) for block in (source, own)
            )
            self._storage.copy_slots(list(sources), list(places))
        table.block_ids.append(own)
        table.length = table.encoder_length

    def cache_prefix(self, table: BlockTable, token_ids: Sequence[int], length: int) -> None:
        """Adds the whole blocks of [0, length) to the prefix index, and the block with the end of an encoder's input to
        that of ends; they are valid and hold committed `token_ids`.

        The caller guarantees both; never for draft tokens. Idempotent, and cheap without new blocks.
        """
        known = len(table.digests)
        if table.encoder_length % self.block_size and length >= table.encoder_length:
            self._ends.add(table.root, table.block_ids[table.encoder_length // self.block_size])
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
        """Forgets cached tokens from `length` on; all of them, if it lies inside an encoder's input. Blocks stay
        reserved; idempotent."""
        self._check_live(table)
        if not 0 <= length <= table.length:
            raise ValueError(f"length is {length}; it must be from 0 to the cached length {table.length}")
        length = 0 if length < table.encoder_length else length
        table.length = length
        del table.digests[length // self.block_size :]

    def prepare_write(self, table: BlockTable, end: int) -> None:
        """Makes the table the only holder of the blocks of positions [table.length, end): takes missing blocks, copies
        shared ones, and removes blocks that are about to be overwritten from the prefix index.

        Idempotent. Raises CacheExhausted with too few free blocks, and changes nothing.
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
            every_offset = range(self.block_size)
            sources = [table.block_ids[index] * self.block_size + offset for offset in every_offset]
            self._storage.copy_slots(sources, [own * self.block_size + offset for offset in every_offset])
            self._drop(table.block_ids[index])
            table.block_ids[index] = own
        for block_id in table.block_ids[first:last]:
            self._index.remove(block_id)
            if table.length < table.encoder_length:
                self._ends.remove(block_id)

    def move(self, table: BlockTable, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies the values of cells to others of a table, none of them below its length: rows of a tree to the
        positions that they turned out to have. All are read before any is written."""
        self._check_live(table)
        if min((*sources, *destinations), default=table.length) < table.length:
            raise ValueError(f"cells {[*sources]} cannot move to {[*destinations]} in {table!r}")
        slots = [[self._slot(table, cell) for cell in cells] for cells in (sources, destinations)]
        if sources:
            self._storage.copy_slots(*slots)

    def advance(self, table: BlockTable, length: int) -> None:
        """Marks [table.length, length) as valid, after a forward wrote it."""
        self._check_live(table)
        if not table.length <= length <= table.capacity:
            raise ValueError(f"length is {length}; it must be from the length {table.length} to {table.capacity}")
        table.length = length

    def _slot(self, table: BlockTable, cell: int) -> int:
        return table.block_ids[cell // self.block_size] * self.block_size + cell % self.block_size

    def scrub(self, table: BlockTable, start: int, end: int) -> None:
        """Zeroes cells [start, end), which must be held by this table only and not valid: see `prepare_write`."""
        for index in range(start // self.block_size, self.blocks_for(end)):
            first = index * self.block_size
            self._storage.scrub(table.block_ids[index], max(start - first, 0), min(end - first, self.block_size))

    def free(self, table: BlockTable) -> None:
        """Frees the table's blocks, shared ones when their last holder frees them; the table stays, empty. Idempotent.

        Blocks in the prefix index become evictable, the last of a chain first: no block matches without those before.
        """
        for block_id in reversed(table.block_ids):
            self._drop(block_id)
        table.block_ids, table.length, table.digests, table.is_decoding = [], 0, [], False

    def release(self, table: BlockTable) -> None:
        """Frees the table's blocks as `free` does, and the table itself. Idempotent."""
        if table.is_released:
            return
        self.free(table)
        table.is_released = True
        self._tables.remove(table)
        table.capacity = 0

    def check_integrity(self) -> None:
        """Raises AssertionError with the broken invariant (numbered in the class docstring)."""
        held = [block_id for table in self._tables for block_id in table.block_ids]
        counted = [0] * self.block_count
        for block_id in held:
            counted[block_id] += 1
        free = set(self._free)
        assert len(free) == len(self._free), "invariant 1: a block is free twice"
        assert ZERO_BLOCK not in free | self._evictable.keys() and counted[ZERO_BLOCK] == 0, "invariant 1: zero block"
        assert free.isdisjoint(held), f"invariant 1: blocks {sorted(free.intersection(held))} are free and held"
        assert self._evictable.keys().isdisjoint(free.union(held)), "invariant 1: an evictable block is free or held"
        assert len(free) + len(self._evictable) + len(set(held)) == self.block_count - 1, "invariant 1: a block is lost"
        assert counted == self._holders, "invariant 2: holder counts differ from the tables"
        for table in self._tables:
            assert len(set(table.block_ids)) == len(table.block_ids), f"invariant 3: {table!r} names a block twice"
            assert 0 <= table.length <= table.capacity, f"invariant 3: {table!r} length"
            assert not 0 < table.length < table.encoder_length, f"invariant 3: {table!r} has a part of an input"
            lowest, highest = self.blocks_for(table.length), self.blocks_for(table.capacity)
            assert lowest <= len(table.block_ids) <= highest, f"invariant 3: {table!r} block count"
        self._check_cached_prefix()

    def _check_cached_prefix(self) -> None:
        self._index.check()
        self._ends.check()
        assert all(map(self._is_named, self._evictable)), "invariant 4: an evictable block has no name"
        assert not any(map(self._is_named, self._free)), "invariant 4: a free block has a name"
        for table in self._tables:
            assert len(table.digests) <= table.length // self.block_size, f"invariant 4: {table!r} digests"
            own = [*table.digests, *[None] * (table.length // self.block_size - len(table.digests))]
            for block_id, digest in zip(table.block_ids, own):
                assert self._index.name_of(block_id) in (None, digest), f"invariant 4: block {block_id} of {table!r}"
            if 0 < table.encoder_length <= table.length and table.encoder_length % self.block_size:
                end = table.block_ids[table.encoder_length // self.block_size]
                assert self._ends.name_of(end) in (None, table.root), f"invariant 4: the end of the input of {table!r}"

    def _take(self, count: int) -> list[int]:
        """Takes blocks. Raises CacheExhausted before it takes any."""
        if count > self.free_block_count:
            raise CacheExhausted(f"{count} cache blocks are needed, {self.free_block_count} are free")
        taken = [self._free.pop() if self._free else self._take_evictable() for _ in range(count)]
        for block_id in taken:
            self._holders[block_id] = 1
        return taken

    def _take_evictable(self) -> int:
        """Removes the least recently used evictable block from the indices and returns it."""
        block_id = next(iter(self._evictable))
        del self._evictable[block_id]
        self._index.remove(block_id)
        self._ends.remove(block_id)
        return block_id

    def _drop(self, block_id: int) -> None:
        self._holders[block_id] -= 1
        if self._holders[block_id] > 0:
            return
        if self._is_named(block_id):
            self._evictable[block_id] = None
        else:
            self._free.append(block_id)

    def _is_named(self, block_id: int) -> bool:
        return block_id in self._index or block_id in self._ends

    def _check_live(self, table: BlockTable) -> None:
        if table not in self._tables:
            raise ValueError(f"{table!r} is not a table of this cache")
