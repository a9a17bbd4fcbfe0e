"""One round of a generation, as it went: the one value that statistics, metrics, policy and trace are told."""

from __future__ import annotations

from typing import NamedTuple

from specdec.policy.plan import Plan
from specdec.protocol.types import TokenKind


class RoundRecord(NamedTuple):
    """A round from the verdict before it (the start, for round 0) to its own. Times in seconds by the monotonic clock.

    `plan`: in force when the verification was sent. `kept_count`: tokens that count, fewer than accepted + 1 only where
    the text ended. `was_looked_up`: the tree had a child for the next token's place; `was_found`: the next token was
    one. `in_hand_count`: draft tokens in hand for the next round at once; `discarded_count`: of the proposal path in
    hand, those the commit left. `wait_s`: held back for draft tokens; `round_trip_s`: from sending the verification to
    its answer; `queue_s`, `forward_s`, `evidence_s` of the target's step; `step_rows` and `step_sessions` of all
    sessions in it, of `active_sessions` with work to do; `step_count` above 1: a prompt, or what was opened again, was
    read. `cached_prompt_tokens` are told with the first round, `evictions` since the round before.
    `is_speculating`: the policy drafts, though the plan may have had no room to.
    """

    round_index: int
    plan: Plan
    offered_count: int
    accepted_count: int
    kept_count: int
    next_kind: TokenKind
    was_looked_up: bool
    was_found: bool
    in_hand_count: int
    discarded_count: int
    start_s: float
    end_s: float
    wait_s: float
    round_trip_s: float
    queue_s: float
    forward_s: float
    evidence_s: float
    step_rows: int = 1
    step_sessions: int = 1
    active_sessions: int = 1
    step_count: int = 1
    cached_prompt_tokens: int = 0
    evictions: int = 0
    server_s: float = 0.0
    is_speculating: bool = True

    @property
    def round_s(self) -> float:
        """From verdict to verdict."""
        return self.end_s - self.start_s

    @property
    def step_s(self) -> float:
        """Of the target's step: forward and evidence."""
        return self.forward_s + self.evidence_s

    @property
    def is_hit(self) -> bool:
        """Whether the next round starts with draft tokens below a next token that was foreseen."""
        return self.was_found and self.in_hand_count > 0

    @property
    def is_branch_hit(self) -> bool:
        """Whether that next token was a correction: a branch child came true."""
        return self.is_hit and self.next_kind is TokenKind.CORRECTION
