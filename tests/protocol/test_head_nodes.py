"""The nodes of a feature head on the target in a session: what it is asked for, whose tokens they are, and faults.

The head here is a toy: a chain that is right in most places.
"""

from __future__ import annotations

import random

import pytest

from specdec.errors import InvalidRequest
from specdec.policy.fixed_policy import FixedPolicy
from specdec.protocol.events import Concluded, DraftFound, DraftLost, FromDraft, Ready, TargetFound, TargetLost
from specdec.protocol.heads import HEAD_PASSES_MAX, NO_HEAD_PLAN, HeadPlan
from specdec.protocol.items import Verification, VerificationResult
from specdec.protocol.records import RoundRecord
from specdec.protocol.session import Session
from specdec.protocol.types import DraftNode, DraftProbs, Proposer, Rule, SamplerOutput, TokenKind, Verdict
from specdec.rpc.convert_items import item_from_message, item_to_bytes
from specdec.v1 import target_service_pb2 as target_pb
from tests.protocol.test_session import (
    PROMPT,
    VOCABULARY_SIZE,
    ToyTarget,
    World,
    begin,
    make_session,
    next_token,
    nodes_of,
    reference,
)


class ToyHead(ToyTarget):
    """A target with a head: after each verification it drafts the chain that was asked for, sometimes malformed."""

    def __init__(self, rng: random.Random, malformed_share: float = 0.0) -> None:
        super().__init__()
        self.rng, self.malformed_share, self.asked = rng, malformed_share, 0

    def take(self, item) -> list:
        answers = super().take(item)
        if not answers or not isinstance(answers[0], VerificationResult) or not item.head_plan.window:
            return answers
        self.asked += 1
        output = answers[0].output
        path, row = list(self.tokens), 0
        while row < len(item.draft_token_ids) and item.draft_token_ids[row] == output.recovered_token_ids[row]:
            path.append(item.draft_token_ids[row])
            row += 1
        path.append(output.recovered_token_ids[row])
        nodes = []
        for number in range(1, item.head_plan.window + 1):
            right = self.rng.random() < 0.7
            path.append(next_token(path) if right else self.rng.randrange(VOCABULARY_SIZE))
            token_id = VOCABULARY_SIZE if self.rng.random() < self.malformed_share else path[-1]
            nodes.append(DraftNode(number, number - 1, token_id, True))
        return [answers[0]._replace(output=output._replace(head_nodes=tuple(nodes)))]


def head_session(draft_length: int = 3, **more) -> Session:
    session = make_session(draft_length, **more)
    session.head_drafts = True
    return session


def concluded(asked: Verification, *tokens: int, nodes: tuple[DraftNode, ...] = (), malformed: int = 0) -> Concluded:
    """A round that accepted all tokens but the last, with the head's nodes in its result."""
    count = len(tokens) - 1
    kind = TokenKind.BONUS if count == len(asked.draft_token_ids) else TokenKind.RECOVERED
    output = SamplerOutput((0,) * (len(asked.draft_token_ids) + 1), head_nodes=nodes)
    answer = VerificationResult(1, asked.incarnation, asked.round_index, output, malformed_count=malformed)
    return Concluded(Verdict(tuple(range(count)), tokens[-1], kind), answer, tokens)


def chain(*tokens: int) -> tuple[DraftNode, ...]:
    return tuple(DraftNode(number, number - 1, token_id, True) for number, token_id in enumerate(tokens, 1))


class HeadWorld(World):
    """A world whose target has a head; it keeps the records of rounds."""

    def __init__(self, seed: int, session: Session, malformed_share: float) -> None:
        super().__init__(seed, session)
        self.target = self.head = ToyHead(self.rng, malformed_share)
        self.records: list[RoundRecord] = []

    def happen(self, event) -> Ready:
        ready = super().happen(event)
        self.records += [ready.record] if ready.record else []
        return ready


