"""The shares by rank: which of the draft's guesses came true."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from bench.pipeline.ranks import token_by_rejection
from specdec.decoding.proposal import ProposalRequest, propose
from specdec.protocol.noise import UNIFORM_BITS
from specdec.protocol.types import ResolvedSamplingParams, Rule

SAMPLES = 2000


@pytest.mark.parametrize("drawn_count", [1, 3])
def test_tokens_after_tested_siblings_follow_the_target(drawn_count: int) -> None:
    """Claim: the committed token follows the target distribution whatever number of siblings is drawn and tested, and
    more of them hold it more often. Conclusive: by the draft's distribution the shares would differ by 0.3."""
    params = ResolvedSamplingParams(rule=Rule.REJECTION, seed=1, prompt_length=1, temperature=1.0)
    target, draft = torch.tensor([1.0, 0.0, 1.5, -1.0]), torch.tensor([2.0, 1.0, 0.0, 0.0])
    chance = random.Random(3)
    counts, held = Counter[int](), 0
    for _ in range(SAMPLES):
        draws = tuple(chance.getrandbits(UNIFORM_BITS) for _ in range(drawn_count))
        (proposal,) = propose([ProposalRequest(params, (0,), 4, draws, 2)], draft[None])
        offered = [token_id for token_id, _ in proposal.guesses][:drawn_count]
        token_id = token_by_rejection(params, (0,), target, proposal, offered, [chance.random() for _ in offered])
        counts[token_id] += 1
        held += token_id in offered
    for token_id, share in enumerate(target.softmax(0).tolist()):
        assert counts[token_id] / SAMPLES == pytest.approx(share, abs=0.06)
    assert (held > 0.7 * SAMPLES) is (drawn_count == 3)
