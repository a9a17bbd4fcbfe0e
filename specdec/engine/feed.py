"""What a service asks of the engine: tokens of one sequence to run, and what to do with their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.engine.block_table import BlockTable
from specdec.engine.runner import Piece
from specdec.errors import SpecdecError


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where a feed's time went, in seconds: `forward_s` sums over its steps.

    `row_count` and `feed_count`, rows and feeds of all sequences together, are of its last step, and so are `started_s`
    and `ended_s`, readings of the clock; its first step began at `first_started_s`.
    """

    queue_s: float
    forward_s: float
    evidence_s: float
    row_count: int
    step_count: int
    feed_count: int = 1
    first_started_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0


@dataclass(slots=True, eq=False)
class Feed:
    """Tokens to run through the model for one sequence, and what to do with the logits of the last `logit_count`.

    Rows are positions [start_position, start_position + len(token_ids)). The caller truncates the table to
    `start_position` first; a feed that finds another length when its turn comes fails. Exactly one of `done` and
    `failed` is called, on the engine thread, unless `is_current` says the feed no longer matters: then neither is.
    """

    table: BlockTable
    start_position: int
    token_ids: Sequence[int]
    logit_count: int
    payload: object
    done: Callable[[object, StepTiming], None]
    failed: Callable[[SpecdecError], None]
    is_current: Callable[[], bool] = lambda: True
    submitted_s: float = field(default=0.0, init=False)
    queue_s: float = field(default=0.0, init=False)
    forward_s: float = field(default=0.0, init=False)
    step_count: int = field(default=0, init=False)
    fed_count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.logit_count <= len(self.token_ids):
            raise ValueError(f"logit_count is {self.logit_count}; it must be from 1 to {len(self.token_ids)}")

    @property
    def next_position(self) -> int:
        return self.start_position + self.fed_count

    @property
    def row_count(self) -> int:
        """Rows that are still to be run."""
        return len(self.token_ids) - self.fed_count

    @property
    def context_count(self) -> int:
        """Those of them whose logits nobody asked for: none in a decode or a verification, most of a prompt."""
        return self.row_count - self.logit_count

    def piece(self, chunk_size: int, row_count_max: int) -> Piece:
        """The rows of the next step: all that remain, or up to an absolute multiple of the chunk size, at most so many.

        Rows with logits are never divided between steps, so that evidence sees a request whole.
        """
        count = self.row_count
        if self.context_count and count > min(chunk_size, row_count_max):
            to_boundary = chunk_size - self.next_position % chunk_size
            count = min(to_boundary, row_count_max, self.context_count)
        is_last = count == self.row_count
        token_ids = self.token_ids[self.fed_count : self.fed_count + count]
        return Piece(self.table, self.next_position, token_ids, self.logit_count if is_last else 0, self.payload)
