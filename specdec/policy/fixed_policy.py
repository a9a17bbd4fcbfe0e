"""The policy of a request that names its plan, and of one without speculation. Pure.

Under load a plan shrinks to the length with the highest goodput if all sessions had it; 0 is plain decoding. Alone, a
session keeps what it asked for: a benchmark measures the plan that it names.
"""

from __future__ import annotations

from specdec.policy.acceptance import Acceptance, expected_accepted
from specdec.policy.mean import Mean
from specdec.policy.steps import StepTimes
from specdec.protocol.plan import OFF_PLAN, Plan
from specdec.protocol.policy import Prediction
from specdec.protocol.records import RoundRecord
from specdec.protocol.types import DRAFT_LENGTH_LIMIT

WAIT_S = 0.05  # default, also of the service: enough for the tokens of a slow draft over a slow link
REVIEW_ROUNDS, SHRINK_GAIN = 4, 1.1  # least ratio of goodputs for a plan shorter than asked: the estimates are rough
SESSIONS_ALONE = 1.5  # mean of active sessions below which a session is alone


class FixedPolicy:
    """Offers up to `draft_length` tokens and waits for all, or for a path of the window's length, `wait_s` at most;
    `wait_s` 0 never waits.

    `window` defaults to one more than the draft length: if all are accepted and the bonus token is the guess after
    them, the next round's tokens are under way already. `nodes_per_step` above 1 lets the draft grow branches.
    `siblings`: of each draft token, in a tree of at most `draft_length` tokens. With the target's `steps` and the
    `acceptance` of its draft the plan shrinks under load; `session_count`: of the generations that run when it begins,
    itself included.
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
        session_count: int = 1,
    ) -> None:
        if window is None:
            window = min(draft_length + 1, DRAFT_LENGTH_LIMIT)
        self.draft_length_cap, self.is_speculating = draft_length, draft_length > 0
        self.wants_heads = draft_length > 0
        wait_length = min(draft_length, window) if wait_s else 0
        asked = Plan(draft_length, window, nodes_per_step, wait_length, wait_s, siblings)
        self._asked = self._plan = asked if draft_length else OFF_PLAN
        self._steps, self._acceptance = steps, Acceptance(acceptance)
        self._offered, self._beside_s = Mean(float(draft_length), 5.0), Mean(0.0, 5.0)
        self._sessions = Mean(float(session_count), 5.0)
        self._reason = f"fixed: {draft_length} tokens" if draft_length else "off"
        self._shrink()

    def __repr__(self) -> str:
        return f"FixedPolicy({self._asked})"

    @property
    def prediction(self) -> Prediction:
        return Prediction(None, self._reason)

    def plan(self, positions_left: int) -> Plan:
        return self._plan.within(positions_left)

    def on_round(self, record: RoundRecord) -> None:
        step, steps = record.step, self._steps
        if steps is None or step.step_count > 1 or not record.round_index:  # it read a prompt or a preempted session
            return
        steps.on_step(record)
        self._acceptance.add(record)
        self._sessions.add(max(1, step.sessions, step.active_sessions))
        self._beside_s.add(max(0.0, record.times.round_s - step.queue_s - step.step_s))
        if record.plan.draft_length_max == self.draft_length_cap:
            self._offered.add(record.tokens.offered_count)
        if record.round_index % REVIEW_ROUNDS == 0:
            steps.fade(record.times.end_s)
            self._shrink()

    def _shrink(self) -> None:
        """Takes the length with the highest goodput; the one asked for alone, or unless another gains SHRINK_GAIN."""
        length, asked, sessions = self.draft_length_cap, self.draft_length_cap, self._sessions.value
        reason = f"fixed: {asked} tokens" if asked else "off"
        if self._steps is not None and sessions >= SESSIONS_ALONE:
            rates = [self._goodput(each) for each in range(asked + 1)]
            best = max(rates)
            if best > SHRINK_GAIN * rates[-1]:
                length = rates.index(best)
                load = f"under the load of {sessions:.0f} sessions"
                reason += f", {length} {load}: {best:.0f} tokens/s predicted, as asked {rates[-1]:.0f}"
        self._reason = reason
        if length != self._plan.draft_length_max:
            self._plan = self._asked if length == asked else self._asked.shrunk(length)
            self.is_speculating = length > 0

    def _goodput(self, length: int) -> float:
        """Tokens per second of a session if every session had plans of `length` draft tokens."""
        assert self._steps is not None
        offered = min(float(length), self._offered.value)
        step_s = self._steps.step_s(self._sessions.value * (1 + offered), length > 0 and self._asked.window > 0)
        return (1 + expected_accepted(self._acceptance.value, offered)) / (step_s + self._beside_s.value)


OFF_POLICY = FixedPolicy(0)
