"""The policies: a session asks one for the plan of each round. Pure: see auto_policy.py for the one that measures."""

from __future__ import annotations

from typing import Protocol

from specdec.policy.plan import PLAIN, Plan, Prediction
from specdec.protocol.round_record import RoundRecord
from specdec.protocol.types import DRAFT_LENGTH_LIMIT, LEAVES_LIMIT, check_integer, check_number

WAIT_S_MAX = 60.0  # a draft that is silent for longer is not worth a verification held back
WAIT_S = 0.05  # where nobody says: a slow draft's tokens over a slow link come within it; the service's default too


class Policy(Protocol):
    """What a session asks and tells, once a round. One policy object per session."""

    @property
    def draft_length_cap(self) -> int:
        """Most draft tokens any plan of this policy offers; 0: the session needs no draft at all."""

    @property
    def is_speculating(self) -> bool:
        """Whether the plan in force drafts."""

    @property
    def prediction(self) -> Prediction:
        """What is expected of the plan in force."""

    def plan(self, room: int) -> Plan:
        """The plan for a session that can still hold `room` tokens; the same until `on_round` is told of a round."""

    def on_round(self, record: RoundRecord) -> None:
        """One round ended."""


class FixedPolicy:
    """Offers up to `draft_length` tokens and waits for all of them, `wait_s` at most; `wait_s` 0 never waits.

    `window` defaults to one more than the draft length: should all pass and the bonus token be the guess after them,
    the next round's tokens are under way already. `leaves` above 1 lets the draft grow branches.
    """

    def __init__(self, draft_length: int, window: int | None = None, leaves: int = 1, wait_s: float = WAIT_S) -> None:
        check_integer("num_speculative_tokens", draft_length, 0, DRAFT_LENGTH_LIMIT)
        if window is None:
            window = min(draft_length + 1, DRAFT_LENGTH_LIMIT)
        check_integer("draft_window", window, draft_length, DRAFT_LENGTH_LIMIT)
        check_integer("draft_leaves", leaves, 1, LEAVES_LIMIT)
        check_number("draft_wait_s", wait_s, 0, WAIT_S_MAX)
        self.draft_length_cap, self.is_speculating = draft_length, draft_length > 0
        self.prediction = Prediction(None, f"fixed: {draft_length} tokens" if draft_length else "off")
        wait_length = draft_length if wait_s else 0
        self._plan = Plan(draft_length, window, leaves, wait_length, wait_s) if draft_length else PLAIN

    def plan(self, room: int) -> Plan:
        return self._plan.within(room)

    def on_round(self, record: RoundRecord) -> None:
        """A fixed policy learns nothing."""


OFF_POLICY = FixedPolicy(0)
