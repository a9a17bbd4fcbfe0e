"""A call of the target's sampler for one verification, on made-up logits.

A token's probability falls with the square of its rank, so that 0.95 of the mass lies on about a dozen tokens, as in
real text. No model is used.
"""

from __future__ import annotations

import time

import torch

from specdec.decoding.verification import VerificationRequest, verify
from specdec.protocol.types import DraftProbs, ResolvedSamplingParams, Rule

ALL_PARAMS: dict[str, ResolvedSamplingParams] = {
    "GREEDY": ResolvedSamplingParams(Rule.GREEDY, 1, 1, temperature=0),
    "COUPLED, temperature 0.7": ResolvedSamplingParams(Rule.COUPLED, 1, 1, temperature=0.7),
    "COUPLED, 0.7, top-p 0.95": ResolvedSamplingParams(Rule.COUPLED, 1, 1, temperature=0.7, top_p=0.95),
    "REJECTION, temperature 1": ResolvedSamplingParams(Rule.REJECTION, 1, 1, temperature=1.0),
    "REJECTION, 0.7, top-p 0.95": ResolvedSamplingParams(Rule.REJECTION, 1, 1, temperature=0.7, top_p=0.95),
}
ROW_TOKENS = 96  # of a draft distribution, the most the draft sends
COMMITTED = tuple(range(1, 101))
CALLS = 5  # of a turn


def made_up_logits(row_count: int, vocabulary_size: int) -> torch.Tensor:
    """Each row another order of the tokens.  # [rows, vocabulary] float32"""
    generator = torch.Generator().manual_seed(vocabulary_size)
    by_rank = -2 * torch.arange(1, vocabulary_size + 1, dtype=torch.float32).log()
    return torch.stack([by_rank[torch.randperm(vocabulary_size, generator=generator)] for _ in range(row_count)])


def request_of(params: ResolvedSamplingParams, logits: torch.Tensor) -> VerificationRequest:
    """Returns a verification of each row's likeliest token; under REJECTION with a draft distribution."""
    order = logits[:-1].topk(ROW_TOKENS, dim=1).indices
    token_ids = tuple(order[:, 0].tolist())
    if params.rule is not Rule.REJECTION:
        return VerificationRequest(params, 0, COMMITTED, token_ids)
    rows = tuple(DraftProbs(tuple(sorted(line)), (1,) * ROW_TOKENS) for line in order.tolist())
    return VerificationRequest(params, 0, COMMITTED, token_ids, rows)


@torch.inference_mode()
def sampler_ms(request: VerificationRequest, logits: torch.Tensor) -> float:
    """The least of CALLS calls, in milliseconds."""
    seconds = []
    for _ in range(CALLS):
        began_s = time.perf_counter()
        verify([request], [request.row_count], logits)
        seconds.append(time.perf_counter() - began_s)
    return 1e3 * min(seconds)
