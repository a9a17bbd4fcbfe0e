"""The draft's side: from logits to one proposal per node.

A draft's numbers decide no text: they are float32, of a large vocabulary only the likeliest few hundred tokens are
used, and a row may depend on its neighbours. Under REJECTION the draft distribution is encoded first, and the token is
drawn from the encoding by integer arithmetic, so the distribution sent is exactly the one the token was drawn from.
Under GREEDY and COUPLED the proposal is the token the target would choose with these logits.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from specdec.decoding.distribution import every_token_id, taken, without_improbable
from specdec.decoding.host_copy import HostCopy, is_device, sent, with_one_host_copy
from specdec.decoding.logits_processors import PathContext, edited_logits
from specdec.decoding.masks import check_masks, masked
from specdec.decoding.noise import gumbel_bits, gumbel_keys
from specdec.decoding.topk import top
from specdec.decoding.verification import in_order
from specdec.engine.cpu.kernels import Kernels
from specdec.engine.cpu.sampling import guess, kernels_for
from specdec.protocol.noise import GUMBEL_BITS, UNIFORM_BITS, Lane, stream_key
from specdec.protocol.types import (
    DRAFT_PROBS_STEPS_PER_OCTAVE,
    DRAFT_PROBS_WEIGHTS,
    DraftProbs,
    ResolvedSamplingParams,
    Rule,
)

Guesses: TypeAlias = tuple[tuple[int, float], ...]  # (token id, confidence)

PROPOSAL_PROBS_TOKENS_MAX = 96  # 2 to 3 bytes each: the draft distributions of 4 draft tokens stay near 1 KiB
# Of COUPLED. Noise lifts an unlikely token to the top as often as the target draws it, so all tokens get noise; in a
# larger vocabulary only the likeliest few hundred, which have nearly all the probability.
NOISED_TOKENS_MAX, NOISED_LIKELIEST = 8192, 512
NOISE_KEPT = 512  # positions with kept noise: of 16 sessions with full windows, 8 MB at 4,096 tokens
NUMBERS_AT_ONCE = 1 << 18  # on a CPU: what is computed of all logits of these rows stays in its cache
NOISE: dict[tuple[int, int, int], Tensor] = {}  # kept noise by seed, position and width, oldest first
WEIGHTS = torch.tensor((*DRAFT_PROBS_WEIGHTS, 0))  # by code
CODE_SCALE = -DRAFT_PROBS_STEPS_PER_OCTAVE / math.log(2)


class ProposalRequest(NamedTuple):
    """One node to propose a token for.

    `path`: every token before the position, committed and draft; not stored. `vocabulary_size`: the target's; higher
    ids are never proposed. `draws`: under REJECTION, uniform_bits(secret, Lane.DRAFT, epoch, node) of each child drawn,
    integers of 53 bits; several are drawn without replacement. `branch_count`: most guesses beside the first.
    """

    params: ResolvedSamplingParams
    path: Sequence[int]
    vocabulary_size: int
    draws: tuple[int, ...] = (0,)
    branch_count: int = 0


class Proposal(NamedTuple):
    """The draft's guesses at a node: tokens and the confidence in each, the proposed token first; none where no token
    that it knows is legal.

    The others are the likeliest after it, best first, at most `branch_count`; under REJECTION those drawn come first,
    in the order of the draws. `draft_probs` under REJECTION: the draft distribution of the tokens drawn. Confidences
    are probabilities of the softmax (GREEDY), of the distribution after the noise (COUPLED) or of the draft
    distribution (REJECTION). They may choose the nodes evaluated next; they may not decide whether a drawn token is
    sent.
    """

    guesses: Guesses
    draft_probs: DraftProbs | None = None

    @property
    def token_id(self) -> int:
        """The proposed token, of a proposal with guesses."""
        return self.guesses[0][0]


NO_PROPOSAL = Proposal(())


def proposals(
    payloads: Sequence[Sequence[ProposalRequest]],
    row_counts: Sequence[int],
    logits: Tensor,
    masks: Tensor | None = None,
) -> list[list[Proposal]]:
    """Runs `propose` for payloads of several requests each; returns one list per payload, in order.

    logits: [sum(row_counts), vocabulary] float32; masks: see `propose`. Raises ValueError unless each payload has one
    request per row.
    """
    if [len(requests) for requests in payloads] != list(row_counts):
        raise ValueError(f"{list(row_counts)} rows for {[len(requests) for requests in payloads]} proposals")
    made = iter(propose([request for requests in payloads for request in requests], logits, masks))
    return [list(itertools.islice(made, count)) for count in row_counts]


def propose(requests: Sequence[ProposalRequest], logits: Tensor, masks: Tensor | None = None) -> list[Proposal]:
    """Returns one proposal per request, in order.  logits: [len(requests), vocabulary] float32

    masks: the legal tokens of each row along its path, of the target's vocabulary (decoding/masks.py); None where all
    are legal. An illegal token has no weight; a row without a legal token has no guess.
    """
    if logits.shape[0] != len(requests):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(requests)} proposals")
    check_masks(masks, logits[:, : max((request.vocabulary_size for request in requests), default=0)])
    groups: dict[tuple[int, int], list[int]] = {}
    for index, request in enumerate(requests):
        width = min(request.vocabulary_size, logits.shape[1])
        groups.setdefault((request.params.rule.value, width), []).append(index)

    def compute(host_copy: HostCopy) -> Callable[[], list[Proposal]]:
        finishes = []
        for (rule, width), every in groups.items():
            is_whole = is_device(logits.device) or rule == Rule.REJECTION.value
            size = len(every) if is_whole else max(1, NUMBERS_AT_ONCE // width)
            for indices in (every[start : start + size] for start in range(0, len(every), size)):
                chosen = [requests[index] for index in indices]
                first, last = indices[0], indices[-1] + 1
                rows = logits[first:last] if last - first == len(indices) else taken(logits, indices)
                own_masks = None if masks is None else taken(masks, indices)
                finishes.append((indices, proposals_of_rule(Rule(rule), chosen, rows[:, :width], own_masks, host_copy)))
        return lambda: in_order(finishes)

    return with_one_host_copy(logits.device, compute)


def proposals_of_rule(
    rule: Rule, requests: Sequence[ProposalRequest], logits: Tensor, masks: Tensor | None, host_copy: HostCopy
) -> Callable[[], list[Proposal]]:
    """Returns a function for the proposals of requests that share a rule, called after the host copy."""
    if masks is None:
        return WAYS[rule](requests, logits, host_copy)
    legal, is_empty = masked(logits, masks)
    found, without = WAYS[rule](requests, legal, host_copy), host_copy.to_host(is_empty)
    return lambda: [NO_PROPOSAL if none else proposal for none, proposal in zip(without(), found())]


def edited_rows(requests: Sequence[ProposalRequest], logits: Tensor) -> Tensor:
    """Returns the logits after all edits: the argument itself without edits."""
    if not any(map(may_edit, own_params(requests))):
        return logits
    return edited_logits(logits, [PathContext(request.params, request.path) for request in requests])


def own_params(requests: Sequence[ProposalRequest]) -> Iterable[ResolvedSamplingParams]:
    """Returns the parameters of all requests, those that several share once."""
    return {id(request.params): request.params for request in requests}.values()


def may_edit(params: ResolvedSamplingParams) -> bool:
    """Whether an edit may change logits."""
    legal = params.allowed_token_ids or params.bad_words
    return bool(legal or params.logit_bias or params.has_penalties or params.min_tokens)


def greedy_proposals(
    requests: Sequence[ProposalRequest], logits: Tensor, host_copy: HostCopy
) -> Callable[[], list[Proposal]]:
    """Returns a function for the likeliest tokens and their shares of the softmax, called after the host copy."""
    edited = edited_rows(requests, logits)
    token_ids = top(edited, guess_count(requests, edited.shape[1]))[1]
    shares = edited.softmax(1).gather(1, token_ids)
    return guesses_of(requests, host_copy.to_host(token_ids), host_copy.to_host(shares))


def coupled_proposals(
    requests: Sequence[ProposalRequest], logits: Tensor, host_copy: HostCopy
) -> Callable[[], list[Proposal]]:
    """Returns a function for the tokens of highest score log p + noise, and their softmax shares of these scores."""
    all_params = [request.params for request in requests]
    seeds, positions = [params.seed for params in all_params], [len(request.path) for request in requests]
    if (native := native_guesser(requests, logits)) is not None:
        keys = [stream_key(seed, Lane.GUMBEL, position) for seed, position in zip(seeds, positions)]
        count = guess_count(requests, logits.shape[1])
        found = guess(native, logits, keys, [params.temperature for params in all_params], count)
        return guesses_of(requests, lambda: found[0], lambda: found[1])
    if logits.shape[1] > NOISED_TOKENS_MAX or any(params.top_k or params.top_p < 1 for params in all_params):
        scores, token_ids = likeliest_of_distribution(requests, logits, NOISED_LIKELIEST)
    else:
        scores, token_ids = tempered_distribution(requests, logits), None
    if token_ids is None and not is_device(logits.device):
        raced = kept_noise(list(zip(seeds, positions)), scores.shape[1])
    else:
        ids = every_token_id(scores) if token_ids is None else token_ids
        raced = noise(gumbel_keys(seeds, positions, logits.device), ids)
    raced += scores
    columns = top(raced, guess_count(requests, raced.shape[1]))[1]
    shares = raced.softmax(1).gather(1, columns)
    chosen = columns if token_ids is None else token_ids.gather(1, columns)
    return guesses_of(requests, host_copy.to_host(chosen), host_copy.to_host(shares))


def native_guesser(requests: Sequence[ProposalRequest], logits: Tensor) -> Kernels | None:
    """Returns the native kernels if these requests' guesses need nothing but logits and temperatures."""
    others = (params.top_k or params.top_p < 1 or params.min_p or may_edit(params) for params in own_params(requests))
    return None if logits.shape[1] > NOISED_TOKENS_MAX or any(others) else kernels_for(logits)


def noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns -log(-log u) for uniform u, -log u as -log1p(u - 1): the winning u, near 1, stay precise.

    It is `decoding.noise.gumbel` in float32.  # [n, columns]
    """
    rest = (1 << GUMBEL_BITS) - gumbel_bits(keys, token_ids)  # (1 - u) * 2**52, half a unit more
    return rest.to(torch.float32).sub_(0.5).mul_(-(2.0**-GUMBEL_BITS)).log1p_().neg_().log_().neg_()


def kept_noise(keys: Sequence[tuple[int, int]], width: int) -> Tensor:
    """Returns the `noise` of all tokens at each (seed, position): the same for all nodes there, and for every tree.

    That of new positions is computed together: at 8 of them in a third of the time.  # [len(keys), width]
    """
    missing = [key for key in dict.fromkeys(keys) if (*key, width) not in NOISE]
    if missing:
        seeds, positions = zip(*missing)
        made = noise(gumbel_keys(seeds, positions, torch.device("cpu")), token_ids_below(width))
        NOISE.update(((*key, width), row) for key, row in zip(missing, made))
    rows = [NOISE[*key, width] for key in keys]
    if len(NOISE) > NOISE_KEPT:
        for oldest in list(NOISE)[:-NOISE_KEPT]:
            NOISE.pop(oldest, None)
    return torch.stack(rows)


@lru_cache(8)
def token_ids_below(width: int) -> Tensor:
    """Returns the ids of a vocabulary.  # [1, width] int64"""
    return torch.arange(width)[None]


