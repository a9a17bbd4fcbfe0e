"""The names of cached prefixes: a block is found by its content and by all tokens before it.

A digest covers the parent's digest and the block's own token ids, and the salt at the root separates the texts of
different tenants. Digests are SHA-256, since a collision would give one text another's cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence


def root_digest(salt: str) -> bytes:
    """Returns the parent digest of the first block of every text with this salt; "" is the common salt."""
    return hashlib.sha256(b"specdec prefix " + salt.encode("utf-8")).digest()


def chain_digests(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Yields the digests of the full blocks in `token_ids`, which follow the block with digest `parent`, in order."""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hashlib.sha256(parent + array("Q", token_ids[start : start + block_size]).tobytes()).digest()
        yield parent


class PrefixIndex:
    """The index from digest to block. A block has one digest at most, a digest one block: the first added."""

    def __init__(self) -> None:
        self._block_ids: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._digests

    def find(self, digest: bytes) -> int | None:
        """Returns the block of a digest, or None."""
        return self._block_ids.get(digest)

    def name_of(self, block_id: int) -> bytes | None:
        """Returns the digest of a block; None if the block is not in the index."""
        return self._digests.get(block_id)

    def add(self, digest: bytes, block_id: int) -> None:
        """Adds a block. No effect if the digest has a block or the block a digest."""
        if digest not in self._block_ids and block_id not in self._digests:
            self._block_ids[digest] = block_id
            self._digests[block_id] = digest

    def remove(self, block_id: int) -> None:
        """Removes a block; idempotent."""
        digest = self._digests.pop(block_id, None)
        if digest is not None:
            del self._block_ids[digest]

    def check(self) -> None:
        """Raises AssertionError unless both directions agree."""
        assert {block_id: digest for digest, block_id in self._block_ids.items()} == self._digests
