"""Times of a draft and its link: steps by nodes of all sessions, and the round trip; and those of a feature head on the
target, whose trip is its passes. Pure."""

from __future__ import annotations

import math

from specdec.policy.mean import Mean
from specdec.protocol.plan import Plan
from specdec.protocol.records import RoundRecord
from specdec.step_curve import StepCurve

STEP_GUESS_S, LATE_S = 0.003, 0.001  # a step; how much longer the first token takes than step and network
SAMPLES_KEPT = 20.0
WAIT_SLACK, WAIT_LEAST_S, WAIT_MAX_S = 2.5, 0.005, 1.0  # limit of a wait: a multiple of the tokens' expected time


class DraftTimes:
    """Of one draft under one rule. `connections`: how often another draft was connected."""

    def __init__(self, link_bytes_per_s: float = math.inf) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._steps = StepCurve()
        self._node_bytes, self._sessions, self._network = (Mean(0.0, SAMPLES_KEPT) for _ in range(3))
        self.connections = 0

    @property
    def network_s(self) -> float:
        """The network round trip."""
        return self._network.value

    def prime(self, step_times: tuple[tuple[int, float], ...]) -> None:
        """Another draft is connected: takes the (nodes, seconds) that it measured at start."""
        self._steps.prime(step_times)
        self.connections += 1

    def on_step(self, nodes: int, seconds: float, sessions: int = 0) -> None:
        """Takes one step; `nodes`: of all `sessions` of the draft, 0 if unknown."""
        self._steps.add(max(1, nodes), seconds)
        if sessions:
            self._sessions.add(sessions)

    def on_round(self, record: RoundRecord) -> None:
        """Takes a round of a session: of a draft it tells no time."""

    def on_bytes(self, node_bytes: float) -> None:
        """Takes the bytes of one evaluated node on the link."""
        self._node_bytes.add(node_bytes)

    def on_network(self, network_s: float) -> None:
        """Takes the network round trip of one exchange with the draft; a pause of a machine is none."""
        most_s = 3 * self.network_s + 2 * WAIT_LEAST_S if self._network.weight else network_s
        self._network.add(min(network_s, most_s))

    def fade(self, now_s: float) -> None:
        """Lets times that were not measured lately return to those at start."""
        self._steps.fade(now_s)

    def step_s(self, plan: Plan, load: float) -> float:
        """Seconds of a step if all sessions of the draft had the plan, or of its messages on a slow link if that is
        longer; without the draft's word it has `load` sessions."""
        nodes = max(1, plan.nodes_per_step) * max(1.0, self._sessions.value or load)
        link_s = nodes * self._node_bytes.value / self._link_bytes_per_s
        return max(self._steps.seconds(nodes) or STEP_GUESS_S, link_s)

    def nodes_s(self, node_count: int) -> float:
        """Seconds of a step of `node_count` nodes of all sessions."""
        return self._steps.seconds(node_count) or STEP_GUESS_S

    def trip_s(self, plan: Plan, load: float) -> float:
        """Seconds from a commit to the draft tokens that a plan waits for, or to the first."""
        return self.network_s + LATE_S + max(1, plan.wait_length) * self.step_s(plan, load)

    def wait_max_s(self, plan: Plan, load: float) -> float:
        """Seconds for which a plan may hold a verification back; 0 if it does not wait."""
        return min(WAIT_LEAST_S + WAIT_SLACK * self.trip_s(plan, load), WAIT_MAX_S) if plan.wait_length else 0.0


class HeadTimes(DraftTimes):
    """Of a target's feature head under one rule: the steps are its passes, all of them between a verification and its
    result, so they keep the round as long as they take and no round waits for them beside."""

    def on_round(self, record: RoundRecord) -> None:
        window, step = record.plan.window, record.step
        if window and step.head_s:
            self.on_step(record.plan.nodes_per_step * step.sessions, step.head_s / window)

    def trip_s(self, plan: Plan, load: float) -> float:
        return max(1, plan.window) * self.step_s(plan, load)
