"""The draft's side: from logits to one proposal per place.

Under REJECTION the distribution is encoded first, and the token is drawn from what the encoding says, by integer
arithmetic, so the row that travels is exactly the law the token came from. Under GREEDY and COUPLED the proposal is the
token the target would take if it had these logits.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

import torch
from torch import Tensor

from specdec.decoding.crossing import Crossing, crossed
from specdec.decoding.distribution import (
    Support,
    first_argmax,
    likeliest,
    row_totals,
    sampled_law,
    taken,
)
from specdec.decoding.edits import PathContext, edited_logits
from specdec.decoding.evidence import chunks, in_order, perturbed_scores
from specdec.protocol.noise import UNIFORM_BITS
from specdec.protocol.types import ROW_STEPS_PER_OCTAVE, ROW_WEIGHTS, Law, Row, Rule

Guesses: TypeAlias = tuple[tuple[int, float], ...]  # (token id, confidence)

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
    groups: dict[tuple[Rule, int], list[int]] = {}
    for index, request in enumerate(requests):
        width = min(request.vocabulary_size, logits.shape[1])
        groups.setdefault((request.law.rule, width), []).append(index)

    def compute(crossing: Crossing) -> Callable[[], list[Proposal]]:
        finishes: list[tuple[list[int], Callable[[], list[Proposal]]]] = []
        for (rule, width), indices in groups.items():
            for chunk in chunks(indices, row_counts, logits):
                chosen = [requests[index] for index in chunk]
                finish = proposals_of_rule(rule, chosen, taken(logits, chunk)[:, :width], crossing)
                finishes.append((chunk, finish))
        return lambda: in_order(finishes)

    return crossed(logits.device, compute)


def proposals_of_rule(
    rule: Rule, requests: Sequence[ProposalRequest], logits: Tensor, crossing: Crossing
) -> Callable[[], list[Proposal]]:
    """Proposals for requests that share a rule and a vocabulary; once crossed."""
    contexts = [PathContext(request.law, request.path) for request in requests]
    if rule is Rule.REJECTION:
        rows = encoded_rows(sampled_law(logits, contexts, crossing), crossing)
        return lambda: [Proposal(guesses_of_row(row, request), row) for row, request in zip(rows(), requests)]
    if rule is Rule.GREEDY:
        values = edited_logits(logits, contexts).to(torch.float64)
        scored = [(Support(list(range(len(requests))), None, values), values)]
    else:
        scored = list(perturbed_scores(sampled_law(logits, contexts, crossing), contexts, logits.device))
    guesses = guesses_of(scored, requests, crossing)
    return lambda: [Proposal(guess) for guess in guesses()]


def guesses_of(
    scored: Sequence[tuple[Support, Tensor]], requests: Sequence[ProposalRequest], crossing: Crossing
) -> Callable[[], list[Guesses]]:
    """The tokens of highest score in each row and their shares of the softmax; the first is the argmax, ties to the
    lowest id; once crossed.  scores: [n, columns] float64"""
    brought = []
    for support, scores in scored:
        weights = (scores - scores.amax(dim=1, keepdim=True)).exp_()
        shares = weights.div_(row_totals(weights))
        first = first_argmax(scores)
        count = min(1 + max(requests[row].branch_count for row in support.rows), scores.shape[1])
        others = scores.topk(count, dim=1).indices
        columns = torch.cat([first.unsqueeze(1), others], dim=1)
        token_ids = crossing.bring(support.ids.expand(scores.shape).gather(1, columns))
        brought.append((support.rows, token_ids, crossing.bring(shares.gather(1, columns))))

    def finish() -> list[Guesses]:
        found: list[Guesses] = [()] * len(requests)
        for rows, token_ids, confidences in brought:
            for row, ids, values in zip(rows, token_ids(), confidences()):
                found[row] = ordered_guesses(ids, values)[: 1 + requests[row].branch_count]
        return found

    return finish


def ordered_guesses(token_ids: list[int], confidences: list[float]) -> Guesses:
    """The argmax, given first and once more among the others, then the others that have any confidence."""
    guesses = dict(zip(token_ids[::-1], confidences[::-1]))
    first = (token_ids[0], guesses.pop(token_ids[0]))
    return first, *((token_id, guesses[token_id]) for token_id in token_ids[1:] if guesses.get(token_id, 0) > 0)


def guesses_of_row(row: Row, request: ProposalRequest) -> tuple[tuple[int, float], ...]:
    """The token drawn from a row, and the likeliest others of it, with their probabilities in it."""
    drawn = draw(row, request.draw_bits)
    total = row.total
    weights = dict(zip(row.token_ids, row.weights))
    first = (drawn, weights.pop(drawn) / total)
    others = sorted(weights.items(), key=itemgetter(1), reverse=True)[: request.branch_count]
    return first, *((token_id, weight / total) for token_id, weight in others)


def encoded_rows(supports: list[Support], crossing: Crossing) -> Callable[[], list[Row]]:
    """Each row's law as it will be sent: its likeliest tokens, with the nearest of the weights a row can carry; once
    crossed.

    The likeliest weighs 65535. A token less likely than 1 in 65535 beside it is left out, of the row and so of what can
    be drawn.
    """
    brought = []
    for support in supports:
        columns, used = likeliest(support.scores, [PROPOSAL_ROW_TOKENS_MAX] * len(support.rows), crossing)
        scores = support.scores.gather(1, columns).masked_fill_(~used, -math.inf)
        codes = (scores * (-ROW_STEPS_PER_OCTAVE / math.log(2))).clamp_(max=len(ROW_WEIGHTS)).round_().to(torch.int64)
        token_ids = crossing.bring(support.ids.expand(support.scores.shape).gather(1, columns))
        brought.append((support.rows, encoded(token_ids, crossing.bring(codes))))
    return lambda: in_order(brought)


def encoded(token_ids: Callable[[], list[list[int]]], codes: Callable[[], list[list[int]]]) -> Callable[[], list[Row]]:
    """The rows of lines of tokens and codes; once crossed."""
    return lambda: [encoded_row(ids, line) for ids, line in zip(token_ids(), codes())]


def encoded_row(token_ids: list[int], codes: list[int]) -> Row:
    """The row of those tokens whose code stands for a weight."""
    code_count = len(ROW_WEIGHTS)
    kept = [(token_id, ROW_WEIGHTS[code]) for token_id, code in zip(token_ids, codes) if code < code_count]
    ids, weights = zip(*kept)
    return Row(ids, weights)


def draw(row: Row, draw_bits: int) -> int:
    """The token of `row` that a 53-bit integer picks: exact integer arithmetic, no rounding anywhere."""
    index = draw_bits * row.total >> UNIFORM_BITS
    return row.token_ids[bisect.bisect_right(list(itertools.accumulate(row.weights)), index)]
