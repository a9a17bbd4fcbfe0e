"""The index of cached prefixes: a block is found by its digest (`specdec.protocol.prefix_digests`)."""

from __future__ import annotations


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
