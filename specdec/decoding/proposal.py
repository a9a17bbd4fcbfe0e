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
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from specdec.decoding.distribution import every_token_id, taken, without_improbable
from specdec.decoding.host_copy import HostCopy, is_device, sent, with_one_host_copy
from specdec.decoding.logits_processors import PathContext, edited_logits, may_edit
from specdec.decoding.masks import check_masks, masked
from specdec.decoding.noise import gumbel_keys, kept_noise, near_gumbel
from specdec.decoding.topk import top
from specdec.decoding.verification import in_order
from specdec.engine.cpu.kernels import Kernels
from specdec.engine.cpu.sampling import guess, kernels_for
from specdec.engine.readback import Readback
from specdec.protocol.noise import UNIFORM_BITS, Lane, stream_key
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
NUMBERS_AT_ONCE = 1 << 18  # on a CPU: what is computed of all logits of these rows stays in its cache
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


class KnownTokens:
    """The tokens of a draft that knows some of the target's: column i of its logits is token ids[i]."""

    def __init__(self, ids: Tensor) -> None:
        """ids: [columns] int64 on the device of the logits, different, ascending if of equal logits the lower id is to
        be the likelier one"""
        self.ids, self.end = ids, int(ids.max()) + 1

    def spread(self, logits: Tensor) -> Tensor:
        """[n, columns] -> [n, end], -infinity for the others"""
        every = logits.new_full((len(logits), self.end), -math.inf)
        return every.index_copy_(1, self.ids, logits)


def proposals(
    payloads: Sequence[Sequence[ProposalRequest]],
    row_counts: Sequence[int],
    logits: Tensor,
    readback: Readback | None = None,
    masks: Tensor | None = None,
) -> list[list[Proposal]]:
    """Runs `propose` for payloads of several requests each; returns one list per payload, in order.

    logits: [sum(row_counts), vocabulary] float32; readback, masks: see `propose`. Raises ValueError unless each payload
    has one request per row.
    """
    if [len(requests) for requests in payloads] != list(row_counts):
        raise ValueError(f"{list(row_counts)} rows for {[len(requests) for requests in payloads]} proposals")
    made = iter(propose([request for requests in payloads for request in requests], logits, masks, None, readback))
    return [list(itertools.islice(made, count)) for count in row_counts]


def propose(
    requests: Sequence[ProposalRequest],
    logits: Tensor,
    masks: Tensor | None = None,
    known: KnownTokens | None = None,
    readback: Readback | None = None,
) -> list[Proposal]:
    """Returns one proposal per request, in order.  logits: [len(requests), vocabulary] float32

    masks: the legal tokens of each row along its path, of the target's vocabulary (decoding/masks.py); None where all
    are legal. An illegal token has no weight; a row without a legal token has no guess. `known`: the tokens of the
    columns; None: column i is token i. Proposals are those of logits that are spread over all tokens. `readback`: see
    `HostCopy`.
    """
    if logits.shape[0] != len(requests):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(requests)} proposals")
    if known is not None and (masks is not None or any(is_by_id(request, known) for request in requests)):
        logits, known = known.spread(logits), None
    check_masks(masks, logits[:, : max((request.vocabulary_size for request in requests), default=0)])
    groups: dict[tuple[int, int], list[int]] = {}
    for index, request in enumerate(requests):
        width = logits.shape[1] if known is not None else min(request.vocabulary_size, logits.shape[1])
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
                own = rows[:, :width], own_masks, known
                finishes.append((indices, proposals_of_rule(Rule(rule), chosen, *own, host_copy)))
        return lambda: in_order(finishes)

    return with_one_host_copy(logits.device, compute, readback)


def is_by_id(request: ProposalRequest, known: KnownTokens) -> bool:
    """Whether a request's guesses follow from more of a token than its logit: edits, or whether the target has it."""
    return request.vocabulary_size < known.end or may_edit(request.params)


def proposals_of_rule(
    rule: Rule,
    requests: Sequence[ProposalRequest],
    logits: Tensor,
    masks: Tensor | None,
    known: KnownTokens | None,
    host_copy: HostCopy,
) -> Callable[[], list[Proposal]]:
    """Returns a function for the proposals of requests that share a rule, called after the host copy."""
    if masks is None:
        return WAYS[rule](requests, logits, known, host_copy)
    legal, is_empty = masked(logits, masks)
    found, without = WAYS[rule](requests, legal, known, host_copy), host_copy.to_host(is_empty)
    return lambda: [NO_PROPOSAL if none else proposal for none, proposal in zip(without(), found())]


def edited_rows(requests: Sequence[ProposalRequest], logits: Tensor) -> Tensor:
    """Returns the logits after all edits: the argument itself without edits."""
    if not any(map(may_edit, own_params(requests))):
        return logits
    return edited_logits(logits, [PathContext(request.params, request.path) for request in requests])


def own_params(requests: Sequence[ProposalRequest]) -> Iterable[ResolvedSamplingParams]:
    """Returns the parameters of all requests, those that several share once."""
    return {id(request.params): request.params for request in requests}.values()


