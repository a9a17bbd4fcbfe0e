"""The drafter on a real engine and a real (tiny) model: its results in a tree's cells are the model's own.

The engine is stepped by hand, so that every schedule is repeatable. Greedy proposals are checked one by one against
the same model run on the whole path in a cache of its own.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.decoding.proposal import proposals
from specdec.draft_service import drafter
from specdec.draft_service.drafter import TREE_CELLS, Drafter
from specdec.draft_service.session import DraftSession
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.scheduler import Engine
from specdec.protocol.items import Close, Commit, Failure, MissingTokens, Nodes, Open
from specdec.protocol.tree import ReceivedTree, TreeNode
from specdec.protocol.types import Description, ResolvedSamplingParams, Rule
from specdec.replica.handler import ABANDONED_S, ItemHandler
from tests.exactness import reference
from tests.support.engine_models import make_tiny_model
from tests.support.trees import OwnTree

VOCABULARY_SIZE = 288
LENGTH_MAX = 120
BLOCK_SIZE = 8  # branches part inside blocks and across their borders


def draft_tokens(node: TreeNode) -> list[int]:
    """The tokens below the committed ones on the path to a node of a coordinator's tree, its own the last."""
    return [] if node.parent is None else [*draft_tokens(node.parent), node.token_id]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("draft"), "llama", vocabulary_size=VOCABULARY_SIZE)


