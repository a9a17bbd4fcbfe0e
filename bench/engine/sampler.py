"""Time of the target's sampler, and of its noise alone, by vocabulary, rule and rows.

Logits are synthetic: a token's probability falls with the square of its rank, so that 0.95 of the mass lies on about a
dozen tokens, as in real text. No model is used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.decoding.distribution import sampled_distribution
from specdec.decoding.noise import gumbel, gumbel_keys
from specdec.decoding.verification import VerificationRequest, verify
from specdec.protocol.noise import Lane, uniform
from specdec.protocol.types import DraftProbs, ResolvedSamplingParams, Rule

VOCABULARIES = (4096, 32000, 128256, 151936)
ROWS = (1, 5)
ALL_PARAMS: dict[str, ResolvedSamplingParams] = {
    "GREEDY": ResolvedSamplingParams(Rule.GREEDY, 1, 1, temperature=0),
    "COUPLED, temperature 0.7": ResolvedSamplingParams(Rule.COUPLED, 1, 1, temperature=0.7),
    "COUPLED, 0.7, top-p 0.95": ResolvedSamplingParams(Rule.COUPLED, 1, 1, temperature=0.7, top_p=0.95),
    "REJECTION, temperature 1": ResolvedSamplingParams(Rule.REJECTION, 1, 1, temperature=1.0),
    "REJECTION, 0.7, top-p 0.95": ResolvedSamplingParams(Rule.REJECTION, 1, 1, temperature=0.7, top_p=0.95),
}
ROW_TOKENS = 96  # of a draft distribution, the most the draft sends
COMMITTED = tuple(range(1, 101))


@dataclass(frozen=True, slots=True)
class SamplerMeasurement:
    """Medians in milliseconds for one request of `rows` rows. `sampling_ms` includes the noise, which is also timed
    alone; GREEDY has none."""

    rule: str
    vocabulary: int
    rows: int
    sampling_ms: float
    noise_ms: float


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


def noise_of(request: VerificationRequest, logits: torch.Tensor) -> Callable[[], object] | None:
    """Returns the function that makes the request's noise: Gumbel noise on every support, or one uniform a row."""
    params, count = request.params, request.row_count
    positions = range(len(COMMITTED), len(COMMITTED) + count)
    if params.rule is Rule.GREEDY:
        return None
    if params.rule is Rule.REJECTION:
        return lambda: [uniform(params.seed, Lane.NEXT, 0, position) for position in positions]
    supports = sampled_distribution(logits, request.contexts)
    token_ids = [(support.rows, support.ids) for support in supports]

    def make() -> None:
        keys = gumbel_keys([params.seed] * count, positions, logits.device)
        for rows, ids in token_ids:
            gumbel(keys[rows], ids)

    return make


def seconds_of(function: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


def measure_sampler(
    vocabularies: Sequence[int], rounds: int, advance: Callable[[], None] = lambda: None
) -> list[SamplerMeasurement]:
    """Returns one measurement per vocabulary, rule and row count. `advance` is called after each vocabulary."""
    measurements: list[SamplerMeasurement] = []
    for vocabulary_size in vocabularies:
        for row_count in ROWS:
            logits = made_up_logits(row_count, vocabulary_size)
            measurements += [measure_rule(name, params, logits, rounds) for name, params in ALL_PARAMS.items()]
        advance()
    return measurements


@torch.inference_mode()
def measure_rule(name: str, params: ResolvedSamplingParams, logits: torch.Tensor, rounds: int) -> SamplerMeasurement:
    """Measures the sampler and its noise in turns."""
    request = request_of(params, logits)
    make_noise = noise_of(request, logits)
    sampling_s: list[float] = []
    noise_s: list[float] = []
    for _ in range(rounds + 1):
        sampling_s.append(seconds_of(lambda: verify([request], [request.row_count], logits)))
        noise_s.append(seconds_of(make_noise) if make_noise else 0.0)
    medians_ms = (statistics.median(times_s[1:]) * 1e3 for times_s in (sampling_s, noise_s))  # the first warms up
    return SamplerMeasurement(name, logits.shape[1], logits.shape[0], *medians_ms)
