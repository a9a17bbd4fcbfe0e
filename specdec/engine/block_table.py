"""One sequence's place in the cache, as a value that only `KVCache` changes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, repr=False)
class BlockTable:
    """One sequence's place in the cache; made by `KVCache.open` and `reserve` only.

    Cached tokens are valid in [0, length); it may grow to `capacity`. Block i holds positions
    [i * block_size, (i + 1) * block_size). `digests` name its first blocks, as far as they were adopted or published,
    below `root`, the digest of its salt. `is_decoding`: it has given logits since it was last empty (the scheduler's).
    """

    capacity: int
    root: bytes
    length: int = 0
    block_ids: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    is_decoding: bool = False
    is_released: bool = False

    def __repr__(self) -> str:
        state = "released" if self.is_released else f"{self.length}/{self.capacity} tokens"
        return f"BlockTable({state}, blocks {self.block_ids})"
