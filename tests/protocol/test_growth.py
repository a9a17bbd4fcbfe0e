"""Best-first growth of the draft tree, compared with its definition: the n likeliest paths.

The draft model here is a formula: it gives every path three guesses whose confidences depend on the path's last token,
so the n likeliest paths can be enumerated without any queue. Where paths tie, only likelihoods are compared.
"""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from specdec.protocol.calibration import Calibration, confidence_features
from specdec.protocol.growth import LIKELIHOOD_MIN, GrowingTree
from specdec.protocol.types import DraftNode, Rule
from tests.support.trees import OwnTree

DEPTH_MAX = 12


def guesses_after(token_id: int) -> list[tuple[int, float]]:
    """Three children of any path that ends with `token_id`; the first, the proposal, is not always the likeliest."""
    shares = (0.35 + 0.031 * (token_id % 7), 0.2 + 0.013 * (token_id % 5), 0.07 + 0.0017 * (token_id % 3))
    first = 3 * token_id + 1
    return [(first + rank, share) for rank, share in enumerate(shares)]


class ConfidenceItself(Calibration):
    """Returns confidences as probabilities; learning is tested separately."""

    def probability(self, features: Hashable, prior: float) -> float:
        return prior


def likeliest_paths(root_token_id: int, count: int) -> list[tuple[int, ...]]:
    """The `count` likeliest paths below a root, best first, by enumerating all of them."""
    found: list[tuple[float, tuple[int, ...]]] = []

    def visit(path: tuple[int, ...], token_id: int, likelihood: float) -> None:
        found.append((likelihood, path))
        for guess, confidence in guesses_after(token_id):
            if likelihood * confidence > LIKELIHOOD_MIN / 4 and len(path) < DEPTH_MAX:
                visit((*path, guess), guess, likelihood * confidence)

    visit((), root_token_id, 1.0)
    return [path for _, path in sorted(found, reverse=True)[:count]]


def likelihoods(paths: list[tuple[int, ...]], root_token_id: int) -> list[float]:
    """The likelihood of each path below a root, to 12 digits: products in different orders differ beyond."""
    found = []
    for path in paths:
        likelihood, token_id = 1.0, root_token_id
        for step in path:
            likelihood *= next(confidence for guess, confidence in guesses_after(token_id) if guess == step)
            token_id = step
        found.append(round(likelihood, 12))
    return found


class Grower:
    """Grows a tree with the formula, and a coordinator's tree from the nodes that leave."""

    def __init__(self, committed: list[int], calibration: Calibration | None = None) -> None:
        self.committed = list(committed)
        self.growth = GrowingTree(Rule.COUPLED, calibration or ConfidenceItself())
        self.growth.restart(committed)
        self.evaluated: list[tuple[int, ...]] = []
        self.remote = OwnTree(list(committed))

    def grow(self, count: int, reach: int = 99, is_chain: bool = False, wait_reach: int = 0) -> list[DraftNode]:
        sent: list[DraftNode] = []
        for taken in self.growth.take(count, reach, is_chain, wait_reach=wait_reach):
            self.evaluated.append(tuple(node.token_id for node in self.growth.path(taken)))
            filed, name = self.growth.file(taken), self.growth.reserve_name()
            sent += [] if filed is None else [filed]
            sent += self.growth.evaluated(taken, [name], guesses_after(taken.token_id), None)
        self.growth.check()
        for node in sent:
            assert self.remote.add(self.growth.epoch, self.growth.root_length, node) is not None
        return sent

    def commit(self, *token_ids: int) -> bool:
        self.remote.commit(token_ids)
        self.committed += token_ids
        self.growth.commit(token_ids)
        return self.growth.root is not None