def tempered_distribution(requests: Sequence[ProposalRequest], logits: Tensor) -> Tensor:
    """Returns log-probabilities without top_k and top_p, up to a constant; may be the argument.  # [n, vocab]"""
    all_params = [request.params for request in requests]
    scores = edited_rows(requests, logits)
    if any(params.temperature != 1 for params in all_params):
        scores = scores / column([params.temperature for params in all_params], scores)
    if any(params.min_p for params in all_params):
        scores = without_improbable(scores - scores.amax(dim=1, keepdim=True), all_params)
    return scores


def rejection_proposals(
    requests: Sequence[ProposalRequest], logits: Tensor, host_copy: HostCopy
) -> Callable[[], list[Proposal]]:
    """Returns a function for the draft distribution as sent, its likeliest tokens with the nearest of the encodable
    weights, and a draw from it.

    The likeliest token has weight 65535. A token less likely than 1/65535 of it is left out of the draft distribution
    and is never drawn.
    """
    scores, token_ids = likeliest_of_distribution(requests, logits, PROPOSAL_PROBS_TOKENS_MAX)
    code_count = len(DRAFT_PROBS_WEIGHTS)
    codes = scores.mul_(CODE_SCALE).round_().clamp_(max=code_count).to(torch.int64).clamp_(0, code_count)
    weights = sent(WEIGHTS, logits.device)[codes]
    by_id = token_ids.masked_fill(weights == 0, logits.shape[1]).sort(dim=1)  # those left out are last
    first = 1 + max(request.branch_count + len(request.draws) for request in requests)
    columns = (
        (weights > 0).sum(1),
        by_id.values,
        weights.gather(1, by_id.indices),
        token_ids[:, :first],
        weights[:, :first],
    )
    brought = [host_copy.to_host(tensor) for tensor in columns]
    return lambda: [
        proposal_of_weights(request, *line) for request, *line in zip(requests, *(read() for read in brought))
    ]


