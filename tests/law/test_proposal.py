"""Proposals: drawn exactly from the row that is sent, inside the target's vocabulary."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.evidence import EvidenceRequest, evidence
from specdec.decoding.proposal import PROPOSAL_ROW_TOKENS_MAX, ProposalRequest, draw, propose
from specdec.protocol.types import ROW_WEIGHT_CODES, ROW_WEIGHTS, Law, Row, Rule
from tests.law import reference
from tests.support.plain_noise import gumbel


def law_of(rule: Rule = Rule.REJECTION, **policy: object) -> Law:
    """A law of any rule."""
    return Law(rule, seed=2, **{"prompt_length": 1, "temperature": 0.0 if rule is Rule.GREEDY else 1.0, **policy})


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 0xFFFF), min_size=1, max_size=32))
def test_a_draw_follows_its_row_to_one_part_in_2_to_the_53(weights: list[int]) -> None:
    """Claim: of the 2**53 equally likely integers each token gets its share, weight / total, to within one integer.
    Conclusive: the borders are computed as fractions and the real function is evaluated on both sides of each.
    """
    row = Row(tuple(range(3, 3 + len(weights))), tuple(weights))
    borders = [Fraction(bound << 53, row.total) for bound in (0, *itertools.accumulate(weights))]
    for token_id, (low, high) in zip(row.token_ids, itertools.pairwise(borders)):
        assert draw(row, -(-low.numerator // low.denominator)) == token_id
        assert draw(row, -(-high.numerator // high.denominator) - 1) == token_id


@pytest.mark.parametrize("policy", [{}, {"top_k": 3}, {"top_k": 100}, {"top_p": 0.6}, {"temperature": 0.05}])
def test_rows_hold_the_likeliest_of_the_sampled_law(policy: dict) -> None:
    """Claim: a row is the draft's sampled law: its support if small, else its 96 likeliest tokens, weights in
    proportion to 65535 for the likeliest, those that round to 0 left out. Conclusive: against the reference law.
    """
    logits = torch.randn(1, 80, generator=torch.Generator().manual_seed(1)) * 2
    law = law_of(**policy)
    row = propose([ProposalRequest(law, [0], 80, 0)], logits)[0].row
    wanted, _ = reference.sampled_law(law, logits[0].tolist(), [0])
    likeliest = sorted(range(80), key=lambda token: -wanted[token])[:PROPOSAL_ROW_TOKENS_MAX]
    shares = {token: wanted[token] / max(wanted) for token in sorted(likeliest) if wanted[token] > 0}
    nearest = {token: nearest_weight(share) for token, share in shares.items()}
    assert dict(zip(row.token_ids, row.weights)) == {token: weight for token, weight in nearest.items() if weight}
    assert max(row.weights) == 65535


def nearest_weight(share: float) -> int:
    """The weight a row can carry whose share of the largest is nearest in ratio; 0 beyond the scale's end."""
    steps = round(-16 * math.log2(share))
    return ROW_WEIGHTS[steps] if steps < len(ROW_WEIGHTS) else 0


def test_the_weights_a_row_can_carry_are_a_fine_scale_of_integers() -> None:
    """Claim: 256 weights, each at least 1 and none above the one before, sixteen to the octave: wherever a weight is
    32 or more, neighbours differ by 4.4 % (rounded down to an integer: by 7.5 % at most), so a share is off by half of
    that. All are listed, so all are checked. Codes name the same weights back."""
    assert len(ROW_WEIGHTS) == 256 and ROW_WEIGHTS[0] == 65535 and min(ROW_WEIGHTS) == 1
    for code, (weight, following) in enumerate(itertools.pairwise(ROW_WEIGHTS)):
        assert weight >= following
        assert following < 32 or weight / following < 1.075, code
    assert all(ROW_WEIGHTS[ROW_WEIGHT_CODES[weight]] == weight for weight in ROW_WEIGHTS)


def test_ids_the_target_lacks_are_never_proposed() -> None:
    """Claim: ids from the target's vocabulary size on stay out of the proposal, of the row and of the law, for every
    rule, also when sessions with different targets meet in one call.
    """
    logits = torch.arange(10, dtype=torch.float32).repeat(6, 1)
    laws = [law_of(rule) for rule in Rule] * 2
    sizes = [4, 4, 4, 10, 10, 1000]
    found = propose([ProposalRequest(law, [0], size, 0) for law, size in zip(laws, sizes)], logits)
    for law, size, proposal in zip(laws, sizes, found):
        assert proposal.token_id < min(size, 10)
        if law.rule is Rule.GREEDY:
            assert proposal.token_id == min(size, 10) - 1
        if proposal.row is not None:
            proposal.row.check_proposal(proposal.token_id, min(size, 10))
            assert proposal.row.token_ids == tuple(range(min(size, 10)))


def test_confidences_are_those_of_the_law_the_token_follows() -> None:
    """Claim: confidence is the softmax's for GREEDY, the row's own for REJECTION, and for COUPLED that of the scores
    with the noise of this very position: so it says how clear the choice was. Recomputed here from the definitions."""
    logits = torch.tensor([[0.5, 2.0, 1.0, -1.0]])
    softmax, _ = reference.sampled_law(law_of(), logits[0].tolist(), [0])
    for law in (law_of(Rule.GREEDY), law_of(Rule.COUPLED, top_p=0.9), law_of(top_k=2)):
        proposal = propose([ProposalRequest(law, [0], 4, 1 << 52, branch_count=3)], logits)[0]
        wanted = softmax if law.rule is Rule.GREEDY else reference.sampled_law(law, logits[0].tolist(), [0])[0]
        if proposal.row is not None:
            wanted = [proposal.row.probability(token_id) for token_id in range(4)]
        if law.rule is Rule.COUPLED:
            noisy = [p * math.exp(gumbel(law.seed, 1, token_id)) for token_id, p in enumerate(wanted)]
            wanted = [value / sum(noisy) for value in noisy]
        assert dict(proposal.guesses) == pytest.approx({t: p for t, p in enumerate(wanted) if p}, rel=1e-4)
        others = [confidence for _, confidence in proposal.guesses[1:]]
        assert others == sorted(others, reverse=True), "branch guesses come best first"


@pytest.mark.parametrize("policy", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"repetition_penalty": 1.5}])
def test_coupled_proposals_are_the_targets_own_draw_on_the_same_logits(policy: dict) -> None:
    """Claim: on the logits the target has, the draft proposes the token the target takes, in at least 199 of 200
    places: it looks at the likeliest few hundred tokens, and noise seldom lifts another to the top. A guess may be
    wrong, so a share is what matters; the logits are as steep as those of language (standard deviation 4)."""
    logits = torch.randn(200, 1500, generator=torch.Generator().manual_seed(4)) * 4
    law, path = law_of(Rule.COUPLED, **policy), [0, 1, 2]
    proposed = propose([ProposalRequest(law, path + [5] * row, 1500) for row in range(200)], logits)
    taken = [
        evidence([EvidenceRequest(law, 0, path + [5] * row)], [1], logits[row : row + 1])[0].replacement_token_ids[0]
        for row in range(200)
    ]
    assert sum(p.token_id == token_id for p, token_id in zip(proposed, taken)) >= 199
