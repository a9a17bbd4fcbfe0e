"""Evidence: draws exact to the last bit, COUPLED and GREEDY equal with and without drafts, logprobs, batches."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rejection import decide
from specdec.decoding.evidence import EvidenceRequest, evidence, inverse_cdf, replacement_columns
from specdec.decoding.proposal import ProposalRequest, propose
from specdec.protocol.noise import Lane, mix64, uniform, uniform_bits
from specdec.protocol.types import Evidence, Law, PositionLogprobs, Row, Rule
from tests.law import reference
from tests.law.policies import laws
from tests.law.statistics import P_VALUE_LIMIT, chi_square_p

BELOW_ONE = 1 - 2.0**-53  # the largest uniform number
Drafter = Callable[[Law, list[int], int], tuple[int, ...]]


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
        return int(replacement_columns(target, *entries, [u]))

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


def verified(law: Law, round_index: int, path: list[int], tokens: tuple[int, ...], model: Callable) -> Evidence:
    """The real evidence for one round over the model."""
    logits = torch.tensor([model([*path, *tokens[:offset]]) for offset in range(len(tokens) + 1)])
    return evidence([EvidenceRequest(law, round_index, path, tokens)], [len(tokens) + 1], logits)[0]


def generated(law: Law, model: Callable, drafter: Drafter, count: int) -> tuple[list[int], list[PositionLogprobs]]:
    """Output tokens and their logprobs through evidence and decide, with whatever the drafter offers."""
    path, logprobs, round_index = [0] * law.prompt_length, [], 0
    while len(path) < law.prompt_length + count:
        tokens = drafter(law, path, round_index)
        found = verified(law, round_index, path, tokens, model)
        verdict = decide(law.rule, tokens, (), found, ())
        path += [*tokens[: verdict.accepted_count], verdict.next_token_id]
        if law.logprobs is not None:
            accepted = found.draft_logprobs[: verdict.accepted_count]
            logprobs += [*accepted, found.replacement_logprobs[verdict.accepted_count]]
        round_index += 1
    return path[law.prompt_length :][:count], logprobs[:count]


def drafters(model: Callable, vocabulary_size: int) -> dict[str, Drafter]:
    """An honest draft with another model, a perfect one, and some that wish to do harm."""
    other, source = table(99, vocabulary_size), random.Random(5)

    def honest(law: Law, path: list[int], round_index: int) -> tuple[int, ...]:
        tokens: list[int] = []
        for _ in range(round_index % 4):
            before = [*path, *tokens]
            logits = torch.tensor([other(before)])
            tokens.append(propose([ProposalRequest(law, before, vocabulary_size)], logits)[0].token_id)
        return tuple(tokens)

    def perfect(law: Law, path: list[int], round_index: int) -> tuple[int, ...]:
        tokens: list[int] = []
        for _ in range(3):
            tokens.append(verified(law, 0, [*path, *tokens], (), model).replacement_token_ids[0])
        return tuple(tokens)

    def half_right(law: Law, path: list[int], round_index: int) -> tuple[int, ...]:
        return *perfect(law, path, round_index)[:1], source.randrange(vocabulary_size), 0

    return {
        "honest": honest,
        "perfect": perfect,
        "half right": half_right,
        "noise": lambda law, path, index: tuple(source.choices(range(vocabulary_size), k=index % 6)),
        "one token": lambda law, path, index: (path[-1],) * 5,
        "stop tokens": lambda law, path, index: (*law.stop_token_ids, 0, 1)[:3],
    }


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_no_draft_changes_a_token_under_coupled_and_greedy(data: st.DataObject) -> None:
    """Claim: text and logprobs are the same with speculation off and with any draft, for any policy. Source: Daliri,
    Musco, Suresh 2025; docs/exactness.md. Conclusive: equality of tokens and of float bits, drafts that are right, half
    right, random and hostile, draft lengths 0 to 5, through the real evidence and rule.
    """
    law = data.draw(laws(6, [Rule.COUPLED, Rule.GREEDY]))
    law = Law(
        **{name: getattr(law, name) for name in law.__dataclass_fields__}
        | {"logprobs": 2, "stop_token_ids": tuple(t for t in law.stop_token_ids if t < 6)}
    )
    model = table(data.draw(st.integers(0, 1000)), 6)
    plain = generated(law, model, lambda *_: (), 8)
    for name, drafter in drafters(model, 6).items():
        assert generated(law, model, drafter, 8) == plain, name


def test_a_perfect_draft_is_always_accepted() -> None:
    """Claim: with the target's own logits every coupled proposal passes: both sides use the same noise and law."""
    model = table(4, 40)
    law = Law(Rule.COUPLED, seed=17, prompt_length=1, temperature=0.9, top_p=0.95, frequency_penalty=0.5)
    path = [0]
    for _ in range(30):
        proposal = propose([ProposalRequest(law, path, 40)], torch.tensor([model(path)]))[0]
        assert proposal.token_id == verified(law, 0, path, (), model).replacement_token_ids[0]
        path.append(proposal.token_id)


