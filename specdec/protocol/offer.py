"""The draft tokens of one verification: the likeliest nodes of all proposers' guesses, as one tree.

Nodes are taken best first by the estimated probability that their path is committed, while that is worth a row. Where
REJECTION tests siblings, their order and the offer of each depend on the path, on the parent's draft distribution, on
earlier siblings and on other branches, never on a drawn token itself or on anything below it (docs/exactness.md): so a
drawn token's estimate has no features but its rank and its distribution, and no sibling is offered without those drawn
before it. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.protocol.calibration import RANK_COUNT, Calibration, confidence_bin, confidence_features
from specdec.protocol.proposers import Run
from specdec.protocol.tree import TreeNode
from specdec.protocol.tree_shape import PATH_COUNT_MAX, branches, children
from specdec.protocol.types import CONFIDENCE_EDGES, DraftProbs, Proposer, Rule, point_mass

STRENGTH_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # matches of equal worth end here
MATCH_HALF = 2.5  # of a match of length n the prior is n / (n + MATCH_HALF)
BIN_CONFIDENCES = tuple((low + high) / 2 for low, high in zip((0.0, *CONFIDENCE_EDGES), (*CONFIDENCE_EDGES, 1.0)))
UNKNOWN_CONFIDENCE = 0.1  # of a branch child sent late


class Limits(NamedTuple):
    """The limits of an offer: most tokens, most tokens of a path, most paths; siblings of a draft token; and the least
    probability of a path that is worth a row, and of one that is worth a row and a further path."""

    row_max: int
    depth_max: int
    path_max: int = PATH_COUNT_MAX
    siblings: int = 0
    reach_min: float = 0.0
    path_reach_min: float = 0.0


class Offer(NamedTuple):
    """The draft tokens of a verification, in depth-first order; `parents`: protocol.tree_shape. `guesses`: (proposer,
    features) of each, of all proposers with that token there, the surest first; `names`: (epoch, node_id) of each in
    the received tree, None where it has no such node."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    draft_probs: tuple[DraftProbs, ...] = ()
    guesses: tuple[tuple[tuple[Proposer, Hashable], ...], ...] = ()
    names: tuple[tuple[int, int] | None, ...] = ()

    @property
    def proposers(self) -> tuple[Proposer, ...]:
        """The surest proposer of each token."""
        return tuple(guesses[0][0] for guesses in self.guesses)

    @property
    def path_count(self) -> int:
        """The number of paths."""
        return len(branches(self.parents, len(self.token_ids))) if self.token_ids else 0

    def sources(
        self, accepted: Sequence[int], drafter: Proposer = Proposer.DRAFT
    ) -> tuple[tuple[Proposer, ...], tuple[Proposer, ...], int, int]:
        """Returns, of a round that accepted these tokens, the proposers of all tokens and of the accepted ones, the
        number of the first accepted ones that others than the drafter guessed too, and that of paths."""
        if not self.token_ids:
            return (), (), 0, 0
        proposers, local_count = self.proposers, 0
        for index in accepted:
            if all(proposer is drafter for proposer, _ in self.guesses[index]):
                break
            local_count += 1
        return proposers, tuple(map(proposers.__getitem__, accepted)), local_count, self.path_count

    def learn(self, calibration: Calibration, accepted: Sequence[int]) -> None:
        """Counts the guesses whose parent's path was accepted. What lies below a rejection enters no estimate."""
        if not self.token_ids:
            return
        following = children(self.parents, len(self.token_ids))
        for row in (0, *(index + 1 for index in accepted)):
            for index in following[row]:
                for _, features in self.guesses[index]:
                    calibration.record(features, index in accepted)


NOTHING = Offer()


@dataclass(slots=True)
class _Node:
    """A possible draft token: its path's probability, its own, its guesses; and the places of the guesses below it."""

    token_id: int
    own: float
    guesses: list[tuple[float, Proposer, Hashable]]
    remote: TreeNode | None
    runs: list[tuple[Run, int]]
    draft_probs: DraftProbs | None = None
    reach: float = 1.0
    depth: int = 0
    below: list[_Node] = field(default_factory=list)

    def add(self, probability: float, proposer: Proposer, features: Hashable) -> None:
        self.guesses.append((probability, proposer, features))
        self.own = max(self.own, probability)


def make_offer(root: TreeNode, runs: Sequence[Run], rule: Rule, limits: Limits, calibration: Calibration) -> Offer:
    """Returns the offer below `root`, the last committed token: nodes of the received tree and of the runs."""
    if not runs and not limits.siblings:
        return _chain(root, rule, limits, calibration)
    return _tree(root, runs, rule, limits, calibration)


