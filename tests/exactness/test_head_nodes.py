"""The nodes of a feature head keep the target distribution under REJECTION, and change no token under the other rules;
mistakes are noticed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from specdec.decoding.proposal import ProposalRequest, propose
from specdec.decoding.verification import VerificationRequest, verify
from specdec.policy.fixed_policy import FixedPolicy
from specdec.protocol import session as session_module
from specdec.protocol.calibration import Calibration
from specdec.protocol.events import Concluded, TargetFound
from specdec.protocol.growth import GrowingTree
from specdec.protocol.items import Verification, VerificationResult
from specdec.protocol.proposers import NgramProposer
from specdec.protocol.rejection import conclude
from specdec.protocol.session import Session
from specdec.protocol.tree import ReceivedTree
from specdec.protocol.types import DraftNode, DraftProbs, Proposer, ResolvedSamplingParams, Rule
from tests.exactness.enumeration import Path, base_two_distribution
from tests.exactness.head_worlds import HeadWorld, MixedWorld, Tree
from tests.exactness.test_exact_distribution import POLICIES, draft_table, target_table
from tests.exactness.test_siblings import check, runs_after

pytestmark = pytest.mark.lengthy


def world(kind: type[HeadWorld] = HeadWorld, vocabulary_size: int = 3, **changes) -> HeadWorld:
    facts = {
        "params": base_two_distribution(prompt_length=2),
        "target": target_table(vocabulary_size),
        "draft": draft_table(vocabulary_size),
        **changes,
    }
    return kind(**facts)


def other_table(path: Path) -> tuple[int, ...]:
    """Logits of a draft unlike the head and the target."""
    return tuple((2 * token_id + 3 * path[-1] + len(path)) % 4 for token_id in range(3))


@pytest.mark.parametrize(
    "drawn_count, depth, count",
    [(1, 1, 4), (1, 3, 2), pytest.param(1, 3, 3, marks=pytest.mark.more), (2, 1, 3), (2, 2, 2), (3, 1, 2)],
)
@pytest.mark.parametrize("has_runs", [False, True], ids=["alone", "with runs"])
def test_output_has_the_target_distribution(drawn_count: int, depth: int, count: int, has_runs: bool) -> None:
    """Claim: the joint distribution of the first tokens is the target's, for chains and siblings, alone and beside
    tokens of the coordinator's own proposers, over the rounds of one session (docs/exactness.md). Conclusive:
    fractions over every cell of every draw, through the real session, which went through all rounds before."""
    runs = {"runs": runs_after(3)} if has_runs else {}
    own = world(drawn_count=drawn_count, depth=depth, **runs)
    check(own, count)
    offers = [own.offered((((0,), tree),)) for _, tree in own.trees((0, 0), depth)]
    assert all(Proposer.HEADS in offer.proposers for offer in offers), "the head's tokens are offered"
    assert any(Proposer.NGRAM in offer.proposers for offer in offers) == has_runs


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_with_all_edits_and_truncations(policy: dict) -> None:
    """The same claim for every edit and truncation of the distribution."""
    check(world(params=base_two_distribution(**{**policy, "prompt_length": 2}), depth=1, runs=runs_after(3)), 2)


@pytest.mark.parametrize("is_draft_first", [True, False])
@pytest.mark.parametrize("depth, has_runs", [(1, False), (1, True), (2, True)])
def test_beside_the_nodes_of_a_draft(is_draft_first: bool, depth: int, has_runs: bool) -> None:
    """The same claim where a draft was found while the head was asked, and the nodes of both are in the tree, whichever
    came first: those stay, and what was drawn below equal tokens of the other goes on there."""
    runs = {"runs": runs_after(3)} if has_runs else {}
    own = world(MixedWorld, depth=depth, other=other_table, is_draft_first=is_draft_first, **runs)
    check(own, 2)
    of_draft = own.of_draft().trees((0, 0), 1)
    (_, tree), *_ = own.trees((0, 0), depth)
    found = Counter(proposer for _, other in of_draft for proposer in own.mixed_offer((0, 0), tree, other).proposers)
    assert found[Proposer.DRAFT if is_draft_first else Proposer.HEADS]


class DeclaresAnother(HeadWorld):
    """The head draws from its distribution over some of the tokens, and declares that over all."""

    def nodes_of(self, path: Path, tree: Tree) -> tuple[DraftNode, ...]:
        every = DraftProbs((0, 1, 2), (2, 3, 4))
        return tuple(node._replace(draft_probs=every) for node in super().nodes_of(path, tree))


class LikeliestSiblingFirst(HeadWorld):
    """Of the siblings the head sends the likeliest first."""

    def nodes_of(self, path: Path, tree: Tree) -> tuple[DraftNode, ...]:
        sent = super().nodes_of(path, tree)
        order = sorted(sent, key=lambda node: -node.draft_probs.probability(node.token_id))
        return tuple(node._replace(token_id=other.token_id) for node, other in zip(sent, order))


def rejected_kept(monkeypatch: pytest.MonkeyPatch) -> HeadWorld:
    """Where the head's token was refused, it stays and is offered again, below what was committed in its place."""
    real = ReceivedTree._descend

    def descend(self, token_id):
        root, found = self.root, self.root.children.get(token_id)
        refused = None if found is not None or root.proposal is None else (root.proposal, root.draft_probs)
        real(self, token_id)
        self.refused = refused
        return found

    def clear(self):
        refused = getattr(self, "refused", None)
        self.named.clear()
        if refused is not None:
            kept = DraftNode(1, 0, refused[0].token_id, True, refused[1])
            self.add(-999, len(self.committed), kept)

    monkeypatch.setattr(ReceivedTree, "_descend", descend)
    monkeypatch.setattr(ReceivedTree, "clear", clear)
    return world(drawn_count=1, depth=1, checks_draws=False)


