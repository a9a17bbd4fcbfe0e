"""A session as the target holds it: committed tokens, and a cache that is derived from them by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.decoding.evidence import EvidenceRequest
from specdec.engine.feed import Feed
from specdec.errors import SpecdecError
from specdec.protocol.items import EvidenceAnswer, Verification
from specdec.protocol.types import Evidence
from specdec.replica.handler import ReplicaSession


@dataclass(eq=False)
class TargetSession(ReplicaSession):
    """One session. Its table grows with it; in it lie the first `fed_length` of `tokens`, then `fed_draft`, as far as
    the table's length reaches.

    `last`: what it was asked last, at `asked_s`, in a message that came at `arrived_s`; `last_answer` is None while
    that is under way, `work` None when it is not. `feed` does the work. `run_end`: it is not evicted before its cache
    is so long. `quiet_since_s`: when its last work was done. `cached_count`: tokens found when it was taken in;
    `evictions`: since its last evidence.
    """

    fed_length: int = 0
    fed_draft: tuple[int, ...] = ()
    work: EvidenceRequest | None = None
    feed: Feed[EvidenceRequest, Evidence] | None = None
    is_admitted: bool = False
    run_end: int = 0
    quiet_since_s: float = 0.0
    cached_count: int = 0
    evictions: int = 0
    last: Verification | None = None
    last_answer: EvidenceAnswer | None = None
    arrived_s: float = 0.0
    asked_s: float = 0.0

    @property
    def wanted_length(self) -> int:
        """Tokens the cache is to hold for what was asked: the committed ones and the draft's."""
        return len(self.tokens) + len(self.work.draft_token_ids if self.work else ())

    def cut(self, length: int) -> None:
        """Forgets committed tokens from `length` on, and what was asked of them."""
        super().cut(length)
        self.work = self.feed = None
        if self.fed_length > length:
            self.fed_length, self.fed_draft = length, ()

    def fail(self, error: SpecdecError) -> None:
        """Answers that what it was asked could not be done, and asks it no more."""
        self.work = self.feed = None
        super().fail(error)

    def agreement(self, draft_token_ids: Sequence[int]) -> int:
        """How many of the committed tokens, and then these, the cache holds already."""
        length = min(self.fed_length, self.table.length)
        fed = self.fed_draft[: self.table.length - length]
        for wanted, token_id in zip([*self.tokens[length:], *draft_token_ids], fed):
            if wanted != token_id:
                break
            length += 1
        return length
