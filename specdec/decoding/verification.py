"""The target's side of verification: from logits to sampler output.

Its output for every position is the recovered token (after the last draft token, the bonus token) and, under
REJECTION, the target probability of the draft token. `coordinator.rejection` accepts or rejects. Without draft tokens
this is plain decoding, by the same code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from specdec.decoding.distribution import (
    Support,
    first_argmax,
    greedy_token_ids,
    in_row_order,
    likeliest,
    row_sums,
    row_totals,
    sampled_distribution,
    taken,
)
from specdec.decoding.edits import PathContext
from specdec.decoding.host_copy import HostCopy, crossed, is_far, sent
from specdec.decoding.noise import gumbel, gumbel_keys
from specdec.protocol.noise import Lane, uniform
from specdec.protocol.types import DraftProbs, PositionLogprobs, ResolvedSamplingParams, Rule, SamplerOutput

Item = TypeVar("Item")

CHUNK_ELEMENTS = 1 << 24  # logits per chunk: limits temporary memory to a few times 128 MiB
CHUNK_ELEMENTS_CPU = 1 << 19  # larger temporaries exceed the caches, and the allocator returns their pages each time


@dataclass(frozen=True, slots=True)
class VerificationRequest:
    """One verification. `committed`: every token before the base position; not stored.

    `draft_probs`: the draft distribution of each draft token, under REJECTION; empty otherwise. Each was checked
    against its draft token (DraftProbs.check_proposal).
    """

    params: ResolvedSamplingParams
    round_index: int
    committed: Sequence[int]
    draft_token_ids: tuple[int, ...] = ()
    draft_probs: tuple[DraftProbs, ...] = ()

    @property
    def row_count(self) -> int:
        """Number of its rows of logits: one per draft token, and one after the last."""
        return len(self.draft_token_ids) + 1

    @property
    def context(self) -> PathContext:
        return PathContext(self.params, self.committed, self.draft_token_ids)


def verify(requests: Sequence[VerificationRequest], row_counts: Sequence[int], logits: Tensor) -> list[SamplerOutput]:
    """Returns the sampler output of each request, in order.

    logits: [sum(row_counts), vocabulary] float32, the rows of the requests in order.

    A result depends on its own rows, params and path only, bit for bit, not on the other requests.
    """
    expected = [request.row_count for request in requests]
    if list(row_counts) != expected or logits.shape[0] != sum(expected):
        raise ValueError(f"{list(row_counts)} rows for requests that need {expected}, and {logits.shape[0]} of logits")
    starts = [0, *itertools.accumulate(expected)]

    def compute(host_copy: HostCopy) -> Callable[[], list[SamplerOutput]]:
        finishes: list[tuple[list[int], Callable[[], list[SamplerOutput]]]] = []
        for rule in Rule:
            for chunk in chunks([i for i, r in enumerate(requests) if r.params.rule is rule], expected, logits):
                chosen = [requests[index] for index in chunk]
                rows = [row for index in chunk for row in range(starts[index], starts[index + 1])]
                finishes.append((chunk, output_of_rule(rule, chosen, taken(logits, rows), host_copy)))
        return lambda: in_order(finishes)

    return crossed(logits.device, compute)


def in_order(finishes: Sequence[tuple[list[int], Callable[[], list[Item]]]]) -> list[Item]:
    """Returns the results of chunks, each with the indices of its requests, in request order."""
    results = {index: result for chunk, finish in finishes for index, result in zip(chunk, finish())}
    return [results[index] for index in range(len(results))]


def chunks(indices: list[int], row_counts: Sequence[int], logits: Tensor) -> list[list[int]]:
    """Returns the indices in groups of a bounded number of logits, or of one request."""
    groups: list[list[int]] = []
    limit = CHUNK_ELEMENTS if is_far(logits.device) else CHUNK_ELEMENTS_CPU
    group_size_max = 0
    for index in indices:
        size = row_counts[index] * logits.shape[1]
        if not groups or size > group_size_max:
            groups.append([])
            group_size_max = limit
        groups[-1].append(index)
        group_size_max -= size
    return groups


def output_of_rule(
    rule: Rule, requests: Sequence[VerificationRequest], logits: Tensor, host_copy: HostCopy
) -> Callable[[], list[SamplerOutput]]:
    """Returns a function for the sampler output of requests that share a rule, called after the host copy."""
    contexts = [request.context for request in requests]
    target_probs: Callable[[], list[float]] = list
    if rule is Rule.GREEDY:
        chosen = greedy_token_ids(logits, contexts)
    elif rule is Rule.COUPLED:
        chosen = coupled_token_ids(sampled_distribution(logits, contexts, host_copy), contexts, logits.device)
    else:
        chosen, probs = rejection_output(sampled_distribution(logits, contexts, host_copy), requests)
        target_probs = host_copy.bring(probs)
    recovered = host_copy.bring(chosen)
    ends = list(itertools.accumulate(request.row_count for request in requests))
    places = [slice(end - request.row_count, end) for end, request in zip(ends, requests)]
    reported = [logprobs_of(r, chosen[place], logits[place], host_copy) for r, place in zip(requests, places)]

    def finish() -> list[SamplerOutput]:
        tokens, probs = recovered(), target_probs()
        return [
            SamplerOutput(tuple(tokens[place]), tuple(probs[place][: place.stop - place.start - 1]), *logprobs())
            for place, logprobs in zip(places, reported)
        ]

    return finish


def logprobs_of(
    request: VerificationRequest, recovered: Tensor, logits: Tensor, host_copy: HostCopy
) -> Callable[[], tuple[tuple[PositionLogprobs, ...], tuple[PositionLogprobs, ...]]]:
    """Returns a function for log-probabilities of draft and recovered tokens, if the request has `logprobs`."""
    if request.params.logprobs is None:
        return lambda: ((), ())
    draft_token_ids = sent(request.draft_token_ids, logits.device, torch.int64)
    tokens = torch.stack([recovered, torch.cat([draft_token_ids, recovered[-1:]])], dim=1)
    both = position_logprobs(logits, tokens, request.params.logprobs, host_copy)

    def finish() -> tuple[tuple[PositionLogprobs, ...], tuple[PositionLogprobs, ...]]:
        pairs = both()
        return tuple(pair[1] for pair in pairs[:-1]), tuple(pair[0] for pair in pairs)

    return finish


def position_logprobs(
    logits: Tensor, token_ids: Tensor, top_count: int, host_copy: HostCopy
) -> Callable[[], list[list[PositionLogprobs]]]:
    """Returns a function for one entry per row and token id, each with the row's `top_count` likeliest tokens.

    Values are the log-softmax of the raw logits, before any edit or truncation: float64, the normaliser summed in id
    order, so a row's values do not depend on the rows beside it.
    logits: [rows, vocabulary] float32; token_ids: [rows, ids per row] int64. Likeliest first, ties to the lowest id. A
    token of probability 0 has -inf.
    """
    values = logits.to(torch.float64)
    shifted = values - values.amax(dim=1, keepdim=True)
    logprobs = shifted - row_totals(shifted.exp()).log()
    chosen = host_copy.bring(logprobs.gather(1, token_ids))
    if top_count == 0:
        return lambda: [[PositionLogprobs(value) for value in line] for line in chosen()]
    ids = likeliest(values, [top_count] * len(values), host_copy)[0]
    top = values.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, top)
    top_ids, top_values = host_copy.bring(ids), host_copy.bring(logprobs.gather(1, ids))

    def finish() -> list[list[PositionLogprobs]]:
        tops = [(tuple(ids), tuple(values)) for ids, values in zip(top_ids(), top_values())]
        return [[PositionLogprobs(value, *top) for value in line] for line, top in zip(chosen(), tops)]

    return finish


def coupled_token_ids(supports: list[Support], contexts: Sequence[PathContext], device: torch.device) -> Tensor:
    """Returns argmax(score + G) over the support, ties to the lowest id, for any draft tokens.  # [rows] int64"""
    perturbed = perturbed_scores(supports, contexts, device)
    return in_row_order([(support.rows, support.token_ids_at(first_argmax(scores))) for support, scores in perturbed])