@pytest.mark.parametrize("malformed_share", [0.0, 0.02])
def test_the_text_is_the_targets_under_faults(malformed_share: float) -> None:
    """Claim: with a head that drafts, items lost, doubled or forgotten, targets and drafts lost and found, and now and
    then a malformed node, the committed tokens are the target's own and the generation ends. A head that sent no
    malformed node is asked to the end, and most rounds accept some of its tokens; another is asked no more after it.
    Conclusive: the text is compared token by token, invariants hold after every event."""
    refused = accepted = rounds = 0
    for seed in range(150):
        session = head_session()
        world = HeadWorld(seed, session, malformed_share)
        world.happen(TargetFound())
        for _ in range(5000):
            if session.finished:
                break
            if world.rng.random() < 0.05:
                world.fault()
            if world.to_target or world.answers or world.draft_is_up or world.nodes or world.timers:
                world.deliver()
        assert session.finished and session.committed == reference(40), f"seed {seed}"
        assert session.is_head_refused == (session.malformed_node_count > 0)
        refused += session.is_head_refused
        tokens = [record.tokens for record in world.records]
        accepted += sum(Proposer.HEADS in own.accepted_proposers for own in tokens)
        rounds += len(tokens)
        assert all(own.drafter is Proposer.HEADS for own in tokens)
        assert not session.is_head_refused or world.records[-1].is_refused
    assert (refused > 50) == (malformed_share > 0)
    assert malformed_share or accepted > rounds / 3


def test_nodes_are_for_the_next_round_and_are_the_heads() -> None:
    """Claim: a head that drafts is asked with every verification, for the plan's tree; its nodes are below the tokens
    that the round commits, and the next verification offers them as tokens of HEADS; those that it did not offer are
    dropped with the result after, whose nodes are offered in their place."""
    session = head_session(draft_length=2)
    session.policy = FixedPolicy(2, window=4, wait_s=0.0)
    session.plan = session.policy.plan(30)
    first = begin(session)
    assert first.head_plan == HeadPlan(4) and first.draft_token_ids == ()
    ready = session.step(concluded(first, 9, nodes=chain(11, 12, 13, 14)))
    second = ready.to_target[-1]
    assert second.draft_token_ids == (11, 12) and session.offer.proposers == (Proposer.HEADS,) * 2
    assert session.offer.names == ((-1, 1), (-1, 2)) and ready.record.tree.in_hand_count == 4
    ready = session.step(concluded(second, 11, 12, 13, nodes=chain(21, 22)))
    assert ready.record.tokens.accepted_proposers == (Proposer.HEADS,) * 2
    assert ready.record.tokens.model_accepted_count == ready.record.tokens.model_tested_count == 2
    assert ready.record.tokens.local_accepted_count == 0 and ready.record.tree.discarded_count == 0
    assert ready.to_target[-1].draft_token_ids == (21, 22), "14 was drafted before, and is gone"
    assert session.committed == [*PROMPT, 9, 11, 12, 13]


@pytest.mark.parametrize("left, window", [(40, 5), (6, 4), (4, 2), (3, 1), (2, 0), (1, 0)])
def test_a_head_drafts_no_further_than_the_text_may_go(left: int, window: int) -> None:
    """Claim: the round after this one has one position less at least, of which one is its own token's; where none is
    left for draft tokens the head is not asked, nor for a plan without a draft, nor beyond HEAD_PASSES_MAX."""
    session = head_session(5, length_max=len(PROMPT) + left)
    session.policy = FixedPolicy(5, window=5, wait_s=0.0)
    session._fix_plan()
    assert begin(session).head_plan == (HeadPlan(window) if window else NO_HEAD_PLAN)
    plans = FixedPolicy(0).plan(40), FixedPolicy(64, wait_s=0.0, siblings=2).plan(400)
    assert [own.of_head(400) for own in plans] == [NO_HEAD_PLAN, HeadPlan(HEAD_PASSES_MAX, 1, 2)]


PROBS = DraftProbs((11, 12), (1, 3))
MALFORMED = {
    "a token beyond the vocabulary": (Rule.GREEDY, DraftNode(2, 1, VOCABULARY_SIZE, True)),
    "a distribution under GREEDY": (Rule.GREEDY, DraftNode(2, 1, 11, True, PROBS)),
    "none under REJECTION": (Rule.REJECTION, DraftNode(2, 1, 11, True)),
    "one without the token": (Rule.REJECTION, DraftNode(2, 1, 13, True, PROBS)),
    "one beyond the vocabulary": (Rule.REJECTION, DraftNode(2, 1, 11, True, DraftProbs((11, VOCABULARY_SIZE), (1, 1)))),
}