def test_one_node_at_a_time_visits_the_likeliest_paths_in_order() -> None:
    """Claim: growth is best-first. A child is never likelier than its parent, so evaluating one node after another
    must visit exactly the likeliest paths, in order; all of them are enumerated here without a queue."""
    for root_token_id in range(7):
        grower = Grower([root_token_id])
        for _ in range(40):
            grower.grow(1)
        assert likelihoods(grower.evaluated, root_token_id) == likelihoods(
            likeliest_paths(root_token_id, 40), root_token_id
        )
        assert len(set(grower.evaluated)) == 40


def test_the_proposal_child_is_sent_whatever_its_likelihood() -> None:
    """Claim: likelihood never decides which child is offered: each evaluated node sends exactly one proposal child,
    its first guess, even where a branch child is likelier (token 1 of a 7-cycle has such children after calibration).
    """

    class Contrary(Calibration):
        def probability(self, features: Hashable, prior: float) -> float:
            return (0.1, 0.5, 0.2)[features[1]]

    grower = Grower([1], Contrary())
    sent = [node for _ in range(10) for node in grower.grow(4)]
    proposals = [node for node in sent if node.proposal]
    assert len(proposals) == len(grower.evaluated) > 10
    assert any(not node.proposal for node in sent)
    root = grower.remote.root
    assert root.proposal is not None and root.proposal.token_id == guesses_after(1)[0][0]


def test_a_commit_inside_goes_on_with_what_is_likeliest_below_it() -> None:
    """Claim: after a commit onto a proposal or a branch child no path beside it is evaluated any more, nothing is
    evaluated twice, and the next nodes are the likeliest open paths below: compared with the enumeration."""
    for rank in (0, 1, 2):
        grower = Grower([2])
        for _ in range(12):
            grower.grow(3)
        token_id = guesses_after(2)[rank][0]
        known = {path[1:] for path in grower.evaluated if path[:1] == (token_id,)}
        assert grower.commit(token_id) == bool(known)
        if not known:
            continue
        grower.evaluated.clear()
        for _ in range(20):
            grower.grow(1)
        expected = [path for path in likeliest_paths(token_id, 20 + len(known)) if path not in known][:20]
        assert likelihoods(grower.evaluated, token_id) == likelihoods(expected, token_id)
        assert len(set(grower.evaluated)) == 20 and known.isdisjoint(grower.evaluated)


def test_a_commit_outside_asks_for_a_restart_in_a_new_epoch() -> None:
    """Claim: after a token outside the tree nothing can be evaluated; the next epoch is rooted behind it, and its nodes
    fit a coordinator's tree that committed the same."""
    grower = Grower([2])
    grower.grow(3)
    assert not grower.commit(999)
    grower.growth.restart([2, 999])
    assert grower.growth.epoch == 2 and grower.growth.root_length == 2
    grower.evaluated.clear()
    grower.grow(1)
    assert grower.evaluated == [()] and grower.remote.root.proposal is not None


def test_the_tree_stays_within_reach_and_goes_on_when_it_moves() -> None:
    """Claim: the window bounds every path, and nodes beyond it are evaluated once the window has moved past them."""
    grower = Grower([3])
    while grower.grow(4, reach=3):
        pass
    assert {len(path) for path in grower.evaluated} == {0, 1}
    token_id = guesses_after(3)[0][0]
    assert grower.commit(token_id)
    grower.evaluated.clear()
    while grower.grow(4, reach=4):
        pass
    assert {len(path) for path in grower.evaluated} == {1}


def test_a_chain_goes_on_however_unlikely_it_is_and_a_tree_stops() -> None:
    """Claim: a tree does not evaluate paths of very low likelihood; a chain does, so that a session that waits for a
    fixed number of tokens gets them."""
    grower = Grower([1])
    while grower.grow(8):
        pass
    assert min(likelihoods(grower.evaluated, 1)) >= LIKELIHOOD_MIN and len(grower.evaluated) > 30
    chain = GrowingTree(Rule.GREEDY, ConfidenceItself())
    chain.restart([1])
    for _ in range(40):
        (node,) = chain.take(1, 99, is_chain=True)
        chain.evaluated(node, [chain.reserve_name()], guesses_after(node.token_id)[:1], None)
    assert [len(chain.path(node)) for node in chain.take(1, 99, is_chain=True)] == [40]


