"""A session on the draft: its cells and its tree, which follow the committed tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.decoding.paths import TokenCounts
from specdec.draft_service.cells import Cells
from specdec.engine.retokenizer import Reading
from specdec.protocol.growth import Growth
from specdec.protocol.items import NO_TRACE, DraftNode, Trace
from specdec.replica.handler import ReplicaSession


@dataclass(eq=False)
class DraftSession(ReplicaSession):
    """A session and its tree. `secret` keys the draft's own draws, which no other noise shares.

    `reading`: of a draft with another tokenizer. `wait_length`: of the proposal path that a verification waits for.
    `grown`: nodes to send; `held_step_count`: steps that ended since the first of them. `traced_step_count`: the number
    of next steps recorded in detail, below the span of `group`. `worked_s`: of steps since the item before. `counts`:
    of its tokens, for penalties.
    """

    cells: Cells
    growth: Growth
    reading: Reading | None = None
    secret: int = field(default_factory=lambda: secrets.randbits(64))
    window: int = 0
    nodes_per_step: int = 1
    siblings: int = 0
    has_siblings: bool = False  # or had: under REJECTION its trees then grow along first draws only
    wait_length: int = 0
    grown: list[DraftNode] = field(default_factory=list)
    held_step_count: int = 0
    traced_step_count: int = 0
    group: Trace = NO_TRACE
    worked_s: float = 0.0
    counts: TokenCounts | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.opened.params.has_penalties:
            self.counts = TokenCounts(self.opened.params)

    @property
    def read_tokens(self) -> Sequence[int]:
        """The committed tokens as the draft reads them, each in a cell at its position."""
        return self.tokens if self.reading is None else self.reading.tokens

    @property
    def shift(self) -> int:
        """The number of positions that a node below the root has more in the draft than in the target."""
        return len(self.read_tokens) - len(self.tokens)

    def cut(self, length: int) -> None:
        """Drops committed tokens from `length` on, and the tree below them."""
        if self.counts is not None:
            self.counts.move(self.tokens, min(length, self.counts.length))
        super().cut(length)
        self.cells.truncate(length if self.reading is None else self.reading.cut(length))
        self.drop_tree()

    def drop_tree(self) -> None:
        """Ends the epoch: there is no tree until the next commit."""
        self.cells.give_back(self.growth.drop())

    def follow(self, token_ids: Sequence[int]) -> None:
        """Re-roots the tree at newly committed tokens; drops it if they leave it, or end a character begun before."""
        if self.reading is not None and self.reading.length < len(self.tokens) - len(token_ids):
            self.drop_tree()
            return
        kept, freed = self.growth.commit(token_ids)
        self.cells.commit(kept)
        self.cells.give_back(freed)
        if self.reading is not None:
            self.reading.read(self.tokens)

    def restart(self) -> None:
        """Begins a tree at the last committed token: it is evaluated as it is fed."""
        if self.reading is not None:
            self.reading.read(self.tokens)
        self.cells.truncate(len(self.read_tokens) - 1)
        self.growth.restart(self.tokens)