class Draft:
    """A drafter whose steps are run by hand, and a coordinator's tree for every session. `penalties`: of all sessions
    of a test, whose prompts then have one length."""

    vocabulary_size = VOCABULARY_SIZE
    penalties: dict[str, float] = {}
    params: ResolvedSamplingParams | None = None

    def __init__(self, folder: Path, block_count: int = 400) -> None:
        self.model = load_model(str(folder), "float32", has_stable_rows=False)
        self.engine = Engine(self.model, block_count, BLOCK_SIZE, proposals)
        own = self.model.description
        description = Description(
            own.model_digest, "", own.model_name, own.vocabulary_size, own.positions_max, (), own.dtype, "cpu", ""
        )
        self.drafter = Drafter(self.engine, description)
        self.handler = ItemHandler(self.drafter, 8)
        self.trees: dict[int, ReceivedTree] = {}
        self.windows: dict[int, int] = {}
        self.failures: list[Failure] = []
        self.errors: list[AssertionError] = []
        self.node_counts: list[int] = []
        self.step_rows: list[int] = []
        self.epochs: dict[int, list[int]] = {}
        self.reference = load_model(str(folder), "float32")
        self.reference.allocate(LENGTH_MAX // BLOCK_SIZE + 2, BLOCK_SIZE)

    def tell(self, *items: object) -> None:
        self.handler.handle(self, list(items), self.take)

    def open(
        self,
        session: int,
        prompt: list[int],
        window: int = 8,
        nodes_per_step: int = 8,
        siblings: int = 0,
        rule: Rule = Rule.GREEDY,
        prompt_length: int | None = None,
    ) -> None:
        """Opens a session and commits its tokens, a prompt unless `prompt_length` says that an output follows it."""
        temperature, length = 0.0 if rule is Rule.GREEDY else 1.0, prompt_length or len(prompt)
        params = ResolvedSamplingParams(rule, seed=1, prompt_length=length, temperature=temperature, **self.penalties)
        self.params = params
        self.trees[session] = OwnTree(list(prompt))
        self.windows[session] = window
        self.tell(
            Open(session, 1, params, LENGTH_MAX, self.vocabulary_size),
            Commit(session, 1, len(prompt), tuple(prompt), window, nodes_per_step, siblings=siblings),
        )

    def commit(self, session: int, *token_ids: int, nodes_per_step: int = 8, wait_length: int = 0) -> bool:
        tree = self.trees[session]
        was_inside = tree.commit(token_ids)
        suffix = tuple(tree.committed[-len(token_ids) :])
        length, window = len(tree.committed), self.windows[session]
        self.tell(Commit(session, 1, length, suffix, window, nodes_per_step, wait_length=wait_length))
        return was_inside

    def take(self, answer: object) -> None:
        """Keeps an error for the next step: the engine logs what its callbacks raise, and goes on."""
        try:
            self.check(answer)
        except AssertionError as error:
            self.errors.append(error)

    def check(self, answer: object) -> None:
        if isinstance(answer, Failure):
            self.failures.append(answer)
            return
        if isinstance(answer, MissingTokens):
            assert self.failures, "only a session that was refused is unknown"
            return
        assert isinstance(answer, Nodes), answer
        epochs = self.epochs.setdefault(answer.session, [])
        if epochs[-1:] != [answer.epoch]:
            epochs.append(answer.epoch)
        tree = self.trees[answer.session]
        self.node_counts.append(sum(node.proposal for node in answer.nodes))
        for node in answer.nodes:
            added = tree.add(answer.epoch, answer.root_length, node)
            assert added is not None, "nothing was in flight, so nothing may be late"
            if node.proposal and not node.draft_probs:  # not drawn
                path = [*tree.committed, *draft_tokens(added)]
                assert path[-1] == self.next_token(path[:-1]), f"the proposal after {path[:-1][-6:]}"
        tree.check()

    def next_token(self, path: list[int]) -> int:
        """The model's argmax after `path`, evaluated from nothing."""
        blocks = range(1, len(path) // BLOCK_SIZE + 2)
        with torch.inference_mode():
            output = self.reference.forward(RaggedBatch((Chunk(list(blocks), 0, path, 1),)))
        logits = output.logits[0, :VOCABULARY_SIZE]
        if self.params is not None and self.params.has_penalties:
            logits = torch.tensor(reference.edited_logits(self.params, logits.tolist(), path), dtype=torch.float64)
        return int(logits.argmax())

    def settle(self, steps_max: int = 1000) -> None:
        """Steps until the trees are grown."""
        for _ in range(steps_max):
            if not self.step():
                self.engine.cache.check_integrity()
                return
        raise AssertionError("growth has no end")

    def step(self) -> bool:
        """One step; False where there is nothing to do."""
        turn = self.drafter.next_step()
        if turn.feeds:
            report = self.engine.run(turn.feeds)
            self.step_rows.append(report.row_count)
            turn.done(report)
        for error in self.errors:
            raise error
        for session in self.sessions:
            session.growth.check()
            session.check()
        return bool(turn.feeds)

    @property
    def sessions(self) -> list[DraftSession]:
        return list(self.handler.sessions.values())


@pytest.mark.parametrize(
    "penalties",
    [
        pytest.param({}, id="plain", marks=pytest.mark.more),
        pytest.param({"repetition_penalty": 1.3, "presence_penalty": 0.5}, id="penalties"),
    ],
)
def test_every_branch_is_evaluated_on_its_own_path(model_folder: Path, penalties: dict[str, float]) -> None:
    """Claim: every node sees the cells of its own path and no other, and its penalties count that path: every proposal
    child sent is the argmax of the model run from nothing on that path, over random commits along proposals, branches
    and strangers, some in the middle of growth. With penalties the committed tokens are counted by the session."""
    rng = random.Random(3)
    draft = Draft(model_folder)
    draft.penalties = penalties
    draft.open(1, [rng.randrange(1, VOCABULARY_SIZE) for _ in range(21)])
    kinds = {"proposal": 0, "branch": 0, "stranger": 0}
    while len(draft.trees[1].committed) < LENGTH_MAX * 2 // 3:
        if rng.random() < 0.5:
            draft.settle()
        else:
            for _ in range(rng.randrange(1, 4)):
                draft.step()
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
    assert min(kinds.values()) >= 5 and max(draft.node_counts) > 4 and not draft.failures
    counts = draft.sessions[0].counts
    assert counts.length == len(draft.trees[1].committed) if penalties else counts is None


def test_sessions_share_a_step_and_the_likeliest_nodes_go_first(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: one step serves all sessions, and when they need more nodes than a step takes, it takes the likeliest: no
    node left is likelier than one evaluated. Conclusive: all nodes of both kinds are compared."""
    monkeypatch.setattr(drafter, "LIKELIHOOD_MIN", 0.0)
    draft = Draft(model_folder)
    for session in range(1, 8):
        draft.open(session, [session * 5 + i for i in range(9)], nodes_per_step=16)
    for _ in range(3):
        draft.step()
    monkeypatch.setattr(drafter, "STEP_NODES_MAX", 40)
    before = {own.opened.session: [n for n in own.growth.root.below() if not n.guesses] for own in draft.sessions}
    draft.step()
    taken: list[float] = []
    left: list[float] = []
    for own in draft.sessions:
        for node in before[own.opened.session]:
            (taken if node.guesses else left).append(own.growth.likelihood(node))
    assert len(taken) == 40 and len(before) == 7
    complete = [own for own in draft.sessions if sum(bool(n.guesses) for n in before[own.opened.session]) == 16]
    assert not complete, "no session reached its nodes per step, so nothing but likelihood decided"
    assert min(taken) >= max(left)


def test_beside_many_sessions_nodes_leave_with_those_of_the_next_steps(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: the nodes of a session leave with those of at most HELD_STEPS_MAX further steps; at once if a verification
    waits for them, under REJECTION, and where few sessions are open; and no later than the next commit, and than the
    last step. Conclusive: the proposals of every item are counted, and chains send one a step."""
    draft = Draft(model_folder)
    for session in (1, 2):
        draft.open(session, [session * 5 + i for i in range(9)], nodes_per_step=1)
    draft.step()
    assert draft.node_counts == [1, 1]
    monkeypatch.setattr(drafter, "SESSIONS_PER_HELD_STEP", 1)
    draft.step()
    draft.step()
    assert draft.node_counts == [1, 1]
    draft.step()
    assert draft.node_counts == [1, 1, 3, 3]
    draft.step()
    next_token = draft.trees[1].root.proposal
    assert next_token is not None
    draft.commit(1, next_token.token_id, nodes_per_step=1, wait_length=8)
    assert draft.node_counts[4:] == [1], "the commit lets go what was held"
    draft.step()
    assert draft.node_counts[5:] == [1], "only the session that is waited for sends at once"
    draft.settle()
    assert sum(draft.node_counts) == 8 + 9, "two chains as long as their windows"
    waited, held = draft.sessions
    assert draft.drafter._held_steps_max(waited) == 0 < draft.drafter._held_steps_max(held)
    held.opened = replace(held.opened, params=replace(held.opened.params, rule=Rule.REJECTION, temperature=1.0))
    assert draft.drafter._held_steps_max(held) == 0


def test_the_more_sessions_are_open_the_fewer_unlikely_nodes_are_evaluated(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a tree leaves out the paths below LIKELIHOOD_MIN times the open sessions, since each node takes the time
    of all, up to LIKELIHOOD_MIN_MOST; a closed session counts no more. Conclusive: trees are grown until nothing is
    left, and every node within the window is on the right side of the bound."""
    monkeypatch.setattr(drafter, "LIKELIHOOD_MIN", 0.02)
    monkeypatch.setattr(drafter, "LIKELIHOOD_MIN_MOST", 0.07)
    for open_count, closed_count, least in ((1, 0, 0.02), (3, 0, 0.06), (1, 2, 0.02), (6, 0, 0.07)):
        draft = Draft(model_folder)
        for session in range(1, open_count + closed_count + 1):
            draft.open(session, [session * 5 + i for i in range(9)], window=4)
            if session <= closed_count:
                draft.tell(Close(session, 1))
        draft.settle()
        evaluated, left = [], []
        for growth in (own.growth for own in draft.sessions):
            for node in growth.root.below():
                if node.length < 9 + 4:
                    (evaluated if node.guesses else left).append(growth.likelihood(node))
        assert max(left) < least <= min(evaluated) and len(evaluated) > open_count


def test_a_chain_has_no_branches(model_folder: Path) -> None:
    """Claim: with 1 node per step the tree is the chain of proposal children, up to the window."""
    draft = Draft(model_folder)
    draft.open(1, list(range(2, 12)), window=6, nodes_per_step=1)
    draft.settle()
    assert draft.node_counts == [1] * 6 and draft.engine.cache.table_count == 1
    assert len(draft.trees[1].proposal_path(99)) == 6 and len(draft.trees[1].named) == 6


def test_nothing_is_evaluated_below_a_drawn_sibling(model_folder: Path) -> None:
    """Claim: where siblings are drawn, the draft evaluates first draws alone, however many nodes it may evaluate, and
    also after a commit that asks for no siblings any more, as long as some drawn before may be offered. Otherwise the
    tokens drawn decide what lies below them, which takes the rows of other siblings (docs/exactness.md). Conclusive:
    all evaluated nodes are looked at; under GREEDY, the same tree grows below siblings, so there are rows for it."""
    evaluated_below = {}
    for rule in (Rule.GREEDY, Rule.REJECTION):
        draft = Draft(model_folder)
        draft.open(1, list(range(2, 12)), nodes_per_step=8, siblings=2, rule=rule)
        draft.settle()
        (session,) = draft.sessions
        for _ in range(2):
            nodes = list(session.growth.root.below())
            evaluated = [node for node in nodes if node.guesses and node.parent is not None]
            assert len(evaluated) >= 5 and len(nodes) > 3 * len(evaluated)
            later = [node for node in evaluated if node is not node.parent.proposal]
            evaluated_below.setdefault(rule, []).append(len(later))
            draft.commit(1, draft.trees[1].root.proposal.token_id)  # asks for no siblings
            draft.settle()
    assert min(evaluated_below[Rule.GREEDY]) > 0 == max(evaluated_below[Rule.REJECTION]), evaluated_below


def test_nothing_is_fed_twice(model_folder: Path) -> None:
    """Claim: a token goes through the model once: after commits along evaluated paths only nodes are evaluated, and a
    commit beside the tree feeds the one new token. Conclusive: the rows of every step are counted."""
    draft = Draft(model_folder)
    rows = draft.step_rows
    prompt = list(range(2, 23))
    draft.open(1, prompt, window=4, nodes_per_step=1)
    draft.settle()
    assert rows == [len(prompt), 1, 1, 1]
    for _ in range(3):
        proposal = draft.trees[1].root.proposal
        assert proposal is not None
        draft.commit(1, proposal.token_id, nodes_per_step=1)
        draft.settle()
    assert rows[4:] == [1, 1, 1]
    draft.commit(1, 7, 8, nodes_per_step=1)
    draft.settle()
    assert rows[7] == 2 and set(rows[8:]) == {1}


def test_prompts_are_fed_in_chunks_beside_others(model_folder: Path) -> None:
    """Claim: a long prompt does not stop other sessions' drafting: beside a growing session it is fed a chunk a step,
    and both are right. Conclusive: rows of every step, and every proposal against the model from nothing."""
    draft = Draft(model_folder)
    draft.engine.chunk_size = 16
    rows = draft.step_rows
    draft.open(1, list(range(2, 12)), window=16, nodes_per_step=1)
    draft.step()
    draft.open(2, list(range(3, 53)), window=2, nodes_per_step=1)
    draft.settle()
    assert rows[1:5] == [17, 17, 17, 3] and not draft.failures
    assert len(draft.trees[2].proposal_path(9)) == 2 and len(draft.trees[1].proposal_path(99)) == 16


def test_branches_never_take_the_cells_of_committed_tokens(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: however far branches grow, committed tokens always find cells, proposals stay right, and growth goes on
    after each commit; that cells really run out is asserted. Conclusive: every proposal, over random walks to the end
    of the session's length."""
    monkeypatch.setattr(drafter, "TREE_CELLS", 8)
    rng, full = random.Random(2), 0
    draft = Draft(model_folder, 1 + (LENGTH_MAX + 8) // BLOCK_SIZE)
    draft.open(1, [rng.randrange(1, VOCABULARY_SIZE) for _ in range(LENGTH_MAX - 40)], window=16)
    while len(draft.trees[1].committed) < LENGTH_MAX - 2:
        draft.settle()
        full += draft.sessions[0].free_cell_count == 0
        root = draft.trees[1].root
        assert root.proposal is not None, "growth goes on"
        draft.commit(1, rng.choice([root.proposal.token_id, *root.children, rng.randrange(1, VOCABULARY_SIZE)]))
    assert full and not draft.failures


def test_more_sessions_draft_than_the_cache_could_hold_whole(model_folder: Path) -> None:
    """Claim: a session holds blocks for the cells it uses, not for all that it may need: eight draft at the same time
    in a cache for two of full length; closed ones free all.

    Source: sessions with a large `max_tokens` filled the cache, and those opened meanwhile never drafted. Conclusive:
    every session has a chain as long as its window, compared with the model's as all others.
    """
    each = -(-(LENGTH_MAX + TREE_CELLS) // BLOCK_SIZE)
    draft = Draft(model_folder, 1 + 2 * each)
    for session in range(1, 9):
        draft.open(session, [session * 5 + i for i in range(10)], nodes_per_step=1)
    draft.settle()
    assert [len(draft.trees[session].proposal_path(99)) for session in range(1, 9)] == [8] * 8
    assert draft.drafter.waiting_count == 0 and draft.engine.cache.free_block_count == 2 * each - 8 * 3
    draft.tell(*(Close(session, 1) for session in range(1, 9)))
    assert draft.engine.cache.table_count == 0 and draft.engine.cache.free_block_count == 2 * each


def test_a_session_without_cells_drafts_once_they_are_free(model_folder: Path) -> None:
    """Claim: a session that finds too few cells for its tokens holds no block, drafts nothing, and drafts from the
    first commit on that finds enough; while it waits no tree takes a block. Conclusive: free blocks are counted, and
    the late session's proposals are compared with the model's as all others."""
    each = -(-(LENGTH_MAX + TREE_CELLS) // BLOCK_SIZE)
    draft = Draft(model_folder, 1 + each)
    for session in (1, 2, 3):
        draft.open(session, [session * 5 + i for i in range(80)], prompt_length=8)
    free_count = each - 2 * 10
    assert draft.engine.cache.free_block_count == free_count < 10 and draft.drafter.waiting_count == 1
    draft.settle()
    draft.commit(1, 5)
    draft.commit(3, 5, 6)
    draft.settle()
    assert [len(draft.trees[session].named) > 0 for session in (1, 2, 3)] == [True, True, False]
    assert draft.engine.cache.free_block_count == free_count - 1, "one more block, for a committed token"
    draft.windows[3] = 0
    draft.commit(3, 9)
    assert draft.drafter.waiting_count == 0, "a session whose draft is not used keeps no tree from growing"
    draft.windows[3] = 8
    draft.commit(3, 4)
    assert draft.drafter.waiting_count == 1
    draft.tell(Close(1, 1))
    draft.commit(3, 7)
    draft.settle()
    assert draft.trees[3].named and draft.drafter.waiting_count == 0 and not draft.failures


def test_a_session_left_alone_gives_its_cells_to_others(model_folder: Path) -> None:
    """Claim: a session without commits for ABANDONED_S keeps no other from drafting, one that works does; it drafts
    again from its next commit on that finds cells. Conclusive: the same commits of the late session find none before,
    and all proposals are compared with the model's."""
    each = -(-(LENGTH_MAX + TREE_CELLS) // BLOCK_SIZE)
    draft = Draft(model_folder, 1 + each)
    for session in (1, 2, 3):
        draft.open(session, [session * 5 + i for i in range(80)], prompt_length=8)
    draft.settle()
    held = {own.opened.session: own for own in draft.sessions}
    draft.commit(3, 5)
    assert draft.drafter.waiting_count == 1 and held[1].table.block_ids and held[2].table.block_ids
    held[1].active_s -= ABANDONED_S
    draft.commit(3, 6)
    draft.settle()
    assert draft.trees[3].named and draft.drafter.waiting_count == 0
    assert held[2].table.block_ids and not held[1].table.block_ids
    draft.commit(1, 7)
    assert draft.drafter.waiting_count == 1, "the others work"
    draft.tell(Close(2, 1), Close(3, 1))
    draft.commit(1, 8)
    draft.settle()
    assert draft.trees[1].named and draft.drafter.waiting_count == 0 and not draft.failures


def test_sessions_that_fill_the_cache_never_keep_each_other_from_drafting(model_folder: Path) -> None:
    """Claim: whatever sessions do in a cache that is too small for them, every proposal sent is the model's, no session
    fails but at its opening, none that waits holds a block, and once the others have ended each drafts at its next
    commit. Conclusive: random openings, commits, closings and steps, in which sessions lose the blocks that they had;
    cells and blocks are checked throughout."""
    rng, lost_count = random.Random(5), 0
    draft = Draft(model_folder, 1 + -(-(LENGTH_MAX + TREE_CELLS) // BLOCK_SIZE))
    for _ in range(600):
        session = rng.randrange(1, 6)
        if session not in draft.trees:
            draft.open(session, [rng.randrange(1, VOCABULARY_SIZE) for _ in range(rng.choice([3, 20, 40]))])
            if draft.failures:
                assert draft.failures.pop().reason == "CACHE_EXHAUSTED"
                del draft.trees[session]
        elif len(draft.trees[session].committed) > LENGTH_MAX - 4 or rng.random() < 0.01:
            draft.tell(Close(session, 1))
            del draft.trees[session]
        else:
            held = {own for own in draft.sessions if own.table.block_ids}
            root, tokens = draft.trees[session].root, [rng.randrange(1, VOCABULARY_SIZE)]
            if root.proposal is not None and rng.random() < 0.7:
                tokens = [root.proposal.token_id]
            draft.commit(session, *tokens)
            lost_count += sum(not own.table.block_ids for own in held)
        for _ in range(rng.randrange(3)):
            draft.step()
        draft.engine.cache.check_integrity()
        waiting = [own for own in draft.sessions if not own.table.block_ids]
        assert len(waiting) == draft.drafter.waiting_count
    assert lost_count >= 3
    session, *others = draft.trees
    draft.tell(*(Close(other, 1) for other in others))
    draft.commit(session, 7, 8)
    draft.settle()
    assert draft.trees[session].root.proposal is not None and not draft.failures


def test_above_its_capacity_a_draft_refuses_new_sessions_and_keeps_those_it_has(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a new session is refused, by name and with a delay, where its prompt does not fit beside the others,
    while a session waits for blocks, and while the steps are late for the rounds of more than PACED_SESSIONS_MIN, here
    one; blocks of sessions left alone count as free. A session that is open goes on, and is opened again, meanwhile;
    afterwards new ones are taken.

    Requirement: "above its capacity it refuses". Conclusive: the same opening on both sides of each
    limit, and load 1 where it is refused for time.
    """
    monkeypatch.setattr(drafter, "PACED_SESSIONS_MIN", 1)
    each = -(-(LENGTH_MAX + TREE_CELLS) // BLOCK_SIZE)
    draft = Draft(model_folder, 1 + each)

    def refusal(session: int, length: int = 8) -> str:
        draft.open(session, [session * 5 + index for index in range(length)])
        failure = draft.failures.pop() if draft.failures else None
        assert failure is None or (failure.reason, failure.retry_after_ms > 0) == ("CACHE_EXHAUSTED", True)
        return failure.message if failure is not None else ""

    for session in (1, 2):
        assert not refusal(session, 80)
    free_count = draft.engine.cache.free_block_count
    assert "blocks of the draft" in refusal(3, (free_count + 1) * BLOCK_SIZE)
    assert draft.engine.cache.free_block_count == free_count
    draft.open(3, [7 + index for index in range(80)], prompt_length=8)
    assert draft.drafter.waiting_count == 1
    assert "1 sessions of the draft wait" in refusal(4)
    draft.tell(Open(1, 2, draft.params, LENGTH_MAX, VOCABULARY_SIZE), Close(3, 1))
    assert not draft.failures and len(draft.sessions) == 2, "its own place again"
    for own in draft.sessions:
        own.active_s -= ABANDONED_S
    assert not refusal(5, 100)
    draft.tell(Close(5, 1))
    pace, now_s = draft.drafter._pace, time.monotonic()
    pace.on_step(0.05)
    pace.on_commit(0.1, now_s)
    draft.handler.handle(draft, [Open(6, 1, draft.params, LENGTH_MAX, VOCABULARY_SIZE)], draft.take, now_s)
    assert "late" in draft.failures.pop().message and draft.handler.load() == (2, 1.0)
    draft.handler.handle(draft, [Open(6, 1, draft.params, LENGTH_MAX, VOCABULARY_SIZE)], draft.take, now_s + 3)
    assert not draft.failures and len(draft.sessions) == 3


def test_commits_and_steps_set_the_pace(model_folder: Path) -> None:
    """Claim: the time between two commits of a session that drafts is a round, steps of nodes count and those that read
    a prompt do not; a session whose window is 0 gives none. Conclusive: arrivals are numbers of the test, and the share
    is 0 until both were measured."""
    draft = Draft(model_folder)
    draft.open(1, list(range(1, 101)))
    pace = draft.drafter._pace
    draft.step()
    assert pace._step_s == 0, "it read the prompt"
    draft.settle()
    assert pace._step_s > 0 and pace.share(10.0) == 0
    draft.sessions[0].committed_s = 10.0
    expected = [(0.001, 0.001), (0.01, 0.001 + 0.05 * 0.008), (0.1, 0.0014 + 0.05 * 0.0886)]
    expected.append(expected[-1])  # the session did not draft before it
    for index, window in enumerate((8, 8, 0, 8)):
        commit = Commit(1, 1, 101 + index, (5,), window, 8)
        draft.handler.handle(draft, [commit], draft.take, 10.0 + 10 ** (index - 3))
        draft.trees[1].commit((5,))
        draft.settle()
        assert (pace._committed_s - 10.0, pace._round_s) == pytest.approx(expected[index])
        assert pace.share(pace._committed_s) > 0


def test_a_session_beyond_the_whole_cache_is_refused(model_folder: Path) -> None:
    """Claim: a session for which no end of others would free enough cells is refused at its opening, with its number
    and the limit, and holds nothing."""
    draft = Draft(model_folder, (LENGTH_MAX + TREE_CELLS) // BLOCK_SIZE)
    draft.open(1, list(range(2, 12)))
    assert f"needs {LENGTH_MAX + TREE_CELLS} cells" in draft.failures[0].message
    assert draft.engine.cache.table_count == 0 and not draft.sessions


def test_epochs_count_the_trees_of_one_incarnation(model_folder: Path) -> None:
    """Claim: the epoch a session sends counts its own restarts, from 1, also after it is opened again and whatever
    other sessions did. Source: epochs were counted for the draft's life, until they fit no field of a message."""
    draft = Draft(model_folder)
    draft.open(1, list(range(2, 12)))
    draft.settle()
    draft.commit(1, 7, 8)
    draft.settle()
    draft.open(2, list(range(2, 12)))
    draft.settle()
    assert [session.growth.epoch for session in draft.sessions] == [2, 1]
    assert draft.epochs == {1: [1, 2], 2: [1]}
    draft.tell(Close(1, 1))
    draft.open(1, list(range(2, 12)))
    draft.settle()
    assert draft.epochs[1] == [1, 2, 1]