def test_a_tree_that_is_waited_for_grows_its_proposal_path_first() -> None:
    """Claim: while a verification waits for a path, each step has the next node of it, however unlikely, so that the
    wait ends after as many steps; the other nodes are the likeliest ones, and with the path complete all are.
    Conclusive: every evaluated path is compared with those of a tree that nothing waits for, by enumeration."""
    length = 12
    path = proposals_after(1, length)
    grower = Grower([1])
    for step in range(length):
        before = len(grower.evaluated)
        grower.grow(4, wait_reach=1 + length)
        assert tuple(path[:step]) in grower.evaluated[before:]
    assert likelihoods([tuple(path[: length - 1])], 1)[0] < LIKELIHOOD_MIN, "the tree alone leaves this path out"
    while grower.grow(4, wait_reach=1 + length):
        pass
    likely, own = Grower([1]), [tuple(path[:step]) for step in range(length)]
    while likely.grow(4):
        pass
    assert sorted(grower.evaluated) == sorted({*likely.evaluated, *own})


def proposals_after(token_id: int, count: int) -> list[int]:
    """The proposal children below a token, one below the other."""
    tokens = []
    for _ in range(count):
        token_id = guesses_after(token_id)[0][0]
        tokens.append(token_id)
    return tokens


def test_a_chain_leaves_the_branches_of_a_tree_alone() -> None:
    """Claim: a session that goes from a tree to a chain grows its proposal path only, though likelier branches are left
    over; when a commit lands on a branch, the path below that one. Conclusive: every evaluated path is compared."""
    grower = Grower([1])
    for _ in range(6):
        grower.grow(8)
    branch = guesses_after(1)[1][0]
    assert (branch,) in grower.evaluated, "the tree has branches"
    for root in (1, branch):
        grower.evaluated.clear()
        while grower.grow(1, reach=len(grower.committed) + 12, is_chain=True):
            pass
        chain = proposals_after(root, 12)
        assert grower.evaluated and all(list(path) == chain[: len(path)] for path in grower.evaluated)
        assert len(grower.evaluated[-1]) == 11, "up to the window's end"
        assert root != 1 or grower.commit(branch)


@pytest.mark.parametrize("rule", Rule)
def test_calibration_learns_what_confidence_is_worth(rule: Rule) -> None:
    """Claim: confidences are mapped to observed shares, per rule and rank, within a few dozen outcomes.
    Conclusive: outcomes of known probability, unlike the confidence; 2,000 draws put the mean within 0.06 of it
    (5 standard errors are 0.056)."""
    rng = random.Random(5)
    calibration = Calibration()
    first, second = (confidence_features(rule, rank, 0.9) for rank in (0, 1))
    assert calibration.probability(first, 0.9) == 0.9
    for _ in range(2000):
        calibration.record(first, rng.random() < 0.4)
        calibration.record(second, rng.random() < 0.7)
    assert abs(calibration.probability(first, 0.9) - 0.4) < 0.06
    assert abs(calibration.probability(second, 0.9) - 0.7) < 0.06
    others = [confidence_features(other, 0, 0.9) for other in Rule if other is not rule]
    assert {calibration.probability(other, 0.9) for other in others} == {0.9}, "rules do not mix"
    for _ in range(200):
        calibration.record(first, True)
    assert calibration.probability(first, 0.9) > 0.42, "and it follows a text that changes"


