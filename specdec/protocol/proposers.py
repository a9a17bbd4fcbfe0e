"""Proposers beside the coordinator: guesses at the text to come from text that is known already.

A proposer is given the committed tokens and returns runs of tokens that may follow them, each with the length of the
match it comes from. They propose without a draw, so under REJECTION a token has all weight in its draft distribution;
which runs are found depends on committed tokens only. The one for earlier text is in `suffix_store`. Pure: no clock, no
I/O, no model.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol, TypeVar

from specdec.protocol.calibration import confidence_bin
from specdec.protocol.heads import HEAD_CONFIDENCE_MAX, HeadProposals
from specdec.protocol.limits import DRAFT_LENGTH_LIMIT
from specdec.protocol.types import Proposer

T = TypeVar("T")

RUN_LENGTH_MAX = DRAFT_LENGTH_LIMIT // 2  # of a run: the policy verifies what is worth its rows
RUN_COUNT_MAX = 2  # runs of one proposer: a third differs from both in few texts
PLACES_MAX = 8  # of one n-gram that are looked at: the latest
NGRAM_LENGTH_MIN, MATCH_LENGTH_MAX = 2, 32
NGRAM_WINDOW = 16_384  # tokens
START_STRENGTH = 8  # of a prediction before any output: as sure as a match of this length


class Run(NamedTuple):
    """Tokens that may follow the committed ones. `strength`: length of the match that they continue; `rank`: 0 for the
    proposer's first choice; `confidences`: of each token, as a bin, from a proposer that knows them."""

    proposer: Proposer
    token_ids: tuple[int, ...]
    strength: int
    rank: int = 0
    confidences: tuple[int, ...] = ()


class LocalProposer(Protocol):
    """A proposer of one generation. To add one: find runs, give it a `Proposer`, and construct it in
    `coordinator.fleet` (docs/proposers.md)."""

    def propose(self, committed: Sequence[int]) -> list[Run]:
        """Returns runs that may follow `committed`, best first; it has grown since the call before, and only that."""


def as_text(token_ids: Iterable[int]) -> str:
    """Returns one character a token, so that `str.rfind` finds matches. Ids above 1,114,111, which no vocabulary has,
    share characters: then a guess is worse."""
    return "".join([chr(token_id % (sys.maxunicode + 1)) for token_id in token_ids])


def longest_match(text: str, context: str, length_min: int) -> tuple[int, int] | None:
    """Returns (length, place): the longest end of `context` that stands in `text` before a place with a token, of equal
    ones the latest; None below `length_min`. By bisection: an end's own ends stand there too."""

    def start(length: int) -> int:
        return text.rfind(context[-length:], 0, -1)

    lengths = range(length_min, min(len(context), len(text) - 1) + 1)
    length = length_min - 1 + bisect_left(lengths, True, key=lambda length: start(length) < 0)
    return (length, start(length) + length) if length >= length_min else None


