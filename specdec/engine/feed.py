"""What a service asks of the engine, and which rows of it the next step takes: a pure choice over the feeds that wait.

Decodes and verifications come first, prompts fill up. Three promises, for any work that waits:

1. A decode is never behind a prompt, and a step that may keep one waiting carries one chunk of prompts at most: so
   prompts delay a decode by one chunk in the step that runs when it comes, and one in its own.
2. The oldest prompt goes on in every step, whatever else there is; so does the oldest decode.
3. A step has at most `rows_max` rows. A verification wider than its share of them is run all the same, alone of its
   kind: its rows cannot be divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from specdec.engine.block_table import BlockTable
from specdec.engine.runner import Answer, Payload, Piece
from specdec.errors import SpecdecError


@dataclass(slots=True)
class StepTiming:
    """Where a feed's time went, in seconds: `forward_s` sums over its steps.

    `row_count` and `feed_count`, rows and feeds of all sequences together, are of its last step, and so are `started_s`
    and `ended_s`, readings of the clock; its first step began at `first_started_s`.
    """

    queue_s: float = 0.0
    forward_s: float = 0.0
    evidence_s: float = 0.0
    row_count: int = 0
    step_count: int = 0
    feed_count: int = 0
    first_started_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0


@dataclass(slots=True, eq=False)
class Feed(Generic[Payload, Answer]):
    """Tokens to run through the model for one sequence, and what to do with the logits of the last `logit_count`.

    Rows are positions [start_position, start_position + len(token_ids)). The caller truncates the table to
    `start_position` first; a feed that finds another length when its turn comes fails. Exactly one of `done` and
    `failed` is called, on the engine thread, unless `is_current` says the feed no longer matters: then neither is.
    """

    table: BlockTable
    start_position: int
    token_ids: Sequence[int]
    logit_count: int
    payload: Payload
    done: Callable[[Answer, StepTiming], None]
    failed: Callable[[SpecdecError], None]
    is_current: Callable[[], bool] = lambda: True
    submitted_s: float = field(default=0.0, init=False)
    timing: StepTiming = field(default_factory=StepTiming, init=False)
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

    def piece(self, chunk_size: int, row_count_max: int) -> Piece[Payload]:
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


def choose(
    feeds: Sequence[Feed[Payload, Answer]], chunk_size: int, rows_max: int, is_decoding: bool
) -> list[tuple[Feed[Payload, Answer], Piece[Payload]]]:
    """The feeds of the next step, each with its rows of it.

    `feeds` are those that may run, oldest first, no sequence twice. `is_decoding`: there are sequences past their
    prompt, which may ask for a decode while this step runs; then prompts have a chunk in it and no more.
    """
    prompts: list[Feed[Payload, Answer]] = []
    decodes: list[Feed[Payload, Answer]] = []
    for feed in feeds:
        (prompts if feed.context_count else decodes).append(feed)
    share = min(chunk_size, max(1, rows_max // 2), prompts[0].row_count) if prompts else 0  # of the oldest, always
    chosen: list[tuple[Feed[Payload, Answer], Piece[Payload]]] = []
    row_count = 0
    for feed in decodes:
        rows = feed.row_count
        if chosen and row_count + rows > rows_max - share:
            break
        row_count += rows
        chosen.append((feed, feed.piece(chunk_size, rows)))
    left = min(rows_max - row_count, chunk_size if is_decoding or chosen else rows_max)
    left = max(left, share)
    for feed in prompts:
        if left <= 0:
            break
        piece = feed.piece(chunk_size, left)
        left -= len(piece.token_ids)
        chosen.append((feed, piece))
    return chosen