WAYS = {
    Rule.GREEDY: greedy_proposals,
    Rule.COUPLED: coupled_proposals,
    Rule.REJECTION: rejection_proposals,
}


def guess_count(requests: Sequence[ProposalRequest], width: int) -> int:
    """Returns the number of tokens to find in each row: the proposal and the most branches of any request."""
    return min(1 + max(request.branch_count for request in requests), width)


def guesses_of(
    requests: Sequence[ProposalRequest],
    token_ids: Callable[[], list[list[int]]],
    shares: Callable[[], list[list[float]]],
) -> Callable[[], list[Proposal]]:
    """Returns a function for proposals from tokens, best first, and shares; branches with share 0 are left out."""

    def finish() -> list[Proposal]:
        made = []
        for request, ids, values in zip(requests, token_ids(), shares()):
            guesses = tuple(zip(ids[: 1 + request.branch_count], values))
            while len(guesses) > 1 and guesses[-1][1] <= 0:
                guesses = guesses[:-1]
            made.append(Proposal(guesses))
        return made

    return finish


def likeliest_of_distribution(requests: Sequence[ProposalRequest], logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the likeliest tokens of each request's distribution, likeliest first: log-probabilities up to a constant,
    the first at 0, and ids.  # [n, columns] float32, -inf outside the support; [n, columns] int64

    The steps are those of decoding/distribution.py: edits, temperature, min_p, top_k, top_p.
    """
    all_params = [request.params for request in requests]
    edited = edited_rows(requests, logits)
    values, token_ids = top(edited, min(count, edited.shape[1]))
    temperatures = column([params.temperature for params in all_params], edited)
    scores = ((values - values[:, :1]) / temperatures).float()
    without_improbable(scores, all_params)
    if any(params.top_k for params in all_params):
        ranks = torch.arange(scores.shape[1], device=scores.device)
        kept = column([float(params.top_k or scores.shape[1]) for params in all_params], scores)
        scores.masked_fill_(ranks >= kept, -math.inf)
    if any(params.top_p < 1 for params in all_params):
        weights = scores.exp()
        every = ((edited - values[:, :1]) / temperatures).exp_().sum(dim=1, keepdim=True)
        is_cut = column([float(bool(params.min_p or params.top_k)) for params in all_params], scores) > 0
        totals = torch.where(is_cut, weights.sum(dim=1, keepdim=True), every)
        before = weights.cumsum(dim=1) - weights
        limits = column([params.top_p if params.top_p < 1 else math.inf for params in all_params], scores)
        outside = before >= limits * totals
        outside[:, 0] = False
        scores.masked_fill_(outside, -math.inf)
    return scores, token_ids


def column(numbers: list[float], like: Tensor) -> Tensor:
    """Returns one number per row.  # [n, 1], of the type of `like`"""
    return sent(numbers, like.device, like.dtype).unsqueeze(1)


def proposal_of_weights(
    request: ProposalRequest,
    count: int,
    token_ids: list[int],
    weights: list[int],
    likeliest: list[int],
    their_weights: list[int],
) -> Proposal:
    """Draws without replacement from the first `count` tokens, ids ascending; adds the likeliest others as branches."""
    probs = DraftProbs(tuple(token_ids[:count]), tuple(weights[:count]))
    drawn: list[int] = []
    for draw_bits in request.draws[:count]:
        drawn.append(draw(probs.without(drawn) if drawn else probs, draw_bits))
    weight_of = {token_id: probs.weights[bisect.bisect_left(probs.token_ids, token_id)] for token_id in drawn}
    for token_id, weight in zip(likeliest, their_weights):
        if len(weight_of) > request.branch_count or not weight:
            break
        weight_of.setdefault(token_id, weight)
    total = probs.total
    return Proposal(tuple((token_id, weight / total) for token_id, weight in weight_of.items()), probs)


def draw(probs: DraftProbs, draw_bits: int) -> int:
    """Returns the token of `probs` chosen by a 53-bit integer: exact integer arithmetic, without rounding."""
    sums = list(itertools.accumulate(probs.weights))
    return probs.token_ids[bisect.bisect_right(sums, draw_bits * sums[-1] >> UNIFORM_BITS)]
