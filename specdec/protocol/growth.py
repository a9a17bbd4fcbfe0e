"""How the draft grows a session's tree: the likeliest nodes first, below whatever is committed by then.

A node is evaluated when the draft model has run on its path: that gives its proposal child and guesses at other
children, with the likelihood of their paths, a product of calibrated probabilities. Likelihood decides what is
evaluated next, never which child is offered. An evaluated node lies in a cell of the cache; a commit keeps the cells
along its path and frees all others. Pure: no model, no clock, no messages.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from specdec.protocol.items import DraftNode
from specdec.protocol.tree import TreeNode
from specdec.protocol.types import Row, Rule

LIKELIHOOD_MIN = 0.003  # work on a path that comes true once in 300 rounds is better left undone
CANDIDATES_MAX = 1024  # above, those that commits have passed are sorted out
NO_CELL = -1
EDGES = (0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
RANK_COUNT = 4  # the proposal child and three branch children
PRIOR_COUNT = 8.0  # outcomes the confidence itself is worth: after so many in a bin both count alike
COUNT_MAX = 2048.0  # a fuller bin is halved, so that a changing text is followed
PROBABILITY_MIN, PROBABILITY_MAX = 0.001, 0.999


class Calibration:
    """From a draft's confidence in a token to the probability that the token is committed, learned from what happened.

    A draft trained to sharpness is sure too often. So confidences are sorted into bins, one set for each rule and rank,
    and each bin counts how often its tokens came true. What is learned orders the draft's work and nothing else, so it
    cannot change a law (docs/exactness.md).
    """

    def __init__(self) -> None:
        bin_count = (1 + max(rule.value for rule in Rule)) * RANK_COUNT
        self._bins = [[[0.0, 0.0] for _ in range(len(EDGES) + 1)] for _ in range(bin_count)]

    def probability(self, rule: Rule, rank: int, confidence: float) -> float:
        """P(committed | the path before it is) of a guess: the bin's share, shrunk towards the confidence."""
        came_true, count = self._bin(rule, rank, confidence)
        share = (came_true + PRIOR_COUNT * confidence) / (count + PRIOR_COUNT)
        return min(max(share, PROBABILITY_MIN), PROBABILITY_MAX)

    def record(self, rule: Rule, rank: int, confidence: float, came_true: bool) -> None:
        """Counts one guess whose place was reached by the committed tokens, once."""
        counts = self._bin(rule, rank, confidence)
        counts[0] += came_true
        counts[1] += 1
        if counts[1] > COUNT_MAX:
            counts[0] /= 2
            counts[1] /= 2

    def _bin(self, rule: Rule, rank: int, confidence: float) -> list[float]:
        """[came true, counted] of the bin a confidence falls in."""
        bins = self._bins[rule.value * RANK_COUNT + min(rank, RANK_COUNT - 1)]
        return bins[bisect.bisect_right(EDGES, confidence)]


@dataclass(slots=True, eq=False)
class GrownNode(TreeNode):
    """A node of the draft's own tree.

    `score`: the logarithm of its path's likelihood, up to a constant of the tree. `name`: as the coordinator knows it,
    0 for the root of an epoch and for a guess that was not sent. `guesses`: what the model said of its children, the
    proposal child first; none before it is evaluated. `cell`: where its keys and values lie.
    """

    score: float = 0.0
    name: int = 0
    guesses: tuple[tuple[int, float], ...] = ()
    cell: int = NO_CELL


def cells_of(nodes: Iterable[GrownNode]) -> list[int]:
    """Where nodes lie, as far as they were evaluated."""
    return [node.cell for node in nodes if node.cell != NO_CELL]


