"""The drafter on a real engine and a real (tiny) model: what branch lanes evaluate is what the model says of the path.

The engine is stepped by hand, so that every schedule is repeatable. Greedy proposals are checked one by one against
the same model run on the whole path in a cache of its own.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from draft_service.drafter import Drafter
from draft_service.lanes import BRANCH_LANE_COUNT_MAX
from specdec.decoding.proposal import propose
from specdec.engine.interface import RaggedBatch, Segment
from specdec.engine.model import load_model
from specdec.engine.scheduler import Engine
from specdec.protocol.items import Close, Commit, Failure, Nodes, Open
from specdec.protocol.tree import DraftTree
from specdec.protocol.types import Description, Law, Rule
from specdec.replica.sessions import HeldSessions
from tests.support.engine_models import make_tiny_model

VOCABULARY_SIZE = 288
LENGTH_MAX = 120
BLOCK_SIZE = 8  # branches part inside blocks and across their borders


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("draft"), "llama", vocabulary_size=VOCABULARY_SIZE)


class Draft:
    """A drafter whose steps are run by hand, and a coordinator's tree for every session."""

    def __init__(self, folder: Path, block_count: int = 400) -> None:
        self.model = load_model(str(folder), "float32", "cpu", lambda *_: None)
        self.engine = Engine(self.model, block_count, BLOCK_SIZE, propose)
        own = self.model.description
        description = Description(
            own.model_digest, "", own.model_name, own.vocabulary_size, own.positions_max, (), own.dtype, "cpu", ""
        )
        self.drafter = Drafter(HeldSessions(self.engine, description, 8))
        self.trees: dict[int, DraftTree] = {}
        self.windows: dict[int, int] = {}
        self.failures: list[Failure] = []
        self.leaf_counts: list[int] = []
        self.reference = load_model(str(folder), "float32", "cpu", lambda *_: None)
        self.reference.allocate(LENGTH_MAX // BLOCK_SIZE + 2, BLOCK_SIZE)

    def tell(self, *items: object) -> None:
        self.drafter.handle(self, list(items), self.take)

    def open(self, session: int, prompt: list[int], window: int = 8, leaves: int = 8) -> None:
        law = Law(Rule.GREEDY, seed=1, prompt_length=len(prompt), temperature=0.0)
        self.trees[session] = DraftTree(list(prompt))
        self.windows[session] = window
        self.tell(
            Open(session, 1, law, LENGTH_MAX, VOCABULARY_SIZE),
            Commit(session, 1, len(prompt), tuple(prompt), window, leaves),
        )

    def commit(self, session: int, *token_ids: int, leaves: int = 8) -> bool:
        tree = self.trees[session]
        was_inside = tree.commit(token_ids)
        suffix = tuple(tree.committed[-len(token_ids) :])
        self.tell(Commit(session, 1, len(tree.committed), suffix, self.windows[session], leaves))
        return was_inside

    def take(self, answer: object) -> None:
        if isinstance(answer, Failure):
            self.failures.append(answer)
            return
        assert isinstance(answer, Nodes), answer
        tree = self.trees[answer.session]
        self.leaf_counts.append(sum(node.proposal for node in answer.nodes))
        for node in answer.nodes:
            place = tree.add(answer.epoch, answer.root_length, node)
            assert place is not None, "nothing was in flight, so nothing may be late"
            if node.proposal:
                path = [*tree.committed, *tree.tokens_to(place)]
                assert path[-1] == self.next_token(path[:-1]), f"the proposal after {path[:-1][-6:]}"
        tree.check()

    def next_token(self, path: list[int]) -> int:
        """The model's argmax after `path`, evaluated from nothing."""
        blocks = range(1, len(path) // BLOCK_SIZE + 2)
        with torch.inference_mode():
            output = self.reference.forward(RaggedBatch((Segment(list(blocks), 0, path, 1),)))
        return int(output.logits[0, :VOCABULARY_SIZE].argmax())

    def settle(self, steps_max: int = 1000) -> None:
        """Steps until the trees are grown."""
        for _ in range(steps_max):
            self.drafter.before_step()
            if not self.engine.waiting_count:
                self.engine.cache.check_integrity()
                return
            self.engine._step()
        raise AssertionError("growth has no end")

    def step(self) -> None:
        self.drafter.before_step()
        self.engine._step()


def test_every_branch_is_evaluated_on_its_own_path(model_folder: Path) -> None:
    """Claim: lanes, forks and copies give each place the cache of its own path: every proposal child that leaves is
    the argmax of the model run from nothing on that path, over random commits along proposals, branches and strangers,
    some of them in the middle of growth."""
    rng = random.Random(3)
    draft = Draft(model_folder)
    draft.open(1, [rng.randrange(1, VOCABULARY_SIZE) for _ in range(21)])
    kinds = {"proposal": 0, "branch": 0, "stranger": 0}
    while len(draft.trees[1].committed) < LENGTH_MAX * 2 // 3:
        if rng.random() < 0.5:
            draft.settle()
        else:
            for _ in range(rng.randrange(1, 4)):
                draft.step()
            draft.drafter.before_step()  # what the last step made leaves first
        root = draft.trees[1].root
        branches = [token_id for token_id, child in root.children.items() if child is not root.proposal]
        kind = rng.choice(["proposal", "proposal", "branch", "stranger"])
        if kind == "proposal" and root.proposal is not None:
            token_id = root.proposal.token_id
        elif kind == "branch" and branches:
            token_id = rng.choice(branches)
        else:
            kind, token_id = "stranger", rng.randrange(1, VOCABULARY_SIZE)
        kinds[kind] += 1
        draft.commit(1, token_id)
    draft.settle()
    assert min(kinds.values()) >= 5 and max(draft.leaf_counts) > 4 and not draft.failures


def test_sessions_share_a_step_and_the_likeliest_places_go_first(model_folder: Path) -> None:
    """Claim: one step serves all sessions, and when they ask for more leaves than a step takes, the likeliest of all
    are taken: none that was left is likelier than one that was evaluated."""
    draft = Draft(model_folder)
    for session in range(1, 8):
        draft.open(session, [session * 5 + i for i in range(9)], leaves=16)
    for _ in range(3):
        draft.step()
    taken: list[float] = []
    left: list[float] = []
    submit, give_back = draft.drafter._evaluate, type(held_growth(draft)).give_back
    draft.drafter._evaluate = lambda held, candidate: (
        taken.append(held.growth.likelihood(candidate)),
        submit(held, candidate),
    )[1]
    for held in draft.drafter._sessions.all():
        held.growth.give_back = lambda c, g=held.growth: (left.append(g.likelihood(c)), give_back(g, c))[1]
    draft.drafter.before_step()
    assert len(taken) > 30 and len({answer for answer in draft.trees}) == 7
    assert not left or min(taken) >= max(left)


def held_growth(draft: Draft):
    return next(iter(draft.drafter._sessions.all())).growth


def test_a_chain_has_one_lane_and_no_branches(model_folder: Path) -> None:
    """Claim: with one leaf a step the tree is the chain of proposal children, up to the window, without any fork."""
    draft = Draft(model_folder)
    draft.open(1, list(range(2, 12)), window=6, leaves=1)
    draft.settle()
    assert draft.leaf_counts == [1] * 6 and draft.engine.cache.table_count == 1
    assert len(draft.trees[1].proposal_path(99)) == 6 and draft.trees[1].name_count == 6


def test_branches_give_way_to_a_new_session(model_folder: Path) -> None:
    """Claim: cache that branches hold never keeps a session from being opened; they are given up, and growth goes on
    with right proposals afterwards. The cache holds two sessions and a little more."""
    block_count = 1 + 2 * (LENGTH_MAX // BLOCK_SIZE) + 4
    draft = Draft(model_folder, block_count)
    draft.open(1, list(range(2, 12)))
    draft.settle()
    assert draft.engine.cache.table_count > 1
    draft.open(2, list(range(3, 20)))
    draft.settle()
    assert not draft.failures
    draft.commit(1, draft.trees[1].root.proposal.token_id)
    draft.settle()
    draft.tell(Close(1, 1), Close(2, 1))
    assert draft.engine.cache.table_count == 0 and draft.engine.cache.free_block_count == block_count - 1


def test_lanes_are_bounded(model_folder: Path) -> None:
    """Claim: a session never holds more lanes than the bound, however its tree branches."""
    draft = Draft(model_folder)
    draft.open(1, list(range(2, 12)), window=16, leaves=16)
    for _ in range(30):
        draft.drafter.before_step()
        assert draft.engine.cache.table_count <= BRANCH_LANE_COUNT_MAX + 1
        if not draft.engine.waiting_count:
            break
        draft.engine._step()


def test_branches_never_cost_a_session_its_own_room(model_folder: Path) -> None:
    """Claim: in a cache with hardly a block to spare, a step that finds none to copy into costs the session its
    branches and nothing else: no Failure is sent, proposals stay right, and the tree goes on as a chain. Random walks
    over several sizes; that the case really comes up is asserted."""
    cramped = 0
    for spare in (1, 3):
        rng = random.Random(spare)
        draft = Draft(model_folder, 1 + LENGTH_MAX // BLOCK_SIZE + spare)
        draft.open(1, [rng.randrange(1, VOCABULARY_SIZE) for _ in range(13)], window=4)
        while len(draft.trees[1].committed) < LENGTH_MAX // 2:
            draft.settle()
            root = draft.trees[1].root
            assert root.proposal is not None, "the chain goes on"
            branches = [token_id for token_id, child in root.children.items() if child is not root.proposal]
            choices = [root.proposal.token_id, *branches, rng.randrange(1, VOCABULARY_SIZE)]
            draft.commit(1, rng.choice(choices))
        draft.settle()
        assert not draft.failures, spare
        cramped += next(iter(draft.drafter._sessions.all())).is_cramped
    assert cramped
