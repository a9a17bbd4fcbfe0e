"""A session of the target: committed tokens, and a cache derived from them by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.decoding.paths import TokenCounts
from specdec.decoding.verification import VerificationRequest
from specdec.engine.feed import Feed
from specdec.errors import SpecdecError
from specdec.protocol.items import Verification, VerificationResult
from specdec.protocol.types import SamplerOutput
from specdec.replica.handler import ReplicaSession


@dataclass(eq=False)
class TargetSession(ReplicaSession):
    """One session. Its table grows with it; it holds the first `fed_length` of `tokens`, then `fed_draft`, up to the
    table's length.

    `last`: its last verification, taken at `requested_s` from a message that arrived at `arrived_s`; until it is
    answered `last_answer` is None, afterwards `work` is. `feed` does the work. `run_end`: no preemption before its
    cache has this length. `quiet_since_s`: end of its last work. `cached_count`: tokens found in the cache at its
    admission; `preemptions`: since its last verification result. `counts`: of its tokens, for penalties.
    """

    fed_length: int = 0
    fed_draft: tuple[int, ...] = ()
    work: VerificationRequest | None = None
    feed: Feed[VerificationRequest, SamplerOutput] | None = None
    is_admitted: bool = False
    run_end: int = 0
    quiet_since_s: float = 0.0
    cached_count: int = 0
    preemptions: int = 0
    last: Verification | None = None
    last_answer: VerificationResult | None = None
    arrived_s: float = 0.0
    requested_s: float = 0.0
    counts: TokenCounts | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.opened.params.has_penalties:
            self.counts = TokenCounts(self.opened.params)

    @property
    def is_busy(self) -> bool:
        return self.work is not None

    @property
    def wanted_length(self) -> int:
        """Tokens the cache must hold for the current request: the committed ones and the draft's."""
        return len(self.tokens) + len(self.work.draft_token_ids if self.work else ())

    def cut(self, length: int) -> None:
        """Drops committed tokens from `length` on, and the current request."""
        if self.counts is not None:
            self.counts.move(self.tokens, min(length, self.counts.length))
        super().cut(length)
        self.work = self.feed = None
        if self.fed_length > length:
            self.fed_length, self.fed_draft = length, ()

    def fail(self, error: SpecdecError) -> None:
        """Answers the current request with an error, and drops it."""
        self.work = self.feed = None
        super().fail(error)

    def agreement(self, draft_token_ids: Sequence[int]) -> int:
        """The number of committed tokens, followed by `draft_token_ids`, that the cache holds already."""
        length = min(self.fed_length, self.table.length)
        fed = self.fed_draft[: self.table.length - length]
        for wanted, token_id in zip([*self.tokens[length:], *draft_token_ids], fed):
            if wanted != token_id:
                break
            length += 1
        return length
