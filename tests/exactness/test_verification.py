"""SamplerOutput: draws exact to the last bit, COUPLED and GREEDY equal with and without drafts, logprobs, batches."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.proposal import ProposalRequest, propose
from specdec.decoding.verification import VerificationRequest, inverse_cdf, residual, verify
from specdec.protocol.noise import Lane, mix64, uniform, uniform_bits
from specdec.protocol.rejection import decide, logprobs_of
from specdec.protocol.types import DraftProbs, PositionLogprobs, ResolvedSamplingParams, Rule, SamplerOutput
from tests.exactness import reference
from tests.exactness.policies import all_params
from tests.exactness.statistics import P_VALUE_LIMIT, chi_square_p

BELOW_ONE = 1 - 2.0**-53  # the largest uniform number
Drafter = Callable[[ResolvedSamplingParams, list[int], int], tuple[int, ...]]


def below(value: float) -> float:
    """The float64 just below."""
    return math.nextafter(value, 0)


def test_dyadic_residuals_are_drawn_exactly() -> None:
    """Claim: with dyadic probabilities the residual's interval borders are exact to the last bit: each border belongs
    to the token above it. Target (1/2, 1/4, 1/8, 1/8), draft (1/4, 1/2, 1/8, 1/8): the residual is token 0 alone;
    draft (1/4, 0, 1/2, 1/4): residual (1/4, 1/4, 0, 0). Conclusive: evaluated at the border and just below it.
    """
    target = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)

    def drawn(draft: list[float], u: float) -> int:
        columns = torch.tensor([c for c, p in enumerate(draft) if p], dtype=torch.int64)
        entries = torch.zeros_like(columns), columns, torch.tensor([p for p in draft if p], dtype=torch.float64)
        return int(inverse_cdf(residual(target, *entries), [u]))

    for u in (0.0, 0.5, BELOW_ONE):
        assert drawn([0.25, 0.5, 0.125, 0.125], u) == 0
    assert [drawn([0.25, 0.0, 0.5, 0.25], u) for u in (0.0, below(0.5), 0.5, BELOW_ONE)] == [0, 0, 1, 1]
    assert [drawn([0.5, 0.25, 0.125, 0.125], u) for u in (below(0.5), 0.5, 0.75, 0.875)] == [0, 1, 2, 3]
    assert [drawn([], u) for u in (below(0.5), 0.5, below(0.75), BELOW_ONE)] == [0, 1, 1, 3]


def test_inverse_cdf_never_draws_a_token_without_mass() -> None:
    """Claim: zero masses at the start, inside and at the end are never drawn, whatever u, and the last token with mass
    closes the interval even where rounding leaves u times the total at the total itself.
    """
    masses = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 0.0, 1e-300, 0.0, 0.0]], dtype=torch.float64)
    for u in (0.0, 0.3, 0.5, BELOW_ONE, 1.0):
        columns = inverse_cdf(masses, [u, u])
        assert bool((masses.gather(1, columns.unsqueeze(1)) > 0).all())
    assert inverse_cdf(masses, [1.0, 1.0]).tolist() == [3, 2]


def table(key: int, vocabulary_size: int) -> Callable[[Sequence[int]], list[float]]:
    """A model: logits, multiples of 1/4 from -3 to 3, that depend on the whole path."""

    def logits(path: Sequence[int]) -> list[float]:
        state = key
        for token in path:
            state = mix64(state + 977 * token + 1)
        return [(mix64(state + token) % 25 - 12) / 4 for token in range(vocabulary_size)]

    return logits


def verified(
    params: ResolvedSamplingParams, round_index: int, path: list[int], tokens: tuple[int, ...], model: Callable
) -> SamplerOutput:
    """The real sampler output of one round over the model."""
    logits = torch.tensor([model([*path, *tokens[:offset]]) for offset in range(len(tokens) + 1)])
    return verify([VerificationRequest(params, round_index, path, tokens)], [len(tokens) + 1], logits)[0]


def generated(
    params: ResolvedSamplingParams, model: Callable, drafter: Drafter, count: int
) -> tuple[list[int], list[PositionLogprobs]]:
    """Output tokens and their logprobs through `verify` and `decide`, with the drafter's tokens."""
    path, logprobs, round_index = [0] * params.prompt_length, [], 0
    while len(path) < params.prompt_length + count:
        tokens = drafter(params, path, round_index)
        found = verified(params, round_index, path, tokens, model)
        verdict = decide(params.rule, tokens, (), found, ())
        path += [*tokens[: verdict.accepted_count], verdict.next_token_id]
        if params.logprobs is not None:
            logprobs += logprobs_of(found, verdict)
        round_index += 1
    return path[params.prompt_length :][:count], logprobs[:count]


