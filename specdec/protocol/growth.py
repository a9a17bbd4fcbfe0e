"""The growth of a session's tree on the draft: the likeliest nodes first, below the current committed tokens.

A node is evaluated when the draft model has run on its path: this gives its proposal child and guesses at other
children, with the likelihood of their paths, a product of calibrated probabilities. Likelihood decides the order of
evaluation, never which child is offered. An evaluated node has a cell of the cache; a commit keeps the cells along its
path and frees all others. Pure: no model, no clock, no messages.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.protocol.calibration import RANK_COUNT, Calibration, bin_features, confidence_bin, confidence_features
from specdec.protocol.tree import NodeBase
from specdec.protocol.types import DraftNode, DraftProbs, Rule

LIKELIHOOD_MIN = 0.003  # a path committed once in 300 rounds is not worth its evaluation
CANDIDATES_MAX = 1024  # above, candidates that commits have passed are removed
NO_CELL = -1


@dataclass(slots=True, eq=False)
class GrowingNode(NodeBase):
    """A node of the draft's own tree.

    `score`: the logarithm of its path's likelihood, up to a constant of the tree. `name`: as the coordinator knows it,
    0 for the root of an epoch and for a guess that was not sent. `guesses`: the model's guesses at its children, the
    proposal child first, none where it has none; None before it is evaluated. `cell`: of its keys and values.
    """

    score: float = 0.0
    name: int = 0
    guesses: tuple[tuple[int, float], ...] | None = None
    cell: int = NO_CELL


def cells_of(nodes: Iterable[GrowingNode]) -> list[int]:
    """Returns the cells of the evaluated ones among these nodes."""
    return [node.cell for node in nodes if node.cell != NO_CELL]


class GrowingTree:
    """The tree of one incarnation of a session on the draft, epoch by epoch.

    `epoch` counts its restarts, `root_length` is the length at the last one; nodes are named from 1 in each. `root` is
    the last committed token; None before the first commit and while committed tokens are missing.
    """

    def __init__(self, rule: Rule, calibration: Calibration) -> None:
        self.rule = rule
        self.epoch = 0
        self.root_length = 0
        self.root: GrowingNode | None = None
        self._calibration = calibration
        self._features = bin_features(rule)
        self._order = itertools.count()
        self._name_count = 0
        self._candidates: list[tuple[float, int, GrowingNode]] = []  # by falling score; equal ones in order of arrival
        self._beyond: list[GrowingNode] = []  # past the window, until the next commit

    def drop(self) -> list[int]:
        """Stops growing until the next restart; returns the cells that are free now."""
        root, self.root = self.root, None
        return [] if root is None else cells_of(root.end())

    def restart(self, committed: Sequence[int]) -> None:
        """Begins a new epoch if there is no root: the last committed token becomes the root and the only candidate."""
        self.epoch += 1
        self.root_length = len(committed)
        self._name_count = 0
        self.root = GrowingNode(len(committed), committed[-1])
        self._candidates, self._beyond = [], []
        self.give_back(self.root)

    def commit(self, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Re-roots the tree at newly committed tokens, and updates the calibration with the guesses along them.

        Returns the cells of the tokens, from the first on, as far as they were evaluated, and the cells that are free
        now. If the tokens leave the sent nodes there is no root any more: `restart` is due.
        """
        assert self.root is not None
        kept: list[int] = []
        freed: list[int] = []
        for token_id in token_ids:
            for rank, (guess, confidence) in enumerate(self.root.guesses or ()):
                self._calibration.record(confidence_features(self.rule, rank, confidence), guess == token_id)
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

    def take(
        self,
        count_max: int,
        reach: int,
        is_chain: bool = False,
        likelihood_min: float = LIKELIHOOD_MIN,
        wait_reach: int = 0,
    ) -> list[GrowingNode]:
        """Takes the likeliest nodes to evaluate, at most `count_max`, best first and none below `likelihood_min`; the
        caller evaluates or returns them.

        A child of an evaluated node stays within `reach`, the longest path the tree may have. A chain continues along
        proposal children however unlikely they are, and ignores the branches of an earlier tree. So does every tree
        until its proposal path has the length `wait_reach`, with one node of each step: a verification waits for it.
        """
        if is_chain:
            return self._take_chain(reach)
        taken = self._take_chain(min(reach, wait_reach))
        while self._candidates and len(taken) < count_max:
            entry = heapq.heappop(self._candidates)
            node = entry[2]
            if not self._is_open(node) or node in taken:
                continue
            if node.length >= reach:
                self._beyond.append(node)
            elif self.likelihood(node) >= likelihood_min:
                taken.append(node)
            else:
                heapq.heappush(self._candidates, entry)  # likelier than this none is left
                break
        return taken

    def _take_chain(self, reach: int) -> list[GrowingNode]:
        node = self.root
        while node is not None and node.guesses is not None:
            node = node.proposal
        return [node] if node is not None and node.length < reach else []

    def give_back(self, node: GrowingNode) -> None:
        """Returns a node that was taken and not evaluated."""
        heapq.heappush(self._candidates, (-node.score, next(self._order), node))

    def likelihood(self, node: GrowingNode) -> float:
        """Returns the estimate of P(the node's path is committed), given the tokens committed now."""
        assert self.root is not None
        return math.exp(node.score - self.root.score)

    def _is_open(self, node: GrowingNode) -> bool:
        """Whether a node is not evaluated yet, and its path agrees with the committed tokens."""
        return node.alive and node.guesses is None

    def path(self, node: GrowingNode) -> list[GrowingNode]:
        """Returns the nodes from below the root to a node, itself last; none for the root."""
        nodes: list[GrowingNode] = []
        walker: GrowingNode | None = node
        while walker is not None and walker is not self.root:
            nodes.append(walker)
            walker = walker.parent
        return nodes[::-1]

    def reserve_name(self) -> int:
        """Reserves the name of a future node: the key of its draw contains it."""
        self._name_count += 1
        return self._name_count

    def file(self, node: GrowingNode) -> DraftNode | None:
        """Names a node about to be evaluated, and returns it for sending; None if the coordinator knows it already."""
        if node.parent is None or node.name:
            return None
        node.name = self.reserve_name()
        return DraftNode(node.name, node.parent.name, node.token_id, False)

    def evaluated(
        self,
        node: GrowingNode,
        names: Sequence[int],
        guesses: Sequence[tuple[int, float]],
        draft_probs: DraftProbs | None,
        cell: int = NO_CELL,
    ) -> list[DraftNode]:
        """Stores the model's `guesses` at a node's children, (token, confidence), and returns those to send: the first,
        its proposal child, and its siblings, as far as `names` were reserved for them. With `draft_probs` all of these
        are drawn from it, in order. `cell`: of the node; none if it is committed."""
        node.guesses, node.cell = tuple(guesses), cell
        is_drawn, sent = draft_probs is not None, []
        length, probability = node.length + 1, self._calibration.probability
        for rank, (token_id, confidence) in enumerate(guesses):
            certainty = confidence_bin(confidence)
            features = self._features[rank if rank < RANK_COUNT else -1][certainty]
            score = node.score + math.log(probability(features, confidence))
            child = node.children[token_id] = GrowingNode(length, token_id, node, score=score)
            heapq.heappush(self._candidates, (-score, next(self._order), child))
            if rank < len(names):
                child.name = names[rank]
                is_proposal, told = is_drawn or rank == 0, 0 if is_drawn else certainty
                sent.append(DraftNode(child.name, node.name, token_id, is_proposal, draft_probs, told))
        if guesses:
            node.proposal = node.children[guesses[0][0]]
        return sent

    def check(self) -> None:
        """Raises AssertionError naming the broken invariant."""
        if self.root is not None:
            self.root.check()
            nodes = list(self.root.below())
            assert all(node.guesses or not node.children for node in nodes), "only evaluated nodes have children"
            assert len(set(cells_of(nodes))) == len(cells_of(nodes)), "a cell holds one node"
