"""The pipeline of one plan under given conditions, as numbers: what stretch.py runs and cost_model.py adds up.

The draft grows its tree best first. Written in costs, minus logs of probabilities, a node is evaluated when growth has
come to its cost, and the number of nodes n(x) that cost at most x obeys n(x) = 1 + sum of n(x - c) over the costs c of
a node's children: a chain at first, and exponential growth beyond the cost of a branch.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

POINTS = 161  # of the table of node counts: its values are within 1 % of exact ones


class NodeCounts:
    """How many nodes of an unlimited tree cost at most x, and the inverse: n(x) = u(x) + sum of n(x - c).

    u is the root's own step from 0 to 1, drawn out over one `chain_cost`, because growth comes to nodes evenly and not
    when their cost is a whole number of steps. Tabled up to `cost_max` and straight between the points.
    """

    __slots__ = ("cost_max", "_chain_cost", "_spacing", "_counts", "_without")

    def __init__(self, costs: tuple[float, ...], cost_max: float) -> None:
        """`costs` of a node's children, that of the chain first; all above 0."""
        chain_cost, *others = costs
        self.cost_max = cost_max
        self._chain_cost = chain_cost
        self._spacing = spacing = cost_max / (POINTS - 1)
        self._counts: list[float] = []
        self._without: dict[int, list[float]] = {}  # by depth: the counts without what lies below that chain node
        share = min(1.0, chain_cost / spacing)  # below 1 the chain's child lies between this point and the one before
        for index in range(POINTS):
            cost = index * spacing
            count = self._root(cost) + sum(self(cost - other) for other in others)
            if share < 1:
                self._counts.append(count / share + self._counts[-1] if index else count)
            else:
                self._counts.append(count + self(cost - chain_cost))

    def __call__(self, cost: float) -> float:
        """Nodes that cost at most so much; beyond the table, as many as at its end."""
        if cost <= 0:
            return self._root(cost)
        place = cost / self._spacing
        index = int(place)
        counts = self._counts
        if index + 1 >= len(counts):
            return counts[-1]
        low = counts[index]
        return low + (counts[index + 1] - low) * (place - index)

    def cost(self, node_count: float, depth: int) -> float:
        """The cost at which there are so many, those below the chain node at `depth` left out; at most `cost_max`."""
        counts = self._without.get(depth)
        if counts is None:
            below = depth * self._chain_cost
            counts = [own - self(index * self._spacing - below) for index, own in enumerate(self._counts)]
            self._without[depth] = counts
        index = bisect_right(counts, node_count)
        if index == len(counts):
            return self.cost_max
        if index == 0:
            return 0.0
        low = counts[index - 1]
        return (index - 1 + (node_count - low) / (counts[index] - low)) * self._spacing

    def _root(self, cost: float) -> float:
        return min(max(cost / self._chain_cost + 0.5, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All a stretch depends on. Times in seconds.

    `round_s[m]`: a round with m draft tokens, overhead included. `first_step_s`, `second_step_s`: draft steps that find
    one node, and its children, to evaluate; `draft_step_s`: all later ones, of `leaves` nodes. `acceptance[i]`: of the
    i-th offered token; `bonus_match`: of a guess for the token after the last offered one, None: as if offered.
    Costs are minus logs of probabilities: `chain_cost` of a proposal child, `branches` (cost, share) of its siblings:
    `share` of corrections are this one. `node_counts`: of the tree they make; nodes beyond its table are not evaluated.
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
    node_counts: NodeCounts
    window: int
    wait_length: int
    wait_s: float

    def node_count(self, cost: float, depth: int) -> float:
        """Nodes that cost no more than that below their root, without those below the chain node at `depth`."""
        return self.node_counts(cost) - self.node_counts(cost - depth * self.chain_cost)

    def level(self, node_count: float, depth: int) -> float:
        """The inverse: how costly a node best-first growth has come to after so many; below 0 before the root."""
        if node_count <= 1:
            return node_count - 1
        return self.node_counts.cost(node_count, max(1, depth))


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


class Heard(NamedTuple):
    """The draft hears at `at_s` that `committed` tokens are; below them it has evaluated `node_count` nodes by then."""

    at_s: float
    committed: int
    node_count: float
