"""What a session asks of a policy, which gives it a plan for each round; `specdec.policy` has the policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specdec.protocol.plan import Plan
from specdec.protocol.records import RoundRecord


@dataclass(frozen=True, slots=True)
class Prediction:
    """A policy's estimate for its plan, in tokens per second of this session (None: no estimate), and its reason; the
    rounds in which it explored another plan, and the estimated seconds lost by that."""

    tokens_per_s: float | None
    reason: str
    num_rounds_exploring: int = 0
    exploration_loss_s: float = 0.0


class Policy(Protocol):
    """The choice of one session's plans, one per round. `draft_length_cap`: most draft tokens any of its plans offers,
    0 if the session needs no draft. `is_speculating`: whether the plan in force has draft tokens. `reach_min`: least
    probability, that the tokens before it and a draft token are committed, at which the token is worth its row;
    `path_reach_min`: if it begins a further path. `wants_heads`: whether the proposals of heads on the target are worth
    their time in the next step; `wants_local`: whether those of the coordinator's own proposers are.
    """

    draft_length_cap: int
    is_speculating: bool
    reach_min: float
    path_reach_min: float
    wants_heads: bool
    wants_local: bool

    @property
    def prediction(self) -> Prediction:
        """The estimate for the plan in force."""

    def plan(self, positions_left: int) -> Plan:
        """Returns the plan for a session with `positions_left`; the same until the next `on_round`."""

    def on_round(self, record: RoundRecord) -> None:
        """Takes the record of one finished round."""
