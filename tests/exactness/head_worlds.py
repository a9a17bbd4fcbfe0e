"""Exact output distributions with the nodes of a feature head, through the real session, as fractions.

Trees are those that the real `GrowingTree` grows from the real proposals, every draw of them enumerated
(`siblings.SiblingWorld`). Each round's nodes come with the result of the verification before it, into a real `Session`
that went through all rounds of the text: so what a session keeps from round to round is part of the distribution.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from specdec.policy.fixed_policy import FixedPolicy
from specdec.protocol.calibration import Calibration
from specdec.protocol.events import Concluded, DraftFound, FromDraft, TargetFound, WaitExpired
from specdec.protocol.growth import GrowingTree
from specdec.protocol.heads import HeadPlan
from specdec.protocol.items import Nodes, Verification, VerificationResult
from specdec.protocol.offer import Offer
from specdec.protocol.proposers import Run
from specdec.protocol.session import Session
from specdec.protocol.tree_shape import children as children_of
from specdec.protocol.types import DraftNode, DraftProbs, Rule, SamplerOutput, TokenKind, Verdict, point_mass
from tests.exactness.enumeration import Path, Table
from tests.exactness.siblings import Drawn, SiblingWorld, Verdicts, row_paths, walked_verdicts
from tests.support.session_check import check_session

Tree = dict[Path, tuple[Drawn, DraftProbs | None]]  # the draws of each evaluated node, by path
History = tuple[tuple[Path, Tree], ...]  # of each round: the tokens committed before it, and the head's draws then


class Runs:
    """A proposer of the coordinator, whose runs depend on the committed tokens alone."""

    def __init__(self, world: SiblingWorld) -> None:
        self._world = world

    def propose(self, committed: Sequence[int]) -> list[Run]:
        return self._world.runs(tuple(committed))


@dataclass
class HeadWorld(SiblingWorld):
    """`draft` is the table of the head, which evaluates the child drawn first of each node. Text is drawn through one
    session. `checks_draws`: every offered token must be one drawn after its own path, with the distribution it was
    drawn from."""

    prompt: Path = (0, 0)
    row_max: int = 12
    checks_draws: bool = True

    def grown(self, drawn: Drawn, probs: DraftProbs) -> Drawn:
        return drawn[:1]

    def policy(self) -> FixedPolicy:
        return FixedPolicy(self.row_max, self.depth, wait_s=0.0, siblings=self.drawn_count - 1)

    def session(self, committed: Path) -> Session:
        """A session whose drafter is the head."""
        places = 1000, self.vocabulary_size, self.policy(), list(committed)
        own = {"path_max": 16, "calibration": copy.deepcopy(self.calibration), "head_drafts": True}
        return Session(1, self.params, *places, proposers=[Runs(self)], **own)

    def nodes_of(self, path: Path, tree: Tree) -> tuple[DraftNode, ...]:
        """The nodes that the head sends for these draws. Subclasses misbehave."""
        growth, sent = GrowingTree(Rule.REJECTION, Calibration()), []
        growth.restart(list(path))
        while taken := growth.take(1, len(path) + self.depth, is_chain=True):
            drawn, probs = tree[(*path, *(node.token_id for node in growth.path(taken[0])))]
            if probs is None:
                break
            sent += filter(None, [growth.file(taken[0])])
            guesses = [(token_id, probs.probability(token_id)) for token_id in drawn]
            sent += growth.evaluated(taken[0], [growth.reserve_name() for _ in drawn], guesses, probs)
        return tuple(sent)

    def concluded(self, asked: Verification, committed: Path, nodes: tuple[DraftNode, ...]) -> Concluded:
        """The end of a round that committed these tokens, with the head's nodes in its result."""
        accepted, row = [], 0
        following = children_of(asked.parents, len(asked.draft_token_ids))
        for token_id in committed[:-1]:
            accepted.append(next(index for index in following[row] if asked.draft_token_ids[index] == token_id))
            row = accepted[-1] + 1
        verdict = Verdict(tuple(accepted), committed[-1], TokenKind.BONUS)
        output = SamplerOutput((0,) * (len(asked.draft_token_ids) + 1), head_nodes=nodes)
        return Concluded(verdict, VerificationResult(1, 1, asked.round_index, output), committed)

    def offered(self, history: History) -> Offer:
        """The offer of a session that went through a history."""
        path, plan = self.prompt[:-1], HeadPlan(self.depth, 1, self.drawn_count - 1)
        session = self.session(path)
        asked = session.step(TargetFound()).to_target[-1]
        for committed, tree in history:
            assert asked.head_plan == plan, "the head is asked for the plan's tree"
            path += committed
            asked = session.step(self.concluded(asked, committed, self.nodes_of(path, tree))).to_target[-1]
            check_session(session)
        assert asked.draft_token_ids == session.offer.token_ids and not session.malformed_node_count
        self.check_draws(path, session.offer, [history[-1][1]])
        return session.offer

    def check_draws(self, path: Path, offer: Offer, trees: Sequence[Tree]) -> None:
        """Raises AssertionError for a token that is no draw after its path of any of the trees, nor of a run."""
        paths = row_paths(offer)
        parents = offer.parents or range(len(offer.token_ids))
        for token_id, parent, probs in zip(offer.token_ids, parents, offer.draft_probs):
            own = [tree[path + paths[parent]] for tree in trees if path + paths[parent] in tree]
            is_drawn = any(token_id in drawn and probs == its for drawn, its in own)
            is_run = probs == point_mass(token_id) and bool(self.runs(path))
            assert is_drawn or is_run or not self.checks_draws, "a token was not drawn after its path"

    def output(self, count: int, path: Path | None = None, history: History = ()) -> Verdicts:
        path = self.prompt if path is None else path
        before = path[len(self.prompt) - 1 + sum(len(committed) for committed, _ in history) :]
        found: Verdicts = {}
        for share, tree in self.trees(path, self.depth):
            longer = (*history, (before, tree))
            for committed, part in walked_verdicts(self, path, self.offered(longer)).items():
                left = count - len(committed)
                following = self.output(left, path + committed, longer) if part and left > 0 else {(): Fraction(1)}
                for rest, own in following.items():
                    tokens = (*committed, *rest)[:count]
                    found[tokens] = found.get(tokens, Fraction(0)) + share * part * own
        return {tokens: share for tokens, share in found.items() if share}


