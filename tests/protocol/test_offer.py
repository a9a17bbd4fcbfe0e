"""The offer: the likeliest prefix-closed set of guesses, in depth-first order, within its limits."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import InvalidRequest
from specdec.protocol import offer as offer_module
from specdec.protocol.calibration import Calibration
from specdec.protocol.offer import Limits, Offer, make_offer
from specdec.protocol.proposers import Run
from specdec.protocol.tree import ReceivedTree
from specdec.protocol.tree_shape import (
    PATH_COUNT_MAX,
    branches,
    check_shape,
    children,
    depth_of,
    path_count_max,
    path_tokens,
)
from specdec.protocol.types import CacheSize, DraftNode, DraftProbs, Proposer, Rule, point_mass

ROOT = [7, 7]
WIDE = Limits(99, 99, siblings=3)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Parents of a tree in depth-first order, and distinct tokens."""
    parents, path = list[int](), [0]
    for index in range(draw(st.integers(1, 14))):
        parents.append(draw(st.sampled_from(path)))
        path = [*itertools.takewhile(lambda row, own=parents[-1]: row != own, path), parents[-1], index + 1]
    return parents, list(range(100, 100 + len(parents)))


@given(shapes())
def test_branches_cover_a_tree_once(shape: tuple[list[int], list[int]]) -> None:
    """Claim: branches cut the tokens of a tree into paths that share what lies above: each row's path from the root,
    restated from the parents, is the prefix of its branch's path."""
    parents, tokens = shape
    check_shape(parents, tokens)
    parts = branches(parents, len(tokens))
    assert [index for part in parts for index in range(part.start, part.end)] == list(range(len(tokens)))
    paths: list[tuple[int, ...]] = [()]
    for parent, token_id in zip(parents, tokens):
        paths.append((*paths[parent], token_id))
    for part, path in zip(parts, path_tokens(parts, tokens)):
        for offset, index in enumerate(range(part.start, part.end)):
            assert paths[index + 1] == path[: part.depth + offset + 1]
    assert depth_of(parents, len(tokens)) == max(map(len, paths))
    following = children(parents, len(tokens))
    assert sorted(itertools.chain(*following)) == list(range(len(tokens)))


@pytest.mark.parametrize(
    "parents, tokens, field",
    [
        ([0], [1, 2], "parents"),
        ([0, 2], [1, 2], "parents"),
        ([0, 1, 0, 2], [1, 2, 3, 4], "parents"),
        ([0, 0], [1, 1], "draft_token_ids"),
        ([0] * (PATH_COUNT_MAX + 1), list(range(PATH_COUNT_MAX + 1)), "parents"),
    ],
    ids=["too few", "a later row", "a path left before", "equal siblings", "too many paths"],
)
def test_a_malformed_tree_is_refused(parents: list[int], tokens: list[int], field: str) -> None:
    """Claim: a tree that is not in depth-first order, has equal siblings or too many paths is refused by name."""
    with pytest.raises(InvalidRequest, match=field):
        check_shape(parents, tokens)


def test_paths_fit_beside_a_session_of_full_length() -> None:
    """Claim: as many paths as the spare positions hold; a chain always fits."""
    assert path_count_max(None, 100, 8) == 1
    assert path_count_max(CacheSize(6, 16, 0), 100, 8) == path_count_max(CacheSize(7, 16, 0), 100, 16) == 1
    assert path_count_max(CacheSize(7, 16, 0), 100, 8) == 2  # 12 spare positions, one path of 8
    assert path_count_max(CacheSize(12, 16, 0), 100, 16) == 6
    assert path_count_max(CacheSize(4096, 16, 0), 100, 16) == PATH_COUNT_MAX


class Certain(Calibration):
    """Probabilities by the table of the test, else the prior."""

    def __init__(self, table: dict[Hashable, float] | None = None) -> None:
        super().__init__()
        self._table = table or {}

    def probability(self, features: Hashable, prior: float) -> float:
        return self._table.get(features, prior)


def grown(rule: Rule = Rule.GREEDY) -> ReceivedTree:
    """A tree of depth two: three children of the root, three of each of these, with falling confidence."""
    tree, probs = ReceivedTree(ROOT), DraftProbs((1, 2, 3), (6, 3, 2))
    names = itertools.count(1)
    is_drawn = rule is Rule.REJECTION

    def add(parent: int) -> list[int]:
        own = [next(names) for _ in range(3)]
        for rank, name in enumerate(own):
            confidence = 0 if is_drawn else (14, 8, 4)[rank]
            node = DraftNode(name, parent, 1 + rank, is_drawn or rank == 0, probs if is_drawn else None, confidence)
            tree.add(1, 2, node)
        return own

    for name in add(0):
        add(name)
    return tree


def paths_of(offer: Offer) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for parent, token_id in zip(offer.parents or range(len(offer.token_ids)), offer.token_ids):
        paths.append((*paths[parent], token_id))
    return paths[1:]