def matches_of(text: str, context: str, length_min: int) -> Iterator[tuple[int, int]]:
    """Yields (length, place) of the longest match of `context` in `text`, and of one that another token follows: among
    the latest PLACES_MAX places of its length, or of half of it, and so on."""
    longest = longest_match(text, context, length_min)
    if longest is None:
        return
    yield longest
    length, following = longest[0], text[longest[1]]
    while True:
        limit = len(text) - 1
        for _ in range(PLACES_MAX):
            place = text.rfind(context[-length:], 0, limit) + length
            if place < length:
                break
            if text[place] != following:
                yield match_length(text, place, context, len(context)), place
                return
            limit = place - 1
        if length == length_min:
            return
        length = max(length // 2, length_min)


def match_length(tokens: Sequence[T], place: int, context: Sequence[T], end: int) -> int:
    """Returns the number of equal tokens before `place` and before `end`."""
    most = min(place, end)
    length = 0
    while length < most and tokens[place - 1 - length] == context[end - 1 - length]:
        length += 1
    return length


def runs_of(
    proposer: Proposer, matches: Iterable[tuple[int, int]], tokens_at: Callable[[int], tuple[int, ...]]
) -> list[Run]:
    """Returns runs from the longest (length, place) of `matches`, of equal ones the latest; of runs that begin alike
    the first. `tokens_at(place)`: the tokens that follow a place."""
    runs: list[Run] = []
    for strength, place in sorted(matches, reverse=True):
        token_ids = tokens_at(place)
        if token_ids and all(token_ids[0] != run.token_ids[0] for run in runs):
            runs.append(Run(proposer, token_ids, strength, len(runs)))
        if len(runs) == RUN_COUNT_MAX:
            break
    return runs


class NgramProposer:
    """The continuation of the longest earlier match in prompt and output (prompt lookup, Saxena 2023).

    A match that reaches the end of the text is continued by itself: the text repeats. `window`: the last tokens of the
    prompt that are searched. Matches have at least `length_min` tokens, and are compared by at most `length_max`.
    """

    def __init__(
        self,
        committed: Sequence[int],
        length_min: int = NGRAM_LENGTH_MIN,
        length_max: int = MATCH_LENGTH_MAX,
        window: int = NGRAM_WINDOW,
    ) -> None:
        self._length_min, self._length_max = length_min, length_max
        self._start = max(0, len(committed) - window)
        self._text = as_text(committed[self._start :])

    def propose(self, committed: Sequence[int]) -> list[Run]:
        start = self._start
        self._text += as_text(committed[start + len(self._text) :])

        def tokens_at(place: int) -> tuple[int, ...]:
            found = tuple(committed[start + place : start + place + RUN_LENGTH_MAX])
            return (found * RUN_LENGTH_MAX)[:RUN_LENGTH_MAX] if len(found) < RUN_LENGTH_MAX else found

        matches = matches_of(self._text, self._text[-self._length_max :], self._length_min)
        return runs_of(Proposer.NGRAM, matches, tokens_at)


class PredictionProposer:
    """The text that the client expects back: from its start, and after output that left it from where they agree again.

    `output_start`: number of tokens before the output.
    """

    def __init__(self, prediction: list[int], output_start: int) -> None:
        self._prediction = prediction
        self._text = as_text(prediction)
        self._output_start = self._read = output_start
        self._place: int | None = 0  # of the next token in the prediction; None: the output has left it
        self._strength = START_STRENGTH

    def propose(self, committed: Sequence[int]) -> list[Run]:
        prediction, end = self._prediction, len(committed)
        for token_id in committed[self._read :]:
            is_next = self._place is not None and prediction[self._place : self._place + 1] == [token_id]
            self._place = self._place + 1 if self._place is not None and is_next else None
            self._strength = min(self._strength + 1, MATCH_LENGTH_MAX)
        self._read = end
        if self._place is None and end - self._output_start >= NGRAM_LENGTH_MIN:
            context = as_text(committed[-MATCH_LENGTH_MAX:])
            self._strength, self._place = longest_match(self._text, context, NGRAM_LENGTH_MIN) or (0, None)
        if self._place is None:
            return []
        found = tuple(prediction[self._place : self._place + RUN_LENGTH_MAX])
        return [Run(Proposer.PREDICTION, found, self._strength)] if found else []


def head_runs(proposals: HeadProposals | None, vocabulary_size: int) -> list[Run]:
    """Returns the proposals of the target's heads as runs: the likeliest token of each head, and the first head's
    second. Tokens beyond the vocabulary end a run."""
    heads = [] if proposals is None else proposals.candidates
    if not heads:
        return []
    first = list(takewhile(lambda token: token.token_id < vocabulary_size, (candidates[0] for candidates in heads)))
    runs = []
    for rank, tokens in enumerate((first, heads[0][1:2])):
        token_ids = tuple(token.token_id for token in tokens)
        if token_ids and max(token_ids) < vocabulary_size:
            bins = tuple(confidence_bin(token.confidence / HEAD_CONFIDENCE_MAX) for token in tokens)
            runs.append(Run(Proposer.HEADS, token_ids, 0, rank, bins))
    return runs
