"""The draft's side: from logits to one proposal per place.

Under REJECTION the distribution is encoded first, and the token is drawn from what the encoding says, by integer
arithmetic, so the row that travels is exactly the law the token came from. Under GREEDY and COUPLED the proposal is the
token the target would take if it had these logits.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.decoding.distribution import (
    Support,
    greedy_token_ids,
    likeliest,
    row_totals,
    sampled_law,
    taken,
)
from specdec.decoding.edits import PathContext
from specdec.decoding.evidence import chunks, coupled_token_ids
from specdec.protocol.noise import UNIFORM_BITS
from specdec.protocol.types import ROW_WEIGHT_MAX, Law, Row, Rule

PROPOSAL_ROW_TOKENS_MAX = 96  # 4 to 5 bytes each: the rows of 4 draft tokens stay near 1.5 KiB


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """One place to propose a token for.

    `path`: every token before the position, committed and draft; it is not kept. `vocabulary_size`: ids from there on
    are the target's to miss and are never proposed. `draw_bits`: uniform_bits(secret, Lane.DRAFT, epoch, node), an
    integer of 53 bits; read under REJECTION only.
    """

    law: Law
    path: Sequence[int]
    vocabulary_size: int
    draw_bits: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed token. `row` under REJECTION: what it was drawn from. `probability`: in the draft's own law.

    For GREEDY, whose law is a single token, `probability` is that of the softmax at temperature 1. It may order which
    places are evaluated next; it may not decide whether a token already drawn is offered.
    """

    token_id: int
    row: Row | None
    probability: float


def propose(requests: Sequence[ProposalRequest], row_counts: Sequence[int], logits: Tensor) -> list[Proposal]:
    """One proposal per request, in order.  logits: [len(requests), vocabulary] float32; every row count is 1."""
    if list(row_counts) != [1] * len(requests) or logits.shape[0] != len(requests):
        raise ValueError(f"{list(row_counts)} rows for {len(requests)} proposals, and {logits.shape[0]} of logits")
    results: list[Proposal | None] = [None] * len(requests)
    groups: dict[tuple[Rule, int], list[int]] = {}
    for index, request in enumerate(requests):
        width = min(request.vocabulary_size, logits.shape[1])
        groups.setdefault((request.law.rule, width), []).append(index)
    for (rule, width), indices in groups.items():
        for chunk in chunks(indices, row_counts, logits):
            chosen = [requests[index] for index in chunk]
            for index, result in zip(chunk, proposals_of_rule(rule, chosen, taken(logits, chunk)[:, :width])):
                results[index] = result
    return [result for result in results if result is not None]


def proposals_of_rule(rule: Rule, requests: Sequence[ProposalRequest], logits: Tensor) -> list[Proposal]:
    """Proposals for requests that share a rule and a vocabulary."""
    contexts = [PathContext(request.law, request.path) for request in requests]
    if rule is Rule.GREEDY:
        token_ids = greedy_token_ids(logits, contexts)
        return plain_proposals(token_ids.tolist(), softmax_at(logits, token_ids))
    supports = sampled_law(logits, contexts)
    if rule is Rule.COUPLED:
        token_ids = coupled_token_ids(supports, contexts, logits)
        return plain_proposals(token_ids.tolist(), probabilities_at(supports, token_ids))
    rows = encoded_rows(supports, len(requests))
    drawn = [draw(row, request.draw_bits) for row, request in zip(rows, requests)]
    probabilities = probabilities_at(supports, torch.tensor(drawn, device=logits.device))
    return [Proposal(*entry) for entry in zip(drawn, rows, probabilities)]


def plain_proposals(token_ids: list[int], probabilities: list[float]) -> list[Proposal]:
    """Proposals without rows."""
    return [Proposal(token_id, None, probability) for token_id, probability in zip(token_ids, probabilities)]


def softmax_at(logits: Tensor, token_ids: Tensor) -> list[float]:
    """The softmax of the raw logits at one token per row."""
    weights = (logits - logits.amax(dim=1, keepdim=True)).exp_().to(torch.float64)
    return (weights.gather(1, token_ids.unsqueeze(1)) / row_totals(weights)).squeeze(1).tolist()


def probabilities_at(supports: list[Support], token_ids: Tensor) -> list[float]:
    """The draft law's probability of one token per row."""
    found = torch.zeros(len(token_ids), dtype=torch.float64, device=token_ids.device)
    for support in supports:
        probabilities = support.probabilities()
        line = torch.arange(len(support.rows), device=token_ids.device)
        columns, inside = support.columns_of(line, token_ids[support.rows])
        found[support.rows] = torch.where(inside, probabilities[line, columns], 0.0)
    return found.tolist()


def encoded_rows(supports: list[Support], count: int) -> list[Row]:
    """Each row's law as it will be sent: its likeliest tokens, weighted in proportion, the likeliest by 65535.

    A token whose weight would round to 0 is left out, of the row and so of what can be drawn.
    """
    rows: list[Row | None] = [None] * count
    for support in supports:
        columns, used = likeliest(support.scores, [PROPOSAL_ROW_TOKENS_MAX] * len(support.rows))
        scores = support.scores.gather(1, columns).masked_fill_(~used, -math.inf)
        weights = (scores.exp() * ROW_WEIGHT_MAX).round().to(torch.int64).tolist()
        token_ids = support.ids.expand(support.scores.shape).gather(1, columns).tolist()
        for row, ids, line in zip(support.rows.tolist(), token_ids, weights):
            kept = [(token_id, weight) for token_id, weight in zip(ids, line) if weight > 0]
            rows[row] = Row(tuple(token_id for token_id, _ in kept), tuple(weight for _, weight in kept))
    return [row for row in rows if row is not None]


def draw(row: Row, draw_bits: int) -> int:
    """The token of `row` that a 53-bit integer picks: exact integer arithmetic, no rounding anywhere."""
    index = draw_bits * row.total >> UNIFORM_BITS
    return row.token_ids[bisect.bisect_right(list(itertools.accumulate(row.weights)), index)]
