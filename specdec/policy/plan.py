"""What a round is to do, as a value: neither how that is chosen nor how it is carried out."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
        if self.draft_length_max <= draft_length_cap:
            return self
        wait_length = min(self.wait_length, draft_length_cap)
        return replace(self, draft_length_max=draft_length_cap, wait_length=wait_length)

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