def merged(monkeypatch: pytest.MonkeyPatch) -> HeadWorld:
    """Where head and draft drew one token, it is tested with the distribution of the later one."""
    real = ReceivedTree._attach

    def attach(parent, name, sent):
        node = real(parent, name, sent)
        if sent.proposal and node is parent.proposal:
            parent.draft_probs = sent.draft_probs
        return node

    monkeypatch.setattr(ReceivedTree, "_attach", staticmethod(attach))
    return world(MixedWorld, drawn_count=1, depth=1, other=other_table, checks_draws=False)


def likelier_source(monkeypatch: pytest.MonkeyPatch) -> HeadWorld:
    """Of the head's token and the draft's the likelier one is offered, each by its own distribution."""
    real = ReceivedTree._attach

    def attach(parent, name, sent):
        first, probs = parent.proposal, parent.draft_probs
        if sent.proposal and first is not None and name[0] != first.name[0]:
            if sent.draft_probs.probability(sent.token_id) > probs.probability(first.token_id):
                parent.proposal, parent.drawn = None, []
        return real(parent, name, sent)

    monkeypatch.setattr(ReceivedTree, "_attach", staticmethod(attach))
    return world(MixedWorld, drawn_count=1, depth=1, other=other_table, checks_draws=False)


def root_off_by_one(monkeypatch: pytest.MonkeyPatch) -> HeadWorld:
    """The head's nodes are filed one position too early: bits that decide no text, so the distribution stays, but what
    is offered was drawn after another path."""
    real = ReceivedTree.take
    monkeypatch.setattr(ReceivedTree, "take", lambda self, epoch, length, *more: real(self, epoch, length - 1, *more))
    return world(drawn_count=1, depth=2)


