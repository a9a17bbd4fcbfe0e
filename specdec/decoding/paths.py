"""A path of tokens as a view: committed tokens up to some length, then draft tokens, without a copy of the context;
and the counts of a sequence's tokens, kept from round to round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import overload

from specdec.protocol.types import ResolvedSamplingParams


class TokenCounts:
    """How often each token occurs in the output of a sequence, and in its prompt if `params` penalise repetition."""

    __slots__ = ("prompt", "output", "length", "_prompt_length")

    def __init__(self, params: ResolvedSamplingParams) -> None:
        self.prompt: Counter[int] = Counter()
        self.output: Counter[int] = Counter()
        self.length = params.prompt_length if params.repetition_penalty == 1 else 0
        self._prompt_length = params.prompt_length

    def move(self, tokens: Sequence[int], length: int) -> None:
        """Counts the first `length` of `tokens`, reading only those between the length before and this one.

        Call it with the length that stays before tokens are removed.
        """
        start, end, between = self.length, length, self._prompt_length
        if start <= end:
            self.prompt.update(tokens[start : min(end, between)])
            self.output.update(tokens[max(start, between) : end])
        else:
            self.prompt -= Counter(tokens[end : min(start, between)])
            self.output -= Counter(tokens[max(end, between) : start])
        self.length = length


class TokenPath(Sequence[int]):
    """The first `length` of `tokens`, then `tail`. Those `length` tokens must not change while it is read.

    `counts`: those of `tokens`, kept by their owner; without a tail only.
    """

    __slots__ = ("_tokens", "_length", "_tail", "_counts")

    def __init__(
        self, tokens: Sequence[int], length: int, tail: Sequence[int] = (), counts: TokenCounts | None = None
    ) -> None:
        self._tokens = tokens
        self._length = length
        self._tail = tail
        self._counts = counts

    def kept_counts(self) -> TokenCounts | None:
        """Returns the counts of the path if they are kept, moved to its length."""
        if self._counts is not None:
            self._counts.move(self._tokens, self._length)
        return self._counts

    def __len__(self) -> int:
        return self._length + len(self._tail)

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self._tokens, self._length), self._tail)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return list(self)[index]
        place = range(len(self))[index]
        return self._tokens[place] if place < self._length else self._tail[place - self._length]

    def __repr__(self) -> str:
        return f"TokenPath({self._length} + {list(self._tail)})"
