"""Names for cached prefixes: a block is found by what it holds and by everything that came before it.

A block's digest covers its parent's digest and its own token ids, so equal digests mean equal texts from the first
token on; the salt at the root keeps texts of different tenants apart. Digests are SHA-256, since a collision would give
one text another's cache. Which blocks exist and who holds them is `KVCache`'s affair.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence


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

    def __len__(self) -> int:
        return len(self._digests)

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