class Growth:
    """The tree of one session on the draft, epoch by epoch.

    `epoch` is the next of `epochs` at each restart, `root_length` is where it began, nodes are named from 1 in each.
    `root` is the last committed token; None before the first commit and while committed tokens are missing.
    """

    def __init__(self, rule: Rule, calibration: Calibration, epochs: Iterator[int] | None = None) -> None:
        self.rule = rule
        self.epoch = 0
        self.root_length = 0
        self.root: GrownNode | None = None
        self._calibration = calibration
        self._epochs = epochs or itertools.count(1)
        self._order = itertools.count()
        self._name_count = 0
        self._candidates: list[tuple[float, int, GrownNode]] = []  # by falling score; equal ones in order of arrival
        self._beyond: list[GrownNode] = []  # past the window, until the next commit

    def drop(self) -> list[int]:
        """Stops growing until the next restart; the cells that are free now."""
        root, self.root = self.root, None
        return [] if root is None else cells_of(root.end())

    def restart(self, committed: Sequence[int]) -> None:
        """A new epoch where there is no root, below the last committed token, which is the one candidate."""
        self.epoch = next(self._epochs)
        self.root_length = len(committed)
        self._name_count = 0
        self.root = GrownNode(len(committed), committed[-1])
        self._candidates, self._beyond = [], []
        self.give_back(self.root)

    def commit(self, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Follows newly committed tokens, and tells the calibration which guesses along them came true.

        The cells of the tokens, from the first on, as far as they were evaluated; and the cells that are free now.
        Where the tokens leave the nodes sent, there is no root any more: `restart` is due.
        """
        assert self.root is not None
        kept: list[int] = []
        freed: list[int] = []
        for token_id in token_ids:
            for rank, (guess, confidence) in enumerate(self.root.guesses):
                self._calibration.record(self.rule, rank, confidence, guess == token_id)
            child = self.root.children.pop(token_id, None)
            freed += cells_of(self.root.end())
            if child is None or not child.name:  # the coordinator knows no name for what lies below a guess
                self.root = None
                return kept, freed
            kept += cells_of([child])
            child.parent, child.cell = None, NO_CELL
            self.root = child
        for node in self._beyond:
            self.give_back(node)
        self._beyond = []
        if len(self._candidates) > CANDIDATES_MAX:
            self._candidates = [entry for entry in self._candidates if self._is_open(entry[2])]
            heapq.heapify(self._candidates)
        return kept, freed

    def take(self, count_max: int, reach: int, is_chain: bool = False) -> list[GrownNode]:
        """The likeliest nodes to evaluate, at most so many, best first; they are the caller's now.

        A child of an evaluated node stays within `reach`, the longest path the tree may have. A chain goes on along
        proposal children however unlikely they are, and leaves the branches of a tree grown before alone.
        """
        if is_chain:
            return self._take_chain(reach)
        taken: list[GrownNode] = []
        while self._candidates and len(taken) < count_max:
            entry = heapq.heappop(self._candidates)
            node = entry[2]
            if not self._is_open(node):
                continue
            if node.length >= reach:
                self._beyond.append(node)
            elif self.likelihood(node) >= LIKELIHOOD_MIN:
                taken.append(node)
            else:
                heapq.heappush(self._candidates, entry)  # likelier than this none is left
                break
        return taken

    def _take_chain(self, reach: int) -> list[GrownNode]:
        node = self.root
        while node is not None and node.guesses:
            node = node.proposal
        return [node] if node is not None and node.length < reach else []

    def give_back(self, node: GrownNode) -> None:
        """Returns a node that was taken and not evaluated."""
        heapq.heappush(self._candidates, (-node.score, next(self._order), node))

    def likelihood(self, node: GrownNode) -> float:
        """P(the node's path is committed), as far as it is known, given what is committed now."""
        assert self.root is not None
        return math.exp(node.score - self.root.score)

    def _is_open(self, node: GrownNode) -> bool:
        """Whether it is still to be evaluated, and its path agrees with the committed tokens."""
        return node.alive and not node.guesses

    def path(self, node: GrownNode) -> list[GrownNode]:
        """The nodes from below the root down to a node, itself the last; none for the root."""
        nodes: list[GrownNode] = []
        walker: GrownNode | None = node
        while walker is not None and walker is not self.root:
            nodes.append(walker)
            walker = walker.parent
        return nodes[::-1]

    def reserve_name(self) -> int:
        """A name for a node to come: for its draw, which must be named before it is known."""
        self._name_count += 1
        return self._name_count

    def file(self, node: GrownNode) -> DraftNode | None:
        """What the coordinator has to be sent of a node about to be evaluated: a guess that it does not know yet."""
        if node.parent is None or node.name:
            return None
        node.name = self.reserve_name()
        return DraftNode(node.name, node.parent.name, node.token_id, False)

    def evaluated(
        self, node: GrownNode, name: int, guesses: Sequence[tuple[int, float]], row: Row | None, cell: int = NO_CELL
    ) -> DraftNode:
        """Files what the model said of a node: (token, confidence) of its children. The first is its proposal child,
        drawn from `row`; `name` was reserved for it. `cell`: where the node lies; none where it is committed."""
        node.guesses, node.cell = tuple(guesses), cell
        probability = self._calibration.probability
        for rank, (token_id, confidence) in enumerate(guesses):
            score = node.score + math.log(probability(self.rule, rank, confidence))
            child = node.children[token_id] = GrownNode(node.length + 1, token_id, node, score=score)
            self.give_back(child)
            if rank == 0:
                child.name, node.proposal = name, child
        return DraftNode(name, node.name, guesses[0][0], True, row)

    def check(self) -> None:
        """Raises AssertionError naming the broken invariant."""
        if self.root is not None:
            self.root.check()
            nodes = list(self.root.below())
            assert all(node.guesses or not node.children for node in nodes), "only evaluated nodes have children"
            assert len(set(cells_of(nodes))) == len(cells_of(nodes)), "a cell holds one node"