def drafters(model: Callable, vocabulary_size: int) -> dict[str, Drafter]:
    """An honest draft with another model, a perfect one, and hostile ones."""
    other, source = table(99, vocabulary_size), random.Random(5)

    def honest(params: ResolvedSamplingParams, path: list[int], round_index: int) -> tuple[int, ...]:
        tokens: list[int] = []
        for _ in range(round_index % 4):
            before = [*path, *tokens]
            logits = torch.tensor([other(before)])
            tokens.append(propose([ProposalRequest(params, before, vocabulary_size)], logits)[0].token_id)
        return tuple(tokens)

    def perfect(params: ResolvedSamplingParams, path: list[int], round_index: int) -> tuple[int, ...]:
        tokens: list[int] = []
        for _ in range(3):
            tokens.append(verified(params, 0, [*path, *tokens], (), model).recovered_token_ids[0])
        return tuple(tokens)

    def half_right(params: ResolvedSamplingParams, path: list[int], round_index: int) -> tuple[int, ...]:
        return *perfect(params, path, round_index)[:1], source.randrange(vocabulary_size), 0

    return {
        "honest": honest,
        "perfect": perfect,
        "half right": half_right,
        "noise": lambda params, path, index: tuple(source.choices(range(vocabulary_size), k=index % 6)),
        "one token": lambda params, path, index: (path[-1],) * 5,
        "stop tokens": lambda params, path, index: (*params.stop_token_ids, 0, 1)[:3],
    }


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_no_draft_changes_a_token_under_coupled_and_greedy(data: st.DataObject) -> None:
    """Claim: text and logprobs are the same with speculation off and with any draft, for any policy. Source: Daliri,
    Musco, Suresh 2025; docs/exactness.md. Conclusive: equality of tokens and of float bits, drafts that are right, half
    right, random and hostile, draft lengths 0 to 5, through the real sampler and rule.
    """
    params = data.draw(all_params(6, [Rule.COUPLED, Rule.GREEDY]))
    params = ResolvedSamplingParams(
        **{name: getattr(params, name) for name in params.__dataclass_fields__}
        | {"logprobs": 2, "stop_token_ids": tuple(t for t in params.stop_token_ids if t < 6)}
    )
    model = table(data.draw(st.integers(0, 1000)), 6)
    plain = generated(params, model, lambda *_: (), 8)
    for name, drafter in drafters(model, 6).items():
        assert generated(params, model, drafter, 8) == plain, name


def test_a_perfect_draft_is_always_accepted() -> None:
    """Claim: with the target's own logits every coupled proposal passes: both sides have one noise and distribution."""
    model = table(4, 40)
    params = ResolvedSamplingParams(
        Rule.COUPLED, seed=17, prompt_length=1, temperature=0.9, top_p=0.95, frequency_penalty=0.5
    )
    path = [0]
    for _ in range(30):
        proposal = propose([ProposalRequest(params, path, 40)], torch.tensor([model(path)]))[0]
        assert proposal.token_id == verified(params, 0, path, (), model).recovered_token_ids[0]
        path.append(proposal.token_id)


@pytest.mark.parametrize("keyed", ["seed", "position"])
@pytest.mark.parametrize("policy", [{}, {"temperature": 0.6, "top_k": 5}, {"top_p": 0.8}])
def test_coupled_and_rejection_tokens_have_the_target_distribution(policy: dict, keyed: str) -> None:
    """Claim: over adjacent seeds, or adjacent positions of one seed, the argmax of score + G has the target
    distribution, and so do the plain draws of REJECTION. Conclusive: chi-square, n = 4000, fixed keys, p limit 1e-6.
    """
    line = [0.0, 1.5, -1.0, 2.0, 0.5, 1.0, -2.0, 0.25]
    for rule in (Rule.COUPLED, Rule.REJECTION):
        requests = []
        for index in range(4000):
            seed, length = (index, 3) if keyed == "seed" else (7, 1 + index)
            requests.append(VerificationRequest(ResolvedSamplingParams(rule, seed, 1, **policy), 0, range(length)))
        found = verify(requests, [1] * 4000, torch.tensor([line] * 4000))
        counts = torch.bincount(torch.tensor([f.recovered_token_ids[0] for f in found]), minlength=8)
        wanted, _ = reference.sampled_distribution(requests[0].params, line, [0])
        assert chi_square_p(counts, wanted) > P_VALUE_LIMIT


