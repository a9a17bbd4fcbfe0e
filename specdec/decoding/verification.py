"""The target's side of verification: from logits to sampler output.

Its output for every row is the recovered token (after the last draft token, the bonus token) and, under REJECTION, the
target probability of each draft token. `protocol.rejection` accepts or rejects. Draft tokens form a tree, usually a
chain; without any this is plain decoding, by the same code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec.decoding.coupled import coupled_token_ids
from specdec.decoding.device_edits import edited_on_device
from specdec.decoding.device_sampler import SampledRow, SiblingTest, sampled
from specdec.decoding.distribution import (
    Support,
    greedy_token_ids,
    in_row_order,
    row_sums,
    row_totals,
    sampled_distribution,
    taken,
)
from specdec.decoding.host_copy import HostCopy, is_device, sent, with_one_host_copy
from specdec.decoding.logits_processors import PathContext, may_edit
from specdec.decoding.logprobs import logprobs_by_kernels, logprobs_of_rows
from specdec.decoding.masks import check_masks, masked
from specdec.engine.cuda.kernels.launch import is_usable, refuse
from specdec.engine.readback import Readback
from specdec.protocol.heads import NO_HEAD_PLAN, HeadPlan
from specdec.protocol.noise import Lane, uniform
from specdec.protocol.tree_shape import branches, children, path_tokens
from specdec.protocol.types import DraftProbs, ResolvedSamplingParams, Rule, SamplerOutput

Item = TypeVar("Item")

CHUNK_ELEMENTS = 1 << 24  # logits per chunk: limits temporary memory to a few times 128 MiB
TRIED: set[torch.device] = set()  # whose kernels were tried
TRIED_WIDTH = 5000  # tokens
CHUNK_ELEMENTS_CPU = 1 << 19  # larger temporaries exceed the caches, and the allocator returns their pages each time


@dataclass(frozen=True, slots=True)
class VerificationRequest:
    """One verification. `committed`: every token before the base position; not stored.

    `draft_probs`: the draft distribution of each draft token, under REJECTION; empty otherwise. Each was checked
    against its draft token (DraftProbs.check_proposal). `parents`: the shape of the tree (`protocol.tree_shape`).
    `wants_heads`: the proposals of heads on the target are wanted; `head_plan`: the tree wanted of its feature head;
    `head_secret`: the key of that head's draws in this session (`noise.Lane.DRAFT`). `verify` reads none of them.
    """

    params: ResolvedSamplingParams
    round_index: int
    committed: Sequence[int]
    draft_token_ids: tuple[int, ...] = ()
    draft_probs: tuple[DraftProbs, ...] = ()
    parents: tuple[int, ...] = ()
    wants_heads: bool = False
    head_plan: HeadPlan = NO_HEAD_PLAN
    head_secret: int = 0

    @property
    def base_position(self) -> int:
        """The position of its first draft token."""
        return len(self.committed)

    @property
    def row_count(self) -> int:
        """Number of its rows of logits: one after the committed tokens, and one after each draft token."""
        return len(self.draft_token_ids) + 1

    @property
    def contexts(self) -> list[PathContext]:
        """The paths of its tree, each with the rows that no path before it has, in the order of the rows."""
        if not self.parents:
            return [PathContext(self.params, self.committed, self.draft_token_ids)]
        parts = branches(self.parents, len(self.draft_token_ids))
        return [
            PathContext(self.params, self.committed, path, part.depth + 1 if part.start else 0)
            for part, path in zip(parts, path_tokens(parts, self.draft_token_ids))
        ]


def verify(
    requests: Sequence[VerificationRequest],
    row_counts: Sequence[int],
    logits: Tensor,
    readback: Readback | None = None,
    masks: Tensor | None = None,
) -> list[SamplerOutput]:
    """Returns the sampler output of each request, in order.

    logits: [sum(row_counts), vocabulary] float32, the rows of the requests in order; masks: the legal tokens of each
    row along its own path (decoding/masks.py), None where all tokens of all rows are legal; readback: of the step on a
    device that computed these rows: where only logits decide, its best ids are the tokens and nothing is computed.

    A result depends on its own rows, params and path only, bit for bit, not on the other requests.
    """
    if is_usable(logits.device) and logits.device not in TRIED:
        try_kernels(logits.device)
    return verified(requests, row_counts, logits, readback, masks, is_usable(logits.device))


def verified(
    requests: Sequence[VerificationRequest],
    row_counts: Sequence[int],
    logits: Tensor,
    readback: Readback | None,
    masks: Tensor | None,
    has_kernels: bool,
) -> list[SamplerOutput]:
    """`verify`, where `has_kernels` by a device's kernels."""
    expected = [request.row_count for request in requests]
    if list(row_counts) != expected or logits.shape[0] != sum(expected):
        raise ValueError(f"{list(row_counts)} rows for requests that need {expected}, and {logits.shape[0]} of logits")
    check_masks(masks, logits)
    starts = [0, *itertools.accumulate(expected)]
    by_rule: dict[Rule | None, list[int]] = {}
    found: list[int] = []  # whose tokens the step found
    for index, request in enumerate(requests):
        has_found = readback is not None and masks is None and is_plain(request.params)
        (found if has_found else by_rule.setdefault(request.params.rule, [])).append(index)

    def compute(host_copy: HostCopy) -> Callable[[], list[SamplerOutput]]:
        finishes: list[tuple[list[int], Callable[[], list[SamplerOutput]]]] = []
        if readback is not None and found:
            finishes.append((found, lambda: best_outputs(readback, [(starts[i], starts[i + 1]) for i in found])))
        together: dict[Rule | None, list[int]] = {None: sorted(itertools.chain(*by_rule.values()))}
        for rule, indices in (together if has_kernels and host_copy.assumes else by_rule).items():
            for chunk in chunks(indices, expected, logits):
                chosen = [requests[index] for index in chunk]
                rows = [row for index in chunk for row in range(starts[index], starts[index + 1])]
                own = taken(logits, rows), None if masks is None else taken(masks, rows)
                finishes.append((chunk, output_of_rule(rule, chosen, *own, host_copy)))
        return lambda: in_order(finishes)

    return with_one_host_copy(logits.device, compute, readback)


