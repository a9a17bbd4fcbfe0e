"""The output of a generation: a round's tokens, taken one by one as plain decoding does, and decoded to text.

The first stop token, stop string or `max_tokens` ends the text; later tokens of the round are dropped. Text that may
begin a stop string, or ends inside a character, is held back, so sent text is never revoked. The output is a function
of the token sequence alone: with speculation, without it and resumed it is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.coordinator.tokenizer import TextStream
from specdec.protocol.types import FinishReason


@dataclass(frozen=True, slots=True)
class Ending:
    """The finish reason of a text, and the stop string or stop token that ended it."""

    reason: FinishReason
    stop_string: str = ""
    stop_token_id: int | None = None


class Appended(NamedTuple):
    """The result of appending some tokens: the text that each kept token made final, and the end if reached."""

    texts: tuple[str, ...]
    ending: Ending | None

    @property
    def kept_count(self) -> int:
        """Tokens kept: those up to the end of the text."""
        return len(self.texts)


class OutputProcessor:
    """The output of one generation so far. `count`: output tokens, `max_tokens`: their limit. `sure_end_ids`: stop
    tokens that end it within min_tokens too, since nothing is legal after them."""

    def __init__(
        self,
        stream: TextStream,
        stop: tuple[str, ...],
        stop_token_ids: Sequence[int],
        min_tokens: int,
        max_tokens: int,
        sure_end_ids: Sequence[int] = (),
    ) -> None:
        self._stream = stream
        self._stop = stop
        self._stop_token_ids = frozenset(stop_token_ids)
        self._sure_end_ids = frozenset(sure_end_ids)
        self._min_tokens = min_tokens
        self.max_tokens = max_tokens
        self._held = ""
        self.count = 0

    def append(self, token_ids: Sequence[int]) -> Appended:
        """Appends the tokens of one round, up to the end of the text if one of them ends it."""
        texts: list[str] = []
        ending = None
        for token_id in token_ids:
            text, ending = self._append(token_id)
            texts.append(text)
            if ending is not None:
                break
        return Appended(tuple(texts), ending)

    def _append(self, token_id: int) -> tuple[str, Ending | None]:
        self.count += 1
        is_sure = self.count > self._min_tokens or token_id in self._sure_end_ids
        if token_id in self._stop_token_ids and is_sure:
            return self._release_all(), Ending(FinishReason.STOP, stop_token_id=token_id)
        released = self._stream.step(token_id)
        if self._stop:
            self._held += released
            released, stop_string = self._release()
            if stop_string:
                return released, Ending(FinishReason.STOP, stop_string=stop_string)
        if self.count == self.max_tokens:
            return released + self._release_all(), Ending(FinishReason.LENGTH)
        return released, None

    def _release(self) -> tuple[str, str]:
        """Returns (final text, the stop string that ends it or ''). A match within min_tokens is ordinary text."""
        released = ""
        while (match := self._first_match()) is not None:
            start, _, stop_string = match
            if self.count > self._min_tokens:
                released += self._held[:start]
                self._held = ""
                return released, stop_string
            released += self._held[: start + 1]
            self._held = self._held[start + 1 :]
        certain = len(self._held) - self._doubtful_length()
        released += self._held[:certain]
        self._held = self._held[certain:]
        return released, ""

    def _first_match(self) -> tuple[int, int, str] | None:
        """Returns the earliest stop string in the held text, of several there the first listed: (start, index in the
        list, string); None without a match."""
        found = ((self._held.find(stop), order, stop) for order, stop in enumerate(self._stop) if stop in self._held)
        return min(found, default=None)

    def _doubtful_length(self) -> int:
        """Length of the longest suffix of the held text that begins a stop string."""
        longest = min(max(map(len, self._stop)) - 1, len(self._held))
        ends = (self._held[-length:] for length in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)

    def _release_all(self) -> str:
        text = self._held + self._stream.rest()
        self._held = ""
        return text
