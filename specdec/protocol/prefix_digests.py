"""The names of prefixes of texts: a block of tokens is named by its content and by all tokens before it.

A digest covers the parent's digest and the block's own token ids, and the salt at the root separates the texts of
different tenants. Every cell of an encoder's input depends on all of it, so the root covers the input too. Digests are
SHA-256, since a collision would give one text another's cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence


def root_digest(salt: str, encoder_input: Sequence[int] = ()) -> bytes:
    """Returns the parent digest of the first block of every text with this salt and encoder's input; "" is the common
    salt, and a decoder alone has no input."""
    root = hashlib.sha256(b"specdec prefix " + salt.encode("utf-8")).digest()
    if not encoder_input:
        return root
    return hashlib.sha256(b"specdec input " + root + array("Q", encoder_input).tobytes()).digest()


def chain_digests(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Yields the digests of the full blocks in `token_ids`, which follow the block with digest `parent`, in order."""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hashlib.sha256(parent + array("Q", token_ids[start : start + block_size]).tobytes()).digest()
        yield parent
