"""Feeds, a service's requests to the engine, and the pure choice of their rows for the next step.

Decodes and verifications come first, prompts fill the rest of a step. Four guarantees, for any waiting feeds:

1. A decode never waits behind a prompt, and a step that may delay a decode has one chunk of prompts at most: prompts
   delay a decode by one chunk in the step that runs when it arrives, and by one in its own.
2. The oldest prompt advances in every step, and so does the oldest decode; few steps are abandoned (`scheduler`).
3. Half of the rows of prompts go by age, so that none waits for more than twice the rows of older ones; the other
   half by length, shortest first, so that a short prompt does not wait for long ones.
4. A step has at most `rows_max` rows. A verification with more rows than prompts leave to it still runs, as the
   only one of its step: its rows cannot be divided. Nor can those of an encoder's input: the oldest prompt's runs whole
   where it is longer than its share, with a chunk at most of what follows, and the other prompts have what it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.interface import Chunk
from specdec.errors import SpecdecError

Payload = TypeVar("Payload")  # input of the sampler for one feed
Answer = TypeVar("Answer")  # the sampler output for one feed


def ignore(*_: Any) -> None:
    """For callers who read the outcomes of a step in its report."""


@dataclass(slots=True)
class StepTiming:
    """Times of a feed, in seconds: `forward_s` sums over its steps.

    `hidden_s`: the part of `sampling_s` in which the hidden states were read. It, `row_count` and `feed_count` (rows
    and feeds of all sequences together), `started_s` and `ended_s` (clock readings) are of its last step; its first
    step began at `first_started_s`.
    """

    queue_s: float = 0.0
    forward_s: float = 0.0
    sampling_s: float = 0.0
    row_count: int = 0
    step_count: int = 0
    feed_count: int = 0
    first_started_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    hidden_s: float = 0.0


@dataclass(slots=True, eq=False)
class Feed(Generic[Payload, Answer]):
    """Tokens of one sequence to run through the model, and callbacks for the logits of the last `logit_count`.

    The first rows are a chain from position `start_position` on, the last len(paths) are nodes of a tree below it (see
    `Chunk`), which run in the step of the logits. The table must have the length `start_position`; a feed whose table
    has another length when it runs fails. Those in the cells of an encoder's input run whole, in one step, and have no
    logits. Exactly one of `done` and `failed` is called, on the engine thread; neither
    if `is_current` returns False. `done` gets the sampler output, None without logits.

    With `part` it is a prompt all of whose rows have logits, in any number of steps: part(start, end) is the payload of
    its rows [start, end), and `done` is called after each step, with the sampler output of that step's rows.
    """

    table: BlockTable
    start_position: int
    token_ids: Sequence[int]
    logit_count: int
    payload: Payload
    done: Callable[[Answer, StepTiming], None] = ignore
    failed: Callable[[SpecdecError], None] = ignore
    is_current: Callable[[], bool] = lambda: True
    paths: Sequence[Sequence[int]] = ()
    part: Callable[[int, int], Payload] | None = None
    submitted_s: float = field(default=0.0, init=False)
    timing: StepTiming = field(default_factory=StepTiming, init=False)
    fed_count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        length, row_count = self.table.encoder_length, self.row_count - self.input_count
        if self.input_count and (self.start_position or row_count < 0):
            end = self.start_position + self.row_count
            raise ValueError(
                f"rows from {self.start_position} to {end}; the encoder's input, {length} tokens, runs whole"
            )
        if not 0 <= self.logit_count <= row_count:
            raise ValueError(f"logit_count is {self.logit_count}; it must be from 0 to {row_count}")
        if self.part is not None and self.input_count:
            raise ValueError(
                f"part is given at position 0; it must be at {length} or above, behind the encoder's input"
            )

    @property
    def next_position(self) -> int:
        return self.start_position + self.fed_count

    @property
    def row_count(self) -> int:
        """Rows not yet run."""
        return len(self.token_ids) - self.fed_count

    @property
    def input_count(self) -> int:
        """Rows of an encoder's input not yet run: all of it, or none."""
        length = self.table.encoder_length
        return length if self.next_position < length else 0

    @property
    def context_count(self) -> int:
        """Remaining rows that may run in a step before the last: none of a decode or a verification, most of a prompt,
        which are those without logits, or with `part` all."""
        return self.row_count - (self.logit_count if self.part is None else 0)

    def rows_within(self, row_count_max: int, chunk_size: int) -> int:
        """Returns the number of rows of the next step: all remaining ones, or those up to the next multiple of the
        chunk size; an encoder's input, with what follows if that is one chunk at most, or none of it.

        At most `row_count_max` rows of a prompt. Rows with logits share one step: the sampler needs a request whole.
        """
        count = self.row_count
        if needed := self.input_count:
            if needed > row_count_max:
                return 0
            return count if count - needed <= min(chunk_size, row_count_max - needed) else needed
        if not self.context_count or count <= min(chunk_size, row_count_max):
            return count
        to_boundary = chunk_size - self.next_position % chunk_size
        return min(to_boundary, row_count_max, self.context_count)

    def chunk(self, count: int | None = None) -> Chunk:
        """Returns the next `count` rows, a number from `rows_within`, or all that are left."""
        token_ids, length = self.token_ids[self.fed_count :], self.table.encoder_length
        if self.part is not None:
            own = token_ids[:count]
            return Chunk(self.table.block_ids, self.next_position, own, len(own), (), length)
        if count is None or count == len(token_ids):
            return Chunk(self.table.block_ids, self.next_position, token_ids, self.logit_count, self.paths, length)
        return Chunk(self.table.block_ids, self.next_position, token_ids[:count], 0, (), length)

    def payload_of(self, chunk: Chunk) -> Payload:
        """Returns the sampler's input for the next rows, which are `chunk`."""
        return self.payload if self.part is None else self.part(self.fed_count, self.fed_count + len(chunk.token_ids))