@pytest.mark.parametrize("rule, bad", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_head_with_malformed_nodes_is_asked_no_more(rule: Rule, bad: DraftNode) -> None:
    """Claim: nodes from the first malformed one on are dropped and counted, those before it are offered, and this
    target's head is asked no more; the policy is told. So it is where the reader of the message found them."""
    good = DraftNode(1, 0, 11, True, PROBS if rule is Rule.REJECTION else None)
    for nodes, malformed in (((good, bad, good._replace(node_id=3)), 0), ((good,), 2)):
        session = head_session(rule=rule)
        ready = session.step(concluded(begin(session), 9, nodes=nodes, malformed=malformed))
        asked = ready.to_target[-1]
        assert asked.draft_token_ids == (11,) and asked.head_plan == NO_HEAD_PLAN
        assert session.malformed_node_count == 2 and ready.record.is_refused and session.is_head_refused


def test_nodes_that_were_not_asked_for_change_nothing() -> None:
    """Claim: a target that sends nodes where none were asked for changes neither offer nor counts."""
    session = make_session()
    ready = session.step(concluded(begin(session), 9, nodes=(DraftNode(1, 0, 999, True), *chain(11)), malformed=3))
    assert ready.to_target[-1].draft_token_ids == () and not session.malformed_node_count


def test_a_draft_takes_the_heads_place_and_their_names_never_meet() -> None:
    """Claim: while a draft is open the head is not asked; nodes of a head asked before stay apart from a draft's of the
    same numbers; when the draft is lost the head is asked again, and its nodes replace the draft's."""
    session = head_session()
    session.policy = FixedPolicy(3, wait_s=0.0)
    session._fix_plan()
    first = begin(session)
    session.step(DraftFound())
    session.step(FromDraft(nodes_of(session, 9, 31)))
    second = session.step(concluded(first, 9, nodes=chain(11, 12))).to_target[-1]
    names = {name: node.token_id for name, node in session.tree.named.items()}
    assert names == {(1, 1): 9, (1, 2): 31, (-1, 1): 11, (-1, 2): 12}
    assert second.draft_token_ids == (31,) and second.head_plan == NO_HEAD_PLAN
    session.step(DraftLost())
    third = session.step(concluded(second, 31, 8)).to_target[-1]
    assert third.draft_token_ids == () and third.head_plan.window
    fourth = session.step(concluded(third, 7, nodes=chain(21))).to_target[-1]
    assert fourth.draft_token_ids == (21,) and set(session.tree.named) == {(-1 - third.round_index, 1)}


def test_a_round_sent_again_asks_the_same() -> None:
    """Claim: a target that is lost, and another that lacks tokens, are asked the same round with the same tree, so one
    that answered it already answers from memory; what determines an answer includes that tree."""
    session = head_session()
    first = begin(session)
    session.step(TargetLost("gone"))
    again = session.step(TargetFound()).to_target[-1]
    assert again.content == first.content and again.incarnation == first.incarnation + 1
    assert again._replace(head_plan=HeadPlan(1)).content != again.content


def test_messages_carry_the_tree_and_its_limits() -> None:
    """Claim: a verification and its result keep what they ask and bring, a verification without a head's tree has no
    byte of it, and windows, nodes per step and siblings beyond their limits are refused by
    field."""

    def read(message: type, item):
        return item_from_message(message.FromString(item_to_bytes(message, item)).items[0])

    asked = Verification(1, 1, 2, 5, (4,), head_plan=HeadPlan(5, 4, 2))
    assert read(target_pb.VerifyRequest, asked) == asked
    plain = Verification(1, 1, 2, 5, (4,))
    assert len(item_to_bytes(target_pb.VerifyRequest, plain)) + 6 == len(item_to_bytes(target_pb.VerifyRequest, asked))
    nodes = chain(11, 12)
    answer = VerificationResult(1, 1, 2, SamplerOutput((7,), head_nodes=nodes), head_us=90)
    assert read(target_pb.VerifyResponse, answer) == answer
    for plan, field in (((17, 1, 0), "window"), ((1, 65, 0), "nodes_per_step"), ((1, 1, 4), "siblings")):
        with pytest.raises(InvalidRequest, match=f"head_{field} is"):
            read(target_pb.VerifyRequest, plain._replace(head_plan=HeadPlan(*plan)))
