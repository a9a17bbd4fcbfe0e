"""A session of the target: committed tokens, and a cache derived from them by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.decoding.paths import TokenCounts
from specdec.decoding.verification import VerificationRequest
from specdec.engine.feed import Feed
from specdec.engine.kv_cache import BranchBlocks, KVCache
from specdec.errors import SpecdecError
from specdec.protocol.items import Verification, VerificationResult
from specdec.protocol.shape import Branch, branches, path_tokens
from specdec.protocol.types import SamplerOutput
from specdec.replica.handler import ReplicaSession


class FedBranch(NamedTuple):
    """A further path of a session's last tree: its blocks, and the draft tokens that followed `base` committed ones."""

    blocks: BranchBlocks
    base: int
    token_ids: tuple[int, ...]


@dataclass(eq=False)
class TargetSession(ReplicaSession):
    """One session. Its table grows with it; it holds the first `fed_length` of `tokens`, then `fed_draft`, up to the
    table's length. The other paths of its last tree have their blocks in `branches`, each with the draft tokens of its
    path, until the next verification tells which path was committed.

    `last`: its last verification, taken at `requested_s` from a message that arrived at `arrived_s`; until it is
    answered `last_answer` is None, afterwards `work` is. `feed` does the work. `run_end`: no preemption before its
    cache has this length. `quiet_since_s`: end of its last work. `cached_count`: tokens found in the cache at its
    admission; `preemptions`: since its last verification result. `counts`: of its tokens, for penalties.
    """

    fed_length: int = 0
    fed_draft: tuple[int, ...] = ()
    branches: list[FedBranch] = field(default_factory=list)
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
    def block_count(self) -> int:
        """Blocks that it holds, those of its branches included."""
        return len(self.table.block_ids) + sum(len(branch.blocks.block_ids) for branch in self.branches)

    @property
    def wanted_length(self) -> int:
        """Tokens its table must hold for the current request: the committed ones and those of the first path."""
        return len(self.tokens) + (self.wanted_paths[0].end if self.work else 0)

    @property
    def wanted_paths(self) -> list[Branch]:
        """The paths of the current request's draft tokens."""
        return branches(self.work.parents, len(self.work.draft_token_ids)) if self.work else []

    @property
    def wanted_ends(self) -> list[int]:
        """Tokens that each further path of the current request has, committed ones included."""
        return [len(self.tokens) + part.depth + part.end - part.start for part in self.wanted_paths[1:]]

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

    def holds(self, length: int, drafted: tuple[int, ...] = ()) -> None:
        """Its table holds the first `length` committed tokens, then these draft tokens, once the feed has run."""
        self.fed_length, self.fed_draft = length, drafted

    def agreement(self) -> int:
        """The number of committed tokens that the table holds already."""
        return self._agreement(self.table.length, self.fed_length, self.fed_draft)

    def follow(self, cache: KVCache) -> None:
        """Continues on the path of the last tree that agrees longest with the committed tokens; frees the others."""
        for branch in self.branches:
            length = self._agreement(branch.blocks.length, branch.base, branch.token_ids)
            if length > self.agreement() and length >= branch.blocks.first * cache.block_size:
                cache.continue_on(self.table, branch.blocks, length)
                self.fed_draft = branch.token_ids
            cache.drop_branch(branch.blocks)
        self.branches.clear()

    def branch_out(self, cache: KVCache) -> None:
        """Takes blocks, which must be free, for the further paths of the current request."""
        base, paths = len(self.tokens), path_tokens(self.wanted_paths, self.work.draft_token_ids if self.work else ())
        self.branches = [
            FedBranch(cache.take_branch(base, end), base, path) for end, path in zip(self.wanted_ends, paths[1:])
        ]

    def drop_branches(self, cache: KVCache) -> None:
        """Frees all paths but that of its table."""
        for branch in self.branches:
            cache.drop_branch(branch.blocks)
        self.branches.clear()

    def _agreement(self, held_length: int, base: int, fed_draft: Sequence[int]) -> int:
        """The number of committed tokens that a path holds, of `held_length` valid ones, the draft's from `base` on."""
        length = min(self.fed_length, held_length)
        if length == base:
            for wanted, token_id in zip(self.tokens[length:], fed_draft[: held_length - length]):
                if wanted != token_id:
                    break
                length += 1
        return length