MUTATIONS = {
    "a refused token kept": rejected_kept,
    "declared before the vocabulary was trimmed": lambda patch: world(DeclaresAnother, depth=1, checks_draws=False),
    "the likeliest sibling first": lambda patch: world(LikeliestSiblingFirst, depth=1, checks_draws=False),
    "equal tokens of head and draft merged": merged,
    "the likelier of head and draft": likelier_source,
    "root off by one": root_off_by_one,
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_every_mutation_is_noticed(mutate, monkeypatch) -> None:
    """Claim: the check finds each of these mistakes, by the distribution, or, where it cannot change it, as a token
    that was not drawn after its path."""
    own = mutate(monkeypatch)
    with pytest.raises(AssertionError, match="distribution|drawn after its path|breakpoint"):
        check(own, 2)


def test_a_shifted_root_leaves_the_distribution() -> None:
    """Claim: the check of draws is what finds a root off by one: without it that mistake passes, as it should."""
    with pytest.MonkeyPatch.context() as patch:
        own = root_off_by_one(patch)
        own.checks_draws = False
        check(own, 2)


VOCABULARY_SIZE, TEXT_LENGTH = 7, 40


def logits_after(path: Path, salt: int) -> torch.Tensor:
    """Logits that depend on the last three tokens.  # [1, vocabulary]"""
    generator = torch.Generator().manual_seed(hash((salt, *path[-3:])) % (1 << 31))
    return 2 * torch.randn(1, VOCABULARY_SIZE, generator=generator)


def head_logits(path: Path) -> torch.Tensor:
    """Those of the head: near the target's, and without one of the tokens."""
    own = logits_after(path, 1) + 0.5 * logits_after(path, 2)
    own[:, path[-1] % VOCABULARY_SIZE] = -torch.inf
    return own


def drafted(params: ResolvedSamplingParams, path: Path, asked: Verification) -> tuple[DraftNode, ...]:
    """The nodes of a head that grows the tree that a verification asks for."""
    plan, sent = asked.head_plan, []
    growth = GrowingTree(params.rule, Calibration())
    growth.restart(list(path))
    for _ in range(plan.window):
        nodes = growth.take(plan.nodes_per_step, len(path) + plan.window, plan.nodes_per_step == 1)
        paths = [(*path, *(own.token_id for own in growth.path(node))) for node in nodes]
        requests = [ProposalRequest(params, own, VOCABULARY_SIZE, (), max(plan.siblings, 1)) for own in paths]
        made = propose(requests, torch.cat(list(map(head_logits, paths)))) if nodes else []
        for node, proposal in zip(nodes, made):
            sent += filter(None, [growth.file(node)])
            names = [growth.reserve_name() for _ in range(1 + plan.siblings)]
            sent += growth.evaluated(node, names, proposal.guesses, None)
    return tuple(sent)


def text_of(params: ResolvedSamplingParams, policy: FixedPolicy, has_head: bool) -> tuple[list[int], Counter[Proposer]]:
    """A text, and its accepted tokens by proposer, through the real session, sampler and rule."""
    committed, accepted = [3, 1], Counter()
    session = Session(1, params, TEXT_LENGTH, VOCABULARY_SIZE, policy, committed, "", [NgramProposer(committed)], 8)
    session.head_drafts = has_head
    asked = session.step(TargetFound()).to_target[-1]
    while not session.finished:
        base = tuple(session.committed)
        request = VerificationRequest(
            params, asked.round_index, base, asked.draft_token_ids, parents=asked.parents, head_plan=asked.head_plan
        )
        paths = [base]
        for parent, token_id in zip(asked.parents or range(len(asked.draft_token_ids)), asked.draft_token_ids):
            paths.append((*paths[parent], token_id))
        (output,) = verify([request], [len(paths)], torch.cat([logits_after(path, 1) for path in paths]))
        verdict = conclude(params, asked, output)
        tokens = (*map(asked.draft_token_ids.__getitem__, verdict.accepted), verdict.next_token_id)
        if asked.head_plan.window:
            output = output._replace(head_nodes=drafted(params, base + tokens, asked))
        ends = len(base) + len(tokens) == TEXT_LENGTH
        ready = session.step(
            Concluded(
                verdict, VerificationResult(1, 1, asked.round_index, output), tokens[: TEXT_LENGTH - len(base)], ends
            )
        )
        accepted.update(ready.record.tokens.accepted_proposers)
        asked = ready.to_target[-1]
    return session.committed, accepted


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.COUPLED])
@pytest.mark.parametrize("nodes_per_step, siblings", [(1, 0), (1, 2), (3, 2)], ids=["chain", "siblings", "tree"])
def test_no_head_changes_a_token_under_greedy_and_coupled(rule: Rule, nodes_per_step: int, siblings: int) -> None:
    """Claim: with a head's nodes, chains and trees, alone and beside n-grams, the text is that of plain decoding, token
    by token, and many tokens of the head are accepted. Conclusive: session, sampler and rule are the real ones, and a
    text of the same seed without a head is the reference."""
    accepted: Counter[Proposer] = Counter()
    for seed in range(12):
        params = ResolvedSamplingParams(rule, seed, 2, temperature=0.0 if rule is Rule.GREEDY else 0.8)
        plain, _ = text_of(params, FixedPolicy(0), False)
        found, own = text_of(params, FixedPolicy(8, 4, nodes_per_step, 0.0, siblings), True)
        assert found == plain
        accepted += own
    assert accepted[Proposer.HEADS] > 60 and not accepted[Proposer.DRAFT]


def test_the_worlds_drive_the_session() -> None:
    """Claim: the nodes go through the session's own code. Conclusive: without it nothing is offered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_module.Session, "_take_head_nodes", lambda *_: None)
        own = world(depth=1)
        ((_, tree), *_) = own.trees((0, 0), 1)
        assert own.offered((((0,), tree),)).token_ids == ()
