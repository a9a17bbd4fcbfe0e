"""One sequence's place in the cache, as a value that only `KVCache` changes."""

from __future__ import annotations


class BlockTable:
    """One sequence's place in the cache; made by `KVCache.open`, `reserve` and `fork` only.

    Cached tokens are valid in [0, length); it may grow to `capacity`. Block i holds positions
    [i * block_size, (i + 1) * block_size). `digests` name its first blocks, as far as they were adopted or published,
    below `root`, the digest of its salt. `is_decoding`: it has given logits since it was last empty (the scheduler's).
    """

    __slots__ = ("block_ids", "length", "capacity", "root", "digests", "is_decoding", "is_released")

    def __init__(self, block_ids: list[int], length: int, capacity: int, root: bytes):
        self.block_ids = block_ids
        self.length = length
        self.capacity = capacity
        self.root = root
        self.digests: list[bytes] = []
        self.is_decoding = False
        self.is_released = False

    def __repr__(self) -> str:
        state = "released" if self.is_released else f"{self.length}/{self.capacity} tokens"
        return f"BlockTable({state}, blocks {self.block_ids})"