def choose(
    feeds: Sequence[Feed[Payload, Answer]],
    chunk_size: int,
    rows_max: int,
    is_decoding: bool,
    prompt_rows_max: int | None = None,
) -> list[tuple[Feed[Payload, Answer], Chunk]]:
    """Returns the feeds of the next step, each with its rows.

    `feeds` are those that may run, oldest first, no sequence twice. `is_decoding`: some sequences are past their
    prompt and may submit a decode while this step runs; then the step has at most one chunk of prompts.
    `prompt_rows_max`: most rows of prompts in a step without decodes; None: all rows.
    """
    prompts: list[Feed[Payload, Answer]] = []
    decodes: list[Feed[Payload, Answer]] = []
    for feed in feeds:
        (prompts if feed.context_count else decodes).append(feed)
    share = min(chunk_size, max(1, rows_max // 2), prompts[0].row_count) if prompts else 0  # beside decodes
    chosen: list[tuple[Feed[Payload, Answer], Chunk]] = []
    row_count = 0
    for feed in decodes:
        rows = feed.row_count
        if chosen and row_count + rows > rows_max - share:
            break
        row_count += rows
        chosen.append((feed, feed.chunk(rows)))
    left = min(rows_max - row_count, chunk_size if is_decoding or chosen else prompt_rows_max or rows_max)
    counts = divide(max(left, share) if chosen else left, prompts, chunk_size)
    return chosen + [(feed, feed.chunk(count)) for feed, count in counts.items() if count]


def rows_beside_short(feeds: Sequence[Feed[Payload, Answer]], chunk_size: int) -> int:
    """Returns the rows of prompts in the next step, if it shall be a quick one because short feeds, of one chunk at
    most, wait: half of its rows suffice for these, and it has half a chunk at least; 0 if none waits."""
    rows = sum(feed.row_count for feed in feeds if feed.fed_count + feed.row_count <= chunk_size)
    return rows and max(chunk_size // 2, 2 * rows)


def divide(
    row_count: int, prompts: Sequence[Feed[Payload, Answer]], chunk_size: int
) -> dict[Feed[Payload, Answer], int]:
    """Returns the rows of each prompt in a step with `row_count` rows for all: half for the shortest, half for the
    oldest. `prompts`: oldest first."""
    counts = dict.fromkeys(prompts, 0)
    if prompts and prompts[0].input_count > row_count - row_count // 2:
        counts[prompts[0]] = prompts[0].rows_within(max(row_count, prompts[0].input_count + chunk_size), chunk_size)
        row_count = max(0, row_count - counts[prompts[0]])
    shortest_first = sorted(prompts, key=lambda feed: feed.row_count)
    left = 0
    for half, ordered in ((row_count // 2, shortest_first), (row_count - row_count // 2, prompts)):
        left += half
        for feed in ordered:
            if not left:
                break
            more = feed.rows_within(counts[feed] + left, chunk_size) - counts[feed]
            counts[feed] += more
            left -= more
    return counts
