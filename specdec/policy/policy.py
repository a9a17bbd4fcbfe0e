"""Plans, and the policies that give a session its plan each round. Pure. auto_policy.py has the measuring policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from specdec.protocol.types import DRAFT_LENGTH_LIMIT

if TYPE_CHECKING:
    from specdec.policy.draft_limit import DraftLimit
    from specdec.protocol.report import RoundRecord

WAIT_S = 0.05  # default, also of the service: enough for the tokens of a slow draft over a slow link


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of the next round.

    `draft_length_max`: most draft tokens it may carry; 0 is plain decoding. `window`: positions past the committed
    length that the draft tree may reach; 0: the draft rests, and the coordinator's own proposers propose. `siblings`:
    further children of each draft token that may be verified beside it. `nodes_per_step`: nodes the draft evaluates for
    this session in one step; 1 is a chain without branches. `wait_length`, `wait_s`: the verification waits for
    `wait_length` draft tokens, at most `wait_s` seconds; 0 never waits.
    """

    draft_length_max: int
    window: int
    nodes_per_step: int = 1
    wait_length: int = 0
    wait_s: float = 0.0
    siblings: int = 0

    def within(self, positions_left: int) -> Plan:
        """Returns the plan for a session with `positions_left`; a round commits one token more than it accepts."""
        most = positions_left - 1
        if self.window <= most and self.draft_length_max <= most:
            return self
        if most <= 0:
            return OFF_PLAN
        length, wait_length = min(self.draft_length_max, most), min(self.wait_length, most)
        window = min(self.window, most)
        return replace(self, draft_length_max=length, window=window, wait_length=wait_length)

    def capped(self, draft_length_cap: int) -> Plan:
        """Returns the plan with at most `draft_length_cap` draft tokens a round."""
        length, wait_length = min(self.draft_length_max, draft_length_cap), min(self.wait_length, draft_length_cap)
        return replace(self, draft_length_max=length, wait_length=wait_length)

    def shrunk(self, draft_length: int) -> Plan:
        """Returns the plan with `draft_length` draft tokens a round, its tree smaller in proportion; 0 is plain."""
        if not draft_length:
            return OFF_PLAN
        most = self.draft_length_max
        nodes_per_step = math.ceil(self.nodes_per_step * draft_length / most)
        window = max(min(self.window, 1), self.window - most + draft_length)
        return replace(self.capped(draft_length), window=window, nodes_per_step=nodes_per_step)

    @property
    def description(self) -> str:
        """The plan in words."""
        shape = "a chain" if self.nodes_per_step == 1 else f"a tree of {self.nodes_per_step} nodes per step"
        if not self.window:
            shape = "no draft model"
        siblings = f", verified with {self.siblings} siblings" if self.siblings else ""
        wait = f", waiting for {self.wait_length}" if self.wait_length else ""
        return f"{shape}{siblings}, up to {self.draft_length_max} tokens{wait}"


OFF_PLAN = Plan(draft_length_max=0, window=0)
LOCAL_PLAN = Plan(draft_length_max=DRAFT_LENGTH_LIMIT, window=0)  # the coordinator's own proposers


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
    their time in the next step.
    """

    draft_length_cap: int
    is_speculating: bool
    reach_min: float
    path_reach_min: float
    wants_heads: bool

    @property
    def prediction(self) -> Prediction:
        """The estimate for the plan in force."""

    def plan(self, positions_left: int) -> Plan:
        """Returns the plan for a session with `positions_left`; the same until the next `on_round`."""

    def on_round(self, record: RoundRecord) -> None:
        """Takes the record of one finished round."""


class FixedPolicy:
    """Offers up to `draft_length` tokens and waits for all, or for a path of the window's length, `wait_s` at most;
    `wait_s` 0 never waits.

    `window` defaults to one more than the draft length: if all are accepted and the bonus token is the guess after
    them, the next round's tokens are under way already. `nodes_per_step` above 1 lets the draft grow branches. A
    `limit` shrinks the plan while other sessions load the target. `siblings`: of each draft token, in a tree of at most
    `draft_length` tokens.
    """

    def __init__(
        self,
        draft_length: int,
        window: int | None = None,
        nodes_per_step: int = 1,
        wait_s: float = WAIT_S,
        limit: DraftLimit | None = None,
        siblings: int = 0,
    ) -> None:
        if window is None:
            window = min(draft_length + 1, DRAFT_LENGTH_LIMIT)
        self.draft_length_cap, self.is_speculating = draft_length, draft_length > 0
        self.reach_min = self.path_reach_min = 0.0
        self.wants_heads = draft_length > 0
        wait_length = min(draft_length, window) if wait_s else 0
        asked = Plan(draft_length, window, nodes_per_step, wait_length, wait_s, siblings)
        self._asked = asked if draft_length else OFF_PLAN
        self._plan, self._limit = self._asked, limit
        self._shrink()

    def __repr__(self) -> str:
        return f"FixedPolicy({self._asked})"

    @property
    def prediction(self) -> Prediction:
        if not self.draft_length_cap:
            return Prediction(None, "off")
        reason, length = f"fixed: {self.draft_length_cap} tokens", self._plan.draft_length_max
        if self._limit is not None and self._plan is not self._asked:
            reason += f", {length} under the load of {self._limit.sessions:.0f} sessions"
        return Prediction(None, reason)

    def plan(self, positions_left: int) -> Plan:
        return self._plan.within(positions_left)

    def on_round(self, record: RoundRecord) -> None:
        if self._limit is not None:
            self._limit.on_round(record)
            self._shrink()

    def _shrink(self) -> None:
        length = self.draft_length_cap if self._limit is None else self._limit.length
        if length != self._plan.draft_length_max:
            self._plan = self._asked if length == self.draft_length_cap else self._asked.shrunk(length)
            self.is_speculating = length > 0


OFF_POLICY = FixedPolicy(0)
