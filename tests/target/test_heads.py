"""The proposer of heads beside the sampler: one row of each verification that wants proposals is computed."""

from __future__ import annotations

import torch

from specdec.decoding.verification import VerificationRequest
from specdec.engine.heads import Heads
from specdec.protocol.heads import HEAD_CANDIDATES
from specdec.protocol.types import ResolvedSamplingParams, Rule, SamplerOutput
from specdec.target_service.heads import HeadProposer

PARAMS = ResolvedSamplingParams(Rule.GREEDY, seed=0, prompt_length=1, temperature=0.0)
ROWS, HIDDEN_SIZE, VOCABULARY_SIZE, HEAD_COUNT = 3, 8, 11, 2


class Counting:
    """An output layer that counts its rows."""

    def __init__(self) -> None:
        self.weight = torch.randn(HIDDEN_SIZE, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1))
        self.row_counts: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.row_counts.append(len(x))
        return x.float() @ self.weight


def request(wants: bool) -> VerificationRequest:
    return VerificationRequest(PARAMS, 0, [1], (2,) * (ROWS - 1), wants_heads=wants)


def test_one_row_of_requests_that_want_proposals_is_computed() -> None:
    """Claim: without a request that wants proposals the outputs come back as they are and the output layer is not
    called; of three requests one row of the one that wants is computed, that after its last accepted token, and it
    alone gets proposals. Conclusive: the rows are counted."""
    output, outputs = Counting(), [SamplerOutput((2, 1, 1)) for _ in range(3)]  # the first draft token is accepted
    proposer = HeadProposer(Heads(HEAD_COUNT, HIDDEN_SIZE).requires_grad_(False), output)
    hidden = torch.randn(3, ROWS, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
    assert proposer([request(False)] * 3, list(hidden), outputs) is outputs and not output.row_counts
    found = proposer([request(False), request(True), request(False)], list(hidden), outputs)
    assert output.row_counts == [HEAD_COUNT]
    assert found[0] is outputs[0] and found[2] is outputs[2] and found[1].recovered_token_ids == (2, 1, 1)
    wanted = (hidden[1, 1] @ output.weight).topk(HEAD_CANDIDATES).indices  # new heads give the hidden state as it is
    heads = found[1].head_proposals.candidates
    assert [[candidate.token_id for candidate in head] for head in heads] == [wanted.tolist()] * HEAD_COUNT


def test_values_that_are_no_numbers_give_bytes() -> None:
    """Claim: rows with not-a-number, which fail their request after the sampler, raise nothing here, and do not change
    the proposals of other rows."""
    proposer = HeadProposer(Heads(HEAD_COUNT, HIDDEN_SIZE).requires_grad_(False), Counting())
    hidden = torch.randn(4, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
    plain = proposer.propose(hidden)
    hidden[1] = torch.nan
    found, size = proposer.propose(hidden), HEAD_COUNT * HEAD_CANDIDATES
    assert all(0 <= own <= 255 for own in found[1])
    assert all(one[: 1 * size] + one[2 * size :] == two[: 1 * size] + two[2 * size :] for one, two in zip(found, plain))
