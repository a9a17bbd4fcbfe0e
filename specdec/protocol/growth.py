"""How the draft grows a session's tree: the likeliest places first, below whatever is committed by then.

A place is evaluated when the draft model has run on its path: that gives its proposal child and guesses at other
children. All of them become candidates, with the likelihood of their path, a product of calibrated probabilities.
Likelihood decides what is evaluated next, never which child is offered. Pure: no model, no clock, no messages.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.protocol.calibration import Calibration
from specdec.protocol.items import DraftNode
from specdec.protocol.tree import DraftTree, Guess, Place
from specdec.protocol.types import Row, Rule

LIKELIHOOD_MIN = 0.003  # work on a path that comes true once in 300 rounds is better left undone


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place not evaluated yet: `place` where the tree holds it, else a guess at a child of `parent`.

    `score` is the logarithm of its path's likelihood, on the scale of the tree's scores. Lower `order` came first.
    """

    score: float
    order: int
    length: int
    token_id: int
    parent: Place | None = None
    place: Place | None = None

    def __lt__(self, other: Candidate) -> bool:
        return (-self.score, self.order) < (-other.score, other.order)


class Growth:
    """The tree of one session on the draft, epoch by epoch.

    `epoch` is the next of `epochs` at each restart, `root_length` is where it began, nodes are named from 1 in each.
    """

    def __init__(self, rule: Rule, calibration: Calibration, epochs: Iterator[int] | None = None) -> None:
        self.rule = rule
        self.epoch = 0
        self.root_length = 0
        self._calibration = calibration
        self._epochs = epochs or itertools.count(1)
        self._order = itertools.count()
        self._node_count = 0
        self._tree: DraftTree | None = None
        self._committed: list[int] = []
        self._candidates: list[Candidate] = []
        self._beyond: list[Candidate] = []  # candidates past the window, or beside a chain, until the next commit

    @property
    def tree(self) -> DraftTree | None:
        """The tree of this epoch; None before the first commit and while committed tokens are missing."""
        return self._tree

    def drop(self) -> None:
        """Stops growing until the next restart."""
        self._tree = None
        self._candidates, self._beyond = [], []

    def restart(self, committed: list[int]) -> None:
        """A new epoch, rooted at `committed`, which grows by each commit; its root is the one candidate."""
        self.drop()
        self._committed = committed
        self._tree = DraftTree(committed)
        self.epoch = next(self._epochs)
        self.root_length = len(committed)
        self._node_count = 0
        root = self._tree.root
        self._candidates = [Candidate(root.score, next(self._order), root.length, root.token_id, place=root)]

    def commit(self, token_ids: Sequence[int]) -> bool:
        """Follows newly committed tokens; False when they left what was grown: then a restart is due."""
        assert self._tree is not None
        self._learn(token_ids)
        self._committed.extend(token_ids)
        if not self._tree.commit(token_ids):
            return False
        for candidate in self._beyond:
            heapq.heappush(self._candidates, candidate)
        self._beyond = []
        return True

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Tells the calibration which guesses along the committed path came true."""
        place: Place | None = self._tree.root if self._tree else None
        for token_id in token_ids:
            if place is None:
                return
            for guess in place.guesses:
                self._calibration.record(self.rule, guess.rank, guess.confidence, guess.token_id == token_id)
            place = place.children.get(token_id)

    def take(self, count_max: int, reach: int, is_chain: bool = False) -> list[Candidate]:
        """The likeliest candidates that may be evaluated, at most so many, best first; they are the caller's now.

        A child of an evaluated place stays within `reach`, the longest path the tree may have. A chain goes
        on along proposal children however unlikely they are, and leaves the branches of a tree grown before alone.
        """
        taken: list[Candidate] = []
        while self._candidates and len(taken) < count_max:
            candidate = heapq.heappop(self._candidates)
            if not self._is_open(candidate):
                continue
            if candidate.length >= reach or (is_chain and not self._is_on_chain(candidate)):
                self._beyond.append(candidate)
            elif is_chain or self.likelihood(candidate) >= LIKELIHOOD_MIN:
                taken.append(candidate)
            else:
                heapq.heappush(self._candidates, candidate)  # likelier than this none is left
                break
        return taken

    def give_back(self, candidate: Candidate) -> None:
        """Returns a candidate that was taken and not evaluated."""
        heapq.heappush(self._candidates, candidate)

    def likelihood(self, candidate: Candidate) -> float:
        """P(the candidate's path is committed), as far as it is known, given what is committed now."""
        assert self._tree is not None
        return math.exp(candidate.score - self._tree.root.score)

    def _is_open(self, candidate: Candidate) -> bool:
        """Whether its path agrees with the committed tokens: it ends at the root or below."""
        assert self._tree is not None
        known = candidate.place or candidate.parent
        return known is not None and self.is_below_root(known)

    def _is_on_chain(self, candidate: Candidate) -> bool:
        """Whether proposal children alone lead from the root to it."""
        assert self._tree is not None
        place = candidate.place
        while place is not None and place is not self._tree.root:
            place = place.parent if place.parent is not None and place.parent.proposal is place else None
        return place is not None

    def is_below_root(self, place: Place) -> bool:
        """Whether a place of this epoch still agrees with the committed tokens: it is the root, or lies below it."""
        assert self._tree is not None
        return place.alive and place.length >= self._tree.root.length

    def path(self, candidate: Candidate) -> list[int]:
        """The tokens of its path that are not committed yet."""
        assert self._tree is not None
        if candidate.place is not None:
            return self._tree.tokens_to(candidate.place)
        assert candidate.parent is not None
        return [*self._tree.tokens_to(candidate.parent), candidate.token_id]

    def reserve_node(self) -> int:
        """A name for a node to come: for its draw, which must be named before it is known."""
        self._node_count += 1
        return self._node_count

    def place(self, candidate: Candidate) -> tuple[Place, DraftNode | None]:
        """The candidate's place in the tree, and the node that filed it there if it was only a guess so far."""
        if candidate.place is not None:
            return candidate.place, None
        assert candidate.parent is not None
        node, place = self._add(DraftNode(self.reserve_node(), candidate.parent.node, candidate.token_id, False))
        place.score = candidate.score
        return place, node

    def evaluated(self, place: Place, node: int, guesses: Sequence[Guess], row: Row | None) -> DraftNode:
        """Files what the model said of a place below the root; the first guess is its proposal child, drawn from `row`.

        `node` is the name reserved for that child.
        """
        place.guesses = tuple(guesses)
        filed, proposal = self._add(DraftNode(node, place.node, guesses[0].token_id, True, row))
        for guess in guesses:
            score = place.score + math.log(self._calibration.probability(self.rule, guess.rank, guess.confidence))
            child = None
            if guess is guesses[0]:
                child, proposal.score = proposal, score
            candidate = Candidate(score, next(self._order), place.length + 1, guess.token_id, place, child)
            heapq.heappush(self._candidates, candidate)
        return filed

    def _add(self, node: DraftNode) -> tuple[DraftNode, Place]:
        assert self._tree is not None
        place = self._tree.add(self.epoch, self.root_length, node)
        assert place is not None, "a place below the root takes children"
        return node, place
