"""The target's side of verification: from logits to evidence.

For every position it reports a replacement token and, under REJECTION, the target probability of the draft token. It
decides nothing: `coordinator.rejection` does. With no draft tokens this is plain decoding, by the same code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.decoding.distribution import Support, first_argmax, greedy_token_ids, row_sums, sampled_law, taken
from specdec.decoding.edits import PathContext
from specdec.decoding.logprobs import position_logprobs
from specdec.decoding.noise import gumbel, gumbel_keys
from specdec.protocol.noise import Lane, uniform
from specdec.protocol.types import Evidence, Law, PositionLogprobs, Row, Rule

CHUNK_ELEMENTS = 1 << 24  # logits worked on at once: bounds temporary memory to a few times 128 MiB
CHUNK_ELEMENTS_CPU = 1 << 19  # larger temporaries leave the caches, and the allocator returns their pages each time


@dataclass(frozen=True, slots=True)
class EvidenceRequest:
    """One verification. `committed`: every token before the base position; it is not kept.

    `rows`: the rows the draft tokens were drawn from, one each, under REJECTION; empty otherwise. They have been
    checked against their draft tokens (Row.check_proposal).
    """

    law: Law
    round_index: int
    committed: Sequence[int]
    draft_token_ids: tuple[int, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def row_count(self) -> int:
        """Rows of logits it needs: one per draft token, and one after the last."""
        return len(self.draft_token_ids) + 1

    @property
    def context(self) -> PathContext:
        return PathContext(self.law, self.committed, self.draft_token_ids)


def evidence(requests: Sequence[EvidenceRequest], row_counts: Sequence[int], logits: Tensor) -> list[Evidence]:
    """Evidence for each request, in order.  logits: [sum(row_counts), vocabulary] float32, requests' rows in order.

    What a request gets depends on its own rows, law and path only, bit for bit, never on the other requests.
    """
    expected = [request.row_count for request in requests]
    if list(row_counts) != expected or logits.shape[0] != sum(expected):
        raise ValueError(f"{list(row_counts)} rows for requests that need {expected}, and {logits.shape[0]} of logits")
    starts = [0, *itertools.accumulate(expected)]
    results: list[Evidence | None] = [None] * len(requests)
    for rule in Rule:
        for chunk in chunks([i for i, r in enumerate(requests) if r.law.rule is rule], expected, logits):
            chosen = [requests[index] for index in chunk]
            rows = [row for index in chunk for row in range(starts[index], starts[index + 1])]
            for index, result in zip(chunk, evidence_of_rule(rule, chosen, taken(logits, rows))):
                results[index] = result
    return [result for result in results if result is not None]


def chunks(indices: list[int], row_counts: Sequence[int], logits: Tensor) -> list[list[int]]:
    """The indices in groups of a bounded number of logits, or of one request."""
    groups: list[list[int]] = []
    limit = CHUNK_ELEMENTS_CPU if logits.device.type == "cpu" else CHUNK_ELEMENTS
    room = 0
    for index in indices:
        size = row_counts[index] * logits.shape[1]
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(index)
        room -= size
    return groups


def evidence_of_rule(rule: Rule, requests: Sequence[EvidenceRequest], logits: Tensor) -> list[Evidence]:
    """Evidence for requests that share a rule."""
    contexts = [request.context for request in requests]
    target_probs: list[float] = []
    if rule is Rule.GREEDY:
        replacements = greedy_token_ids(logits, contexts).tolist()
    elif rule is Rule.COUPLED:
        replacements = coupled_token_ids(sampled_law(logits, contexts), contexts, logits).tolist()
    else:
        replacements, target_probs = rejection_evidence(sampled_law(logits, contexts), requests)
    results, start = [], 0
    for request in requests:
        end = start + request.row_count
        tokens = tuple(replacements[start:end])
        probs = tuple(target_probs[start : end - 1])
        results.append(Evidence(tokens, probs, *logprobs_of(request, tokens, logits[start:end])))
        start = end
    return results


def logprobs_of(
    request: EvidenceRequest, replacements: tuple[int, ...], logits: Tensor
) -> tuple[tuple[PositionLogprobs, ...], tuple[PositionLogprobs, ...]]:
    """Log-probabilities of draft tokens and replacements, when the law asks for them."""
    count = request.law.logprobs
    if count is None:
        return (), ()
    tokens = [(*pair,) for pair in zip(replacements, (*request.draft_token_ids, replacements[-1]))]
    both = position_logprobs(logits, tokens, count)
    return tuple(pair[1] for pair in both[:-1]), tuple(pair[0] for pair in both)


def coupled_token_ids(supports: list[Support], contexts: Sequence[PathContext], logits: Tensor) -> Tensor:
    """argmax(score + G) over the support, ties to the lowest id: the same token whoever proposes.  # [rows] int64"""
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for support, perturbed in perturbed_scores(supports, contexts, logits.device):
        chosen[support.rows] = support.token_ids_at(first_argmax(perturbed))
    return chosen


