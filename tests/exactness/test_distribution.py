"""The target distribution: equal to the formulas and, without ties, to transformers, for any rows of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.decoding.distribution import (
    NUCLEUS_COLUMNS,
    dense_scores,
    doubled_sums,
    greedy_token_ids,
    likeliest,
    sampled_distribution,
)
from specdec.decoding.logits_processors import PathContext
from specdec.protocol.types import ResolvedSamplingParams, Rule
from tests.exactness import reference
from tests.exactness.policies import rounds

WIDE = 4 * NUCLEUS_COLUMNS[1]  # wide enough that top_p meets both a search among the likeliest and a full sort


def params_of(**policy: object) -> ResolvedSamplingParams:
    """REJECTION parameters."""
    return ResolvedSamplingParams(Rule.REJECTION, seed=1, **{"prompt_length": 1, **policy})


def probabilities(logits: torch.Tensor, contexts: list[PathContext]) -> torch.Tensor:
    """The target distribution as a dense tensor.  # [rows, vocabulary] float64"""
    weights = dense_scores(logits, contexts).exp()
    return weights / weights.sum(dim=1, keepdim=True)


def random_logits(rows: int, width: int, key: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Normal logits from a fixed key.  # [rows, width] float32"""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(key)) * scale


@settings(max_examples=250, deadline=None, derandomize=True)
@given(rounds())
def test_equals_the_formulas(case) -> None:
    """Claim: for any mix of features every position of a round has exactly the support and, to 1e-12, the
    probabilities of the reference, with draft tokens before it counted as output. Source: design section 5, through
    tests/exactness/reference.py. Conclusive: an independent program; logits are multiples of 1/2, so ties are
    everywhere.
    """
    params, committed, draft_token_ids, logits = case
    found = probabilities(torch.tensor(logits), [PathContext(params, committed, draft_token_ids)])
    for offset, line in enumerate(logits):
        wanted, margin = reference.sampled_distribution(params, line, [*committed, *draft_token_ids[:offset]])
        assume(margin > 1e-9)
        assert [p > 0 for p in found[offset]] == [p > 0 for p in wanted]
        assert torch.allclose(found[offset], torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-15)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rounds(rules=[Rule.GREEDY]))
def test_greedy_is_the_first_maximum_of_the_edited_logits(case) -> None:
    """Claim: GREEDY takes the argmax after all edits, ties to the lowest id."""
    params, committed, draft_token_ids, logits = case
    found = greedy_token_ids(torch.tensor(logits), [PathContext(params, committed, draft_token_ids)]).tolist()
    for offset, line in enumerate(logits):
        edited = reference.edited_logits(params, line, [*committed, *draft_token_ids[:offset]])
        assert found[offset] == edited.index(max(edited))


WARPED = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "top_k": ({"top_k": 17}, [TopKLogitsWarper(17)]),
    "top_p": ({"top_p": 0.83}, [TopPLogitsWarper(0.83)]),
    "min_p": ({"min_p": 0.04}, [MinPLogitsWarper(0.04)]),
    "repetition_penalty": ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    "several": (
        {"repetition_penalty": 0.8, "temperature": 1.4, "top_k": 60, "top_p": 0.9},
        [
            RepetitionPenaltyLogitsProcessor(0.8),
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(60),
            TopPLogitsWarper(0.9),
        ],
    ),
}


