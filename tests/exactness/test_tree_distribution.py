"""REJECTION keeps the target distribution when the draft grows a tree, best first, and likelihoods follow the draws.

The evaluated nodes, and so the length of a proposal, depend here on the confidence in tokens drawn before: the real
`GrowingTree` decides, fed with the real proposals. Every draw of every node is enumerated, so the output distribution
is known as fractions and compared without tolerance (see enumeration.py). A draft that offers tokens by their
likelihood must fail the same check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from specdec.decoding.proposal import ProposalRequest, propose
from specdec.protocol.calibration import Calibration
from specdec.protocol.growth import GrowingNode, GrowingTree
from specdec.protocol.types import DraftNode, Rule
from tests.exactness.enumeration import PROMPT, Child, Path, Setting, base_two_distribution, chain_offer
from tests.exactness.exactness import target_output_distribution
from tests.exactness.test_exact_distribution import POLICIES, draft_table, target_table
from tests.support.trees import OwnTree

pytestmark = pytest.mark.lengthy

History = tuple[tuple[str, Path | Child], ...]  # since the tree's last restart: nodes evaluated, tokens committed
BRANCH_COUNT = 2


class Grown:
    """A draft and a coordinator that went through a history."""

    def __init__(self, world: TreeWorld, path: Path, history: History) -> None:
        committed_count = sum(len(what) for kind, what in history if kind == "commit")
        start = list(path[: len(path) - committed_count])
        self.world = world
        self.growth = GrowingTree(Rule.REJECTION, Calibration())
        self.growth.restart(list(start))
        self.tree = OwnTree(list(start))
        for kind, what in history:
            if kind == "commit":
                self.tree.commit(what)
                self.growth.commit(what)
                assert self.growth.root is not None, "a history ends where the tree is left"
            else:
                self.evaluate(what)

    @property
    def committed(self) -> Path:
        return tuple(self.tree.committed)

    def next_candidate(self) -> GrowingNode | None:
        """The node the real growth takes next; growth itself is not changed."""
        taken = self.growth.take(1, 99)
        if taken:
            self.growth.give_back(taken[0])
        return taken[0] if taken else None

    def path_of(self, candidate: GrowingNode) -> Path:
        return (*self.committed, *(node.token_id for node in self.growth.path(candidate)))

    def evaluate(self, child: Child) -> None:
        """Evaluates the next node with `child` as its draw, and sends the result."""
        (candidate,) = self.growth.take(1, 99)
        path = self.path_of(candidate)
        filed, name = self.growth.file(candidate), self.growth.reserve_name()
        guesses = self.world.guesses(path, child)
        likelihood = self.growth.likelihood(candidate)
        (node,) = self.growth.evaluated(candidate, [name], guesses, child.draft_probs)
        for sent in ([] if filed is None else [filed]) + self.world.sent(node, guesses, likelihood):
            self.tree.add(self.growth.epoch, self.growth.root_length, sent)


@dataclass
class TreeWorld(Setting):
    """A setting whose draft evaluates `evaluation_count(path)` nodes a round."""

    evaluation_count: Callable[[Path], int] = lambda path: 3

    def guesses(self, path: Path, child: Child) -> list[tuple[int, float]]:
        """The guesses of the real draft side for a node with this draw: (token, confidence)."""
        key = ("guesses", path, child.token_id)
        if key not in self.cache:
            low, total = 0, child.draft_probs.total
            for token_id, weight in zip(child.draft_probs.token_ids, child.draft_probs.weights):
                if token_id == child.token_id:
                    break
                low += weight
            draw_bits = -(-low * (1 << 53) // total)
            request = ProposalRequest(self.params, path, self.vocabulary_size, (draw_bits,), BRANCH_COUNT)
            logits = torch.tensor([self.draft(path)], dtype=torch.float32)
            (proposal,) = propose([request], logits)
            assert proposal.token_id == child.token_id and proposal.draft_probs == child.draft_probs
            self.cache[key] = list(proposal.guesses)
        return self.cache[key]

    def sent(self, node: DraftNode, guesses: list[tuple[int, float]], likelihood: float) -> list[DraftNode]:
        """The nodes sent for an evaluated node: its proposal child, always. Subclasses misbehave."""
        return [node]

    def grown(self, path: Path, history: History, count: int) -> Iterator[tuple[Fraction, History]]:
        """Every way in which `count` more nodes can be evaluated."""
        now = Grown(self, path, history)
        candidate = now.next_candidate() if count else None
        if candidate is None:
            yield Fraction(1), history
            return
        for share, child in self.children(now.path_of(candidate)):
            for rest, longer in self.grown(path, (*history, ("evaluate", child)), count - 1):
                yield share * rest, longer

    def tree_rounds(self, path: Path, history: History) -> dict[tuple[Path, History], Fraction]:
        """The distribution of one round: committed tokens, and the history at the start of the next round."""
        outcomes: dict[tuple[Path, History], Fraction] = {}
        for share, longer in self.grown(path, history, self.evaluation_count(path)):
            tree = Grown(self, path, longer).tree
            tokens, rows = chain_offer(tree, self.draft_length(path))
            for part, committed in self.verdicts(path, tokens, rows):
                growth = Grown(self, path, longer).growth
                growth.commit(committed)
                outcome = committed, (*longer, ("commit", committed)) if growth.root is not None else ()
                outcomes[outcome] = outcomes.get(outcome, Fraction(0)) + share * part
        return outcomes


def output_distribution(
    world: TreeWorld, count: int, path: Path = PROMPT, history: History = ()
) -> dict[Path, Fraction]:
    """The joint distribution of the next `count` output tokens."""
    if count <= 0:
        return {(): Fraction(1)}
    key = ("output", count, path, history)
    if key not in world.cache:
        params: dict[Path, Fraction] = {}
        for (committed, later), share in world.tree_rounds(path, history).items():
            for rest, part in output_distribution(world, count - len(committed), path + committed, later).items():
                tokens = (*committed, *rest)[:count]
                params[tokens] = params.get(tokens, Fraction(0)) + share * part
        world.cache[key] = params
    return world.cache[key]


def tree_world(vocabulary_size: int, kind: type[TreeWorld] = TreeWorld, **policy: object) -> TreeWorld:
    return kind(
        params=base_two_distribution(**policy),
        target=target_table(vocabulary_size),
        draft=draft_table(vocabulary_size),
        draft_length=lambda path: 2,
        evaluation_count=lambda path: 4 + sum(path) % 2,
    )


@pytest.mark.parametrize(
    "policy, vocabulary_size, count",
    [
        ("plain", 2, 3),
        pytest.param("plain", 3, 2, marks=pytest.mark.more),
        ("top_k, penalties and min_tokens", 2, 3),
        ("top_k, penalties and min_tokens", 3, 2),
    ],
)
def test_the_output_has_the_target_distribution(policy: str, vocabulary_size: int, count: int) -> None:
    """Claim: the joint distribution of the first tokens is the target's, with branches, re-rooting onto recovered and
    bonus tokens, and growth steered by the draws. Conclusive: fractions over all draws, without tolerance."""
    chosen = {key: value for key, value in POLICIES[policy].items() if key != "stop_token_ids"}
    stops = {"stop_token_ids": (vocabulary_size - 1,)} if "min_tokens" in chosen else {}
    world = tree_world(vocabulary_size, **chosen, **stops)
    found = {path: share for path, share in output_distribution(world, count).items() if share}
    assert found == target_output_distribution(world, count)


def test_the_worlds_grow_branches_and_hit_them() -> None:
    """The checks above mean something: rounds commit onto branch children, and next rounds start with their tokens."""
    world = tree_world(3)
    hits = 0
    for (committed, history), share in world.tree_rounds(PROMPT, ()).items():
        if share and history:
            tree = Grown(world, PROMPT + committed, history).tree
            before = Grown(world, PROMPT, history[:-1]).tree
            last = before.node(committed[:-1])
            is_branch = last is not None and last.proposal is not None and last.proposal.token_id != committed[-1]
            hits += is_branch and bool(tree.proposal_path(9))
    assert hits >= 3


class KeepsBackUnlikely(TreeWorld):
    """An unlikely proposal is not sent: likelihood decides the offer."""

    def sent(self, node: DraftNode, guesses: list[tuple[int, float]], likelihood: float) -> list[DraftNode]:
        return [node] if guesses[0][1] >= 0.3 else []


class OffersTheLikeliest(TreeWorld):
    """The likeliest child is offered with the draft distribution of the drawn one."""

    def sent(self, node: DraftNode, guesses: list[tuple[int, float]], likelihood: float) -> list[DraftNode]:
        best = max(guesses, key=lambda guess: guess[1])[0]
        return [DraftNode(node.node_id, node.parent_id, best, True, node.draft_probs)]


@pytest.mark.parametrize("kind", [KeepsBackUnlikely, OffersTheLikeliest])
def test_likelihood_that_decides_an_offer_is_noticed(kind: type[TreeWorld]) -> None:
    """Claim: the check can fail: a draft that offers by the likelihood of the drawn token changes the distribution, and
    the same comparison fails."""
    world = tree_world(3, kind)
    assert {
        path: share for path, share in output_distribution(world, 1).items() if share
    } != target_output_distribution(world, 1)
