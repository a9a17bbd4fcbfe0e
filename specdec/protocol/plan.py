"""The plan of a round: how many draft tokens it may carry, how the draft's tree grows, and how long it waits. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specdec.protocol.heads import HEAD_PASSES_MAX, NO_HEAD_PLAN, HeadPlan
from specdec.protocol.limits import DRAFT_LENGTH_LIMIT


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

    def of_head(self, positions_left: int) -> HeadPlan:
        """Returns what a verification asks of the target's feature head, for the round after its own, which commits one
        token at least; `positions_left`: before it."""
        window = min(self.window, positions_left - 2, HEAD_PASSES_MAX)
        return HeadPlan(window, max(1, self.nodes_per_step), self.siblings) if window > 0 else NO_HEAD_PLAN

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