@pytest.mark.parametrize("width", [100, WIDE])
@pytest.mark.parametrize("policy, processors", WARPED.values(), ids=WARPED.keys())
def test_equals_the_processors_of_transformers(policy: dict, processors: list, width: int) -> None:
    """Claim: each feature alone, and several in a common order, give the support of transformers' logits processors
    and their probabilities to float32 accuracy. Conclusive: logits without ties, where the two definitions agree.
    """
    logits, path = random_logits(4, width), list(range(0, width, 3))
    expected = logits.clone()
    for processor in processors:
        expected = processor(torch.tensor([path] * 4), expected)
    found = torch.cat([probabilities(line[None], [PathContext(params_of(**policy), path)]) for line in logits])
    assert torch.equal(found > 0, expected > -math.inf)
    assert torch.allclose(found, expected.double().softmax(dim=1), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("scale, top_p", [(3.0, 0.95), (0.01, 0.95), (0.01, 0.2), (8.0, 0.999999)])
def test_nucleus_is_the_smallest_set_that_reaches_top_p(scale: float, top_p: float) -> None:
    """Claim: over a wide vocabulary the kept tokens are the likeliest ones, reach top_p, and would not without the
    last. Conclusive: against sorted sums, for peaked distributions, found among the likeliest tokens, for flat ones,
    which need the whole vocabulary sorted, and for both kinds in one call.
    """
    logits = torch.cat([random_logits(2, WIDE, 1, scale), random_logits(1, WIDE, 2)])
    found = dense_scores(logits, [PathContext(params_of(top_p=top_p), [0]) for _ in range(3)])
    for line, kept in zip(logits.double().softmax(dim=1), found > -math.inf):
        count = int(kept.sum())
        top = line.sort(descending=True).values
        assert float(line[kept].min()) >= float(top[count - 1])
        assert float(top[:count].sum()) >= top_p - 1e-12
        assert float(top[: count - 1].sum()) < top_p + 1e-12


def test_ties_go_to_the_lowest_ids_and_exactly_k_are_kept() -> None:
    """Claim: with equal logits top_k and top_p keep the first ids, and no more than asked."""
    flat = torch.zeros(1, 2000)
    for policy, count in [({"top_k": 5}, 5), ({"top_p": 0.25}, 500), ({"top_k": 8, "top_p": 0.5}, 4)]:
        kept = (dense_scores(flat, [PathContext(params_of(**policy), [0])]) > -math.inf)[0]
        assert kept.nonzero().flatten().tolist() == list(range(count))
    steps = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    ids, used = likeliest(steps, [3, 2])
    assert ids[used].tolist() == [1, 2, 3, 0, 1]


def test_a_distribution_is_never_empty() -> None:
    """Claim: at least one token remains: stop ids that cover the vocabulary are not masked, nor do the smallest top_p,
    min_p 1 and top_k 1 together, minus infinity elsewhere, or a bias that sinks everything, leave nothing.
    """
    logits = torch.tensor([[0.5, -math.inf, 0.5, -1e38]])
    policies = [
        {"min_tokens": 5, "stop_token_ids": (0, 1, 2, 3)},
        {"min_tokens": 5, "stop_token_ids": (0, 2, 3)},
        {"top_p": 1e-300, "min_p": 1.0, "top_k": 1},
        {"logit_bias": tuple((token, -100.0) for token in range(4)), "temperature": 0.01, "repetition_penalty": 100.0},
    ]
    for policy in policies:
        params = probabilities(logits, [PathContext(params_of(**policy), [0, 1, 2, 3])])
        assert float(params.sum()) == pytest.approx(1) and not bool(params.isnan().any())


MIXED = [
    {},
    {"temperature": 0.3},
    {"top_k": 9},
    {"top_k": 3, "top_p": 0.5, "min_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 50.0},
    {"min_p": 0.1},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"repetition_penalty": 1.3, "top_k": 30, "logit_bias": ((1, 4.5), (3, -2.0))},
]


@pytest.mark.parametrize("width", [7, 1000, WIDE + 3])
def test_a_row_does_not_depend_on_its_neighbours(width: int) -> None:
    """Claim: a row's distribution is the same bits alone, among 1 to 9 rows of other policies, at any index, and with
    one or two threads. Conclusive: torch.equal, with policies that take every way to a support.
    """
    logits = random_logits(9, width)
    contexts = [PathContext(params_of(**policy), [0, 1, 1, 2]) for policy in MIXED]
    alone = [dense_scores(logits[row : row + 1], contexts[row : row + 1]) for row in range(9)]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in range(1, 10):
            for order in (range(count), range(9 - count, 9), reversed(range(count))):
                rows = list(order)
                together = dense_scores(logits[rows], [contexts[row] for row in rows])
                assert all(torch.equal(together[place], alone[row][0]) for place, row in enumerate(rows))


def test_probabilities_do_not_depend_on_neighbours_or_threads() -> None:
    """Claim: the same for normalised probabilities, whose totals are sums over a wide row. Conclusive: as above; a
    plain torch.sum is split over threads when a call has a single long row.
    """
    logits = random_logits(9, 150_000)
    contexts = [PathContext(params_of(), [0])] * 9
    first = sampled_distribution(logits[:1], contexts[:1])[0].probabilities()[0]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 2, 5, 9):
            assert torch.equal(sampled_distribution(logits[:count], contexts[:count])[0].probabilities()[0], first)


def test_sums_by_doubling_rise_only_where_there_is_mass() -> None:
    """Claim: the running sums used beside CPUs are those of cumsum to 1e-14, never fall, rise exactly where a value is
    positive enough to count, and are the same bits alone, among others and with zeros behind. Conclusive: values over
    20 orders of magnitude, half of them 0, where plain sums by doubling do fall.
    """
    generator = torch.Generator().manual_seed(2)
    values = (torch.randn(9, 3001, generator=generator, dtype=torch.float64) * 15).exp()
    values *= torch.rand(9, 3001, generator=generator) < 0.5
    sums = doubled_sums(values)
    assert torch.allclose(sums, values.cumsum(dim=1), rtol=1e-14)
    rises = sums.diff(dim=1)
    assert bool((rises >= 0).all()) and bool((rises[values[:, 1:] == 0] == 0).all())
    for row in range(9):
        assert torch.equal(doubled_sums(values[row : row + 1])[0], sums[row])
    assert torch.equal(doubled_sums(torch.cat([values, torch.zeros(9, 2000)], dim=1))[:, :3001], sums)