def _chain(root: TreeNode, rule: Rule, limits: Limits, calibration: Calibration) -> Offer:
    """The offer of the draft's proposal path alone: the same as `_tree`'s, in a third of its time."""
    node, reach = root, 1.0
    tokens: list[int] = []
    probs: list[DraftProbs] = []
    guesses: list[tuple[tuple[Proposer, Hashable], ...]] = []
    names: list[tuple[int, int]] = []
    while node.proposal is not None and len(tokens) < min(limits.row_max, limits.depth_max):
        if rule is not Rule.REJECTION:
            features, prior = node_features(rule, node.proposal)
        elif node.draft_probs is not None:
            features, prior = drawn_features(node.draft_probs, 0, proposer=node.proposal.proposer)
            probs.append(node.draft_probs)
        reach *= calibration.probability(features, prior)
        if reach < limits.reach_min:
            break
        node = node.proposal
        tokens.append(node.token_id)
        guesses.append(((node.proposer, features),))
        names.append(node.name)
    return Offer(tuple(tokens), (), tuple(probs[: len(tokens)]), tuple(guesses), tuple(names))


def _tree(root: TreeNode, runs: Sequence[Run], rule: Rule, limits: Limits, calibration: Calibration) -> Offer:
    """The offer of all guesses."""
    top = _Node(0, 1.0, [], root, [(run, 0) for run in runs])
    heap: list[tuple[float, int, _Node, Iterator[_Node], _Node]] = []
    order, count, path_count = 0, 0, 1

    def push_next(parent: _Node, siblings: Iterator[_Node]) -> None:
        nonlocal order
        node = next(siblings, None)
        if node is None or parent.depth == limits.depth_max:
            return
        node.reach, node.depth = parent.reach * node.own, parent.depth + 1
        if node.reach >= limits.reach_min:
            order += 1
            heapq.heappush(heap, (-node.reach, order, parent, siblings, node))

    push_next(top, _children(top, rule, limits.siblings, calibration))
    while heap and count < limits.row_max:
        _, _, parent, siblings, node = heapq.heappop(heap)
        is_further = bool(parent.below)
        if is_further and (path_count == limits.path_max or node.reach < limits.path_reach_min):
            continue
        path_count += is_further
        parent.below.append(node)
        count += 1
        push_next(parent, siblings)
        push_next(node, _children(node, rule, limits.siblings, calibration))
    return _in_order(top, rule)


def _children(node: _Node, rule: Rule, siblings: int, calibration: Calibration) -> Iterator[_Node]:
    """Yields the possible tokens after a node, each unlike those before: by falling probability, those drawn in the
    order of their draws. What several proposers guess is one node of all; under REJECTION a drawn token is its own."""
    found: dict[int, _Node] = {}
    drawn: list[_Node] = []
    remote = node.remote

    def guess(token_id: int, proposer: Proposer, features: Hashable, prior: float) -> None:
        own = found.get(token_id)
        if own is None:
            own = found[token_id] = _Node(token_id, 0.0, [], None, [])
        own.add(calibration.probability(features, prior), proposer, features)

    for run, place in node.runs:
        if place < len(run.token_ids):
            guess(run.token_ids[place], run.proposer, *run_features(run, place, rule))
    if rule is Rule.REJECTION:
        for own in found.values():
            own.draft_probs = point_mass(own.token_id)
        drawn = _drawn(remote, siblings, calibration)
    else:
        for child in _guessed(remote, siblings):
            guess(child.token_id, child.proposer, *node_features(rule, child))
    nodes = [*found.values(), *drawn]
    taken: set[int] = set()
    if len(nodes) > 1:
        nodes.sort(key=lambda own: -own.own)  # equal ones keep their order
    for own in nodes:
        if own.token_id not in taken:
            taken.add(own.token_id)
            is_sure = rule is Rule.REJECTION and found.get(own.token_id) is own
            own.remote = None if remote is None else _remote_below(remote, own.token_id, is_sure)
            own.runs = [
                (run, place + 1) for run, place in node.runs if run.token_ids[place : place + 1] == (own.token_id,)
            ]
            own.guesses.sort(key=lambda guess: -guess[0])
            yield own


