"""Logit edits, the first steps of the target distribution: bias, masks and penalties by request and path.

In order: `min_tokens` masks the stop ids, `logit_bias` is added, the repetition penalty divides positive and multiplies
negative logits of tokens in prompt or output, presence and frequency penalties are subtracted for tokens in the output.
Draft tokens before a position count as output. Rows without any edit pass through untouched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.decoding.host_copy import sent
from specdec.decoding.paths import TokenCounts, TokenPath
from specdec.protocol.types import ResolvedSamplingParams


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
    def is_edited(self) -> bool:
        """Whether any row of the path is edited."""
        return bool(self.masked_row_count or self.params.logit_bias or self.params.has_penalties)


def edited_logits(logits: Tensor, contexts: Sequence[PathContext]) -> Tensor:
    """Returns the logits after all edits: the argument itself without edits, else a float64 copy.

    Float32 becomes float64 without rounding, so the type of a row does not change its distribution.
    # logits: [rows, vocabulary] float32
    """
    if not any(context.is_edited for context in contexts):
        return logits
    edited = logits.to(torch.float64, copy=True)
    start = 0
    for context in contexts:
        if context.is_edited:
            edit_path(edited[start : start + context.row_count], context)
        start += context.row_count
    return edited


def edit_path(values: Tensor, context: PathContext) -> None:
    """Edits the rows of one path in place, only in the columns concerned.  # values: [row_count, vocabulary]"""
    params, width = context.params, values.shape[1]
    mask_stop_tokens(values[: context.masked_row_count], [t for t in params.stop_token_ids if t < width])
    bias = [(token_id, number) for token_id, number in params.logit_bias if token_id < width]
    if bias:
        columns = sent([token_id for token_id, _ in bias], values.device)
        values[:, columns] += sent([number for _, number in bias], values.device, values.dtype)
    if params.has_penalties:
        penalise(values, context)


def mask_stop_tokens(values: Tensor, stop_token_ids: list[int]) -> None:
    """Sets stop ids to -inf, except in a row without other tokens: the support is never empty."""
    if not len(values) or not stop_token_ids:
        return
    columns = sent(stop_token_ids, values.device)
    before = values[:, columns]
    values[:, columns] = -math.inf
    emptied = values.amax(dim=1, keepdim=True) == -math.inf
    values[:, columns] = torch.where(emptied, before, values[:, columns])


def penalise(values: Tensor, context: PathContext) -> None:
    """Applies repetition, presence and frequency penalties to the columns of tokens that occur in the path."""
    params, width = context.params, values.shape[1]
    counted = committed_counts(context)
    first_counts = counted.output
    first_seen = first_counts.keys() if params.repetition_penalty == 1 else first_counts.keys() | counted.prompt.keys()
    token_ids = [token_id for token_id in {*first_seen, *context.draft_token_ids} if token_id < width]
    columns = sent(token_ids, values.device, torch.int64)
    draft_counts = sent(draft_counts_before(context, token_ids), values.device)
    chosen = values[:, columns]
    if params.repetition_penalty != 1:
        repeated = torch.where(chosen > 0, chosen / params.repetition_penalty, chosen * params.repetition_penalty)
        seen_at_first = sent([token_id in first_seen for token_id in token_ids], values.device, torch.bool)
        chosen = torch.where(seen_at_first | (draft_counts > 0), repeated, chosen)
    if params.presence_penalty or params.frequency_penalty:
        counts = sent([first_counts[token_id] for token_id in token_ids], values.device, torch.int64) + draft_counts
        chosen -= params.presence_penalty * (counts > 0).to(values.dtype)
        chosen -= params.frequency_penalty * counts.to(values.dtype)
    values[:, columns] = chosen


def committed_counts(context: PathContext) -> TokenCounts:
    """Returns the counts of the committed tokens: those that their owner keeps, or new ones."""
    committed = context.committed
    counts = committed.kept_counts() if isinstance(committed, TokenPath) else None
    if counts is None:
        counts = TokenCounts(context.params)
        counts.move(committed, len(committed))
    return counts


def draft_counts_before(context: PathContext, token_ids: list[int]) -> Tensor:
    """Counts each token in the draft tokens before each row.  # [row_count, len(token_ids)] int64"""
    counts = torch.zeros(context.row_count, len(token_ids), dtype=torch.int64)
    if context.draft_token_ids:
        column_of = {token_id: column for column, token_id in enumerate(token_ids)}
        for index, token_id in enumerate(context.draft_token_ids):
            if token_id in column_of:
                counts[max(0, index + 1 - context.first_row) :, column_of[token_id]] += 1
    return counts
