"""A session of the target: committed tokens, and a cache derived from them by position."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from specdec.decoding.prompt_logprobs import TargetOutput, TargetWork
from specdec.decoding.token_path import TokenCounts
from specdec.decoding.verification import VerificationRequest
from specdec.engine.cache.kv_cache import KVCache
from specdec.engine.scheduling.feed import Feed, StepTiming
from specdec.errors import SpecdecError
from specdec.grammar.jobs import SessionGrammar
from specdec.protocol.items import Verification, VerificationResult
from specdec.protocol.tree_shape import children
from specdec.replica.handler import ReplicaSession


@dataclass(eq=False)
class TargetSession(ReplicaSession):
    """One session. Its table grows with it; it holds the first `fed_length` of `tokens`, up to the table's length. The
    draft tokens `fed_draft` were run behind them, token i in cell fed_length + i, as a tree of the shape `fed_parents`,
    until the next verification tells which of them were committed.

    `last`: its last verification, taken at `requested_s` from a message that arrived at `arrived_s`; until it is
    answered `last_answer` is None, afterwards `work` is. `feed` does the work. `guaranteed_length`: no preemption
    before its cache has this length. `born_s`: when its text began, by its age. `quiet_since_s`: end of its last work.
    `cached_count`: tokens found in the cache at its admission; `preemptions`: since its last verification result.
    `counts`: of its tokens, for penalties. `scored_index`: of the next prompt token whose log-probabilities its request
    wants, 0 for none; `timing`: of the steps for those. `grammar`: None without. `head_secret` keys the draws of
    a feature head, which no other noise shares.
    """

    fed_length: int = 0
    fed_draft: tuple[int, ...] = ()
    fed_parents: tuple[int, ...] = ()
    work: VerificationRequest | None = None
    feed: Feed[TargetWork, TargetOutput] | None = None
    is_admitted: bool = False
    guaranteed_length: int = 0
    born_s: float = 0.0
    quiet_since_s: float = 0.0
    cached_count: int = 0
    preemptions: int = 0
    last: Verification | None = None
    last_answer: VerificationResult | None = None
    arrived_s: float = 0.0
    requested_s: float = 0.0
    counts: TokenCounts | None = field(default=None, init=False)
    scored_index: int = 0
    timing: StepTiming | None = None
    grammar: SessionGrammar | None = field(default=None, init=False)
    head_secret: int = field(default_factory=lambda: secrets.randbits(64), init=False)

    def __post_init__(self) -> None:
        if self.opened.params.has_penalties:
            self.counts = TokenCounts(self.opened.params)

    @property
    def is_busy(self) -> bool:
        return self.work is not None

    @property
    def wanted_length(self) -> int:
        """Cells that its table must have for the current request: of the committed tokens and of all draft tokens."""
        return len(self.tokens) + (len(self.work.draft_token_ids) if self.work else 0)

    @property
    def reused_max(self) -> int:
        """Committed tokens, at most, whose rows need not run again for its request: not the last, nor any before a
        prompt token whose log-probabilities are wanted."""
        return (self.scored_index or len(self.tokens)) - 1

    def cut(self, length: int) -> None:
        """Drops committed tokens from `length` on, and the current request."""
        if self.counts is not None:
            self.counts.move(self.tokens, min(length, self.counts.length))
        super().cut(length)
        self.drop_work()
        if self.fed_length > length:
            self.holds(length)

    def fail(self, error: SpecdecError) -> None:
        """Answers the current request with an error, and drops it."""
        self.drop_work()
        super().fail(error)

    def drop_work(self) -> None:
        """Drops the current request; its pending feed will not run."""
        self.work = self.feed = None

    def holds(self, length: int, drafted: tuple[int, ...] = (), parents: tuple[int, ...] = ()) -> None:
        """Its table holds the first `length` committed tokens; behind them these draft tokens were run."""
        self.fed_length, self.fed_draft, self.fed_parents = length, drafted, parents

    def agreement(self) -> int:
        """The number of committed tokens that the table holds in the cells of their positions."""
        length = min(self.fed_length, self.table.length)
        if length == self.fed_length < self.table.length:  # draft tokens that were a chain
            length += len(self._followed())
        return min(length, self.table.length)

    def follow(self, cache: KVCache) -> None:
        """Moves the rows of its last tree that the committed tokens follow to their positions."""
        if not self.fed_parents:
            return
        if self.table.length == self.fed_length:
            followed = self._followed()
            end = self.fed_length + len(followed)
            moved = [(self.fed_length + row, cell) for cell, row in enumerate(followed, self.fed_length)]
            moved = [(source, cell) for source, cell in moved if source != cell]
            cache.move(self.table, [source for source, _ in moved], [cell for _, cell in moved])
            cache.advance(self.table, end)
            self.holds(end)
        else:
            self.holds(self.table.length)

    def _followed(self) -> list[int]:
        """The draft tokens along which the committed tokens continue after `fed_length`."""
        followed: list[int] = []
        following = children(self.fed_parents, len(self.fed_draft))
        row = 0
        for token_id in self.tokens[self.fed_length :]:
            drafted = next((index for index in following[row] if self.fed_draft[index] == token_id), None)
            if drafted is None:
                break
            followed.append(drafted)
            row = drafted + 1
        return followed
