"""A coordinator's draft tree without the session that owns its committed tokens."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.protocol.tree import ReceivedTree


class OwnTree(ReceivedTree):
    """Owns its committed tokens, which `commit` appends."""

    def __init__(self, committed: Sequence[int]) -> None:
        self.tokens = list(committed)
        super().__init__(self.tokens)

    def commit(self, token_ids: Sequence[int]) -> bool:
        self.tokens += token_ids
        return super().commit(token_ids)
