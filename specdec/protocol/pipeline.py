"""The pipeline of one plan under given conditions, as numbers: what stretch.py runs and cost_model.py adds up.

The draft grows its tree best first. Written in costs, minus logs of probabilities, a node is evaluated when growth has
come to its cost, and the number of nodes n(x) that cost at most x obeys n(x) = 1 + sum of n(x - c) over the costs c of
a node's children. So n + 1/2 grows like exp(rate x) with sum of exp(-rate c) = 1, wherever there are three children.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

NODES_PER_GROWTH = 1.5  # nodes cheaper than x number about 1.5 exp(rate x) - 0.5: 1 for the root, then growing so


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All a stretch depends on. Times in seconds.

    `round_s[m]`: a round with m draft tokens, overhead included. `first_step_s`, `second_step_s`: draft steps that find
    one node, and its children, to evaluate; `draft_step_s`: all later ones, of `leaves` nodes. `acceptance[i]`: of the
    i-th offered token; `bonus_match`: of a guess for the token after the last offered one, None: as if offered.
    Costs are minus logs of probabilities: `chain_cost` of a proposal child, `branches` (cost, share) of its siblings:
    `share` of corrections are this one. Nodes beyond `cost_max` are not evaluated; `growth_rate`: how the number of
    nodes grows with their cost.
    """

    round_s: tuple[float, ...]
    first_step_s: float
    second_step_s: float
    draft_step_s: float
    leaves: int
    half_network_s: float
    acceptance: tuple[float, ...]
    bonus_match: float | None
    chain_cost: float
    branches: tuple[tuple[float, float], ...]
    cost_max: float
    growth_rate: float
    window: int
    wait_length: int
    wait_s: float

    def node_count(self, cost: float, depth: int) -> float:
        """Nodes that cost no more than that below their root, without those below the chain node at `depth`."""
        if cost < 0:
            return 0.0
        rate, beyond = self.growth_rate, cost - depth * self.chain_cost
        if beyond <= 0:
            return NODES_PER_GROWTH * math.exp(rate * cost) - 0.5
        return NODES_PER_GROWTH * (math.exp(rate * cost) - math.exp(rate * beyond))

    def level(self, node_count: float, depth: int) -> float:
        """The inverse: how costly a node best-first growth has come to after so many; below 0 before the root."""
        if node_count <= 1:
            return node_count - 1
        cost = math.log((node_count + 0.5) / NODES_PER_GROWTH) / self.growth_rate
        reach = max(1, depth) * self.chain_cost
        if cost > reach:
            share = NODES_PER_GROWTH * (1 - math.exp(-self.growth_rate * reach))
            cost = max(reach, math.log(node_count / share) / self.growth_rate)
        return min(cost, self.cost_max)


class Landing(NamedTuple):
    """What the draft already has below the commit that ends one stretch and begins the next.

    `steps` draft steps went by between the first that could evaluate something there and the moment the draft hears of
    the commit; by then it has `evaluated` tokens, of which `in_hand` were at the coordinator when it committed: real
    numbers, means over the phase of its steps. `level`: how costly a node growth has come to there. `ahead`: how far
    the commit lies beyond the last one the draft knew. `is_sparse`: other nodes were likelier or the window ended, so
    that tokens came spread out; else one each step.
    """

    in_hand: float = 0.0
    evaluated: float = 0.0
    steps: float = 0.0
    level: float = -1.0
    ahead: float = 0.0
    is_sparse: bool = False


NOTHING = Landing()


class Heard(NamedTuple):
    """The draft hears at `at_s` that `committed` tokens are; below them it has evaluated `node_count` nodes by then."""

    at_s: float
    committed: int
    node_count: float
