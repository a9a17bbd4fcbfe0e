"""Proposals: drawn exactly from the draft distribution that is sent, inside the target's vocabulary."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding import noise
from specdec.decoding.proposal import PROPOSAL_PROBS_TOKENS_MAX, ProposalRequest, draw, propose
from specdec.decoding.topk import top
from specdec.decoding.verification import VerificationRequest, verify
from specdec.protocol.types import (
    DRAFT_PROBS_WEIGHT_CODES,
    DRAFT_PROBS_WEIGHTS,
    DraftProbs,
    ResolvedSamplingParams,
    Rule,
)
from tests.exactness import reference
from tests.support.plain_noise import gumbel


def params_of(rule: Rule = Rule.REJECTION, **policy: object) -> ResolvedSamplingParams:
    """Parameters of any rule."""
    return ResolvedSamplingParams(
        rule, **{"seed": 2, "prompt_length": 1, "temperature": 0.0 if rule is Rule.GREEDY else 1.0, **policy}
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 0xFFFF), min_size=1, max_size=32))
def test_a_draw_follows_its_row_to_one_part_in_2_to_the_53(weights: list[int]) -> None:
    """Claim: of the 2**53 equally likely integers each token gets its share, weight / total, to within one integer.
    Conclusive: the borders are computed as fractions and the real function is evaluated on both sides of each.
    """
    row = DraftProbs(tuple(range(3, 3 + len(weights))), tuple(weights))
    borders = [Fraction(bound << 53, row.total) for bound in (0, *itertools.accumulate(weights))]
    for token_id, (low, high) in zip(row.token_ids, itertools.pairwise(borders)):
        assert draw(row, -(-low.numerator // low.denominator)) == token_id
        assert draw(row, -(-high.numerator // high.denominator) - 1) == token_id


@pytest.mark.parametrize("policy", [{}, {"top_k": 3}, {"top_k": 100}, {"top_p": 0.6}, {"temperature": 0.05}])
def test_draft_probs_hold_the_likeliest_tokens(policy: dict) -> None:
    """Claim: a draft distribution is the sampled distribution of the draft's logits: its support if small, else its 96
    likeliest tokens, 65535 for the likeliest, weights that round to 0 left out. Conclusive: against the reference.
    """
    logits = torch.randn(1, 80, generator=torch.Generator().manual_seed(1)) * 2
    params = params_of(**policy)
    row = propose([ProposalRequest(params, [0], 80, (0,))], logits)[0].draft_probs
    wanted, _ = reference.sampled_distribution(params, logits[0].tolist(), [0])
    likeliest = sorted(range(80), key=lambda token: -wanted[token])[:PROPOSAL_PROBS_TOKENS_MAX]
    shares = {token: wanted[token] / max(wanted) for token in sorted(likeliest) if wanted[token] > 0}
    nearest = {token: nearest_weight(share) for token, share in shares.items()}
    assert dict(zip(row.token_ids, row.weights)) == {token: weight for token, weight in nearest.items() if weight}
    assert max(row.weights) == 65535


def nearest_weight(share: float) -> int:
    """The DraftProbs weight whose share of the largest is nearest in ratio; 0 beyond the scale's end."""
    steps = round(-16 * math.log2(share))
    return DRAFT_PROBS_WEIGHTS[steps] if steps < len(DRAFT_PROBS_WEIGHTS) else 0


def test_the_weights_a_row_can_carry_are_a_fine_scale_of_integers() -> None:
    """Claim: 256 weights, each at least 1 and none above the one before, sixteen to the octave: wherever a weight is
    32 or more, neighbours differ by 4.4 % (rounded down to an integer: by 7.5 % at most), so a share is off by half of
    that. All are listed, so all are checked. Codes name the same weights back."""
    assert len(DRAFT_PROBS_WEIGHTS) == 256 and DRAFT_PROBS_WEIGHTS[0] == 65535 and min(DRAFT_PROBS_WEIGHTS) == 1
    for code, (weight, following) in enumerate(itertools.pairwise(DRAFT_PROBS_WEIGHTS)):
        assert weight >= following
        assert following < 32 or weight / following < 1.075, code
    assert all(DRAFT_PROBS_WEIGHTS[DRAFT_PROBS_WEIGHT_CODES[weight]] == weight for weight in DRAFT_PROBS_WEIGHTS)


def test_ids_the_target_lacks_are_never_proposed() -> None:
    """Claim: ids from the target's vocabulary size on are in no proposal and no draft distribution, for every rule,
    also when sessions with different targets meet in one call.
    """
    logits = torch.arange(10, dtype=torch.float32).repeat(6, 1)
    all_params = [params_of(rule) for rule in Rule] * 2
    sizes = [4, 4, 4, 10, 10, 1000]
    found = propose([ProposalRequest(params, [0], size, (0,)) for params, size in zip(all_params, sizes)], logits)
    for params, size, proposal in zip(all_params, sizes, found):
        assert proposal.token_id < min(size, 10)
        if params.rule is Rule.GREEDY:
            assert proposal.token_id == min(size, 10) - 1
        if proposal.draft_probs is not None:
            proposal.draft_probs.check_proposal(proposal.token_id, min(size, 10))
            assert proposal.draft_probs.token_ids == tuple(range(min(size, 10)))


