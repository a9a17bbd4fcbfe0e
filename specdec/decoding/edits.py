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

from specdec.decoding.crossing import sent
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
        columns = sent([token_id for token_id, _ in bias], values.device)
        values[:, columns] += sent([number for _, number in bias], values.device, values.dtype)
    if law.has_penalties:
        penalise(values, context)


def mask_stop_tokens(values: Tensor, stop_token_ids: list[int]) -> None:
    """-inf for stop ids, except in a row that would be left without any token: a law never has empty support."""
    if not len(values) or not stop_token_ids:
        return
    columns = sent(stop_token_ids, values.device)
    before = values[:, columns]
    values[:, columns] = -math.inf
    emptied = values.amax(dim=1, keepdim=True) == -math.inf
    values[:, columns] = torch.where(emptied, before, values[:, columns])


def penalise(values: Tensor, context: PathContext) -> None:
    """Repetition, presence and frequency penalties on the columns of tokens that occur in the path."""
    law, width = context.law, values.shape[1]
    first_counts = Counter(context.committed[law.prompt_length :])
    first_seen = first_counts.keys() if law.repetition_penalty == 1 else set(context.committed)
    token_ids = [token_id for token_id in {*first_seen, *context.draft_token_ids} if token_id < width]
    columns = sent(token_ids, values.device, torch.int64)
    draft_counts = sent(draft_counts_before(context, token_ids), values.device)
    chosen = values[:, columns]
    if law.repetition_penalty != 1:
        repeated = torch.where(chosen > 0, chosen / law.repetition_penalty, chosen * law.repetition_penalty)
        seen_at_first = sent([token_id in first_seen for token_id in token_ids], values.device, torch.bool)
        chosen = torch.where(seen_at_first | (draft_counts > 0), repeated, chosen)
    if law.presence_penalty or law.frequency_penalty:
        counts = sent([first_counts[token_id] for token_id in token_ids], values.device, torch.int64) + draft_counts
        chosen -= law.presence_penalty * (counts > 0).to(values.dtype)
        chosen -= law.frequency_penalty * counts.to(values.dtype)
    values[:, columns] = chosen


def draft_counts_before(context: PathContext, token_ids: list[int]) -> Tensor:
    """How often each token occurs in the draft tokens before each row.  # [row_count, len(token_ids)] int64"""
    counts = torch.zeros(context.row_count, len(token_ids), dtype=torch.int64)
    if context.draft_token_ids:
        column_of = {token_id: column for column, token_id in enumerate(token_ids)}
        for index, token_id in enumerate(context.draft_token_ids):
            if token_id in column_of:
                counts[index + 1 :, column_of[token_id]] += 1
    return counts
