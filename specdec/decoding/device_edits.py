"""Edits of logits by a device's kernel: what `logits_processors` and `masks` do, for a whole step in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.decoding.host_copy import sent, sent_together
from specdec.decoding.logits_processors import Later, PathContext, counted, head_of, later
from specdec.engine.cuda.kernels.edits import FIELDS, PENALTIES, Edits, edit
from specdec.protocol.types import ResolvedSamplingParams

NO_LIST = (0, 0)
List = tuple[int, int]  # the first of the entries, and their number


def edited_on_device(logits: Tensor, contexts: Sequence[PathContext], masks: Tensor | None) -> Tensor:
    """Returns the logits after mask and edits: the argument itself without any, else a float64 copy.

    logits: [rows, vocabulary] float32 on a device; masks: [rows, words] int32 of the host.
    """
    if masks is None and not any(context.is_edited for context in contexts):
        return logits
    writer = EditWriter(logits.shape[1])
    for context in contexts:
        writer.add(context, masks is not None)
    words = torch.zeros(1, 1, dtype=torch.int32) if masks is None else masks.contiguous()
    return edit(logits, writer.send(words, logits.device))


@dataclass(slots=True)
class EditWriter:
    """The tables of rows of `width` tokens, on the host. Lists that rows share are written once."""

    width: int
    fields: list[int] = field(default_factory=list)
    penalties: list[float] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    row_count: int = 0
    shared: dict[object, List] = field(default_factory=dict)

    def add(self, context: PathContext, is_masked: bool) -> None:
        """Adds the rows of a path."""
        params = context.params
        allowed = self._ids(("allowed", id(params)), params.allowed_token_ids)
        stops = self._ids(("stops", id(params)), params.stop_token_ids)
        first_bias, biased = self._biases(params)
        numbers = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        its_later = later(context)
        penalised = self._counts(context, its_later) if params.has_penalties else NO_LIST
        first_later = self._list([*its_later.token_ids] if params.has_penalties else [])[0]
        masked_row_count = context.masked_row_count
        for row, word_ends in enumerate(context.word_ends):
            words = self._list([token_id for token_id in word_ends if token_id < self.width])
            before = len(its_later.token_ids) - its_later.row_count + row + 1 if params.has_penalties else 0
            mask = self.row_count if is_masked else -1
            left_out = *words, *(stops if row < masked_row_count else NO_LIST)
            self.fields += (mask, *allowed, *left_out, *biased, *penalised, first_later, before, first_bias)
            self.penalties += numbers
            self.row_count += 1

    def send(self, words: Tensor, device: torch.device) -> Edits:
        """Sends all, the masks in a copy of their own."""
        fields, entries, penalties, numbers = sent_together(
            (self.fields, self.entries), (self.penalties, self.numbers), device
        )
        return Edits(fields.view(-1, FIELDS), penalties.view(-1, PENALTIES), entries, numbers, sent(words, device))

    def _list(self, entries: list[int]) -> List:
        first = len(self.entries)
        self.entries += entries
        return first, len(entries)

    def _ids(self, key: object, token_ids: Sequence[int]) -> List:
        """Returns the list of ids, which rows of the same key share."""
        if key not in self.shared:
            self.shared[key] = self._list([token_id for token_id in token_ids if token_id < self.width])
        return self.shared[key]

    def _biases(self, params: ResolvedSamplingParams) -> tuple[int, List]:
        """Returns the first of the biases, and the list of their ids."""
        first = len(self.numbers)
        bias = [(token_id, number) for token_id, number in params.logit_bias if token_id < self.width]
        self.numbers += [number for _, number in bias]
        return first, self._list([token_id for token_id, _ in bias])

    def _counts(self, context: PathContext, its_later: Later) -> List:
        """Returns the list of tokens that occur before some row of a path, with their counts in the committed ones."""
        key = "counts", id(context.params), head_of(context), its_later.token_ids
        if key not in self.shared:
            counts = counted(context)
            token_ids = counts.occurring(its_later.token_ids, self.width)
            output, every = counts.of(token_ids).tolist()
            self._list([*token_ids, *output, *every])
            self.shared[key] = len(self.entries) - 3 * len(token_ids), len(token_ids)
        return self.shared[key]
