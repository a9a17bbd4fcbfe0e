"""The policy of a request that names its plan, and of one without speculation. Pure. auto_policy.py has the measuring
policy."""

from __future__ import annotations

from specdec.policy.draft_limit import DraftLimit
from specdec.protocol.plan import OFF_PLAN, Plan
from specdec.protocol.policy import Prediction
from specdec.protocol.records import RoundRecord
from specdec.protocol.types import DRAFT_LENGTH_LIMIT

WAIT_S = 0.05  # default, also of the service: enough for the tokens of a slow draft over a slow link


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
