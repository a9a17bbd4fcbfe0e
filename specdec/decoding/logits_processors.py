"""Logit edits, the first steps of the target distribution: bias, masks and penalties by request and path.

In order: `allowed_token_ids` masks all other ids, `bad_words` those that would complete one, `min_tokens` the stop ids;
`logit_bias` is added, the repetition penalty divides positive and multiplies negative logits of tokens in prompt or
output, presence and frequency penalties are subtracted for tokens in the output. Draft tokens before a position count
as output. Rows without any edit pass through untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy
import torch
from torch import Tensor

from specdec.decoding.bad_words import word_ends
from specdec.decoding.host_copy import is_device, sent
from specdec.decoding.token_path import Counted, TokenCounts, TokenPath
from specdec.protocol.types import ResolvedSamplingParams

Edit: TypeAlias = Callable[[Tensor, ResolvedSamplingParams, Tensor], Tensor]

PENALISED_AT_ONCE = 1 << 16  # numbers on a CPU, whose temporaries stay in its cache


@dataclass(frozen=True, slots=True)
class PathContext:
    """Consecutive rows along one path: the one after draft_token_ids[:first_row], and so on to the one after all.

    `committed` holds every token before the draft tokens; it is read during the call only and never changed. The rows
    before `first_row` are those of another path of the same tree.
    """

    params: ResolvedSamplingParams
    committed: Sequence[int]
    draft_token_ids: tuple[int, ...] = ()
    first_row: int = 0

    @property
    def first_position(self) -> int:
        """The position that the first row is for."""
        return len(self.committed) + self.first_row

    @property
    def row_count(self) -> int:
        return len(self.draft_token_ids) + 1 - self.first_row

    @property
    def masked_row_count(self) -> int:
        """Number of rows, from the first on, with fewer than min_tokens output tokens before them."""
        missing = self.params.prompt_length + self.params.min_tokens - self.first_position
        return max(0, min(self.row_count, missing)) if self.params.stop_token_ids else 0

    @property
    def word_ends(self) -> list[list[int]]:
        """Of each row the tokens that would complete a bad word."""
        words = self.params.bad_words
        if not words:
            return [[]] * self.row_count
        return word_ends(words, self.committed, self.params.prompt_length, self.draft_token_ids, self.first_row)

    @property
    def is_edited(self) -> bool:
        """Whether any row of the path is edited."""
        params = self.params
        is_any = self.masked_row_count or params.logit_bias or params.has_penalties or params.allowed_token_ids
        return bool(is_any or params.bad_words and any(self.word_ends))


def may_edit(params: ResolvedSamplingParams) -> bool:
    """Whether an edit may change logits."""
    legal = params.allowed_token_ids or params.bad_words
    return bool(legal or params.logit_bias or params.has_penalties or params.min_tokens)


def edited_logits(logits: Tensor, contexts: Sequence[PathContext]) -> Tensor:
    """Returns the logits after all edits: the argument itself without edits, else a float64 copy.

    Float32 becomes float64 without rounding, so the type of a row does not change its distribution.
    # logits: [rows, vocabulary] float32
    """
    if not any(context.is_edited for context in contexts):
        return logits
    edited = logits.to(torch.float64, copy=True)
    start = 0
    for params, sharing in groupby(contexts, key=lambda context: context.params):
        paths = list(sharing)
        row_count = sum(context.row_count for context in paths)
        edit_paths(edited[start : start + row_count], params, paths)
        start += row_count
    return edited


def edit_paths(values: Tensor, params: ResolvedSamplingParams, contexts: Sequence[PathContext]) -> None:
    """Edits the rows of paths with the same params in place, only in the columns concerned.

    # values: [rows of all paths, vocabulary]
    """
    width = values.shape[1]
    if params.allowed_token_ids:
        keep_tokens(values, [token_id for token_id in params.allowed_token_ids if token_id < width])
    if params.bad_words:
        end = 0
        for token_ids, rows in groupby(ids for context in contexts for ids in context.word_ends):
            start, end = end, end + len(list(rows))
            mask_tokens(values[start:end], [token_id for token_id in token_ids if token_id < width])
    masked = masked_rows(contexts)
    if masked:
        stop_token_ids = [token_id for token_id in params.stop_token_ids if token_id < width]
        for start, end in masked:
            mask_tokens(values[start:end], stop_token_ids)
    bias = [(token_id, number) for token_id, number in params.logit_bias if token_id < width]
    if bias:
        columns = sent([token_id for token_id, _ in bias], values.device)
        values[:, columns] += sent([number for _, number in bias], values.device, values.dtype)
    if params.has_penalties:
        end = 0
        for _, sharing in groupby(contexts, key=head_of):
            paths = list(sharing)
            start, end = end, end + sum(path.row_count for path in paths)
            penalise(values[start:end], params, counted(paths[0]), [later(path) for path in paths])


def masked_rows(contexts: Sequence[PathContext]) -> list[tuple[int, int]]:
    """Returns the rows of the paths whose stop tokens are masked, adjacent ones together."""
    found: list[tuple[int, int]] = []
    start = 0
    for context in contexts:
        if count := context.masked_row_count:
            if found and found[-1][1] == start:
                found[-1] = found[-1][0], start + count
            else:
                found.append((start, start + count))
        start += context.row_count
    return found


def keep_tokens(values: Tensor, token_ids: list[int]) -> None:
    """Sets all other ids to -inf, except in a row without any of these: the support is never empty."""
    if not token_ids:
        return
    columns = sent(token_ids, values.device)
    kept = values[:, columns]
    values.masked_fill_(kept.amax(dim=1, keepdim=True) > -math.inf, -math.inf)
    values[:, columns] = kept


def mask_tokens(values: Tensor, token_ids: list[int]) -> None:
    """Sets ids to -inf, except in a row without other tokens: the support is never empty."""
    if not len(values) or not token_ids:
        return
    columns = sent(token_ids, values.device)
    before = values[:, columns]
    values[:, columns] = -math.inf
    emptied = values.amax(dim=1, keepdim=True) == -math.inf
    values[:, columns] = torch.where(emptied, before, values[:, columns])


class Later(NamedTuple):
    """The rows of one path: `row_count` of them, the last after all of these uncommitted tokens."""

    token_ids: tuple[int, ...]
    row_count: int


def head_of(context: PathContext) -> tuple[int, int]:
    """Returns what is equal for paths in a row that continue the same committed tokens."""
    path = context.committed
    if isinstance(path, TokenPath) and path.counts is not None:
        return id(path.counts), path.head_length
    return id(path), len(path)


def counted(context: PathContext) -> TokenCounts:
    """Returns the counts of the committed tokens: those that their owner keeps, or new ones."""
    path = context.committed
    counts = path.kept_counts() if isinstance(path, TokenPath) else None
    if counts is None:
        counts = TokenCounts(context.params)
        counts.move(path, len(path))
    return counts


def later(context: PathContext) -> Later:
    """Returns the rows of a path, and the tokens that its counts lack."""
    path = context.committed
    tail = path.tail if isinstance(path, TokenPath) and path.counts is not None else ()
    return Later((*tail, *context.draft_token_ids), context.row_count)


def penalise(values: Tensor, params: ResolvedSamplingParams, counts: TokenCounts, paths: Sequence[Later]) -> None:
    """Applies repetition, presence and frequency penalties to the columns of tokens that occur in the paths.

    All rows have the committed tokens, few columns a draft token too: these are computed apart, for each row its own.
    """
    width, device = values.shape[1], values.device
    later_ids = sorted({token_id for path in paths for token_id in path.token_ids if token_id < width})
    later_columns = sent(later_ids, device, torch.int64)
    chosen = values[:, later_columns]
    if params.repetition_penalty != 1:
        edit_columns(values, repeated, params, counts.in_all(width, device))
    if params.presence_penalty or params.frequency_penalty:
        edit_columns(values, recurring, params, counts.in_output(width, device))
    if later_ids:
        committed = sent(torch.from_numpy(counts.of(later_ids)), device)
        output, every = (committed[:, None] + sent(draft_counts_before(paths, later_ids), device)).unbind()
        values[:, later_columns] = recurring(repeated(chosen, params, every), params, output)


def edit_columns(values: Tensor, edit: Edit, params: ResolvedSamplingParams, counted: Counted) -> None:
    """Edits the columns of counted tokens in place."""
    columns, times = counted
    if isinstance(columns, Tensor):
        values[:, columns] = edit(values[:, columns], params, times)
    else:
        size = values.shape[1] if is_device(values.device) else max(1, PENALISED_AT_ONCE // len(values))
        for start in range(0, len(times), size):
            part = slice(start, min(start + size, len(times)))
            values[:, part] = edit(values[:, part], params, times[part])


def repeated(chosen: Tensor, params: ResolvedSamplingParams, every: Tensor) -> Tensor:
    """Returns values after the repetition penalty: of tokens that occur, positive ones divided, others multiplied. Of
    quotient and product that is the smaller one for a penalty above 1, else the larger, also when rounded.

    `every`: how often each column's token occurs before the row.  # [rows, columns] float64; [rows or 1, columns]
    """
    penalty = params.repetition_penalty
    factors = torch.ones_like(every, dtype=chosen.dtype).masked_fill_(every > 0, penalty)
    both = chosen / factors, chosen * factors
    return torch.minimum(*both) if penalty > 1 else torch.maximum(*both)


def recurring(chosen: Tensor, params: ResolvedSamplingParams, output: Tensor) -> Tensor:
    """Returns values after presence and frequency penalties; may change the argument. `output`: how often each column's
    token occurs in the output before the row.  # [rows, columns] float64; [rows or 1, columns]"""
    if params.presence_penalty:
        chosen -= params.presence_penalty * (output > 0).to(chosen.dtype)
    if params.frequency_penalty:
        chosen -= params.frequency_penalty * output.to(chosen.dtype)
    return chosen


def draft_counts_before(paths: Sequence[Later], token_ids: Sequence[int]) -> Tensor:
    """Counts each token in the draft tokens before each row of the paths.  # [rows, len(token_ids)] int64"""
    counts = numpy.zeros((sum(path.row_count for path in paths), len(token_ids)), numpy.int64)
    column_of = {token_id: column for column, token_id in enumerate(token_ids)}
    end = 0
    for path in paths:
        start, end = end, end + path.row_count
        for index, token_id in enumerate(path.token_ids):
            if token_id in column_of:
                first = end - len(path.token_ids) + index  # the row after it
                counts[max(start, first) : end, column_of[token_id]] += 1
    return torch.from_numpy(counts)
