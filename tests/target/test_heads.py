"""The proposer of heads beside the sampler: one row of each verification that wants proposals is computed."""

from __future__ import annotations

import torch

from specdec.decoding.verification import VerificationRequest
from specdec.engine.heads import Heads
from specdec.engine.interface import Chunk
from specdec.protocol.heads import HEAD_CANDIDATES
from specdec.protocol.types import ResolvedSamplingParams, Rule, SamplerOutput
from specdec.target_service.heads import HeadProposer

PARAMS = ResolvedSamplingParams(Rule.GREEDY, seed=0, prompt_length=1, temperature=0.0)
ROWS, HIDDEN_SIZE, VOCABULARY_SIZE, HEAD_COUNT = 3, 8, 11, 2
CHUNKS = [Chunk((1,), 1, [1, 2, 2], 3)] * 3  # which these heads do not read


class Counting:
    """An output layer that counts its rows."""

    def __init__(self) -> None:
        self.weight = torch.randn(HIDDEN_SIZE, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1))
        self.row_counts: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.row_counts.append(len(x))
        return x.float() @ self.weight


def request(wants: bool, draft_count: int = ROWS - 1) -> VerificationRequest:
    return VerificationRequest(PARAMS, 0, [1], (2,) * draft_count, wants_heads=wants)


def test_one_row_of_requests_that_want_proposals_is_computed() -> None:
    """Claim: without a request that wants proposals the outputs come back as they are and the output layer is not
    called; of three requests one row of each of the two that want is computed, that after its last accepted token, and
    they alone get proposals. Conclusive: the rows are counted, and differ between the requests, as their lengths do."""
    output, outputs = Counting(), [SamplerOutput((2, 1, 1)), SamplerOutput((1, 1, 1)), SamplerOutput((2, 1))]
    proposer = HeadProposer(Heads(HEAD_COUNT, HIDDEN_SIZE).requires_grad_(False), output)
    hidden = list(torch.randn(3, ROWS, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2)))
    hidden[2] = hidden[2][:2]
    asked = [request(True), request(False), request(True, 1)]
    assert proposer([request(False)] * 3, CHUNKS, hidden, outputs) is outputs and not output.row_counts
    for outputs[0], row in (
        (SamplerOutput((1, 2, 2)), 0),
        (SamplerOutput((2, 1, 1)), 1),
        (SamplerOutput((2, 2, 1)), 2),
    ):
        output.row_counts.clear()
        found = proposer(asked, CHUNKS, hidden, outputs)
        assert output.row_counts == [2 * HEAD_COUNT]
        assert found[1] is outputs[1] and [one.recovered_token_ids for one in found] == [
            one.recovered_token_ids for one in outputs
        ]
        for index, own in ((0, row), (2, 1)):  # new heads give the hidden state as it is
            wanted = (hidden[index][own] @ output.weight).topk(HEAD_CANDIDATES).indices.tolist()
            heads = found[index].head_proposals.candidates
            assert [[candidate.token_id for candidate in head] for head in heads] == [wanted] * HEAD_COUNT


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
