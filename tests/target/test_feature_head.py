"""A feature head behind a real verifier, engine and cache, stepped by hand: what it drafts from its cells is what the
plain network drafts from the whole text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.decoding.prompt_logprobs import with_prompt_rows
from specdec.decoding.proposal import KnownTokens, ProposalRequest, propose
from specdec.decoding.verification import verify
from specdec.engine.eagle.model import EagleTarget
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.scheduler import Engine
from specdec.protocol.heads import HeadPlan
from specdec.protocol.items import Close, Open, Verification, VerificationResult
from specdec.protocol.noise import Lane, uniform_bits
from specdec.protocol.rejection import conclude
from specdec.protocol.tree_shape import children
from specdec.protocol.types import Description, DraftNode, DraftProbs, ResolvedSamplingParams, Rule
from specdec.replica.handler import ItemHandler
from specdec.target_service.feature_head import FeatureHeadDrafter
from specdec.target_service.verifier import Verifier
from tests.support.eagle_heads import WholeText, random_head
from tests.support.engine_models import make_tiny_model, random_tokens
from tests.support.gguf_models import make_tiny_gguf

BLOCK_SIZE, CHUNK_SIZE, VOCABULARY_SIZE = 16, 24, 288
PROMPT = random_tokens(70, 1)
SURE = 65535  # the whole weight of a distribution


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


class Target:
    """A target with a head, and its sessions' texts."""

    def __init__(self, folder: Path, rule: Rule = Rule.GREEDY, **engine: Any) -> None:
        self.rule = rule
        self.model = EagleTarget(load_model(str(folder)), random_head(), is_packed=False)
        self.drafter = FeatureHeadDrafter(self.model)
        options = {"chunk_size": CHUNK_SIZE, "rows_max": 64} | engine
        sampler = with_prompt_rows(verify)
        self.engine: Engine = Engine(self.model, 65, BLOCK_SIZE, sampler, read_hidden=self.drafter, **options)
        own = self.model.description
        size = own.vocabulary_size, own.positions_max
        described = Description(own.model_digest, "", own.model_name, *size, (), own.dtype, "cpu", "")
        self.verifier = Verifier(self.engine, described)
        self.handler = ItemHandler(self.verifier, 8)
        self.answers: dict[int, Any] = {}
        self.asked: dict[int, Verification] = {}
        self.texts: dict[int, list[int]] = {}
        self.rounds: dict[int, int] = {}

    @property
    def params(self) -> ResolvedSamplingParams:
        temperature = 0.0 if self.rule is Rule.GREEDY else 0.8
        return ResolvedSamplingParams(self.rule, seed=3, prompt_length=4, temperature=temperature)

    def open(self, session: int, prompt: Sequence[int] = PROMPT) -> None:
        self.texts[session], self.rounds[session] = [*prompt], 0
        params = self.params.__class__(
            self.rule, seed=3, prompt_length=len(prompt), temperature=self.params.temperature
        )
        self.handler.handle(self, [Open(session, 1, params, 200, VOCABULARY_SIZE)], self.take)

    def take(self, answer: Any) -> None:
        self.answers[answer.session] = answer

    def ask(self, session: int, plan: HeadPlan, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> None:
        """Asks a round with these draft tokens, under REJECTION each of a distribution of its own."""
        text = self.texts[session]
        probs = tuple(DraftProbs((token,), (SURE,)) for token in tokens) if self.rule is Rule.REJECTION else ()
        asked = Verification(
            session,
            1,
            self.rounds[session],
            len(text),
            tuple(text),
            tuple(tokens),
            probs,
            parents=tuple(parents),
            head_plan=plan,
        )
        self.asked[session] = asked
        self.rounds[session] += 1
        self.handler.handle(self, [asked.checked()], self.take)

    def run(self) -> None:
        """Turns until nothing waits; the cache is sound. Commits what the rounds say."""
        while self.engine.waiting_count or self.verifier.waiting_count:
            self.verifier.next_step()
            self.engine._step()
            self.engine.cache.check_integrity()
        for session, asked in self.asked.items():
            answer = self.answers[session]
            assert isinstance(answer, VerificationResult)
            params = self.session(session).opened.params
            verdict = conclude(params, asked, answer.output)
            accepted = [asked.draft_token_ids[index] for index in verdict.accepted]
            self.texts[session] += [*accepted, verdict.next_token_id]
        self.asked.clear()

    def session(self, number: int) -> Any:
        return next(one for one in self.handler.sessions.values() if one.name[0] == number)

    def nodes(self, session: int) -> tuple[DraftNode, ...]:
        return self.answers[session].output.head_nodes


class Checker:
    """Compares nodes with the plain network."""

    def __init__(self, folder: Path) -> None:
        self.whole = WholeText(folder, "llama", random_head())

    def check(self, target: Target, session: int, plan: HeadPlan) -> None:
        """Fails unless the nodes behind a session's text are those of the plan by the plain network: with the proposals
        that a draft service makes of the same logits, names and draws."""
        text, nodes = target.texts[session], target.nodes(session)
        params, its = target.session(session).opened.params, target.session(session)
        assert len({node.node_id for node in nodes}) == len(nodes)
        paths: dict[int, list[int]] = {0: []}
        own: dict[int, list[DraftNode]] = {}
        for node in nodes:
            paths[node.node_id] = [*paths[node.parent_id], node.token_id]
            own.setdefault(node.parent_id, []).append(node)
        depth = max(map(len, paths.values()))
        assert depth == plan.window
        evaluated = [parent for parent, found in own.items() if any(node.proposal for node in found)]
        assert len(evaluated) <= 1 + (plan.window - 1) * plan.nodes_per_step
        for parent in evaluated:
            first = next(node for node in own[parent] if node.proposal)
            names = range(first.node_id, first.node_id + 1 + plan.siblings)
            key = its.head_secret, Lane.DRAFT, target.rounds[session] - 1
            draws = tuple(uniform_bits(*key, name) for name in names) if params.rule is Rule.REJECTION else ()
            request = ProposalRequest(params, [*text, *paths[parent]], VOCABULARY_SIZE, draws, 3)
            logits = self.whole.logits(text, paths[parent])
            (expected,) = propose([request], logits[None])
            assert first.token_id == expected.token_id
            siblings = [node.token_id for node in own[parent] if node.node_id in names]
            assert siblings == [token_id for token_id, _ in expected.guesses][: 1 + plan.siblings]
            others = {node.token_id for node in own[parent]} - {*siblings}
            assert others <= {token_id for token_id, _ in expected.guesses}
            if params.rule is Rule.REJECTION:
                assert first.draft_probs is not None and expected.draft_probs is not None
                theirs = expected.draft_probs
                for token_id in theirs.token_ids:
                    assert first.draft_probs.probability(token_id) == pytest.approx(
                        theirs.probability(token_id), rel=0.1
                    )


@pytest.fixture(scope="module")
def checker(folder: Path) -> Checker:
    return Checker(folder)


def truth(target: Target, folder: Path, session: int, count: int) -> list[int]:
    """The tokens that the target chooses next by itself."""
    plain = Target(folder, target.rule)
    plain.open(session, target.texts[session])
    plain.rounds[session] = target.rounds[session]
    while len(plain.texts[session]) < len(target.texts[session]) + count:
        plain.ask(session, HeadPlan())
        plain.run()
    return plain.texts[session][len(target.texts[session]) :]


def wrong(token_id: int) -> int:
    return 1 + token_id % 280


CHAIN, TREE = HeadPlan(4), HeadPlan(3, 4)


@pytest.mark.parametrize(
    ("rule", "loses_blocks"),
    [
        (Rule.GREEDY, True),
        pytest.param(Rule.COUPLED, True, marks=pytest.mark.more),
        pytest.param(Rule.GREEDY, False, marks=pytest.mark.more),
        pytest.param(Rule.COUPLED, False, marks=pytest.mark.more),
    ],
)
def test_drafts_from_cells_are_those_of_the_whole_text(
    rule: Rule, loses_blocks: bool, folder: Path, checker: Checker
) -> None:
    """Claim: after a prompt in chunks, chains with rejections, trees whose accepted path is not in place, rounds
    without drafting, a preemption, a prefix that another session wrote and in blocks that others had, the nodes of
    every round are those of the plain network over the whole committed text, beside another session in the same passes.

    Source: the paper's section 3.1: pairs of committed positions read the target's features. Conclusive: in float32
    every evaluated node's proposals are compared, and a stale pair, a feature of a rejected row, or a position shifted
    by one changes them (`test_mistakes_are_found`).
    """
    target = Target(folder, rule)
    target.open(1)
    target.open(2, random_tokens(30, 5))
    for number in range(7):
        _one_round(target, folder, number, checker)
        if loses_blocks and number in (1, 4):
            target.verifier._admission._preempt(target.session(1))
    target.open(3, target.texts[1][:90])
    target.ask(3, CHAIN)
    target.run()
    assert target.answers[3].cached_prompt_tokens >= 64
    checker.check(target, 3, CHAIN)
    _blocks_of_others(target, checker)


def _blocks_of_others(target: Target, checker: Checker) -> None:
    """Every block is taken by one session, then again by others."""
    for number in [*target.texts]:
        target.handler.handle(target, [Close(number, 1)], target.take)
    length = 185
    for number in range(10, 18):
        target.open(number, random_tokens(length, number))
        target.ask(number, CHAIN)
        target.run()
        checker.check(target, number, CHAIN)
        target.handler.handle(target, [Close(number, 1)], target.take)


def _one_round(target: Target, folder: Path, number: int, checker: Checker) -> None:
    """A round of sessions 1 and 2; the draft tokens of the first are accepted in part."""
    plan = HeadPlan() if number == 3 else TREE if number in (2, 5) else CHAIN
    if number in (1, 6):
        right = truth(target, folder, 1, 3)
        target.ask(1, plan, [*right[:2], wrong(right[2])])
    elif number in (2, 4):
        right = truth(target, folder, 1, 2)  # depth first: two wrong ones before the path that is accepted
        target.ask(1, plan, [wrong(right[0]), 9, right[0], right[1], wrong(right[1])], [0, 1, 0, 3, 3])
    else:
        target.ask(1, plan, [] if number == 0 else [5])
    target.ask(2, TREE)
    target.run()
    if plan.window:
        checker.check(target, 1, plan)
    else:
        assert not target.nodes(1)
    checker.check(target, 2, TREE)


@pytest.mark.parametrize("plan", [HeadPlan(3), HeadPlan(3, 1, 2), HeadPlan(2, 4, 1)])
def test_rejection_draws_and_declares_like_a_draft(plan: HeadPlan, folder: Path, checker: Checker) -> None:
    """Claim: under REJECTION tokens are drawn, siblings without replacement, from the distribution that is sent with
    them, by the session's secret, the round and the node's name, over the head's trimmed vocabulary; with siblings a
    tree grows along first draws only. Conclusive: draws and distributions are recomputed from the plain network."""
    target = Target(folder, Rule.REJECTION)
    target.open(1)
    for number in range(4):
        target.ask(1, plan, [] if number == 0 else [PROMPT[number]])
        target.run()
        checker.check(target, 1, plan)
        for node in target.nodes(1):
            assert (node.draft_probs is not None) == node.proposal
            if node.draft_probs is not None:
                assert node.draft_probs.probability(node.token_id) > 0
                assert {*node.draft_probs.token_ids} <= {*random_head().target_ids.tolist()}


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def planted(function: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    PLANTED[function.__name__] = function
    return function


@planted
def features_of_a_rejected_row(patch: pytest.MonkeyPatch) -> None:
    from specdec.target_service import feature_head

    patch.setattr(feature_head.Drafting, "feature_cell", lambda self, position: position)


@planted
def a_position_shifted_by_one(patch: pytest.MonkeyPatch) -> None:
    from specdec.engine.eagle import native

    shifted = native.plan_pairs
    patch.setattr(
        native, "plan_pairs", lambda *own: (rows := shifted(*own))._replace(position=(rows.position * 2).clip(max=500))
    )


@planted
def pairs_kept_where_rows_were_rejected(patch: pytest.MonkeyPatch) -> None:
    from specdec.engine.eagle import storage

    def write(self, slots, features):
        self.features.index_copy_(0, torch.from_numpy(slots), features)

    patch.setattr(storage.EagleStorage, "write", write)


@planted
def a_vocabulary_that_is_not_trimmed(patch: pytest.MonkeyPatch) -> None:
    from specdec.target_service import feature_head

    patch.setattr(feature_head, "KnownTokens", lambda ids: KnownTokens(torch.arange(len(ids))))


@pytest.mark.parametrize("mistake", PLANTED)
def test_mistakes_are_found(mistake: str, folder: Path, checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the comparison finds planted mistakes. Conclusive: the same rounds pass without them, above."""
    PLANTED[mistake](monkeypatch)
    target = Target(folder)
    target.open(1)
    target.open(2, random_tokens(30, 5))
    with pytest.raises(AssertionError):
        for number in range(7):
            _one_round(target, folder, number, checker)
        _blocks_of_others(target, checker)


def test_nothing_is_computed_without_a_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a step without a verification that asks for the head runs no pass, and gives the sampler's own outputs."""
    target = Target(folder)
    for name in ("run_pass", "draft_chain"):
        monkeypatch.setattr(target.model, name, lambda *own: pytest.fail("a pass ran"))
    target.open(1)
    for _ in range(2):
        target.ask(1, HeadPlan(), [5, 6])
        target.run()
        assert target.nodes(1) == ()


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.COUPLED])
@pytest.mark.parametrize("kind", ["dense", "packed", "normed"])
def test_a_chain_in_one_call_is_that_of_its_passes(
    kind: str, rule: Rule, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: the chains of one session, drafted in one native call, are those of a pass for each token, with their
    confidences, bit for bit: with a dense or packed table of embeddings, a norm before the residual, and draft tokens
    that were rejected; one with a pass that is not finite is not sent. Conclusive: a call that is not made fails."""
    if kind == "packed":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 3}
        folder = make_tiny_gguf(tmp_path, "llama", "Q8_0", **sizes)
    head, calls, draft_chain = random_head(norm_before_residual=kind == "normed"), [], EagleTarget.draft_chain
    monkeypatch.setattr(sys.modules[__name__], "random_head", lambda: head)
    monkeypatch.setattr(EagleTarget, "draft_chain", lambda *own: (calls.append(1), draft_chain(*own))[1])
    sent: dict[bool, list[tuple[DraftNode, ...]]] = {False: [], True: []}
    for has_chains in (False, True):
        monkeypatch.setattr(EagleTarget, "has_chains", has_chains)
        target = Target(folder, rule)
        assert isinstance(target.model._table, torch.Tensor) is (kind != "packed")
        target.open(1)
        for number in range(6):
            target.ask(1, HeadPlan(1 + number), [*range(5, 5 + number)])
            target.run()
            sent[has_chains].append(target.nodes(1))
        assert len(calls) == (6 if has_chains else 0)
    assert sent[True] == sent[False] and [len(nodes) for nodes in sent[True]] == [1, 2, 3, 4, 5, 6]
    assert len({tuple(node.token_id for node in nodes) for nodes in sent[True]}) == 6
    head.lm_head.weight.fill_(torch.inf)
    target = Target(folder, rule)
    target.open(1)
    target.ask(1, CHAIN)
    target.run()
    assert target.nodes(1) == () and len(calls) == 7


def test_texts_are_those_without_a_head(folder: Path) -> None:
    """Claim: sampler outputs are the same with a plan and without, chain or tree. Conclusive: compared exactly over
    rounds of both kinds of draft tokens."""
    outputs = []
    for plan in (HeadPlan(), CHAIN, TREE):
        target = Target(folder, Rule.COUPLED)
        target.open(1)
        outputs.append([])
        for tokens, parents in (((), ()), ((5, 6), ()), ((7, 8, 9), (0, 1, 0))):
            target.ask(1, plan, tokens, parents)
            target.run()
            outputs[-1].append(target.answers[1].output._replace(head_nodes=()))
    assert outputs[0] == outputs[1] == outputs[2]


def test_passes_are_timed_by_their_rows(folder: Path) -> None:
    """Claim: times of passes ascend with their rows, and leave the cells of sessions alone."""
    target = Target(folder)
    times = target.drafter.measure_passes(VOCABULARY_SIZE)
    assert [rows for rows, _ in times] == [1, 2, 4, 8, 16]
    assert all(0 < first <= second for (_, first), (_, second) in zip(times, times[1:]))
    assert not target.model.storage.has_pair.any()


def test_the_shape_of_trees_is_depth_first() -> None:
    """Claim: the trees above are what a coordinator sends."""
    assert children([0, 1, 0, 3, 3], 5) == [[0, 2], [1], [], [3, 4], [], []]