def _remote_below(remote: TreeNode, token_id: int, is_sure: bool) -> TreeNode | None:
    """Returns the received node of a possible token. One that was not drawn though others are (`is_sure`) gets one only
    as the first token drawn, which is then not tested: else the rows left for a drawn token would depend on it."""
    if is_sure and not (remote.drawn and remote.drawn[0].token_id == token_id):
        return None
    return remote.children.get(token_id)


def _guessed(remote: TreeNode | None, siblings: int) -> list[TreeNode]:
    """Returns the received children of a node that may be offered under GREEDY and COUPLED."""
    if remote is None or remote.proposal is None:
        return []
    others = remote.children.values() if siblings else ()
    return [remote.proposal, *(child for child in others if child is not remote.proposal)]


def _drawn(remote: TreeNode | None, siblings: int, calibration: Calibration) -> list[_Node]:
    """Returns the tokens drawn for a node, in order, no later one likelier than one before it. If the likeliest token
    was drawn and is refused, the target has little use for the others: so the next one's estimate knows of it."""
    if remote is None or remote.draft_probs is None or remote.proposal is None:
        return []
    nodes: list[_Node] = []
    before: set[int] = set()
    probs, proposer = remote.draft_probs, remote.proposal.proposer
    most, likeliest = 1.0, probs.token_ids[probs.weights.index(max(probs.weights))]
    for rank, child in enumerate(remote.drawn[: 1 + siblings]):
        features, prior = drawn_features(probs, rank, likeliest in before, proposer)
        most = min(most, calibration.probability(features, prior))
        nodes.append(_Node(child.token_id, most, [(most, proposer, features)], None, [], probs))
        before.add(child.token_id)
    return nodes


def run_features(run: Run, place: int, rule: Rule) -> tuple[Hashable, float]:
    """Returns the features of a run's token, and the prior of its probability: its proposer, the rank of the run, and
    the length of the match before it, or its place and confidence."""
    if run.confidences:
        confidence = run.confidences[place]
        return (run.proposer, rule.value, run.rank, place, confidence), BIN_CONFIDENCES[confidence - 1]
    strength = run.strength + place
    edge = next((edge for edge in reversed(STRENGTH_EDGES) if edge <= strength), 0)
    return (run.proposer, rule.value, run.rank, edge), strength / (strength + MATCH_HALF)


def drawn_features(
    probs: DraftProbs, rank: int, is_likeliest_drawn: bool = False, proposer: Proposer = Proposer.DRAFT
) -> tuple[Hashable, float]:
    """Returns the features of a token drawn in that place, and the prior of its probability: who drew it, its rank, the
    largest share of its distribution, and whether a sibling drawn before it is the likeliest token; never the token.
    Priors are fits to the embedded pair."""
    share = max(probs.weights) / probs.total
    if rank == 0:
        prior = 0.3 + 0.55 * share
    else:
        prior = (min(0.1, 1 - share) if is_likeliest_drawn else 0.05 + 0.27 * share) / rank
    return _of(proposer, confidence_features(Rule.REJECTION, rank, share), is_likeliest_drawn), prior


def _of(proposer: Proposer, *features: Hashable) -> Hashable:
    """Returns the features of a received token: a head's outcomes teach nothing of a draft's."""
    return features if proposer is Proposer.DRAFT else (*features, proposer)


def node_features(rule: Rule, node: TreeNode) -> tuple[Hashable, float]:
    """Returns the features of a received token under GREEDY or COUPLED, and the prior of its probability."""
    prior = BIN_CONFIDENCES[node.confidence - 1] if node.confidence else UNKNOWN_CONFIDENCE
    own = rule.value, min(node.rank, RANK_COUNT - 1), node.confidence or confidence_bin(prior)
    return _of(node.proposer, *own), prior


def _in_order(top: _Node, rule: Rule) -> Offer:
    """Returns the chosen nodes in depth-first order; a chain has no parents."""
    nodes: list[_Node] = []
    parents: list[int] = []
    stack = [(0, node) for node in reversed(top.below)]
    while stack:
        parent, node = stack.pop()
        parents.append(parent)
        nodes.append(node)
        row = len(nodes)
        stack.extend((row, child) for child in reversed(node.below))
    is_chain = all(parent == index for index, parent in enumerate(parents))
    return Offer(
        tuple(node.token_id for node in nodes),
        () if is_chain else tuple(parents),
        tuple(node.draft_probs for node in nodes if node.draft_probs) if rule is Rule.REJECTION else (),
        tuple(tuple((proposer, features) for _, proposer, features in node.guesses) for node in nodes),
        tuple([None if node.remote is None else node.remote.name for node in nodes]),
    )
