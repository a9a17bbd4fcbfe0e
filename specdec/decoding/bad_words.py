"""Bad words: the tokens that would complete one, at each row of a path."""

from __future__ import annotations

from collections.abc import Sequence


def word_ends(
    words: Sequence[tuple[int, ...]],
    committed: Sequence[int],
    output_start: int,
    draft_token_ids: Sequence[int],
    first_row: int,
) -> list[list[int]]:
    """Returns for each row, the one after draft_token_ids[:first_row] to the one after all, the tokens that complete a
    word there, ascending: the last ones of words whose other tokens end the output before the row.

    The output begins at `output_start` and contains the draft tokens before a row. Of `committed` only as many tokens
    are read as the longest word has.
    """
    reach = max(map(len, words)) - 1
    single = {word[0] for word in words if len(word) == 1}
    longer: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        if len(word) > 1:
            longer.setdefault(word[-2], []).append(word)
    start = max(output_start, len(committed) - reach)
    tail = (*(committed[position] for position in range(start, len(committed))), *draft_token_ids)
    rows = []
    for end in range(len(tail) - len(draft_token_ids) + first_row, len(tail) + 1):
        found = set(single)
        for word in longer.get(tail[end - 1], ()) if end else ():
            begun = word[:-1]
            if tail[max(0, end - len(begun)) : end] == begun:
                found.add(word[-1])
        rows.append(sorted(found))
    return rows