def mixed_requests(width: int) -> tuple[list[VerificationRequest], list[int], torch.Tensor]:
    """Rounds of all rules, policies and draft lengths, as they meet in one step."""
    generator, requests = torch.Generator().manual_seed(3), []
    policies = [{}, {"top_k": 7}, {"top_p": 0.9, "min_p": 0.001}, {"frequency_penalty": 1.0, "logprobs": 3}]
    for index, (rule, policy) in enumerate(itertools.product(Rule, policies)):
        params = ResolvedSamplingParams(rule, index, 2, temperature=0.0 if rule is Rule.GREEDY else 0.8, **policy)
        length = index % 4
        proposed = propose(
            [
                ProposalRequest(params, [1, 2, 3], width, (uniform_bits(5, Lane.DRAFT, 1, node),))
                for node in range(length)
            ],
            torch.randn(length, width, generator=generator),
        )
        rows = tuple(p.draft_probs for p in proposed if p.draft_probs is not None)
        requests.append(VerificationRequest(params, index, [1, 2, 3], tuple(p.token_id for p in proposed), rows))
    counts = [request.row_count for request in requests]
    return requests, counts, torch.randn(sum(counts), width, generator=generator) * 2


@pytest.mark.parametrize("width", [9, 3000])
def test_a_request_does_not_depend_on_its_neighbours(width: int) -> None:
    """Claim: sampler output, logprobs included, is the same bits for a request alone, among all others, in reverse
    order and with two threads. Conclusive: equality of values with floats, for every rule and way to a support.
    """
    requests, counts, logits = mixed_requests(width)
    parts = list(logits.split(counts))
    alone = [verify([request], [count], part)[0] for request, count, part in zip(requests, counts, parts)]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert verify(requests, counts, logits) == alone
        assert verify(requests[::-1], counts[::-1], torch.cat(parts[::-1])) == alone[::-1]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Claim: log-softmax of the raw logits, whatever the policy, for draft and recovered tokens, likeliest first and
    ties to the lowest id. Conclusive: against torch's float64 log_softmax to 1e-12.
    """
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 0.0]] * 2)
    params = ResolvedSamplingParams(Rule.COUPLED, 3, 1, temperature=0.5, top_k=1, logit_bias=((5, 100.0),), logprobs=4)
    found = verify([VerificationRequest(params, 0, [0], (2,))], [2], logits)[0]
    expected = logits[0].double().log_softmax(0).tolist()
    assert found.recovered_token_ids == (5, 5) and len(found.draft_logprobs) == 1
    assert found.draft_logprobs[0] == pytest.approx(expected[2], rel=1e-12)
    for position in found.recovered_logprobs:
        assert position.top_token_ids == (1, 3, 2, 4)
        assert position.top_logprobs == pytest.approx([expected[t] for t in (1, 3, 2, 4)], rel=1e-12)
    assert found.recovered_logprobs[0].logprob == pytest.approx(expected[5], rel=1e-12)


def test_target_probability_is_zero_outside_the_support() -> None:
    """Claim: a draft token outside the target's support has probability 0, however the support was found, also a token
    beyond the logits' width; it cannot pass, even at u = 0.
    """
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 3)
    for policy in ({"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.2}):
        params = ResolvedSamplingParams(Rule.REJECTION, 3, 1, **policy)
        rows = (DraftProbs((3,), (1,)), DraftProbs((0, 9), (1, 1)))
        found = verify([VerificationRequest(params, 0, [0], (3, 9), rows)], [3], logits)[0]
        assert found.target_probs == (0.0, 0.0)
        assert decide(Rule.REJECTION, (3, 9), rows, found, (0.0, 0.0)).accepted_count == 0


def test_draws_of_one_generation_never_share_a_key() -> None:
    """Claim: accept and next draws of all rounds and positions of a session have keys of their own. Conclusive: the
    hash is a bijection in its last word and different lanes start elsewhere; here the values are simply all different.
    """
    draws = [
        uniform(6, lane, round_index, position)
        for lane in (Lane.ACCEPT, Lane.NEXT)
        for round_index in range(50)
        for position in range(round_index, round_index + 9)
    ]
    assert len(set(draws)) == len(draws)


def test_rows_must_fit_the_requests() -> None:
    """Claim: row counts that do not fit are refused before anything is computed."""
    request = VerificationRequest(ResolvedSamplingParams(Rule.GREEDY, 0, 1, temperature=0.0), 0, [0], (1,))
    for counts, rows in [([1], 1), ([2], 1), ([3], 3)]:
        with pytest.raises(ValueError):
            verify([request], counts, torch.zeros(rows, 4))
