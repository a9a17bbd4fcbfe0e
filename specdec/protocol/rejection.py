"""The verification rules: which draft tokens are accepted, and which token follows.

Plain arithmetic on the target's sampler output; no tensor of the target distribution enters here. docs/exactness.md
states the rules and the proof that each keeps the target distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from specdec.errors import InvalidRequest
from specdec.protocol.noise import Lane, uniform
from specdec.protocol.tree_shape import children
from specdec.protocol.types import (
    DraftProbs,
    PositionLogprobs,
    ResolvedSamplingParams,
    Rule,
    SamplerOutput,
    TokenKind,
    Verdict,
)

SIBLING_SHIFT = 32  # of the rank in the key of an accept draw: positions are below


class Round(Protocol):
    """The draft tokens of one verification, as the coordinator sends and the target reads them."""

    @property
    def round_index(self) -> int: ...
    @property
    def base_position(self) -> int: ...
    @property
    def draft_token_ids(self) -> tuple[int, ...]: ...
    @property
    def draft_probs(self) -> tuple[DraftProbs, ...]: ...
    @property
    def parents(self) -> tuple[int, ...]: ...


def conclude(params: ResolvedSamplingParams, asked: Round, output: SamplerOutput) -> Verdict:
    """Returns the verdict on one verification, with the draws of its parameters. Raises as `decide` does."""
    tokens, parents = asked.draft_token_ids, asked.parents
    draws: Sequence[float] = ()
    if params.rule is Rule.REJECTION:
        draws = accept_draws(params.seed, asked.round_index, asked.base_position, parents, len(tokens))
    return decide(params.rule, tokens, asked.draft_probs, output, draws, parents)


def accept_draws(seed: int, round_index: int, base_position: int, parents: Sequence[int], count: int) -> list[float]:
    """Returns the uniform number of each draft token's test. Tokens with the same position and the same rank among
    their siblings share it: a round tests one of them, chosen without it."""
    draws, depths = [0.0] * count, [0] * (count + 1)
    for row, following in enumerate(children(parents, count)):
        for rank, index in enumerate(following):
            depths[index + 1] = depths[row] + 1
            key = base_position + depths[row] | rank << SIBLING_SHIFT
            draws[index] = uniform(seed, Lane.ACCEPT, round_index, key)
    return draws


def logprobs_of(output: SamplerOutput, verdict: Verdict) -> tuple[PositionLogprobs, ...]:
    """Returns the log-probabilities of the tokens a verdict commits; none if the sampling parameters request none."""
    if not output.recovered_logprobs:
        return ()
    rows = (0, *(index + 1 for index in verdict.accepted))  # each accepted token's is that of its parent
    drafted = (
        replace(output.recovered_logprobs[row], logprob=output.draft_logprobs[index])
        for row, index in zip(rows, verdict.accepted)
    )
    return *drafted, output.recovered_logprobs[verdict.last_row]


def decide(
    rule: Rule,
    draft_token_ids: Sequence[int],
    draft_probs: Sequence[DraftProbs],
    output: SamplerOutput,
    accept_draws: Sequence[float],
    parents: Sequence[int] = (),
) -> Verdict:
    """Returns the verdict on one round. Pure: the same arguments give the same verdict.

    Walks from the root of the tree (`parents`: protocol.tree_shape): the children of a row are tested in order, the
    first that passes is accepted and the walk continues below it. If none passes, the row's recovered token follows, or
    the bonus token after a row without children. `draft_probs` and `accept_draws` hold one entry per draft token under
    REJECTION and are not read otherwise; `draft_probs` are those of `Verification`. Raises InvalidRequest for a draft
    token that its draft distribution lacks: it was not drawn from it and must not be tested.
    """
    count, recovered = len(draft_token_ids), output.recovered_token_ids
    is_drawn = rule is Rule.REJECTION
    check_count("output.recovered_token_ids", recovered, count + 1)
    if is_drawn:
        check_count("output.target_probs", output.target_probs, count)
        check_count("draft_probs", draft_probs, count)
        check_count("accept_draws", accept_draws, count)

    def passes(index: int, tested: list[int]) -> bool:
        token_id = draft_token_ids[index]
        probs = draft_probs[index].without(tested)
        tested.append(token_id)
        return accepts(probs, token_id, output.target_probs[index], accept_draws[index])

    following = children(parents, count)
    accepted: list[int] = []
    row = 0
    while following[row]:
        if is_drawn:
            tested: list[int] = []
            passed = next((index for index in following[row] if passes(index, tested)), None)
        else:
            passed = next((index for index in following[row] if draft_token_ids[index] == recovered[row]), None)
        if passed is None:
            return Verdict(tuple(accepted), recovered[row], TokenKind.RECOVERED)
        accepted.append(passed)
        row = passed + 1
    return Verdict(tuple(accepted), recovered[row], TokenKind.BONUS)


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
