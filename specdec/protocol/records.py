"""The record of a round, which policy, statistics and trace see: what was planned, what became of it, and its time.

It has counts and seconds, never tokens. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from specdec.protocol.items import VerificationResult
from specdec.protocol.plan import Plan
from specdec.protocol.types import Proposer, TokenKind


class RoundTokens(NamedTuple):
    """The tokens of a round. `kept_count` is below `accepted_count` + 1 only if the text ended."""

    offered_count: int = 0
    accepted_count: int = 0
    kept_count: int = 1
    next_kind: TokenKind = TokenKind.BONUS
    proposers: tuple[Proposer, ...] = ()  # of each draft token, the surest one
    accepted_proposers: tuple[Proposer, ...] = ()
    local_accepted_count: int = 0  # first accepted tokens that a proposer of the coordinator had guessed
    path_count: int = 0
    had_heads: bool = False  # proposals of the target's heads were in hand
    drafter: Proposer = Proposer.DRAFT  # whose tokens the plan is about: a draft model, or the target's feature head

    @property
    def tested_count(self) -> int:
        """Places of the walked path at which draft tokens were tested: the accepted ones, and a rejection."""
        if self.path_count <= 1:
            return min(self.offered_count, self.accepted_count + 1)
        return self.accepted_count + (self.next_kind is TokenKind.RECOVERED)

    @property
    def model_offered_count(self) -> int:
        """Draft tokens of the drafter."""
        return self.proposers.count(self.drafter) if self.proposers else self.offered_count

    @property
    def model_accepted_count(self) -> int:
        """Accepted draft tokens of the drafter."""
        return self.accepted_proposers.count(self.drafter) if self.proposers else self.accepted_count

    @property
    def model_tested_count(self) -> int:
        """Places of the walked path at which tokens of the drafter were tested: the accepted ones, and a rejection
        if it had more."""
        accepted = self.model_accepted_count
        return accepted + (self.tested_count > self.accepted_count and self.model_offered_count > accepted)


class TreeUse(NamedTuple):
    """What the draft's tree was to a round."""

    was_looked_up: bool = False  # it had children at the next token's position
    was_found: bool = False  # the next token was one of these
    in_hand_count: int = 0  # draft tokens in hand for the next round at once
    discarded_count: int = 0  # tokens in hand on the proposal path that the commit left
    names: tuple[tuple[int, int] | None, ...] = ()  # of the round's draft tokens; None: the tree had no such node
    accepted: tuple[int, ...] = ()  # those committed, by their places in `names`


class RoundTimes(NamedTuple):
    """Seconds by the coordinator's monotonic clock, from the verdict before (the start, for round 0) to the round's."""

    start_s: float = 0.0
    end_s: float = 0.0
    wait_s: float = 0.0  # for draft tokens
    round_trip_s: float = 0.0  # from sending the verification to its answer
    sent_s: float = 0.0  # when it was sent

    @property
    def round_s(self) -> float:
        """Seconds from verdict to verdict."""
        return self.end_s - self.start_s


NO_TIMES = RoundTimes()


class TargetStep(NamedTuple):
    """The target's step with the round in it, as the target reports it."""

    queue_s: float = 0.0
    forward_s: float = 0.0
    sampling_s: float = 0.0
    server_s: float = 0.0  # from the verification's arrival to its answer; 0: unknown
    rows: int = 1  # of all its sessions
    sessions: int = 1
    active_sessions: int = 1  # that had work
    step_count: int = 1  # above 1 the target read a prompt or a reopened session
    cached_prompt_tokens: int = 0  # in the first round only
    preemptions: int = 0  # since the round before
    head_s: float = 0.0  # of heads after the step

    @classmethod
    def of(cls, answer: VerificationResult) -> TargetStep:
        """Returns what an answer says of its step."""
        return cls(
            answer.queue_us / 1e6,
            answer.forward_us / 1e6,
            answer.sampling_us / 1e6,
            answer.server_us / 1e6,
            answer.step_rows,
            answer.step_sessions,
            answer.active_sessions,
            answer.step_count,
            answer.cached_prompt_tokens,
            answer.preemptions,
            answer.head_us / 1e6,
        )

    @property
    def step_s(self) -> float:
        """Seconds of forward pass and sampler, without those of heads."""
        return self.forward_s + self.sampling_s


class RoundRecord(NamedTuple):
    """A round: what was planned, what became of it, and its time."""

    round_index: int
    plan: Plan  # in force when the verification was sent
    tokens: RoundTokens
    tree: TreeUse
    times: RoundTimes
    step: TargetStep
    is_speculating: bool = True  # the policy drafts, though the plan may have had no positions left for it
    is_refused: bool = False  # the drafter is connected and does not draft for this session

    @property
    def server_share_s(self) -> float:
        """Seconds at the target, from the arrival of the verification to its answer; never more than the round trip."""
        step = self.step
        return min(self.times.round_trip_s, step.server_s or step.queue_s + step.step_s + step.head_s)

    @property
    def server_wait_s(self) -> float:
        """Seconds at the target outside its steps and the heads after them."""
        return max(0.0, self.server_share_s - self.step.step_s - self.step.head_s)

    @property
    def is_hit(self) -> bool:
        """Whether the next token was in the tree and the next round starts with draft tokens below it."""
        return self.tree.was_found and self.tree.in_hand_count > 0

    @property
    def is_branch_hit(self) -> bool:
        """Whether that next token is a recovered token: a branch child was right."""
        return self.is_hit and self.tokens.next_kind is TokenKind.RECOVERED
