"""A path of tokens as a view: committed tokens up to some length, then draft tokens, without a copy of the context;
and the counts of a sequence's tokens, kept from round to round as columns that the edits read in place."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, overload

import numpy
import torch
from torch import Tensor

from specdec.decoding.host_copy import is_device, sent
from specdec.protocol.types import ResolvedSamplingParams

SPARSE_SHARE = 8  # a CPU edits the columns of less than one token in eight; of more, all columns, which is faster


class Counted(NamedTuple):
    """How often tokens occur. `columns`: their ids, each once, or a slice of all ids.  # times: [tokens] int32"""

    columns: Tensor | slice
    times: Tensor


class TokenCounts:
    """How often each token occurs in the output of a sequence, and in prompt and output if `params` penalise
    repetition: otherwise the prompt is not read. An encoder's input is never counted.

    The counts stand by token id where logits are edited, and a move changes those of the tokens that it passes, so a
    step builds no list of the context. 8 bytes for each id up to the highest that occurred.
    """

    __slots__ = ("length", "_first", "_prompt_length", "_times", "_moved", "_far")

    def __init__(self, params: ResolvedSamplingParams) -> None:
        is_output = params.repetition_penalty == 1
        self._first = self.length = params.prompt_length if is_output else params.encoder_length
        self._prompt_length = params.prompt_length
        self._times = numpy.zeros((2, 0), numpy.int32)  # by token id: in the output, in all
        self._moved: list[numpy.ndarray] = []  # tokens whose counts changed since the copy on a device was made
        self._far: Tensor | None = None

    def move(self, tokens: Sequence[int], length: int) -> None:
        """Counts the first `length` of `tokens`, reading only those between the length before and this one.

        Call it with the length that stays before tokens are removed.
        """
        length = max(length, self._first)
        start, end = min(self.length, length), max(self.length, length)
        if start < end:
            passed = numpy.frombuffer(array("L", tokens[start:end]), numpy.int64)
            if (size := int(passed.max()) + 1) > self._times.shape[1]:
                self._times = numpy.pad(self._times, ((0, 0), (0, size - self._times.shape[1])))
            step = numpy.int32(1 if self.length < length else -1)
            numpy.add.at(self._times[1], passed, step)
            numpy.add.at(self._times[0], passed[max(0, self._prompt_length - start) :], step)
            if self._far is not None:
                self._moved.append(passed)
        self.length = length

    def occurring(self, others: Sequence[int], width: int) -> list[int]:
        """Returns the ids below `width` of the tokens that occur, or are among `others`, ascending."""
        own = numpy.flatnonzero(self._times[1, :width])
        others = [token_id for token_id in others if token_id < width]
        found: list[int] = numpy.union1d(own, numpy.array(others, numpy.int64)).tolist()
        return found

    def of(self, token_ids: Sequence[int]) -> numpy.ndarray:
        """Returns how often these tokens occur: in the output, and in all.  # [2, tokens] int32"""
        asked = numpy.array(token_ids, numpy.int64)
        found = numpy.zeros((2, len(asked)), numpy.int32)
        known = asked < self._times.shape[1]
        found[:, known] = self._times[:, asked[known]]
        return found

    def in_output(self, width: int, device: torch.device) -> Counted:
        """Returns how often tokens below `width` occur in the output, on a device, valid until the next move; others do
        not. Nothing is read from the device."""
        return self._counted(0, width, device)

    def in_all(self, width: int, device: torch.device) -> Counted:
        """Returns the same for prompt and output together."""
        return self._counted(1, width, device)

    def _counted(self, place: int, width: int, device: torch.device) -> Counted:
        own = self._times[place, :width]
        if is_device(device):
            return Counted(slice(0, len(own)), self._sent(device)[place, :width])
        if SPARSE_SHARE * numpy.count_nonzero(own) >= len(own):
            return Counted(slice(0, len(own)), torch.from_numpy(own))
        token_ids = numpy.flatnonzero(own > 0)
        return Counted(torch.from_numpy(token_ids), torch.from_numpy(own[token_ids]))

    def _sent(self, device: torch.device) -> Tensor:
        """Returns the counts on a device: there already, but for those that changed since the call before."""
        if self._far is None or self._far.shape != self._times.shape:
            self._far = sent(torch.from_numpy(self._times), device)
        elif self._moved:
            token_ids = numpy.concatenate(self._moved)
            changed = sent(torch.from_numpy(numpy.stack([token_ids, *self._times[:, token_ids]])), device)
            self._far.index_copy_(1, changed[0], changed[1:].to(torch.int32))
        self._moved.clear()
        return self._far


class TokenPath(Sequence[int]):
    """The first `length` of `tokens`, then `tail`. Those `length` tokens must not change while it is read.

    `counts`: those of `tokens`, kept by their owner.
    """

    __slots__ = ("_tokens", "head_length", "tail", "counts")

    def __init__(
        self, tokens: Sequence[int], length: int, tail: Sequence[int] = (), counts: TokenCounts | None = None
    ) -> None:
        self._tokens = tokens
        self.head_length = length
        self.tail = tail
        self.counts = counts

    def followed_by(self, tail: Sequence[int]) -> TokenPath:
        """Returns the path with more tokens behind it."""
        return TokenPath(self._tokens, self.head_length, (*self.tail, *tail), self.counts)

    def kept_counts(self) -> TokenCounts | None:
        """Returns the counts if they are kept, moved to the first `head_length` tokens."""
        if self.counts is not None:
            self.counts.move(self._tokens, self.head_length)
        return self.counts

    def __len__(self) -> int:
        return self.head_length + len(self.tail)

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self._tokens, self.head_length), self.tail)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return list(self)[index]
        place = range(len(self))[index]
        return self._tokens[place] if place < self.head_length else self.tail[place - self.head_length]

    def __repr__(self) -> str:
        return f"TokenPath({self.head_length} + {list(self.tail)})"