def perturbed_scores(
    supports: list[Support], contexts: Sequence[PathContext], device: torch.device
) -> Iterator[tuple[Support, Tensor]]:
    """Yields each support with its scores plus the Gumbel noise of seed, position, token.  # [n, columns] float64"""
    seeds = [context.params.seed for context in contexts for _ in range(context.row_count)]
    positions = [context.base_position + offset for context in contexts for offset in range(context.row_count)]
    keys = gumbel_keys(seeds, positions, device)
    for support in supports:
        yield support, gumbel(taken(keys, support.rows), support.ids).add_(support.scores)


def rejection_output(supports: list[Support], requests: Sequence[VerificationRequest]) -> tuple[Tensor, Tensor]:
    """Returns the recovered token and the draft token's target probability per row.  # [rows] int64, [rows] float64

    The probability has no meaning at last positions.
    """
    draft_token_ids = [token for request in requests for token in (*request.draft_token_ids, -1)]
    draft_probs = [row for request in requests for row in (*request.draft_probs, None)]
    uniforms = [
        uniform(request.params.seed, Lane.NEXT, request.round_index, len(request.committed) + offset)
        for request in requests
        for offset in range(request.row_count)
    ]
    recovered: list[tuple[list[int], Tensor]] = []
    target_probs: list[tuple[list[int], Tensor]] = []
    for support in supports:
        rows = support.rows
        target = support.probabilities()
        entries = draft_entries(support, [draft_probs[row] for row in rows])
        chosen = support.token_ids_at(recovered_columns(target, *entries, [uniforms[row] for row in rows]))
        wanted = sent([max(draft_token_ids[row], 0) for row in rows], target.device)
        line = torch.arange(len(rows), device=target.device)
        columns, found = support.columns_of(line, wanted)
        recovered.append((rows, chosen))
        target_probs.append((rows, torch.where(found, target[line, columns], 0.0)))
    return in_row_order(recovered), in_row_order(target_probs)


