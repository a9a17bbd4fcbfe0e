"""The verification rules: which draft tokens pass, and which token follows.

Plain arithmetic on what the target reported; the target's law never enters here as a tensor. The rules and why each
keeps the target's law stand in docs/exactness.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.errors import InvalidRequest
from specdec.protocol.items import EvidenceAnswer, Verification
from specdec.protocol.noise import Lane, uniform
from specdec.protocol.types import Evidence, Law, PositionLogprobs, Row, Rule, TokenKind, Verdict


def conclude(law: Law, flying: Verification, answer: EvidenceAnswer) -> Verdict:
    """The verdict on the verification in flight, with the draws its law gives it. Raises as `decide` does."""
    draws: Sequence[float] = ()
    if law.rule is Rule.REJECTION:
        draws = [
            uniform(law.seed, Lane.ACCEPT, flying.round_index, flying.base_position + index)
            for index in range(len(flying.draft_token_ids))
        ]
    return decide(law.rule, flying.draft_token_ids, flying.rows, answer.evidence, draws)


def logprobs_of(evidence: Evidence, verdict: Verdict) -> tuple[PositionLogprobs, ...]:
    """The log-probabilities of the tokens a verdict commits; none where the law does not ask for them."""
    if not evidence.replacement_logprobs:
        return ()
    return *evidence.draft_logprobs[: verdict.accepted_count], evidence.replacement_logprobs[verdict.accepted_count]


def decide(
    rule: Rule, draft_token_ids: Sequence[int], rows: Sequence[Row], evidence: Evidence, accept_draws: Sequence[float]
) -> Verdict:
    """The verdict on one round. Pure: the same arguments give the same verdict.

    `rows` and `accept_draws` hold one entry per draft token under REJECTION and are not read otherwise;
    `accept_draws[i]` is uniform(seed, Lane.ACCEPT, round_index, base_position + i). The first draft token that does
    not pass ends the round with its replacement, the correction token; when all pass the bonus token follows.
    Raises InvalidRequest for a draft token its row lacks: it was not drawn from the row and must not be tested.
    """
    draft_length, replacements = len(draft_token_ids), evidence.replacement_token_ids
    is_drawn = rule is Rule.REJECTION
    check_count("evidence.replacement_token_ids", replacements, draft_length + 1)
    if is_drawn:
        check_count("evidence.target_probs", evidence.target_probs, draft_length)
        check_count("rows", rows, draft_length)
        check_count("accept_draws", accept_draws, draft_length)
    for index, token_id in enumerate(draft_token_ids):
        if is_drawn:
            accepted = accepts(rows[index], token_id, evidence.target_probs[index], accept_draws[index])
        else:
            accepted = token_id == replacements[index]
        if not accepted:
            return Verdict(index, replacements[index], TokenKind.CORRECTION)
    return Verdict(draft_length, replacements[-1], TokenKind.BONUS)


def accepts(row: Row, token_id: int, target_prob: float, accept_draw: float) -> bool:
    """Accept with probability min(1, target_prob / draft_prob): u * draft_prob < target_prob, u in [0, 1), strictly."""
    draft_prob = row.probability(token_id)
    if draft_prob == 0:
        raise InvalidRequest("row", f"without draft token {token_id}", "a row that holds the draft token")
    return accept_draw * draft_prob < target_prob


def check_count(field: str, part: Sequence[object], count: int) -> None:
    """Raises InvalidRequest when a part of a round does not fit the others: nothing may be decided on them."""
    if len(part) != count:
        raise InvalidRequest(field, len(part), f"{count} entries for the draft tokens of the round")
