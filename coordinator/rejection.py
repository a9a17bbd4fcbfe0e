"""The verification rules: which draft tokens are accepted, and which token follows.

Plain arithmetic on the target's sampler output; no tensor of the target distribution enters here. docs/exactness.md
states the rules and the proof that each keeps the target distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.errors import InvalidRequest
from specdec.protocol.items import Verification, VerificationResult
from specdec.protocol.noise import Lane, uniform
from specdec.protocol.types import (
    DraftProbs,
    PositionLogprobs,
    ResolvedSamplingParams,
    Rule,
    SamplerOutput,
    TokenKind,
    Verdict,
)


def conclude(params: ResolvedSamplingParams, flying: Verification, answer: VerificationResult) -> Verdict:
    """Returns the verdict on the verification in flight, with the draws of its parameters. Raises as `decide` does."""
    draws: Sequence[float] = ()
    if params.rule is Rule.REJECTION:
        draws = [
            uniform(params.seed, Lane.ACCEPT, flying.round_index, flying.base_position + index)
            for index in range(len(flying.draft_token_ids))
        ]
    return decide(params.rule, flying.draft_token_ids, flying.draft_probs, answer.output, draws)


def logprobs_of(output: SamplerOutput, verdict: Verdict) -> tuple[PositionLogprobs, ...]:
    """Returns the log-probabilities of the tokens a verdict commits; none if the sampling parameters request none."""
    if not output.recovered_logprobs:
        return ()
    return *output.draft_logprobs[: verdict.accepted_count], output.recovered_logprobs[verdict.accepted_count]


def decide(
    rule: Rule,
    draft_token_ids: Sequence[int],
    draft_probs: Sequence[DraftProbs],
    output: SamplerOutput,
    accept_draws: Sequence[float],
) -> Verdict:
    """Returns the verdict on one round. Pure: the same arguments give the same verdict.

    `draft_probs` and `accept_draws` hold one entry per draft token under REJECTION and are not read otherwise;
    `accept_draws[i]` is uniform(seed, Lane.ACCEPT, round_index, base_position + i). The first rejected draft token ends
    the round with the recovered token in its place; if all are accepted the bonus token follows. Raises InvalidRequest
    for a draft token that its draft distribution lacks: it was not drawn from it and must not be tested.
    """
    draft_length, recovered = len(draft_token_ids), output.recovered_token_ids
    is_drawn = rule is Rule.REJECTION
    check_count("output.recovered_token_ids", recovered, draft_length + 1)
    if is_drawn:
        check_count("output.target_probs", output.target_probs, draft_length)
        check_count("draft_probs", draft_probs, draft_length)
        check_count("accept_draws", accept_draws, draft_length)
    for index, token_id in enumerate(draft_token_ids):
        if is_drawn:
            accepted = accepts(draft_probs[index], token_id, output.target_probs[index], accept_draws[index])
        else:
            accepted = token_id == recovered[index]
        if not accepted:
            return Verdict(index, recovered[index], TokenKind.RECOVERED)
    return Verdict(draft_length, recovered[-1], TokenKind.BONUS)


def accepts(probs: DraftProbs, token_id: int, target_prob: float, accept_draw: float) -> bool:
    """Accept with probability min(1, target_prob / draft_prob): u * draft_prob < target_prob, u in [0, 1), strictly."""
    draft_prob = probs.probability(token_id)
    if draft_prob == 0:
        raise InvalidRequest(
            "draft_probs", f"without draft token {token_id}", "a distribution that holds the draft token"
        )
    return accept_draw * draft_prob < target_prob


def check_count(field: str, part: Sequence[object], count: int) -> None:
    """Raises InvalidRequest if a part of a round does not have `count` entries: such a round has no verdict."""
    if len(part) != count:
        raise InvalidRequest(field, len(part), f"{count} entries for the draft tokens of the round")