def test_a_session_starts_from_what_its_service_learned() -> None:
    """Claim: a session's prior is the service's share, its own outcomes move it faster, and the service learns too.
    Conclusive: with n outcomes and a prior of weight 8 the share is (true + 8 prior) / (n + 8)."""
    shared = Calibration()
    for _ in range(992):
        shared.record("match", False)
    session, other = Calibration(shared), Calibration(shared)
    assert session.probability("match", 0.5) == pytest.approx(0.004)
    for _ in range(8):
        session.record("match", True)
    assert session.probability("match", 0.5) == pytest.approx((8 + 8 * 12 / 1008) / 16)
    assert other.probability("match", 0.5) == pytest.approx(12 / 1008)


def test_growth_reports_outcomes_along_the_committed_path_only() -> None:
    """Claim: a guess is counted once, when the committed tokens reach its node, and none after the first token
    outside the tree: under REJECTION the tokens after a rejection must not enter any estimate."""
    counted: list[tuple[int, bool]] = []

    class Counting(ConfidenceItself):
        def record(self, features: Hashable, came_true: bool) -> None:
            counted.append((features[1], came_true))

    grower = Grower([2], Counting())
    for _ in range(20):
        grower.grow(2)
    first = guesses_after(2)[0][0]
    grower.commit(first, 998, 999)
    assert counted == [(0, True), (1, False), (2, False), (0, False), (1, False), (2, False)]


def test_a_commit_keeps_the_cells_of_its_path_and_frees_all_others() -> None:
    """Claim: of the cells that evaluated nodes lie in, a commit keeps those of the committed path, in order, and frees
    the rest above the new root; what lies below it stays; dropping the tree frees all. Conclusive: every cell is given
    once, and the three parts make up the whole, over random commits."""
    rng = random.Random(11)
    growth, next_cell, used = GrowingTree(Rule.COUPLED, ConfidenceItself()), 0, set()
    committed = [3]
    growth.restart(committed)
    for _ in range(60):
        for node in growth.take(rng.randrange(1, 6), 99):
            growth.file(node)
            is_root = node is growth.root
            cell = -1 if is_root else next_cell
            growth.evaluated(node, [growth.reserve_name()], guesses_after(node.token_id), None, cell)
            used |= set() if is_root else {cell}
            next_cell += not is_root
        growth.check()
        if rng.random() < 0.5:
            path: list[int] = []
            node = growth.root
            while node.guesses and rng.random() < 0.8:
                node = rng.choice(list(node.children.values()))
                path.append(node.token_id)
            path += [] if path else [999]
            committed += path
            kept, cells = growth.commit(path)
            freed = set(cells)
            assert set(kept) | freed <= used and len(kept) <= len(path) and not freed & set(kept)
            used -= freed | set(kept)
            if growth.root is None:
                growth.restart(committed)
                assert not used
            growth.check()
            held = {node.cell for node in growth.root.below() if node.cell != -1}
            assert held == used
    assert set(growth.drop()) == used


@pytest.mark.parametrize("is_chain", [True, False])
def test_a_node_without_guesses_ends_its_path(is_chain: bool) -> None:
    """Claim: where the model has no guess, as no token that it knows is legal, the node counts as evaluated: nothing is
    sent below it, it is not taken again, other nodes are, and a commit beyond it begins a new tree. Conclusive: a node
    that was taken again would be returned by the next `take`, which is asked until it has nothing."""
    growth = GrowingTree(Rule.COUPLED, ConfidenceItself())
    growth.restart([3])
    (root,) = growth.take(1, 99, is_chain)
    growth.evaluated(root, [growth.reserve_name()], guesses_after(3), None)
    (proposal,) = growth.take(1, 99, is_chain)
    assert proposal is root.proposal
    growth.file(proposal)
    assert growth.evaluated(proposal, [growth.reserve_name()], (), None, 1) == []
    left = growth.take(9, 99, is_chain)
    assert proposal not in left and len(left) == (0 if is_chain else 2)
    growth.check()
    assert growth.commit([proposal.token_id]) == ([1], []) and growth.root is proposal
    assert growth.take(9, 99, is_chain) == []
    growth.commit([5])
    assert growth.root is None
