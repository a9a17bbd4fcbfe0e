"""The draft tree: names, late arrivals, re-rooting. Checked against the definition: a node is usable while the path
from its root agrees with the committed tokens, whenever it arrives."""

from __future__ import annotations

import gc
import random

from specdec.protocol.tree import ReceivedTree
from specdec.protocol.types import DraftNode
from tests.support.trees import OwnTree


def node(number: int, parent: int, token_id: int, proposal: bool = True) -> DraftNode:
    return DraftNode(number, parent, token_id, proposal)


def path_tokens(tree: ReceivedTree, limit: int = 64) -> list[int]:
    return [node.token_id for node in tree.proposal_path(limit)]


def test_a_commit_inside_the_tree_keeps_what_lies_below_it():
    """Claim: after a rejection whose recovered token is a branch child, that child's subtree is the next proposal."""
    tree = OwnTree([7])
    for entry in (node(1, 0, 10), node(2, 0, 11, proposal=False), node(3, 2, 20), node(4, 1, 30)):
        tree.add(1, 1, entry)
    assert path_tokens(tree) == [10, 30]
    assert tree.commit([11])
    tree.check()
    assert path_tokens(tree) == [20]


def test_a_commit_outside_empties_the_tree_and_kills_its_names():
    """Claim: nodes below a path that was not committed are never offered, even when they arrive later."""
    tree = OwnTree([7])
    tree.add(1, 1, node(1, 0, 10))
    assert not tree.commit([12])
    assert path_tokens(tree) == []
    assert tree.add(1, 1, node(2, 1, 13)) is None
    assert path_tokens(tree) == []


def test_a_dead_tree_is_free_without_the_garbage_collector():
    """Claim: nodes that a commit left are in no cycle, so they are free when the last holder lets go: the collector
    took a tenth of a coordinator's time. Conclusive: it counts what it finds after the tree was dropped."""
    tree = OwnTree([7])
    for entry in (node(1, 0, 10), node(2, 0, 11, proposal=False), node(3, 2, 20), node(4, 1, 30)):
        tree.add(1, 1, entry)
    gc.collect()
    gc.disable()
    try:
        assert tree.commit([10])
        tree.clear()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_late_node_whose_path_was_committed_is_used():
    """Claim: lateness alone does not make a node useless; agreement of its path decides."""
    tree = OwnTree([7])
    tree.add(1, 1, node(1, 0, 10))
    tree.commit([10, 20, 30])
    assert tree.add(1, 1, node(2, 1, 20)) is not None
    assert tree.add(1, 1, node(3, 2, 30)) is tree.root
    tree.add(1, 1, node(4, 3, 40))
    tree.check()
    assert path_tokens(tree) == [40]


def test_a_late_node_that_disagrees_is_dropped_with_all_below_it():
    """Claim: a node below a dropped one has no parent, for any token of its own."""
    tree = OwnTree([7])
    tree.commit([10, 20])
    assert tree.add(1, 1, node(1, 0, 11)) is None
    assert tree.add(1, 1, node(2, 1, 20)) is None
    assert len(tree.named) == 0 and not tree.root.children


def test_of_two_proposal_children_for_one_place_the_first_stays():
    """Claim: the choice between two draws after one path is by arrival, not by token."""
    tree = OwnTree([7])
    tree.add(1, 1, node(1, 0, 10))
    tree.add(2, 1, node(1, 0, 11))
    assert path_tokens(tree) == [10]


def test_names_of_one_epoch_do_not_meet_those_of_another():
    """Claim: node numbers begin again in each epoch, so a name needs both."""
    tree = OwnTree([7])
    tree.add(1, 1, node(1, 0, 10))
    tree.commit([12])
    tree.add(2, 2, node(1, 0, 20))
    tree.add(1, 1, node(2, 1, 30))
    assert path_tokens(tree) == [20]


def test_a_node_rooted_beyond_the_committed_tokens_is_dropped():
    """A draft cannot know tokens the coordinator has not committed: such a node is forged or broken."""
    tree = OwnTree([7])
    assert tree.add(1, 5, node(1, 0, 10)) is None


def test_random_trees_agree_with_the_definition():
    """Claim: for random trees, commits and arrival orders (parents first), a node is placed exactly when its path
    agrees with the committed tokens. Conclusive: the check recomputes every path from scratch."""
    for seed in range(300):
        rng = random.Random(seed)
        tree = OwnTree([1])
        paths: dict[int, list[int]] = {0: []}
        for number in range(1, 40):
            if rng.random() < 0.25:
                tree.commit([rng.randrange(3) for _ in range(rng.randrange(1, 3))])
                tree.check()
            parent = rng.choice(list(paths))
            path = [*paths[parent], rng.randrange(3)]
            placed = tree.add(1, 1, node(number, parent, path[-1], rng.random() < 0.5))
            full = [1, *path]
            shared = min(len(full), len(tree.committed))
            agrees = full[:shared] == tree.committed[:shared]
            assert (placed is not None) == agrees, (seed, number)
            if agrees:
                paths[number] = path
            tree.check()
