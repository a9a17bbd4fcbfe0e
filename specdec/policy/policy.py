"""Plans, and the policies a session asks for one each round. Pure: see auto_policy.py for the one that measures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from specdec.protocol.types import DRAFT_LENGTH_LIMIT

if TYPE_CHECKING:
    from specdec.protocol.report import RoundRecord

WAIT_S = 0.05  # where nobody says: a slow draft's tokens over a slow link come within it; the service's default too


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next round is to do.

    `draft_length_max`: most draft tokens it may carry; 0 is plain decoding. `window`: positions past the committed
    length the draft tree may reach. `leaves`: nodes the draft evaluates for this session in one step; 1 is a chain
    without branches. `wait_length`, `wait_s`: hold the verification until so many draft tokens are in hand, at most so
    long; `wait_length` 0 never waits.
    """

    draft_length_max: int
    window: int
    leaves: int = 1
    wait_length: int = 0
    wait_s: float = 0.0

    def within(self, room: int) -> Plan:
        """The same plan for a session that can still hold `room` tokens; a round commits one more than it accepts."""
        most = room - 1
        if self.window <= most and self.draft_length_max <= most:
            return self
        if most <= 0:
            return PLAIN
        length, wait_length = min(self.draft_length_max, most), min(self.wait_length, most)
        return Plan(length, min(self.window, most), self.leaves, wait_length, self.wait_s)

    def capped(self, draft_length_cap: int) -> Plan:
        """The same plan with at most so many draft tokens a round."""
        length, wait_length = min(self.draft_length_max, draft_length_cap), min(self.wait_length, draft_length_cap)
        return replace(self, draft_length_max=length, wait_length=wait_length)

    @property
    def description(self) -> str:
        """The plan in words."""
        shape = "a chain" if self.leaves == 1 else f"a tree of {self.leaves} leaves"
        wait = f", waiting for {self.wait_length}" if self.wait_length else ""
        return f"{shape}, up to {self.draft_length_max} tokens{wait}"


PLAIN = Plan(draft_length_max=0, window=0)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a policy expects of its plan, tokens per second of this session (None: it has no model), and its reason; the
    rounds in which it tried another plan, and the seconds it lost by that, as estimated."""

    tokens_per_s: float | None
    reason: str
    num_rounds_trial: int = 0
    trial_loss_s: float = 0.0


class Policy(Protocol):
    """What a session asks and tells, once a round; one object per session. `draft_length_cap`: most draft tokens any
    of its plans offers, 0 where the session needs no draft at all. `is_speculating`: whether the plan in force drafts.
    """

    draft_length_cap: int
    is_speculating: bool

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
        if window is None:
            window = min(draft_length + 1, DRAFT_LENGTH_LIMIT)
        self.draft_length_cap, self.is_speculating = draft_length, draft_length > 0
        self.prediction = Prediction(None, f"fixed: {draft_length} tokens" if draft_length else "off")
        wait_length = draft_length if wait_s else 0
        self._plan = Plan(draft_length, window, leaves, wait_length, wait_s) if draft_length else PLAIN

    def __repr__(self) -> str:
        return f"FixedPolicy({self._plan})"

    def plan(self, room: int) -> Plan:
        return self._plan.within(room)

    def on_round(self, record: RoundRecord) -> None:
        """A fixed policy learns nothing."""


OFF_POLICY = FixedPolicy(0)
