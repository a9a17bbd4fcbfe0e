"""The draft's side: from logits to one proposal per place.

A draft only has to guess: numbers are float32, of a large vocabulary the likeliest few hundred tokens are looked at,
and a row may depend on its neighbours. Under REJECTION the distribution is encoded first, and the token is drawn from
what the encoding says, by integer arithmetic, so the row that travels is exactly the law the token came from. Under
GREEDY and COUPLED the proposal is the token the target would take if it had these logits.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from specdec.decoding.crossing import Crossing, crossed, sent
from specdec.decoding.distribution import every_token_id, taken, without_improbable
from specdec.decoding.edits import PathContext, edited_logits
from specdec.decoding.evidence import in_order
from specdec.decoding.noise import gumbel_bits, gumbel_keys
from specdec.protocol.noise import GUMBEL_BITS, UNIFORM_BITS
from specdec.protocol.types import ROW_STEPS_PER_OCTAVE, ROW_WEIGHTS, Law, Row, Rule

Guesses: TypeAlias = tuple[tuple[int, float], ...]  # (token id, confidence)

PROPOSAL_ROW_TOKENS_MAX = 96  # 2 to 3 bytes each: the rows of 4 draft tokens stay near 1 KiB
# Of COUPLED. Noise lifts an unlikely token to the top as often as the target draws it, so all tokens have a part; of
# more than these the likeliest few hundred do, which for a model of many tokens are nearly all of its law.
NOISED_TOKENS_MAX, NOISED_LIKELIEST = 8192, 512
CODE_SCALE = -ROW_STEPS_PER_OCTAVE / math.log(2)


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

    guesses: Guesses
    row: Row | None = None

    @property
    def token_id(self) -> int:
        """The proposed token."""
        return self.guesses[0][0]


def proposals(
    payloads: Sequence[Sequence[ProposalRequest]], row_counts: Sequence[int], logits: Tensor
) -> list[list[Proposal]]:
    """`propose` for payloads of several requests each: one list for each payload, in order.

    logits: [sum(row_counts), vocabulary] float32. Raises ValueError where a payload's requests are not its rows.
    """
    if [len(requests) for requests in payloads] != list(row_counts):
        raise ValueError(f"{list(row_counts)} rows for {[len(requests) for requests in payloads]} proposals")
    made = iter(propose([request for requests in payloads for request in requests], logits))
    return [list(itertools.islice(made, count)) for count in row_counts]


def propose(requests: Sequence[ProposalRequest], logits: Tensor) -> list[Proposal]:
    """One proposal per request, in order.  logits: [len(requests), vocabulary] float32"""
    if logits.shape[0] != len(requests):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(requests)} proposals")
    groups: dict[tuple[Rule, int], list[int]] = {}
    for index, request in enumerate(requests):
        width = min(request.vocabulary_size, logits.shape[1])
        groups.setdefault((request.law.rule, width), []).append(index)

    def compute(crossing: Crossing) -> Callable[[], list[Proposal]]:
        finishes = []
        for (rule, width), indices in groups.items():
            chosen = [requests[index] for index in indices]
            finishes.append((indices, WAYS[rule](chosen, taken(logits, indices)[:, :width], crossing)))
        return lambda: in_order(finishes)

    return crossed(logits.device, compute)


def greedy_proposals(
    requests: Sequence[ProposalRequest], logits: Tensor, crossing: Crossing
) -> Callable[[], list[Proposal]]:
    """The likeliest tokens, and their shares of the softmax; once crossed."""
    edited = edited_logits(logits, [PathContext(request.law, request.path) for request in requests])
    values, token_ids = edited.topk(guess_count(requests, edited.shape[1]), dim=1)
    shares = (values - edited.logsumexp(dim=1, keepdim=True)).exp_()
    return guesses_of(requests, crossing.bring(token_ids), crossing.bring(shares))


def coupled_proposals(
    requests: Sequence[ProposalRequest], logits: Tensor, crossing: Crossing
) -> Callable[[], list[Proposal]]:
    """The tokens of highest score log law + noise, and their shares of the softmax of these scores; once crossed.

    With u the uniform number behind the noise G = -log(-log u), exp(score) is law / -log u: no score is ever made.
    """
    laws = [request.law for request in requests]
    if logits.shape[1] > NOISED_TOKENS_MAX or any(law.top_k or law.top_p < 1 for law in laws):
        scores, token_ids = likeliest_of_law(requests, logits, NOISED_LIKELIEST)
    else:
        scores, token_ids = tempered_law(requests, logits), None
    ids = every_token_id(scores) if token_ids is None else token_ids
    positions = [len(request.path) for request in requests]
    raced = scores.exp_().div_(waits(gumbel_keys([law.seed for law in laws], positions, logits.device), ids))
    values, columns = raced.topk(guess_count(requests, raced.shape[1]), dim=1)
    shares = values / raced.sum(dim=1, keepdim=True)
    chosen = columns if token_ids is None else token_ids.gather(1, columns)
    return guesses_of(requests, crossing.bring(chosen), crossing.bring(shares))


def waits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """-log u of the noise, as -log1p(u - 1): u near 1, which is what wins, keeps its digits.  # [n, columns] float32"""
    rest = (1 << GUMBEL_BITS) - gumbel_bits(keys, token_ids)  # (1 - u) * 2**52, half a unit more
    return rest.to(torch.float32).sub_(0.5).mul_(-(2.0**-GUMBEL_BITS)).log1p_().neg_()


