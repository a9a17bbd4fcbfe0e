"""A session as the target holds it: committed tokens, and a cache that is derived from them by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.engine.block_table import BlockTable
from specdec.engine.feed import Feed, StepTiming
from specdec.protocol.items import EvidenceAnswer, Open, Verification
from specdec.replica.sessions import Reply


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done with the logits of the last `logit_count` rows: of the draft tokens, and of the token before
    them; asked at `asked_s`."""

    draft_token_ids: tuple[int, ...]
    payload: object
    done: Callable[[object, StepTiming], None]
    asked_s: float

    @property
    def logit_count(self) -> int:
        return len(self.draft_token_ids) + 1


@dataclass(slots=True, eq=False)
class TargetSession:
    """One session. Its table grows with it; in it lie the first `fed_length` of `tokens`, then `fed_draft`, as far as
    the table's length reaches.

    `work` is what it was asked and has not done; `feed` does it. `run_end`: it is not evicted before its cache is so
    long. `quiet_since_s`: when its last work was done. `cached_count`: tokens found when it was taken in; `evictions`:
    since its last evidence. `last_answer` is None while the round of `last` is under way.
    """

    opened: Open
    table: BlockTable
    reply: Reply
    tokens: list[int] = field(default_factory=list)
    fed_length: int = 0
    fed_draft: tuple[int, ...] = ()
    work: Work | None = None
    feed: Feed | None = None
    is_admitted: bool = False
    run_end: int = 0
    quiet_since_s: float = 0.0
    cached_count: int = 0
    evictions: int = 0
    last: Verification | None = None
    last_answer: EvidenceAnswer | None = None

    @property
    def wanted_length(self) -> int:
        """Tokens the cache is to hold for what was asked: the committed ones and the draft's."""
        return len(self.tokens) + len(self.work.draft_token_ids if self.work else ())

    def hold(self, start_position: int, token_ids: Sequence[int]) -> bool:
        """Takes committed tokens from `start_position` on; False when tokens before it are missing.

        The coordinator is the only truth: tokens that disagree replace what was held from there on.
        """
        if start_position > len(self.tokens):
            return False
        known = self.tokens[start_position : start_position + len(token_ids)]
        if known != list(token_ids[: len(known)]):
            self.cut(start_position)
            known = []
        self.tokens += token_ids[len(known) :]
        return True

    def cut(self, length: int) -> None:
        """Forgets committed tokens from `length` on, and what was asked of them."""
        del self.tokens[length:]
        self.work = self.feed = None
        if self.fed_length > length:
            self.fed_length, self.fed_draft = length, ()

    def agreement(self, draft_token_ids: Sequence[int]) -> int:
        """How many of the committed tokens, and then these, the cache holds already."""
        length, end = min(self.fed_length, self.table.length), self.table.length
        if length < self.fed_length:
            return length
        for fed in self.fed_draft:
            place = length - len(self.tokens)
            wanted = draft_token_ids[place : place + 1] if place >= 0 else self.tokens[length : length + 1]
            if length >= end or list(wanted) != [fed]:
                break
            length += 1
        return length

    def lacking(self, draft_token_ids: Sequence[int]) -> list[int]:
        """The committed tokens, and then these, from the table's length on."""
        length, count = self.table.length, len(self.tokens)
        return [*self.tokens[length:], *draft_token_ids[max(0, length - count) :]]
