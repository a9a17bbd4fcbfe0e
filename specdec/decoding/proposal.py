"""The draft's side: from logits to one proposal per place.

Under REJECTION the distribution is encoded first, and the token is drawn from what the encoding says, by integer
arithmetic, so the row that travels is exactly the law the token came from. Under GREEDY and COUPLED the proposal is the
token the target would take if it had these logits.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.decoding.distribution import (
    Support,
    first_argmax,
    likeliest,
    row_totals,
    sampled_law,
    taken,
)
from specdec.decoding.edits import PathContext, edited_logits
from specdec.decoding.evidence import chunks, perturbed_scores
from specdec.protocol.noise import UNIFORM_BITS
from specdec.protocol.types import ROW_STEPS_PER_OCTAVE, ROW_WEIGHTS, Law, Row, Rule

PROPOSAL_ROW_TOKENS_MAX = 96  # 2 to 3 bytes each: the rows of 4 draft tokens stay near 1 KiB


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
    branch_count: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the draft says of a place: tokens it thinks of and its confidence in each, the proposed token first.

    The others are the likeliest beside it, best first, at most as many as were asked for. `row` under REJECTION: what
    the proposed token was drawn from. Confidences are probabilities of the softmax (GREEDY), of the law after the noise
    (COUPLED) or of the law (REJECTION). They may order which places are evaluated next; they may not decide whether a
    token already drawn is offered.
    """

    guesses: tuple[tuple[int, float], ...]
    row: Row | None = None

    @property
    def token_id(self) -> int:
        """The proposed token."""
        return self.guesses[0][0]


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
        values = edited_logits(logits, contexts).to(torch.float64)
        support = Support(torch.arange(len(requests), device=logits.device), None, values)
        return [Proposal(guesses) for guesses in guesses_of([(support, values)], requests)]
    supports = sampled_law(logits, contexts)
    if rule is Rule.COUPLED:
        perturbed = list(perturbed_scores(supports, contexts, logits.device))
        return [Proposal(guesses) for guesses in guesses_of(perturbed, requests)]
    rows = encoded_rows(supports, len(requests))
    return [Proposal(guesses_of_row(row, request), row) for row, request in zip(rows, requests)]


def guesses_of(
    scored: Sequence[tuple[Support, Tensor]], requests: Sequence[ProposalRequest]
) -> list[tuple[tuple[int, float], ...]]:
    """The tokens of highest score in each row and their shares of the softmax; the first is the argmax, ties to the
    lowest id.  scores: [n, columns] float64"""
    found: list[tuple[tuple[int, float], ...]] = [()] * len(requests)
    for support, scores in scored:
        weights = (scores - scores.amax(dim=1, keepdim=True)).exp_()
        shares = weights.div_(row_totals(weights))
        first = first_argmax(scores)
        rows = support.rows.tolist()
        count = min(1 + max(requests[row].branch_count for row in rows), scores.shape[1])
        others = scores.topk(count, dim=1).indices
        columns = torch.cat([first.unsqueeze(1), others], dim=1)
        token_ids = support.ids.expand(scores.shape).gather(1, columns).tolist()
        confidences = shares.gather(1, columns).tolist()
        for row, ids, values in zip(rows, token_ids, confidences):
            guesses = dict(zip(ids[::-1], values[::-1]))  # the argmax once, in its first place
            ordered = [(ids[0], guesses.pop(ids[0])), *((t, guesses[t]) for t in ids[1:] if guesses.get(t, 0) > 0)]
            found[row] = tuple(ordered[: 1 + requests[row].branch_count])
    return found


def guesses_of_row(row: Row, request: ProposalRequest) -> tuple[tuple[int, float], ...]:
    """The token drawn from a row, and the likeliest others of it, with their probabilities in it."""
    drawn = draw(row, request.draw_bits)
    total = row.total
    weights = dict(zip(row.token_ids, row.weights))
    first = (drawn, weights.pop(drawn) / total)
    likeliest_others = heapq.nlargest(request.branch_count, weights.items(), key=lambda entry: entry[1])
    return first, *((token_id, weight / total) for token_id, weight in likeliest_others)


def encoded_rows(supports: list[Support], count: int) -> list[Row]:
    """Each row's law as it will be sent: its likeliest tokens, with the nearest of the weights a row can carry.

    The likeliest weighs 65535. A token less likely than 1 in 65535 beside it is left out, of the row and so of what can
    be drawn.
    """
    rows: list[Row | None] = [None] * count
    for support in supports:
        columns, used = likeliest(support.scores, [PROPOSAL_ROW_TOKENS_MAX] * len(support.rows))
        scores = support.scores.gather(1, columns).masked_fill_(~used, -math.inf)
        codes = (scores * (-ROW_STEPS_PER_OCTAVE / math.log(2))).clamp_(max=len(ROW_WEIGHTS)).round_().to(torch.int64)
        token_ids = support.ids.expand(support.scores.shape).gather(1, columns).tolist()
        for row, ids, line in zip(support.rows.tolist(), token_ids, codes.tolist()):
            kept = [(token_id, ROW_WEIGHTS[code]) for token_id, code in zip(ids, line) if code < len(ROW_WEIGHTS)]
            rows[row] = Row(tuple(token_id for token_id, _ in kept), tuple(weight for _, weight in kept))
    return [row for row in rows if row is not None]


def draw(row: Row, draw_bits: int) -> int:
    """The token of `row` that a 53-bit integer picks: exact integer arithmetic, no rounding anywhere."""
    index = draw_bits * row.total >> UNIFORM_BITS
    return row.token_ids[bisect.bisect_right(list(itertools.accumulate(row.weights)), index)]