@dataclass
class MixedWorld(HeadWorld):
    """A draft of the table `other` is found while a verification asks the head: its draws at a path are nodes of the
    session too, before the head's or after them. Each round is that of a session of its own."""

    other: Table | None = None
    is_draft_first: bool = True

    def policy(self) -> FixedPolicy:
        return FixedPolicy(self.row_max, self.depth + 2, wait_s=1.0, siblings=self.drawn_count - 1)

    def of_draft(self) -> SiblingWorld:
        """The draft's draws."""
        assert self.other is not None
        key = "of draft"
        return self.cache.setdefault(key, SiblingWorld(self.params, self.target, self.other, self.drawn_count, 1))

    def mixed_offer(self, path: Path, tree: Tree, of_draft: Tree) -> Offer:
        """The offer after a path with the nodes of both."""
        session = self.session(path[:-1])
        asked = session.step(TargetFound()).to_target[-1]
        session.step(DraftFound())
        drawn, probs = of_draft[path]
        first = DraftNode(1, 0, path[-1], True, DraftProbs(tuple(range(self.vocabulary_size)), (1,) * 3))
        below = tuple(DraftNode(2 + place, 1, token_id, True, probs) for place, token_id in enumerate(drawn))
        messages = [Nodes(1, 1, 1, len(path) - 1, nodes) for nodes in ((first,), below)]
        session.step(FromDraft(messages[0]))
        if self.is_draft_first:
            session.step(FromDraft(messages[1]))
        session.step(self.concluded(asked, path[-1:], self.nodes_of(path, tree)))
        assert session.waiting
        if not self.is_draft_first:
            session.step(FromDraft(messages[1]))
        session.step(WaitExpired(session.wait_index))
        check_session(session)
        self.check_draws(path, session.offer, [tree, of_draft])
        return session.offer

    def round(self, path: Path) -> Verdicts:
        key = ("round", path)
        if key not in self.cache:
            found: Verdicts = {}
            for share, tree in self.trees(path, self.depth):
                for part, of_draft in self.of_draft().trees(path, 1):
                    offer = self.mixed_offer(path, tree, of_draft)
                    for committed, own in walked_verdicts(self, path, offer).items():
                        found[committed] = found.get(committed, Fraction(0)) + share * part * own
            self.cache[key] = found
        return self.cache[key]

    output = SiblingWorld.output
