"""The first steps of the sampled law: what is done to single logits because of the request and of the path before.

In order: `min_tokens` masks the stop ids, `logit_bias` is added, the repetition penalty divides positive and multiplies
negative logits of tokens in prompt or output, presence and frequency penalties are subtracted for tokens in the output.
Draft tokens before a position count as output. Rows without any edit pass through untouched.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.protocol.types import Law


@dataclass(frozen=True, slots=True)
class PathContext:
    """Consecutive rows along one path: row i is the law at position len(committed) + i, after draft_token_ids[:i].

    `committed` holds every token before the first row; it is read during the call only and never changed.
    """

    law: Law
    committed: Sequence[int]
    draft_token_ids: tuple[int, ...] = ()

    @property
    def base_position(self) -> int:
        return len(self.committed)

    @property
    def row_count(self) -> int:
        return len(self.draft_token_ids) + 1

    @property
    def masked_row_count(self) -> int:
        """Rows, from the first on, at which fewer than min_tokens output tokens have come."""
        missing = self.law.prompt_length + self.law.min_tokens - self.base_position
        return max(0, min(self.row_count, missing)) if self.law.stop_token_ids else 0

    @property
    def is_edited(self) -> bool:
        """Whether any row of the path is changed at all."""
        return bool(self.masked_row_count or self.law.logit_bias or self.law.has_penalties)


def edited_logits(logits: Tensor, contexts: Sequence[PathContext]) -> Tensor:
    """The logits after all edits: the argument itself when there are none, else a float64 copy.

    Float32 becomes float64 without rounding, so which of the two a row is held in does not change its law.
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
    """Edits the rows of one path in place, touching only the columns concerned.  # values: [row_count, vocabulary]"""
    law, width = context.law, values.shape[1]
    mask_stop_tokens(values[: context.masked_row_count], [t for t in law.stop_token_ids if t < width])
    bias = [(token_id, number) for token_id, number in law.logit_bias if token_id < width]
    if bias:
        columns = torch.tensor([token_id for token_id, _ in bias], device=values.device)
        values[:, columns] += torch.tensor([number for _, number in bias], dtype=values.dtype, device=values.device)
    if law.has_penalties:
        penalise(values, context)


def mask_stop_tokens(values: Tensor, stop_token_ids: list[int]) -> None:
    """-inf for stop ids, except in a row that would be left without any token: a law never has empty support."""
    if not len(values) or not stop_token_ids:
        return
    columns = torch.tensor(stop_token_ids, device=values.device)
    before = values[:, columns]
    values[:, columns] = -math.inf
    emptied = values.amax(dim=1, keepdim=True) == -math.inf
    values[:, columns] = torch.where(emptied, before, values[:, columns])


def penalise(values: Tensor, context: PathContext) -> None:
    """Repetition, presence and frequency penalties on the columns of tokens that occur in the path."""
    law, width = context.law, values.shape[1]
    output = Counter(context.committed[law.prompt_length :])
    output_only = law.repetition_penalty == 1
    seen_ids = set(output) if output_only else set(context.committed)
    token_ids = sorted(t for t in seen_ids.union(context.draft_token_ids) if t < width)
    if not token_ids:
        return
    columns = torch.tensor(token_ids, device=values.device)
    draft_counts = draft_counts_before(context, token_ids).to(values.device)
    first_counts = torch.tensor([output[t] for t in token_ids], device=values.device)
    counts = first_counts + draft_counts  # [row_count, columns]: occurrences in the output before each row
    first_seen = torch.tensor([t in seen_ids for t in token_ids], device=values.device)
    seen = first_seen | (draft_counts > 0)  # [row_count, columns]: in prompt or output before each row
    chosen = values[:, columns]
    repeated = torch.where(chosen > 0, chosen / law.repetition_penalty, chosen * law.repetition_penalty)
    chosen = torch.where(seen, repeated, chosen)
    counts = counts.to(values.dtype)
    chosen = chosen - law.presence_penalty * (counts > 0).to(values.dtype)
    values[:, columns] = chosen - law.frequency_penalty * counts


def draft_counts_before(context: PathContext, token_ids: list[int]) -> Tensor:
    """How often each token occurs in the draft tokens before each row.  # [row_count, len(token_ids)] int64"""
    column_of = {token_id: column for column, token_id in enumerate(token_ids)}
    counts = torch.zeros(context.row_count, len(token_ids), dtype=torch.int64)
    for index, token_id in enumerate(context.draft_token_ids):
        if token_id in column_of:
            counts[index + 1 :, column_of[token_id]] += 1
    return counts