@pytest.mark.parametrize("keyed", ["seed", "position"])
@pytest.mark.parametrize("policy", [{}, {"temperature": 0.6, "top_k": 5}, {"top_p": 0.8}])
def test_coupled_and_rejection_tokens_follow_the_law(policy: dict, keyed: str) -> None:
    """Claim: over adjacent seeds, or adjacent positions of one seed, the argmax of score + G follows the sampled law,
    and so do the plain draws of REJECTION. Conclusive: chi-square, n = 4000, fixed keys, p limit 1e-6.
    """
    line = [0.0, 1.5, -1.0, 2.0, 0.5, 1.0, -2.0, 0.25]
    for rule in (Rule.COUPLED, Rule.REJECTION):
        requests = []
        for index in range(4000):
            seed, length = (index, 3) if keyed == "seed" else (7, 1 + index)
            requests.append(EvidenceRequest(Law(rule, seed, 1, **policy), 0, range(length)))
        found = evidence(requests, [1] * 4000, torch.tensor([line] * 4000))
        counts = torch.bincount(torch.tensor([f.replacement_token_ids[0] for f in found]), minlength=8)
        wanted, _ = reference.sampled_law(requests[0].law, line, [0])
        assert chi_square_p(counts, wanted) > P_VALUE_LIMIT


def mixed_requests(width: int) -> tuple[list[EvidenceRequest], list[int], torch.Tensor]:
    """Rounds of all rules, policies and draft lengths, as they meet in one step."""
    generator, requests = torch.Generator().manual_seed(3), []
    policies = [{}, {"top_k": 7}, {"top_p": 0.9, "min_p": 0.001}, {"frequency_penalty": 1.0, "logprobs": 3}]
    for index, (rule, policy) in enumerate(itertools.product(Rule, policies)):
        law = Law(rule, index, 2, temperature=0.0 if rule is Rule.GREEDY else 0.8, **policy)
        length = index % 4
        proposed = propose(
            [ProposalRequest(law, [1, 2, 3], width, uniform_bits(5, Lane.DRAFT, 1, node)) for node in range(length)],
            torch.randn(length, width, generator=generator),
        )
        rows = tuple(p.row for p in proposed if p.row is not None)
        requests.append(EvidenceRequest(law, index, [1, 2, 3], tuple(p.token_id for p in proposed), rows))
    counts = [request.row_count for request in requests]
    return requests, counts, torch.randn(sum(counts), width, generator=generator) * 2


@pytest.mark.parametrize("width", [9, 3000])
def test_a_request_does_not_depend_on_its_neighbours(width: int) -> None:
    """Claim: evidence, logprobs included, is the same bits for a request alone, among all others, in reverse order and
    with two threads. Conclusive: equality of values that hold floats, every rule and way to a support among them.
    """
    requests, counts, logits = mixed_requests(width)
    parts = list(logits.split(counts))
    alone = [evidence([request], [count], part)[0] for request, count, part in zip(requests, counts, parts)]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert evidence(requests, counts, logits) == alone
        assert evidence(requests[::-1], counts[::-1], torch.cat(parts[::-1])) == alone[::-1]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Claim: log-softmax of the raw logits, whatever the policy, for draft and replacement tokens, likeliest first and
    ties to the lowest id. Conclusive: against torch's float64 log_softmax to 1e-12.
    """
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 0.0]] * 2)
    law = Law(Rule.COUPLED, 3, 1, temperature=0.5, top_k=1, logit_bias=((5, 100.0),), logprobs=4)
    found = evidence([EvidenceRequest(law, 0, [0], (2,))], [2], logits)[0]
    expected = logits[0].double().log_softmax(0).tolist()
    assert found.replacement_token_ids == (5, 5) and len(found.draft_logprobs) == 1
    assert found.draft_logprobs[0].logprob == pytest.approx(expected[2], rel=1e-12)
    for position in (*found.draft_logprobs, *found.replacement_logprobs):
        assert position.top_token_ids == (1, 3, 2, 4)
        assert position.top_logprobs == pytest.approx([expected[t] for t in (1, 3, 2, 4)], rel=1e-12)
    assert found.replacement_logprobs[0].logprob == pytest.approx(expected[5], rel=1e-12)


def test_target_probability_is_zero_outside_the_support() -> None:
    """Claim: a draft token the target's law excludes has probability 0, whichever way its support was found, also a
    token beyond the logits' width; then it cannot pass, even at u = 0.
    """
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 3)
    for policy in ({"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.2}):
        law = Law(Rule.REJECTION, 3, 1, **policy)
        rows = (Row((3,), (1,)), Row((0, 9), (1, 1)))
        found = evidence([EvidenceRequest(law, 0, [0], (3, 9), rows)], [3], logits)[0]
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
    request = EvidenceRequest(Law(Rule.GREEDY, 0, 1, temperature=0.0), 0, [0], (1,))
    for counts, rows in [([1], 1), ([2], 1), ([3], 3)]:
        with pytest.raises(ValueError):
            evidence([request], counts, torch.zeros(rows, 4))
