"""Sampling by the kernels of a device: all rows of a step, whatever their rules and parameters, in a few launches.

The host writes what the kernels read of each row into one buffer, which is sent once. The decisions are those of
`verification`, which computes them where there are no kernels, and again where an assumption of theirs fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.decoding.distribution import ASSUMED_NUCLEUS_COLUMNS
from specdec.decoding.host_copy import HostCopy, sent_together
from specdec.decoding.noise import signed
from specdec.engine.cuda.kernels.sampling import FIELDS, NUMBERS, Tables, sample
from specdec.protocol.noise import Lane, stream_key
from specdec.protocol.types import DraftProbs, ResolvedSamplingParams, Rule

RULES = {Rule.GREEDY: 0, Rule.REJECTION: 1, Rule.COUPLED: 2}


class SiblingTest(NamedTuple):
    """The test of one draft token: its place among those of all requests, and the distribution it was drawn from once
    the siblings before it were drawn."""

    place: int
    token_id: int
    draft_probs: DraftProbs


class SampledRow(NamedTuple):
    """A row to sample: the position it is for; under REJECTION its uniform number and the tests of its children."""

    params: ResolvedSamplingParams
    position: int
    uniform: float = 0.0
    tests: Sequence[SiblingTest] = ()


@dataclass(slots=True)
class Writer:
    """The tables of rows of `width` tokens, on the host."""

    width: int
    fields: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    selected: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    columns: int = 0  # ranked numbers that some row needs
    touched_max: int = 0
    test_count: int = 0
    has_totals: bool = False

    def add(self, index: int, row: SampledRow) -> None:
        """Adds the row `index` of the values."""
        params = row.params
        place, top_k, used = -1, 0, 0
        if params.rule is not Rule.GREEDY and (params.top_p < 1 or 0 < params.top_k < self.width):
            place = len(self.selected)
            self.selected.append(index)
            if 0 < params.top_k < self.width:
                top_k = used = params.top_k
            else:
                self.has_totals = True
                is_narrow = 4 * ASSUMED_NUCLEUS_COLUMNS > self.width
                used = self.width if is_narrow else ASSUMED_NUCLEUS_COLUMNS
            self.columns = max(self.columns, min(used + 1, self.width))
        key = 0
        if params.rule is Rule.COUPLED:
            key = signed(stream_key(params.seed, Lane.GUMBEL, row.position))
        self.fields += (index, RULES[params.rule], key, place, top_k, used, *self._add_tests(row.tests))
        least = math.log(params.min_p) if params.min_p else -math.inf
        top_p = params.top_p if params.top_p < 1 else math.inf
        self.numbers += (params.temperature or 1.0, least, top_p, row.uniform)

    def _add_tests(self, tests: Sequence[SiblingTest]) -> tuple[int, int, int, int, int]:
        """Adds the tests of a row; returns the last of its fields."""
        first, first_share = len(self.entries), len(self.shares)
        own = {test.token_id for test in tests}.union(*(test.draft_probs.token_ids for test in tests))
        token_ids = sorted(token_id for token_id in own if token_id < self.width)
        self.entries += token_ids
        for test in tests:
            of_token = dict(zip(test.draft_probs.token_ids, test.draft_probs.probabilities))
            self.entries += (test.token_id, test.place)
            self.shares += [of_token.get(token_id, 0.0) for token_id in token_ids]
        self.touched_max = max(self.touched_max, len(token_ids))
        self.test_count += len(tests)
        return first, len(token_ids), first + len(token_ids), len(tests), first_share

    def send(self, device: torch.device) -> Tables:
        """Sends all in one copy."""
        fields, selected, entries, numbers, shares = sent_together(
            (self.fields, self.selected, self.entries), (self.numbers, self.shares), device
        )
        return Tables(
            fields.view(-1, FIELDS),
            numbers.view(-1, NUMBERS),
            selected,
            entries,
            shares,
            self.test_count,
            self.touched_max,
            self.has_totals,
        )


def sampled(values: Tensor, rows: Sequence[SampledRow], host_copy: HostCopy) -> Tensor:
    """Returns the token of each row, then the target probability of each test, in the order of their places.

    values [rows, vocabulary] float32 or float64: logits after all edits.  # [rows + tests] float64
    """
    writer = Writer(values.shape[1])
    for index, row in enumerate(rows):
        writer.add(index, row)
    tables = writer.send(values.device)
    ranked = None
    if writer.selected:
        chosen = values if len(writer.selected) == len(rows) else values.index_select(0, tables.selected)
        ranked = chosen.topk(writer.columns, dim=1).values
    found = sample(values, tables, ranked)
    count = len(rows) + writer.test_count
    if writer.selected:
        host_copy.assume_zero(found[count:])
    return found[:count]
