"""A path of tokens as a view: committed tokens up to some length, then draft tokens, without a copy of the context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import overload


class TokenPath(Sequence[int]):
    """The first `length` of `tokens`, then `tail`. What lies below `length` must not change while it is read."""

    __slots__ = ("_tokens", "_length", "_tail")

    def __init__(self, tokens: Sequence[int], length: int, tail: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self._length = length
        self._tail = tail

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
