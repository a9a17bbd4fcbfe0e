"""The policy of a request that names its plan, and of one without speculation. Pure.

Under load a plan shrinks to the length with the highest goodput if all sessions had it; 0 is plain decoding. Alone, a
session keeps what it asked for: a benchmark measures the plan that it names.
"""

from __future__ import annotations

from specdec.policy.acceptance import Acceptance, expected_accepted
from specdec.policy.mean import Mean
from specdec.policy.steps import StepTimes
from specdec.protocol.limits import DRAFT_LENGTH_LIMIT
from specdec.protocol.plan import OFF_PLAN, Plan
from specdec.protocol.policy import Prediction
from specdec.protocol.records import RoundRecord

WAIT_S = 0.05  # default, also of the service: enough for the tokens of a slow draft over a slow link
LOAD_MIN, SHRINK_GAIN = 1.5, 1.1  # least load, and ratio of goodputs, for a shorter plan: the estimates are rough
ROUNDS_KEPT = 5.0  # of the means of one session


class FixedPolicy:
    """Offers up to `draft_length` tokens and waits for all, or for a path of the window's length, `wait_s` at most;
    `wait_s` 0 never waits.

    `window` defaults to one more than the draft length: if all are accepted and the bonus token is the guess after
    them, the next round's tokens are under way already. `nodes_per_step` above 1 lets the draft grow branches.
    `siblings`: of each draft token, in a tree of at most `draft_length` tokens. With the target's `steps` and the
    `acceptance` of its draft the plan shrinks under load.
    """

    reach_min = path_reach_min = 0.0
    wants_local = True

    def __init__(
        self,
        draft_length: int,
        window: int | None = None,
        nodes_per_step: int = 1,
        wait_s: float = WAIT_S,
        siblings: int = 0,
        steps: StepTimes | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        if window is None:
            window = min(draft_length + 1, DRAFT_LENGTH_LIMIT)
        wait_length = min(draft_length, window) if wait_s else 0
        asked = Plan(draft_length, window, nodes_per_step, wait_length, wait_s, siblings) if draft_length else OFF_PLAN
        self._asked, self.draft_length_cap, self.wants_heads = asked, draft_length, draft_length > 0
        self._steps, self._acceptance = steps, Acceptance(acceptance)
        self._offered, self._beside_s = Mean(float(draft_length), ROUNDS_KEPT, 1.0), Mean(0.0, ROUNDS_KEPT)
        self._run(draft_length, "")
        self._shrink()

    def __repr__(self) -> str:
        return f"FixedPolicy({self._asked})"

    @property
    def prediction(self) -> Prediction:
        return Prediction(
            None, f"fixed: {self.draft_length_cap} tokens{self._reason}" if self.draft_length_cap else "off"
        )

    def plan(self, positions_left: int) -> Plan:
        return self._plan.within(positions_left)

    def on_round(self, record: RoundRecord) -> None:
        if self._steps is None or record.step.step_count > 1 or not record.round_index:  # it read a prompt
            return
        self._steps.on_step(record)
        self._steps.fade(record.times.end_s)
        self._acceptance.add(record)
        self._beside_s.add(max(0.0, record.times.round_s - record.step.queue_s - record.step.step_s))
        if record.plan.draft_length_max == self.draft_length_cap:
            self._offered.add(record.tokens.offered_count)
        if record.round_index % 4 == 0:
            self._shrink()

    def _shrink(self) -> None:
        """Takes the length with the highest goodput; the one asked for alone, or unless another gains SHRINK_GAIN."""
        if self._steps is None or self._steps.load < LOAD_MIN:
            self._run(self.draft_length_cap, "")
            return
        rates = []
        for length in range(self.draft_length_cap + 1):
            offered = min(float(length), self._offered.value)
            step_s = self._steps.step_s(self._steps.load * (1 + offered), length > 0 and self._asked.window > 0)
            rates.append((1 + expected_accepted(self._acceptance.value, offered)) / (step_s + self._beside_s.value))
        best, length = max(rates), self.draft_length_cap
        if best > SHRINK_GAIN * rates[-1]:
            length = rates.index(best)
        load = f"under the load of {self._steps.load:.0f} sessions"
        self._run(length, f", {length} {load}: {best:.0f} tokens/s predicted, as asked {rates[-1]:.0f}")

    def _run(self, length: int, reason: str) -> None:
        """Puts a length in force."""
        is_asked = length == self.draft_length_cap
        self._plan, self._reason = (self._asked, "") if is_asked else (self._asked.shrunk(length), reason)
        self.is_speculating = length > 0


OFF_POLICY = FixedPolicy(0)
