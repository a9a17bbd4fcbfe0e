"""Which rows the next step takes: a pure choice over the feeds that wait.

Decodes and verifications come first, prompts fill up. Three promises, for any work that waits:

1. A decode is never behind a prompt, and a step that may keep one waiting carries one chunk of prompts at most: so
   prompts delay a decode by one chunk in the step that runs when it comes, and one in its own.
2. The oldest prompt goes on in every step, whatever else there is; so does the oldest decode.
3. A step has at most `rows_max` rows. A verification wider than its share of them is run all the same, alone of its
   kind: its rows cannot be divided.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.engine.feed import Feed
from specdec.engine.runner import Piece


def choose(feeds: Sequence[Feed], chunk_size: int, rows_max: int, is_decoding: bool) -> list[tuple[Feed, Piece]]:
    """The feeds of the next step, each with its rows of it.

    `feeds` are those that may run, oldest first, no sequence twice. `is_decoding`: there are sequences past their
    prompt, which may ask for a decode while this step runs; then prompts have a chunk in it and no more.
    """
    prompts: list[Feed] = []
    decodes: list[Feed] = []
    for feed in feeds:
        (prompts if feed.context_count else decodes).append(feed)
    share = min(chunk_size, max(1, rows_max // 2), prompts[0].row_count) if prompts else 0  # of the oldest, always
    chosen: list[tuple[Feed, Piece]] = []
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