def test_confidences_are_those_of_the_distribution_of_the_token() -> None:
    """Claim: confidence is the softmax's for GREEDY, the draft distribution's for REJECTION, and for COUPLED that of
    the scores with the noise of the same position: how clear the choice was. Conclusive: from the definitions."""
    logits = torch.tensor([[0.5, 2.0, 1.0, -1.0]])
    softmax, _ = reference.sampled_distribution(params_of(), logits[0].tolist(), [0])
    for params in (params_of(Rule.GREEDY), params_of(Rule.COUPLED, top_p=0.9), params_of(top_k=2)):
        proposal = propose([ProposalRequest(params, [0], 4, (1 << 52,), branch_count=3)], logits)[0]
        wanted = (
            softmax
            if params.rule is Rule.GREEDY
            else reference.sampled_distribution(params, logits[0].tolist(), [0])[0]
        )
        if proposal.draft_probs is not None:
            wanted = [proposal.draft_probs.probability(token_id) for token_id in range(4)]
        if params.rule is Rule.COUPLED:
            noisy = [p * math.exp(gumbel(params.seed, 1, token_id)) for token_id, p in enumerate(wanted)]
            wanted = [value / sum(noisy) for value in noisy]
        assert dict(proposal.guesses) == pytest.approx({t: p for t, p in enumerate(wanted) if p}, rel=1e-4)
        others = [confidence for _, confidence in proposal.guesses[1:]]
        assert others == sorted(others, reverse=True), "branch guesses come best first"


@pytest.mark.parametrize("policy", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"repetition_penalty": 1.5}])
def test_coupled_proposals_are_the_targets_own_draw_on_the_same_logits(policy: dict) -> None:
    """Claim: on the target's logits the draft proposes the target's token at 199 of 200 positions at least: it reads
    the likeliest few hundred tokens, and noise seldom lifts another to the top. A guess may be wrong, so only a share
    is claimed; the logits are as steep as those of language (standard deviation 4)."""
    logits = torch.randn(200, 1500, generator=torch.Generator().manual_seed(4)) * 4
    params, path = params_of(Rule.COUPLED, **policy), [0, 1, 2]
    proposed = propose([ProposalRequest(params, path + [5] * row, 1500) for row in range(200)], logits)
    taken = [
        verify([VerificationRequest(params, 0, path + [5] * row)], [1], logits[row : row + 1])[0].recovered_token_ids[0]
        for row in range(200)
    ]
    assert sum(p.token_id == token_id for p, token_id in zip(proposed, taken)) >= 199


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_coupled_proposals_over_a_small_vocabulary_are_the_argmax_with_all_noise(temperature: float) -> None:
    """Claim: with kept noise, several nodes at one position, other seeds beside them and rows computed in parts, the
    guesses are the tokens of highest log p / temperature + noise over the whole vocabulary, in order. Source: the
    definition in float64 with `decoding.noise.gumbel`. Conclusive: equality of every guess of 150 rows of 4,100 tokens,
    asked twice: the second time all noise is kept."""
    logits = torch.randn(150, 4100, generator=torch.Generator().manual_seed(6)) * 4
    keys = [(seed, 3 + row % 7) for row, seed in enumerate([5, 6, 7] * 50)]
    requests = [
        ProposalRequest(params_of(Rule.COUPLED, seed=seed, temperature=temperature), [1] * position, 4100, (0,), 3)
        for seed, position in keys
    ]
    all_noise = noise.gumbel(noise.gumbel_keys(*zip(*keys), torch.device("cpu")), torch.arange(4100)[None])
    wanted = (logits.double() / temperature + all_noise).topk(4, dim=1).indices.tolist()
    for _ in range(2):
        assert [[token_id for token_id, _ in own.guesses] for own in propose(requests, logits)] == wanted


@pytest.mark.parametrize("width", [7, 300, 2048, 4096, 5001])
@pytest.mark.parametrize("count", [1, 4, 7, 96])
def test_the_largest_of_each_row_are_found(width: int, count: int) -> None:
    """Claim: `top` returns the library's largest numbers, in order, and columns that hold them: for every way to find
    them, rows of any width, in views with gaps, among equal numbers and infinities. Conclusive: against a full sort."""
    count = min(count, width)
    whole = torch.randn(9, width + 3, generator=torch.Generator().manual_seed(width))
    whole[1] = whole[1].round()  # many equal ones
    whole[2, : width // 2] = -math.inf
    whole[3] = 0
    values = whole[:, :width]
    found, columns = top(values, count)
    assert torch.equal(found, values.sort(dim=1, descending=True).values[:, :count])
    assert torch.equal(values.gather(1, columns), found)
    assert all(len(set(row)) == count for row in columns.tolist())