def tempered_law(requests: Sequence[ProposalRequest], logits: Tensor) -> Tensor:
    """Log-probabilities up to a constant, the likeliest at 0, of laws without top_k and top_p.  # [n, vocab] float32"""
    laws = [request.law for request in requests]
    edited = edited_logits(logits, [PathContext(request.law, request.path) for request in requests])
    shifted = edited - edited.amax(dim=1, keepdim=True)
    return without_improbable(shifted.div_(column([law.temperature for law in laws], shifted)).float(), laws)


def rejection_proposals(
    requests: Sequence[ProposalRequest], logits: Tensor, crossing: Crossing
) -> Callable[[], list[Proposal]]:
    """The law as it will be sent, its likeliest tokens with the nearest of the weights a row can carry, and a draw from
    it; once crossed.

    The likeliest weighs 65535. A token less likely than 1 in 65535 beside it is left out, of the row and so of what can
    be drawn.
    """
    scores, token_ids = likeliest_of_law(requests, logits, PROPOSAL_ROW_TOKENS_MAX)
    codes = scores.mul_(CODE_SCALE).clamp_(max=len(ROW_WEIGHTS)).round_().to(torch.int64)
    its_ids, its_codes = crossing.bring(token_ids), crossing.bring(codes)
    return lambda: [proposal_of_row(*line) for line in zip(requests, its_ids(), its_codes())]


WAYS = {
    Rule.GREEDY: greedy_proposals,
    Rule.COUPLED: coupled_proposals,
    Rule.REJECTION: rejection_proposals,
}


def guess_count(requests: Sequence[ProposalRequest], width: int) -> int:
    """Tokens to look for in each row: the proposal, and the most branches that any request asks for."""
    return min(1 + max(request.branch_count for request in requests), width)


def guesses_of(
    requests: Sequence[ProposalRequest],
    token_ids: Callable[[], list[list[int]]],
    shares: Callable[[], list[list[float]]],
) -> Callable[[], list[Proposal]]:
    """Proposals of lines of tokens, best first, and their shares; those without any are left out. Once crossed."""

    def finish() -> list[Proposal]:
        made = []
        for request, ids, values in zip(requests, token_ids(), shares()):
            guesses = list(zip(ids, values))[: 1 + request.branch_count]
            made.append(Proposal((guesses[0], *(guess for guess in guesses[1:] if guess[1] > 0))))
        return made

    return finish


def likeliest_of_law(requests: Sequence[ProposalRequest], logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each request's law, likeliest first: log-probabilities up to a constant, the first at 0,
    and ids.  # [n, columns] float32, -inf outside the law; [n, columns] int64

    The steps are those of the sampled law (decoding/distribution.py): edits, temperature, min_p, top_k, top_p.
    """
    laws = [request.law for request in requests]
    edited = edited_logits(logits, [PathContext(request.law, request.path) for request in requests])
    values, token_ids = edited.topk(min(count, edited.shape[1]), dim=1)
    temperatures = column([law.temperature for law in laws], edited)
    scores = ((values - values[:, :1]) / temperatures).float()
    without_improbable(scores, laws)
    if any(law.top_k for law in laws):
        ranks = torch.arange(scores.shape[1], device=scores.device)
        kept = column([float(law.top_k or scores.shape[1]) for law in laws], scores)
        scores.masked_fill_(ranks >= kept, -math.inf)
    if any(law.top_p < 1 for law in laws):
        weights = scores.exp()
        every = ((edited - values[:, :1]) / temperatures).exp_().sum(dim=1, keepdim=True)
        is_cut = column([float(bool(law.min_p or law.top_k)) for law in laws], scores) > 0
        totals = torch.where(is_cut, weights.sum(dim=1, keepdim=True), every)
        before = weights.cumsum(dim=1) - weights
        limits = column([law.top_p if law.top_p < 1 else math.inf for law in laws], scores)
        outside = before >= limits * totals
        outside[:, 0] = False
        scores.masked_fill_(outside, -math.inf)
    return scores, token_ids


def column(numbers: list[float], like: Tensor) -> Tensor:
    """One number per row.  # [n, 1], of the type of `like`"""
    return sent(numbers, like.device, like.dtype).unsqueeze(1)


def proposal_of_row(request: ProposalRequest, token_ids: list[int], codes: list[int]) -> Proposal:
    """The row of those tokens, likeliest first, whose code stands for a weight; its draw, and the likeliest others."""
    code_count = len(ROW_WEIGHTS)
    ranked = [(token_id, ROW_WEIGHTS[code]) for token_id, code in zip(token_ids, codes) if code < code_count]
    row = Row(*zip(*sorted(ranked)))
    drawn = draw(row, request.draw_bits)
    total = row.total
    others = itertools.islice((one for one in ranked if one[0] != drawn), request.branch_count)
    weight = next(weight for token_id, weight in ranked if token_id == drawn)
    guesses = ((drawn, weight / total), *((token_id, weight / total) for token_id, weight in others))
    return Proposal(guesses, row)


def draw(row: Row, draw_bits: int) -> int:
    """The token of `row` that a 53-bit integer picks: exact integer arithmetic, no rounding anywhere."""
    index = draw_bits * row.total >> UNIFORM_BITS
    return row.token_ids[bisect.bisect_right(list(itertools.accumulate(row.weights)), index)]