def draft_entries(support: Support, draft_probs: Sequence[DraftProbs | None]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the draft distributions as (line, column, probability); 0 for a token outside the target's support.

    A last position has no distribution and no entries. Probabilities are those of `DraftProbs.probability`, which the
    acceptance test uses.
    """
    entries = [(line, row) for line, row in enumerate(draft_probs) if row is not None]
    device = support.scores.device
    lines = sent([line for line, row in entries for _ in row.token_ids], device, torch.int64)
    token_ids = sent([t for _, row in entries for t in row.token_ids], device, torch.int64)
    probs = sent([p for _, row in entries for p in row.probabilities], device, torch.float64)
    columns, found = support.columns_of(lines, token_ids)
    return lines, columns, torch.where(found, probs, 0.0)


def recovered_columns(
    target: Tensor, lines: Tensor, columns: Tensor, draft_probs: Tensor, uniforms: Sequence[float]
) -> Tensor:
    """Draws from the residual max(0, target - draft) of each row, or from the target if the residual has no mass.

    target: [n, columns] float64; the draft's probabilities at (lines, columns), each pair once or with zeros, none at
    a last position, whose residual is the target itself.  # [n] int64
    """
    residual = target.clone()
    residual.index_put_((lines, columns), -draft_probs, accumulate=True)
    residual[lines, columns] = residual[lines, columns].clamp_(min=0)
    empty = residual.amax(dim=1, keepdim=True) == 0
    if is_far(target.device) or bool(empty.any()):
        residual = torch.where(empty, target, residual)
    return inverse_cdf(residual, uniforms)


def inverse_cdf(masses: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Returns the first column whose running sum exceeds u times the total, at most the last column with mass.

    masses: [n, columns] float64, not normalised, some above 0; uniforms in [0, 1).  # [n] int64
    """
    sums = row_sums(masses)
    totals = sums[:, -1:].contiguous()
    draws = sent(uniforms, masses.device, torch.float64).unsqueeze(1)
    columns = torch.searchsorted(sums, draws * totals, right=True)
    return torch.minimum(columns, torch.searchsorted(sums, totals)).squeeze(1)