def try_kernels(device: torch.device) -> None:
    """Runs the kernels of a device beside torch, once; they are not used there if they fail or decide otherwise."""
    TRIED.add(device)
    tried: list[dict[str, Any]] = [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1, "frequency_penalty": 0.5}]
    requests = []
    for seed, (rule, policy) in enumerate(itertools.product((Rule.COUPLED, Rule.REJECTION), tried)):
        params = ResolvedSamplingParams(rule, seed, 1, temperature=0.7, logprobs=2, **policy)
        probs = (DraftProbs((3, 5), (2, 3)),) if rule is Rule.REJECTION else ()
        requests.append(VerificationRequest(params, 0, [1, 2], (3,), probs))
    rows = torch.randn(2 * len(requests), TRIED_WIDTH, generator=torch.Generator().manual_seed(1))
    arguments = requests, [2] * len(requests), rows.to(device), None, None
    try:
        found, wanted = verified(*arguments, True), verified(*arguments, False)
    except Exception as error:  # whatever a compiler raises: torch samples instead
        refuse(device, (str(error).strip() or type(error).__name__).splitlines()[0])
        return
    if [one.recovered_token_ids for one in found] != [one.recovered_token_ids for one in wanted]:
        refuse(device, "it chose other tokens than torch")


def is_plain(params: ResolvedSamplingParams) -> bool:
    """Whether a row's token is the likeliest of its logits, and nothing else is asked."""
    return params.rule is Rule.GREEDY and params.logprobs is None and not may_edit(params)


def best_outputs(readback: Readback, places: Sequence[tuple[int, int]]) -> list[SamplerOutput]:
    """Returns the sampler outputs of requests whose rows are at these places of a step."""
    best_ids = readback.best_ids()
    return [SamplerOutput(tuple(best_ids[start:end])) for start, end in places]


