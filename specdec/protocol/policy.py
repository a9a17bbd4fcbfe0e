"""How much to speculate: how many draft tokens a verification may carry, how far the draft may run, whether to wait.

Pure: it sees counts and answers with a plan. The fixed policy asks for one draft length and waits for it; the session
bounds that wait (`Session.on_wait_expired`), so a silent draft costs one wait and not one per round.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.protocol.types import DRAFT_LENGTH_LIMIT, check_integer


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next round is to do.

    `draft_length_max`: most draft tokens it may carry; 0 is plain decoding. `window`: positions past the committed
    length the draft tree may reach. `wait`: hold the verification until `draft_length_max` tokens are in hand.
    """

    draft_length_max: int
    window: int
    wait: bool


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """`draft_length` tokens a round, and a draft that runs one ahead of them.

    Should all pass and the bonus token be the guess after them, the next round's tokens are under way already.

    The draft length of a round depends on counts alone, never on the tokens drawn (docs/exactness.md).
    """

    draft_length: int

    def __post_init__(self) -> None:
        check_integer("num_speculative_tokens", self.draft_length, 0, DRAFT_LENGTH_LIMIT)

    def plan(self, room: int) -> Plan:
        """The plan for a session that can still hold `room` tokens; a round commits one more than it accepts."""
        draft_length_max = max(0, min(self.draft_length, room - 1))
        window = min(self.draft_length + 1, room - 1, DRAFT_LENGTH_LIMIT) if draft_length_max else 0
        return Plan(draft_length_max, window, wait=draft_length_max > 0)
