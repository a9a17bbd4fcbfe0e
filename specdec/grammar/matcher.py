"""The legal tokens along the paths of one text: its matcher stands at the committed tokens, and walks along draft
tokens and back.

End tokens never enter a matcher. They are legal where the grammar accepts what is there, and alone where nothing can
follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specdec.errors import GrammarFailed, SpecdecError, one_line
from specdec.grammar.compiler import Compiled

ALL = b"\xff"
RENEWALS_MAX = 8  # of one text
RECENT_COUNT = 8  # of tokens that decide how the text after them is split
OF_LEXER = "lexer error"  # the library's words for a limit of what the matchers of a grammar share


class LexerExceeded(GrammarFailed):
    """A limit of the library, of what the matchers of a grammar share."""


class OutOfTime(Exception):
    """Masks are not made by the time that they were given."""


class MaskRows(NamedTuple):
    """Rows of bits, each of as many 32-bit words as hold a vocabulary: bit i of word w is token 32 w + i, 1 is legal.

    `dead`: rows of legal paths after which no token is known to be legal, by the library's limits or the model's
    tokens.
    """

    bits: bytearray
    dead: frozenset[int] = frozenset()


class PathMatcher:
    """The matcher of one text. Not for two threads at once. `end_token_ids`: of the target. `end_s`: processor time of
    the calling thread after which no further row is begun, but OutOfTime raised."""

    def __init__(self, compiled: Compiled, end_token_ids: Sequence[int], vocabulary_size: int) -> None:
        self._compiled = compiled
        self._ends = frozenset(end_token_ids)
        self._never = self._ends | {token_id for token_id in compiled.ends if token_id < vocabulary_size}
        self._row_bytes = 4 * -(-vocabulary_size // 32)
        self._renewal_count = 0
        self.end_s = math.inf
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._first, self._matcher = self._compiled.matcher()
        self._output: list[int] = []  # what the matcher has consumed: of the committed output,
        self._path: list[int] = []  # and below it
        self._stands = False  # its output is that of the call under way

    def rows(self, output: Sequence[int], draft_token_ids: Sequence[int] = (), parents: Sequence[int] = ()) -> MaskRows:
        """Returns the legal tokens after the committed output, and after each draft token of a tree along its own path
        (`parents`: protocol.tree_shape); all tokens where no legal path leads, and in dead rows. Raises GrammarFailed
        if none is known after the output."""
        self._stands, size = False, self._row_bytes
        bits = bytearray(ALL) * (size * (1 + len(draft_token_ids)))
        bits[:size] = self._row_after(output, [])
        paths: dict[int, list[int]] = {0: []}  # of the rows that a legal path reaches
        dead: set[int] = set()
        for row, token_id in enumerate(draft_token_ids, 1):
            parent = parents[row - 1] if parents else row - 1
            if parent not in paths or token_id in self._ends or not is_legal(bits, parent * size, token_id):
                continue
            path = [*paths[parent], token_id]
            try:
                bits[row * size : (row + 1) * size] = self._row_after(output, path)
                paths[row] = path
            except GrammarFailed:
                dead.add(row)
        return MaskRows(bits, frozenset(dead))

    def rows_of_paths(self, output: Sequence[int], paths: Iterable[Sequence[int]]) -> MaskRows:
        """Returns the legal tokens after each path below the committed output; none after an illegal one, and in dead
        rows."""
        self._stands = False
        bits, dead = bytearray(), set[int]()
        for row, path in enumerate(paths):
            try:
                bits += self._row_after(output, path)
            except GrammarFailed:
                dead.add(row)
                bits += bytes(self._row_bytes)
        return MaskRows(bits, frozenset(dead))

    def legal_count(self, output: Sequence[int], token_ids: Sequence[int]) -> int:
        """Returns the number of the first tokens that are legal after the committed output, ends of the text not
        among them. Raises GrammarFailed if the output is not legal."""
        self._stands = False
        self._walk(output, [])
        ends = (index for index, token_id in enumerate(token_ids) if token_id in self._never)
        found: int = self._matcher.validate_tokens(list(token_ids[: next(ends, len(token_ids))]))
        self._check()
        return found

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        """Returns tokens of the only text that may follow the committed output, as the tokenizer splits it; none where
        several may. The text's other splits are as legal. Raises GrammarFailed if the output is not legal."""
        self._stands = False
        self._walk(output, [])
        text = b"" if self._matcher.is_accepting() else self._matcher.compute_ff_bytes()
        self._check()
        return tuple(self._compiled.tokenizer.tokenize_partial(text, list(output[-RECENT_COUNT:]))[0]) if text else ()

    def _row_after(self, output: Sequence[int], path: Sequence[int]) -> bytearray:
        """Returns the legal tokens after a path. Where a limit of the lexer is exceeded, by what other matchers of the
        grammar or other paths have taken, it is tried once with a new one. Raises GrammarFailed,
        OutOfTime."""
        if time.thread_time() > self.end_s:
            raise OutOfTime
        first = self._first
        try:
            self._walk(output, path)
            return self._row()
        except LexerExceeded:
            if self._renewal_count == RENEWALS_MAX:
                raise
            self._renewal_count += 1
            self._compiled.renew(first)
            self._begin_anew()
        self._walk(output, path)
        return self._row()

    def _walk(self, output: Sequence[int], path: Sequence[int]) -> None:
        """Brings the matcher to the end of a path below the committed output."""
        if not self._stands:
            common = common_length(self._output, output)
            back_count, self._path = len(self._path) + len(self._output) - common, []
            del self._output[common:]
            self._move(back_count, output[common:])
            self._output, self._stands = list(output), True
        common = common_length(self._path, path)
        back_count = len(self._path) - common
        del self._path[common:]
        self._move(back_count, path[common:])
        self._path = list(path)

    def _move(self, back_count: int, token_ids: Sequence[int]) -> None:
        """Takes tokens back, then consumes some."""
        if back_count and not self._matcher.rollback(back_count):
            self._check()
        if not token_ids:
            return
        if not self._never.isdisjoint(token_ids) or not self._matcher.consume_tokens(list(token_ids)):
            self._check()
            self._begin_anew()
            raise GrammarFailed("an end token stands in the midst of the text")

    def _row(self) -> bytearray:
        """The legal tokens where the matcher stands. Raises GrammarFailed if there are none."""
        found = self._matcher.compute_bitmask()
        self._check()
        row = bytearray(found[: self._row_bytes])
        row += bytes(self._row_bytes - len(row))
        if self._matcher.is_stopped():
            row = bytearray(self._row_bytes)
        may_end = self._matcher.is_accepting()
        for token_id in self._never:
            row[token_id >> 3] &= ~(1 << (token_id & 7))
        if may_end:
            for token_id in self._ends:
                row[token_id >> 3] |= 1 << (token_id & 7)
        elif row.count(0) == len(row):
            raise GrammarFailed("no token of the model continues the text by the grammar")
        return row

    def _check(self) -> None:
        """Raises GrammarFailed for a matcher in an error state: it never leaves it, so the next one begins anew."""
        if not self._matcher.is_error():
            return
        message = self._matcher.get_error().replace("<non-verbose/>", "")
        kind = LexerExceeded if OF_LEXER in message else GrammarFailed
        self._begin_anew()
        raise kind(f"the grammar cannot be followed any further: {one_line(SpecdecError(message))}")


def is_legal(bits: bytearray, start: int, token_id: int) -> bool:
    """Whether a row that begins at byte `start` allows a token."""
    return bool(bits[start + (token_id >> 3)] >> (token_id & 7) & 1)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of first tokens that are equal."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next((index for index in range(length) if first[index] != second[index]), length)