def in_order(finishes: Sequence[tuple[list[int], Callable[[], list[Item]]]]) -> list[Item]:
    """Returns the results of chunks, each with the indices of its requests, in request order."""
    results = {index: result for chunk, finish in finishes for index, result in zip(chunk, finish())}
    return [results[index] for index in range(len(results))]


def chunks(indices: list[int], row_counts: Sequence[int], logits: Tensor) -> list[list[int]]:
    """Returns the indices in groups of a bounded number of logits, or of one request."""
    groups: list[list[int]] = []
    limit = CHUNK_ELEMENTS if is_device(logits.device) else CHUNK_ELEMENTS_CPU
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
    rule: Rule | None,
    requests: Sequence[VerificationRequest],
    logits: Tensor,
    masks: Tensor | None,
    host_copy: HostCopy,
) -> Callable[[], list[SamplerOutput]]:
    """Returns a function for the sampler output of requests that share a rule, called after the host copy; of any rules
    by the device's kernels for None."""
    contexts = [context for request in requests for context in request.contexts]
    if rule is None:
        legal = edited_on_device(logits, contexts, masks)
    else:
        legal = logits if masks is None else masked(logits, masks)[0]
    target_probs: Callable[[], list[float]] = list
    if rule is None:
        found = sampled(legal, sampled_rows(requests), host_copy)
        chosen, probs = found.split([len(logits), len(found) - len(logits)])
        target_probs = host_copy.to_host(probs)
    elif rule is Rule.GREEDY:
        chosen = greedy_token_ids(legal, contexts)
    elif rule is Rule.COUPLED:
        chosen = coupled_token_ids(legal, contexts, host_copy)
    else:
        chosen, probs = rejection_output(sampled_distribution(legal, contexts, host_copy), requests)
        target_probs = host_copy.to_host(probs)
    recovered = host_copy.to_host(chosen)
    ends = list(itertools.accumulate(request.row_count for request in requests))
    places = [slice(end - request.row_count, end) for end, request in zip(ends, requests)]
    tokens_of = tested_places(requests)
    of_rows = logprobs_by_kernels if rule is None else logprobs_of_rows
    reported = of_rows(requests, chosen, logits, places, host_copy)

    def finish() -> list[SamplerOutput]:
        tokens, probs = [int(token_id) for token_id in recovered()], target_probs()
        return [
            SamplerOutput(tuple(tokens[place]), tuple(probs[own]), *logprobs())
            for place, own, logprobs in zip(places, tokens_of, reported)
        ]

    return finish


def tested_places(requests: Sequence[VerificationRequest]) -> list[slice]:
    """Returns the places of each request's draft tokens among those that are tested."""
    counts = [len(r.draft_token_ids) if r.params.rule is Rule.REJECTION else 0 for r in requests]
    return [slice(end - count, end) for end, count in zip(itertools.accumulate(counts), counts)]


def sampled_rows(requests: Sequence[VerificationRequest]) -> list[SampledRow]:
    """Returns the rows of requests, for the kernels of a device."""
    rows: list[SampledRow] = []
    for request, places in zip(requests, tested_places(requests)):
        params, is_drawn = request.params, request.params.rule is Rule.REJECTION
        positions = [c.first_position + offset for c in request.contexts for offset in range(c.row_count)]
        uniforms = next_draws([request]) if is_drawn else [0.0] * request.row_count
        tests = row_tests(request, places.start) if is_drawn else [[]] * request.row_count
        rows += [SampledRow(params, *row) for row in zip(positions, uniforms, tests)]
    return rows


