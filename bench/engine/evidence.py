"""Time of evidence and of its noise, apart, by vocabulary, rule and rows: what follows the forward at the target.

Logits are made up: a token's probability falls with the square of its rank, so that 0.95 of the mass lies on about a
dozen tokens, as it does in real text. No model takes part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.decoding.distribution import sampled_law
from specdec.decoding.evidence import EvidenceRequest, evidence
from specdec.decoding.noise import gumbel, gumbel_keys
from specdec.protocol.noise import Lane, uniform
from specdec.protocol.types import Law, Row, Rule

VOCABULARIES = (4096, 32000, 128256, 151936)
ROWS = (1, 5)
LAWS: dict[str, Law] = {
    "GREEDY": Law(Rule.GREEDY, 1, 1, temperature=0),
    "COUPLED, temperature 0.7": Law(Rule.COUPLED, 1, 1, temperature=0.7),
    "COUPLED, 0.7, top-p 0.95": Law(Rule.COUPLED, 1, 1, temperature=0.7, top_p=0.95),
    "REJECTION, temperature 1": Law(Rule.REJECTION, 1, 1, temperature=1.0),
    "REJECTION, 0.7, top-p 0.95": Law(Rule.REJECTION, 1, 1, temperature=0.7, top_p=0.95),
}
ROW_TOKENS = 96  # of a draft row, the most the draft sends
COMMITTED = tuple(range(1, 101))


@dataclass(frozen=True, slots=True)
class EvidenceFigure:
    """Medians in milliseconds for one request of so many rows. `evidence_ms` holds the noise, which is also timed
    alone; GREEDY has none."""

    rule: str
    vocabulary: int
    rows: int
    evidence_ms: float
    noise_ms: float


def made_up_logits(row_count: int, vocabulary_size: int) -> torch.Tensor:
    """Each row another order of the tokens.  # [rows, vocabulary] float32"""
    generator = torch.Generator().manual_seed(vocabulary_size)
    by_rank = -2 * torch.arange(1, vocabulary_size + 1, dtype=torch.float32).log()
    return torch.stack([by_rank[torch.randperm(vocabulary_size, generator=generator)] for _ in range(row_count)])


def request_of(law: Law, logits: torch.Tensor) -> EvidenceRequest:
    """A verification of each row's likeliest token; under REJECTION drawn from a row of its likeliest ones."""
    order = logits[:-1].topk(ROW_TOKENS, dim=1).indices
    token_ids = tuple(order[:, 0].tolist())
    if law.rule is not Rule.REJECTION:
        return EvidenceRequest(law, 0, COMMITTED, token_ids)
    rows = tuple(Row(tuple(sorted(line)), (1,) * ROW_TOKENS) for line in order.tolist())
    return EvidenceRequest(law, 0, COMMITTED, token_ids, rows)


def noise_of(request: EvidenceRequest, logits: torch.Tensor) -> Callable[[], object] | None:
    """What makes the request's noise, given the law: Gumbel noise on every support, or one uniform a row."""
    law, count = request.law, request.row_count
    positions = range(len(COMMITTED), len(COMMITTED) + count)
    if law.rule is Rule.GREEDY:
        return None
    if law.rule is Rule.REJECTION:
        return lambda: [uniform(law.seed, Lane.NEXT, 0, position) for position in positions]
    supports = sampled_law(logits, [request.context])
    token_ids = [(support.rows, support.ids) for support in supports]

    def make() -> None:
        keys = gumbel_keys([law.seed] * count, positions, logits.device)
        for rows, ids in token_ids:
            gumbel(keys[rows], ids)

    return make


def seconds_of(function: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


def measure_evidence(
    vocabularies: Sequence[int], rounds: int, advance: Callable[[], None] = lambda: None
) -> list[EvidenceFigure]:
    """One figure a vocabulary, rule and row count. `advance` is called after each vocabulary."""
    figures: list[EvidenceFigure] = []
    for vocabulary_size in vocabularies:
        for row_count in ROWS:
            logits = made_up_logits(row_count, vocabulary_size)
            figures += [measure_rule(name, law, logits, rounds) for name, law in LAWS.items()]
        advance()
    return figures


@torch.inference_mode()
def measure_rule(name: str, law: Law, logits: torch.Tensor, rounds: int) -> EvidenceFigure:
    """Evidence and its noise in turns."""
    request = request_of(law, logits)
    make_noise = noise_of(request, logits)
    evidence_s: list[float] = []
    noise_s: list[float] = []
    for _ in range(rounds + 1):
        evidence_s.append(seconds_of(lambda: evidence([request], [request.row_count], logits)))
        noise_s.append(seconds_of(make_noise) if make_noise else 0.0)
    medians_ms = (statistics.median(times_s[1:]) * 1e3 for times_s in (evidence_s, noise_s))  # the first warms up
    return EvidenceFigure(name, logits.shape[1], logits.shape[0], *medians_ms)
