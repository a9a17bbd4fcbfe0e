"""The rounds of a text as a table: what was offered, what became of it, and the parts of the time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specdec.protocol.report import Delta, Round
from specdec.protocol.types import TokenKind

HEADINGS = (
    "round",
    "ms",
    "wait",
    "queue",
    "forward",
    "sampling",
    "heads",
    "link",
    "accepted",
    "next",
    "offered",
    "draft tokens",
)
NUMBER_COUNT = 9  # first columns, which are aligned to the right


def table_of(deltas: Iterable[Delta]) -> str:
    """Returns a line per round: milliseconds, and parts of them; how many draft tokens were accepted, the kind of the
    target's token after them (none where the text ended before it), the draft tokens of each proposer, and their ids,
    depth first, the discarded ones in brackets."""
    rows = [HEADINGS, *(row for delta in deltas for row in rows_of(delta))]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        aligned = [
            cell.rjust(width) if index < NUMBER_COUNT else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def rows_of(delta: Delta) -> Iterator[tuple[str, ...]]:
    """Yields the row of each round, by HEADINGS."""
    end = 0
    for own in delta.rounds:
        end += own.num_output_tokens
        last = delta.kinds[end - 1]
        next_name = "" if last is TokenKind.ACCEPTED else last.name.lower()
        proposers = ", ".join(f"{one.name.lower()} {own.proposers.count(one)}" for one in sorted(set(own.proposers)))
        at_target = own.target_queue_s, own.target_forward_s, own.target_sampling_s, own.target_heads_s
        times = own.round_s, own.draft_wait_s, *at_target, own.target_link_s
        milliseconds = (f"{1000 * time_s:.2f}" for time_s in times)
        count = str(len(own.accepted))
        yield str(own.round_index), *milliseconds, count, next_name, proposers, draft_tokens(own)


def draft_tokens(own: Round) -> str:
    """Returns the ids of the draft tokens, the discarded ones in brackets."""
    accepted = set(own.accepted)
    ids = enumerate(own.draft_token_ids)
    return " ".join(str(token_id) if index in accepted else f"({token_id})" for index, token_id in ids)