def rejection_output(supports: list[Support], requests: Sequence[VerificationRequest]) -> tuple[Tensor, Tensor]:
    """Returns the recovered token per row and the target probability per draft token.  # [rows] int64, [tokens] float64

    The children of a row are tested in order: each against what is left of the target distribution after the ones
    before it were rejected, and the recovered token is drawn from what is left after all of them (docs/exactness.md).
    """
    ends = itertools.accumulate((len(request.draft_token_ids) for request in requests), initial=0)
    tests = [row for request, place in zip(requests, ends) for row in row_tests(request, place)]
    uniforms = next_draws(requests)
    recovered: list[tuple[list[int], Tensor]] = []
    target_probs: list[tuple[list[int], Tensor]] = []
    for support in supports:
        rows = support.rows
        left = support.probabilities()
        for rank in range(max(len(tests[row]) for row in rows)):
            tested = [(line, tests[row][rank]) for line, row in enumerate(rows) if rank < len(tests[row])]
            lines = sent([line for line, _ in tested], left.device, torch.int64)
            if rank:
                left = normalised(left, lines)
            columns, found = support.columns_of(lines, sent([test.token_id for _, test in tested], left.device))
            target_probs.append(([test.place for _, test in tested], torch.where(found, left[lines, columns], 0.0)))
            left = residual(left, *draft_entries(support, [(line, test.draft_probs) for line, test in tested]))
        recovered.append((rows, support.token_ids_at(inverse_cdf(left, [uniforms[row] for row in rows]))))
    none = torch.empty(0, dtype=torch.float64, device=supports[0].scores.device)
    return in_row_order(recovered), in_row_order(target_probs) if target_probs else none


def row_tests(request: VerificationRequest, first_place: int) -> list[list[SiblingTest]]:
    """Returns the tests of each row's children, in order; the first draft token has the place `first_place`."""
    tests: list[list[SiblingTest]] = []
    for row in children(request.parents, len(request.draft_token_ids)):
        before: list[int] = []
        tests.append([])
        for index in row:
            token_id = request.draft_token_ids[index]
            tests[-1].append(SiblingTest(first_place + index, token_id, request.draft_probs[index].without(before)))
            before.append(token_id)
    return tests


def next_draws(requests: Sequence[VerificationRequest]) -> list[float]:
    """Returns the uniform number of every row's recovered token. Rows for the same position share it: a round uses one
    of them, chosen without it."""
    return [
        uniform(request.params.seed, Lane.NEXT, request.round_index, context.first_position + offset)
        for request in requests
        for context in request.contexts
        for offset in range(context.row_count)
    ]


def draft_entries(support: Support, draft_probs: Sequence[tuple[int, DraftProbs]]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the draft distributions, each for a line, as (line, column, probability); 0 for a token outside the
    target's support. Probabilities are those of `DraftProbs.probability`, which the acceptance test uses."""
    device = support.scores.device
    lines = sent([line for line, row in draft_probs for _ in row.token_ids], device, torch.int64)
    token_ids = sent([t for _, row in draft_probs for t in row.token_ids], device, torch.int64)
    probs = sent([p for _, row in draft_probs for p in row.probabilities], device, torch.float64)
    columns, found = support.columns_of(lines, token_ids)
    return lines, columns, torch.where(found, probs, 0.0)


def normalised(masses: Tensor, lines: Tensor) -> Tensor:
    """Returns the masses with the rows `lines` divided by their totals.  # [n, columns] float64"""
    scaled = masses.clone()
    scaled[lines] /= row_totals(masses[lines])
    return scaled


def residual(target: Tensor, lines: Tensor, columns: Tensor, draft_probs: Tensor) -> Tensor:
    """Returns max(0, target - draft) of each row, not normalised; the target itself where that has no mass.

    target: [n, columns] float64; the draft's probabilities at (lines, columns), each pair once or with zeros; a row
    without any stays as it is.  # [n, columns] float64
    """
    left = target.clone()
    left.index_put_((lines, columns), -draft_probs, accumulate=True)
    left[lines, columns] = left[lines, columns].clamp_(min=0)
    empty = left.amax(dim=1, keepdim=True) == 0
    if is_device(target.device) or bool(empty.any()):
        left = torch.where(empty, target, left)
    return left


def inverse_cdf(masses: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Returns the first column whose running sum exceeds u times the total, at most the last column with mass.

    masses: [n, columns] float64, not normalised, some above 0; uniforms in [0, 1).  # [n] int64
    """
    sums = row_sums(masses)
    totals = sums[:, -1:].contiguous()
    draws = sent(uniforms, masses.device, torch.float64).unsqueeze(1)
    columns = torch.searchsorted(sums, draws * totals, right=True)
    return torch.minimum(columns, torch.searchsorted(sums, totals)).squeeze(1)