@pytest.mark.parametrize("row_max", range(1, 13))
def test_the_likeliest_nodes_are_offered(row_max: int) -> None:
    """Claim: with k rows the k nodes with the likeliest paths are offered. Conclusive: all twelve are enumerated with
    the product of their confidences' bins, no two alike."""
    own = {1: 0.85, 2: 0.25, 3: 0.055}
    reach = {(token,): p for token, p in own.items()}
    reach |= {(a, b): own[a] * own[b] for a in own for b in own}
    wanted = sorted(reach, key=lambda path: -reach[path])[:row_max]
    offer = make_offer(grown().root, [], Rule.GREEDY, WIDE._replace(row_max=row_max), Certain())
    assert sorted(paths_of(offer)) == sorted(wanted)
    check_shape(offer.parents, offer.token_ids)


def test_limits_hold() -> None:
    """Claim: depth, number of paths and the least reach limit an offer; without siblings it is the proposal path."""
    root = grown().root

    def of(**limits: object) -> list[tuple[int, ...]]:
        return paths_of(make_offer(root, [], Rule.GREEDY, WIDE._replace(**limits), Certain()))

    assert of(depth_max=1) == [(1,), (2,), (3,)]
    assert of(path_max=1) == [(1,), (1, 1)] == of(siblings=0)
    assert of(reach_min=0.5) == [(1,), (1, 1)]
    assert (2,) not in of(path_reach_min=0.26) and (2,) in of(path_reach_min=0.25) and (1,) in of(path_reach_min=1.0)
    assert len(branches(make_offer(root, [], Rule.GREEDY, WIDE._replace(path_max=3), Certain()).parents, 12)) <= 12


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.COUPLED])
def test_equal_tokens_of_several_proposers_are_one_node(rule: Rule) -> None:
    """Claim: without draws a token that draft and n-gram both name is offered once, with both guesses, the surest
    first; and the run goes on below it."""
    runs = [Run(Proposer.NGRAM, (1, 9), strength=30)]
    offer = make_offer(grown(rule).root, runs, rule, Limits(3, 9), Certain())
    assert offer.token_ids[0] == 1 and paths_of(offer)[1] in ((1, 9), (1, 1))
    assert {proposer for proposer, _ in offer.guesses[0]} == {Proposer.DRAFT, Proposer.NGRAM}
    assert offer.proposers[0] is Proposer.NGRAM and offer.sources([0])[2] == 1


@pytest.mark.parametrize("rule", Rule)
def test_matches_of_a_length_that_never_comes_true_lose_their_rows(rule: Rule) -> None:
    """Claim: a proposer's tokens are weighed by outcomes of the same length of match: after forty outcomes each, runs
    of short matches, all wrong, are offered no more, and runs of long ones, all right, as before.

    Conclusive: at first both are offered at this least probability, and the outcomes are counted by the features that
    the offers name, as a session counts them.
    """
    calibration, limits = Calibration(), Limits(4, 4, reach_min=0.2)
    runs = {length: Run(Proposer.NGRAM, (1, 2), strength=length) for length in (2, 10)}

    def offered(length: int) -> Offer:
        return make_offer(ReceivedTree(ROOT).root, [runs[length]], rule, limits, calibration)

    assert offered(2).token_ids and offered(10).token_ids == (1, 2)
    for length in runs:
        ((_, features),) = offered(length).guesses[0]
        for _ in range(40):
            calibration.record(features, length == 10)
    assert not offered(2).token_ids and offered(10).token_ids == (1, 2)


def test_drawn_siblings_stand_in_the_order_of_their_draws() -> None:
    """Claim: under REJECTION drawn siblings are offered from the first on, without a gap; one whose token a guess
    before it named is skipped, and a guess named by a drawn one before it too; a guess has all weight on its token."""
    tree = grown(Rule.REJECTION)
    offer = make_offer(tree.root, [], Rule.REJECTION, WIDE._replace(depth_max=1), Certain())
    assert offer.token_ids == (1, 2, 3) and len({id(probs) for probs in offer.draft_probs}) == 1
    sure = [Run(Proposer.NGRAM, (2,), strength=30)]
    offer = make_offer(tree.root, sure, Rule.REJECTION, WIDE._replace(depth_max=1), Certain())
    assert offer.token_ids == (2, 1, 3) and offer.draft_probs[0] == point_mass(2)
    unsure = [Run(Proposer.NGRAM, (1,), strength=1)]
    offer = make_offer(tree.root, unsure, Rule.REJECTION, WIDE._replace(depth_max=1), Certain())
    assert offer.token_ids == (1, 2, 3) and point_mass(1) not in offer.draft_probs


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("limits", [Limits(1, 9), Limits(9, 9), Limits(9, 1), Limits(9, 9, reach_min=0.5)])
def test_the_quick_way_of_a_chain_is_the_same(rule: Rule, limits: Limits) -> None:
    """Claim: without runs and siblings the proposal path is offered as the general way offers it, for every limit."""
    calibration = Calibration()
    for outcome in (True, False, True):
        calibration.record((rule.value, 0, 14), outcome)
    root = grown(rule).root
    assert make_offer(root, [], rule, limits, calibration) == offer_module._tree(root, [], rule, limits, calibration)