def perturbed_scores(
    supports: list[Support], contexts: Sequence[PathContext], device: torch.device
) -> Iterator[tuple[Support, Tensor]]:
    """Each support with its scores plus the Gumbel noise of seed, position and token.  # [n, columns] float64"""
    seeds = [context.law.seed for context in contexts for _ in range(context.row_count)]
    positions = [context.base_position + offset for context in contexts for offset in range(context.row_count)]
    keys = gumbel_keys(seeds, positions, device)
    for support in supports:
        yield support, gumbel(keys[support.rows], support.ids).add_(support.scores)


def rejection_evidence(supports: list[Support], requests: Sequence[EvidenceRequest]) -> tuple[list[int], list[float]]:
    """Replacement token and target probability of the draft token, per row; the latter 0 at last positions."""
    draft_token_ids = [token for request in requests for token in (*request.draft_token_ids, -1)]
    draft_rows = [row for request in requests for row in (*request.rows, None)]
    uniforms = [
        uniform(request.law.seed, Lane.NEXT, request.round_index, len(request.committed) + offset)
        for request in requests
        for offset in range(request.row_count)
    ]
    replacements, target_probs = [0] * len(uniforms), [0.0] * len(uniforms)
    for support in supports:
        rows = support.rows.tolist()
        target = support.probabilities()
        entries = draft_entries(support, [draft_rows[row] for row in rows])
        chosen = support.token_ids_at(replacement_columns(target, *entries, [uniforms[row] for row in rows]))
        wanted = torch.tensor([max(draft_token_ids[row], 0) for row in rows], device=target.device)
        line = torch.arange(len(rows), device=target.device)
        columns, found = support.columns_of(line, wanted)
        probs = torch.where(found, target[line, columns], 0.0)
        for row, token_id, prob in zip(rows, chosen.tolist(), probs.tolist()):
            replacements[row], target_probs[row] = token_id, prob
    return replacements, target_probs


def draft_entries(support: Support, draft_rows: Sequence[Row | None]) -> tuple[Tensor, Tensor, Tensor]:
    """The draft's rows as (line, column, probability) of the tokens the target's support holds too.

    A last position has no row and no entries. Probabilities are those of `Row.probability`, which the test reads.
    """
    entries = [(line, row) for line, row in enumerate(draft_rows) if row is not None]
    device = support.scores.device
    lines = torch.tensor([line for line, row in entries for _ in row.token_ids], dtype=torch.int64, device=device)
    token_ids = torch.tensor([t for _, row in entries for t in row.token_ids], dtype=torch.int64, device=device)
    probs = torch.tensor([p for _, row in entries for p in row.probabilities], dtype=torch.float64, device=device)
    columns, found = support.columns_of(lines, token_ids)
    return lines[found], columns[found], probs[found]


def replacement_columns(
    target: Tensor, lines: Tensor, columns: Tensor, draft_probs: Tensor, uniforms: Sequence[float]
) -> Tensor:
    """A draw from the residual max(0, target - draft) of each row, or from the target where that has no mass.

    target: [n, columns] float64; the draft's probabilities at (lines, columns), each pair once, nothing at a last
    position, whose residual is the target itself.  # [n] int64
    """
    residual = target.clone()
    residual[lines, columns] = (target[lines, columns] - draft_probs).clamp_(min=0)
    empty = residual.amax(dim=1, keepdim=True) == 0
    if bool(empty.any()):
        residual = torch.where(empty, target, residual)
    return inverse_cdf(residual, uniforms)


def inverse_cdf(masses: Tensor, uniforms: Sequence[float]) -> Tensor:
    """The first column whose running sum exceeds u times the total; the last one with mass closes the interval.

    masses: [n, columns] float64, not normalised, some above 0; uniforms in [0, 1).  # [n] int64
    """
    sums = row_sums(masses)
    totals = sums[:, -1:].contiguous()
    draws = torch.tensor(uniforms, dtype=torch.float64, device=masses.device).unsqueeze(1)
    columns = torch.searchsorted(sums, draws * totals, right=True)
    return torch.minimum(columns, torch.searchsorted(sums, totals)).squeeze(1)
