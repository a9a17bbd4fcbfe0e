"""How much to speculate: the plan of a round, and the policies that make one.

Pure: a policy sees counts and seconds it is told and answers with a plan. It knows neither tokens nor messages, so what
it decides under REJECTION cannot depend on the tokens just drawn (docs/exactness.md). `FixedPolicy` does what it was
told; `AutoPolicy` (auto_policy.py) chooses by what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specdec.policy.plan import PLAIN, Plan, Prediction
from specdec.protocol.round_record import RoundRecord
from specdec.protocol.types import DRAFT_LENGTH_LIMIT, check_integer, check_number

LEAVES_MAX = 64  # nodes of one session in one draft step; the likeliest 8 hold nearly all that can come true
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


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Offers up to `draft_length` tokens and waits for all of them, `wait_s` at most; `wait_s` 0 never waits.

    `window` defaults to one more than the draft length: should all pass and the bonus token be the guess after them,
    the next round's tokens are under way already. `leaves` above 1 lets the draft grow branches.
    """

    draft_length: int
    window: int | None = None
    leaves: int = 1
    wait_s: float = WAIT_S

    def __post_init__(self) -> None:
        check_integer("num_speculative_tokens", self.draft_length, 0, DRAFT_LENGTH_LIMIT)
        if self.window is not None:
            check_integer("draft_window", self.window, self.draft_length, DRAFT_LENGTH_LIMIT)
        check_integer("draft_leaves", self.leaves, 1, LEAVES_MAX)
        check_number("draft_wait_s", self.wait_s, 0, WAIT_S_MAX)

    @property
    def draft_length_cap(self) -> int:
        return self.draft_length

    @property
    def is_speculating(self) -> bool:
        return self.draft_length > 0

    @property
    def prediction(self) -> Prediction:
        return Prediction(None, f"fixed: {self.draft_length} tokens" if self.draft_length else "off")

    def plan(self, room: int) -> Plan:
        if not self.draft_length:
            return PLAIN
        window = min(self.draft_length + 1, DRAFT_LENGTH_LIMIT) if self.window is None else self.window
        wait_length = self.draft_length if self.wait_s else 0
        return Plan(self.draft_length, window, self.leaves, wait_length, self.wait_s).within(room)

    def on_round(self, record: RoundRecord) -> None:
        """A fixed policy learns nothing."""


OFF_POLICY = FixedPolicy(0)
