"""A policy that changes its plan every other round: a session must accept every plan of any policy."""

from __future__ import annotations

from specdec.protocol.noise import Lane, hash64
from specdec.protocol.plan import OFF_PLAN, Plan
from specdec.protocol.policy import Prediction
from specdec.protocol.records import RoundRecord

DRAFT_LENGTH_CAP = 5
WAITS_S = (0.0, 0.0, 0.0, 0.003, 0.02)


class WanderingPolicy:
    """A `Policy` whose plans follow from a seed and the number of rounds alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rounds = 0
        self.learned: list[int] = []  # indices of the rounds that it was told of
        self._plan = self._drawn()

    @property
    def draft_length_cap(self) -> int:
        return DRAFT_LENGTH_CAP

    @property
    def is_speculating(self) -> bool:
        return self._plan.draft_length_max > 0

    @property
    def reach_min(self) -> float:
        return 0.0

    @property
    def path_reach_min(self) -> float:
        return 0.0

    @property
    def wants_heads(self) -> bool:
        return self.is_speculating and self._rounds % 3 > 0

    @property
    def wants_local(self) -> bool:
        return self._rounds % 5 > 0

    @property
    def prediction(self) -> Prediction:
        return Prediction(None, "wandering")

    def plan(self, positions_left: int) -> Plan:
        """The plan of this round."""
        return self._plan.within(positions_left)

    def on_round(self, record: RoundRecord) -> None:
        """Another round, another plan."""
        self._rounds += 1
        self.learned.append(record.round_index)
        self._plan = self._drawn()

    def _drawn(self) -> Plan:
        bits = hash64(self._seed, Lane.DRAFT, self._rounds // 2, 7)
        if bits % 5 == 0:
            return OFF_PLAN
        length = 1 + (bits >> 8) % DRAFT_LENGTH_CAP
        wait_s = WAITS_S[(bits >> 16) % len(WAITS_S)]
        wait_length = 1 + (bits >> 24) % length if wait_s else 0
        siblings = max(0, (bits >> 48) % 5 - 2)
        return Plan(length, length + (bits >> 32) % 3, 1 + (bits >> 40) % 3, wait_length, wait_s, siblings)