def greedy_proposals(
    requests: Sequence[ProposalRequest], logits: Tensor, known: KnownTokens | None, host_copy: HostCopy
) -> Callable[[], list[Proposal]]:
    """Returns a function for the likeliest tokens and their shares of the softmax, called after the host copy."""
    if (native := native_guesser(requests, logits)) is not None:
        return native_guesses(native, requests, logits, None, [1.0] * len(requests), known)
    edited = edited_rows(requests, logits)
    columns = top(edited, guess_count(requests, edited.shape[1]))[1]
    shares = edited.softmax(1).gather(1, columns)
    return guesses_of(requests, host_copy.to_host(tokens_at(columns, known)), host_copy.to_host(shares))


def coupled_proposals(
    requests: Sequence[ProposalRequest], logits: Tensor, known: KnownTokens | None, host_copy: HostCopy
) -> Callable[[], list[Proposal]]:
    """Returns a function for the tokens of highest score log p + noise, and their softmax shares of these scores."""
    all_params = [request.params for request in requests]
    seeds, positions = [params.seed for params in all_params], [len(request.path) for request in requests]
    is_large = logits.shape[1] > NOISED_TOKENS_MAX
    if not is_large and (native := native_guesser(requests, logits)) is not None:
        keys = [stream_key(seed, Lane.GUMBEL, position) for seed, position in zip(seeds, positions)]
        return native_guesses(native, requests, logits, keys, [params.temperature for params in all_params], known)
    token_ids = None if known is None else known.ids[None]
    if is_large or any(params.top_k or params.top_p < 1 for params in all_params):
        scores, token_ids = likeliest_of_distribution(requests, logits, known, NOISED_LIKELIEST)
    else:
        scores = tempered_distribution(requests, logits)
    if token_ids is None and not is_device(logits.device):
        raced = kept_noise(list(zip(seeds, positions)), scores.shape[1])
    else:
        ids = every_token_id(scores) if token_ids is None else token_ids
        raced = near_gumbel(gumbel_keys(seeds, positions, logits.device), ids)
    raced += scores
    columns = top(raced, guess_count(requests, raced.shape[1]))[1]
    shares = raced.softmax(1).gather(1, columns)
    chosen = columns if token_ids is None else token_ids.expand(raced.shape).gather(1, columns)
    return guesses_of(requests, host_copy.to_host(chosen), host_copy.to_host(shares))


def tokens_at(columns: Tensor, known: KnownTokens | None) -> Tensor:
    """Returns the token ids of columns, in their shape.  # int64"""
    return columns if known is None else known.ids[columns]


def native_guesser(requests: Sequence[ProposalRequest], logits: Tensor) -> Kernels | None:
    """Returns the native kernels if these requests' guesses need nothing but logits and temperatures."""
    every = own_params(requests)
    others = (may_edit(params) or params.rule is not Rule.GREEDY and has_cut(params) for params in every)
    return None if any(others) else kernels_for(logits)


def has_cut(params: ResolvedSamplingParams) -> bool:
    """Whether its distribution leaves tokens out."""
    return bool(params.top_k or params.top_p < 1 or params.min_p)


def native_guesses(
    native: Kernels,
    requests: Sequence[ProposalRequest],
    logits: Tensor,
    keys: Sequence[int] | None,
    temperatures: Sequence[float],
    known: KnownTokens | None,
) -> Callable[[], list[Proposal]]:
    """Returns a function for guesses by the kernels; `keys`: of the noise of each row, if any."""
    token_ids = None if known is None else known.ids
    found = guess(native, logits, keys, temperatures, guess_count(requests, logits.shape[1]), token_ids)
    return guesses_of(requests, lambda: found[0], lambda: found[1])


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
    requests: Sequence[ProposalRequest], logits: Tensor, known: KnownTokens | None, host_copy: HostCopy
) -> Callable[[], list[Proposal]]:
    """Returns a function for the draft distribution as sent, its likeliest tokens with the nearest of the encodable
    weights, and a draw from it.

    The likeliest token has weight 65535. A token less likely than 1/65535 of it is left out of the draft distribution
    and is never drawn.
    """
    scores, token_ids = likeliest_of_distribution(requests, logits, known, PROPOSAL_PROBS_TOKENS_MAX)
    code_count = len(DRAFT_PROBS_WEIGHTS)
    codes = scores.mul_(CODE_SCALE).round_().clamp_(max=code_count).to(torch.int64).clamp_(0, code_count)
    weights = sent(WEIGHTS, logits.device)[codes]
    past = logits.shape[1] if known is None else known.end
    by_id = token_ids.masked_fill(weights == 0, past).sort(dim=1)  # those left out are last
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


def likeliest_of_distribution(
    requests: Sequence[ProposalRequest], logits: Tensor, known: KnownTokens | None, count: int
) -> tuple[Tensor, Tensor]:
    """Returns the likeliest tokens of each request's distribution, likeliest first: log-probabilities up to a constant,
    the first at 0, and ids.  # [n, columns] float32, -inf outside the support; [n, columns] int64

    The steps are those of decoding/distribution.py: edits, temperature, min_p, top_k, top_p.
    """
    all_params = [request.params for request in requests]
    edited = edited_rows(requests, logits)
    values, columns = top(edited, min(count, edited.shape[1]))
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
    return scores, tokens_at(columns, known)


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
