"""One generation as a state machine: events in, actions out; no clock, no I/O, no torch.

It owns the committed tokens, the draft tree received so far, the plan in force and the verification in flight, and
rejects late, duplicate and stale items. Its owner carries out the returned actions, applies the verification rule to
the verification results that the session expects, and reports the end of a wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.protocol.calibration import Calibration
from specdec.protocol.items import (
    NO_TRACE,
    Close,
    Commit,
    DraftItem,
    DraftNode,
    Failure,
    MissingTokens,
    Nodes,
    Open,
    TargetItem,
    Verification,
    VerificationResult,
    catch_up,
)
from specdec.protocol.offer import NOTHING, Limits, Offer, make_offer
from specdec.protocol.plan import Plan
from specdec.protocol.policy import Policy
from specdec.protocol.proposers import LocalProposer, Run, head_runs
from specdec.protocol.records import NO_TIMES, RoundRecord, RoundTimes, RoundTokens, TargetStep, TreeUse
from specdec.protocol.shape import check_shape, children
from specdec.protocol.states import DRAFT_MOVES, PHASE_MOVES, DraftEvent, DraftState, Phase, PhaseEvent
from specdec.protocol.tree import DraftTree
from specdec.protocol.types import DRAFT_LENGTH_LIMIT, ResolvedSamplingParams, Rule, Verdict

ANSWERS_PER_COMMIT_MAX = 1024  # items of a draft between two commits: many times the steps that a window needs
RESEND_COUNT_MAX = 64  # times without nodes that a draft lacks tokens: commits that may be on the way to it
NODE_COUNT_MAX = 4096  # names of nodes held at once: many times what the largest window grows between two commits


class ToTarget(NamedTuple):
    """Send this item to the target."""

    item: TargetItem


class ToDraft(NamedTuple):
    """Send this item to the draft."""

    item: DraftItem


class AwaitDraft(NamedTuple):
    """Start a timer; after `wait_s` seconds, call `on_wait_expired(wait_index)`. It need not be cancelled."""

    wait_index: int
    wait_s: float


Action = ToTarget | ToDraft | AwaitDraft


@dataclass(slots=True)
class Session:
    """One generation. Every method returns the actions to carry out, in order; none fails.

    `plan`, with its limits, comes from the policy once a round, at the commit of the round before, until the next.
    `proposers` are those of the coordinator; `path_max`: most paths of a verification, 1 without trees. `calibration`
    learns the worth of guesses. `offer`: the draft tokens of the verification in flight, or of the last one.
    `asks_heads`: verifications ask for the proposals of the target's heads, until it shows that it has none.
    """

    number: int
    params: ResolvedSamplingParams
    length_max: int
    vocabulary_size: int
    policy: Policy
    committed: list[int]
    cache_salt: str = ""
    proposers: Sequence[LocalProposer] = ()
    path_max: int = 1
    calibration: Calibration = field(default_factory=Calibration)
    offer: Offer = NOTHING
    asks_heads: bool = False
    round_index: int = 0
    in_flight: Verification | None = None
    wait_index: int = 0
    phase: Phase = Phase.NEW
    draft_state: DraftState = DraftState.ABSENT
    draft_incarnation: int = 0
    target_incarnation: int = 0
    malformed_node_count: int = 0
    tree: DraftTree = field(init=False)
    plan: Plan = field(init=False)
    is_speculating: bool = field(init=False)
    _reach: tuple[float, float] = field(init=False)
    _wants_heads: bool = field(init=False)
    _draft_known_length: int = 0
    _draft_resent_length: int = 0  # of the commit at which tokens that the draft lacked were last sent again
    _draft_window: int = 0
    _draft_answer_count: int = 0  # since the last commit
    _draft_resend_count: int = 0  # since the last nodes
    _target_known_length: int = 0
    _head_runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = DraftTree(self.committed)
        self._fix_plan()

    @property
    def waiting(self) -> bool:
        """Whether a verification is held back for draft tokens."""
        return self.phase is Phase.WAITING

    @property
    def finished(self) -> bool:
        """Whether the text has ended, or the generation was cancelled or failed."""
        return self.phase is Phase.FINISHED

    @property
    def has_draft(self) -> bool:
        """Whether the session is open on a draft."""
        return self.draft_state not in (DraftState.ABSENT, DraftState.PAUSED)

    @property
    def positions_left(self) -> int:
        """Tokens the session can still hold."""
        return self.length_max - len(self.committed)

    def begin(self) -> list[Action]:
        """Opens the session on the target and requests the first token, without waiting for the draft."""
        self.target_incarnation += 1
        actions: list[Action] = [ToTarget(self._open(self.target_incarnation, self.cache_salt))]
        return actions + self._verify_now()

    def on_nodes(self, nodes: Nodes) -> list[Action]:
        """Adds draft tokens to the tree. Drops and counts them from the first malformed one on, or from the one that
        NODE_COUNT_MAX does not admit, and ends drafting; so does a flood of items."""
        if not self._is_current_draft(nodes.incarnation):
            return []
        self._draft_answer_count += 1
        if self._draft_answer_count > ANSWERS_PER_COMMIT_MAX:
            return self._pause_draft()
        malformed_count = nodes.malformed_count
        free_count = NODE_COUNT_MAX - len(self.tree.named)
        for index, node in enumerate(nodes.nodes):
            if index == free_count or not self._is_sound(node):
                malformed_count += len(nodes.nodes) - index
                break
            self.tree.add(nodes.epoch, nodes.root_length, node)
        if malformed_count:
            self.malformed_node_count += malformed_count
            return self._pause_draft()
        self._draft_resend_count = 0
        self._draft(DraftEvent.NODES)
        return self._verify_when_ready() if self.waiting else []

    def _draft(self, event: DraftEvent) -> None:
        self.draft_state = DRAFT_MOVES[self.draft_state, event]

    def _move(self, event: PhaseEvent) -> None:
        self.phase = PHASE_MOVES[self.phase, event]

    def _is_current_draft(self, incarnation: int) -> bool:
        """The fence: whether an answer of the draft is of the current incarnation."""
        return self.has_draft and not self.finished and incarnation == self.draft_incarnation

    def _pause_draft(self) -> list[Action]:
        """Ends drafting for this session by this draft, and closes the session there."""
        self._draft(DraftEvent.REFUSED)
        close: list[Action] = [ToDraft(Close(self.number, self.draft_incarnation))]
        return close + (self._verify_when_ready() if self.waiting else [])

    def _is_sound(self, node: DraftNode) -> bool:
        if not 0 <= node.token_id < self.vocabulary_size:
            return False
        if self.params.rule is not Rule.REJECTION or not node.proposal:
            return node.draft_probs is None
        probs = node.draft_probs
        return probs is not None and probs.token_ids[-1] < self.vocabulary_size and node.token_id in probs.token_ids

    def expects(self, answer: VerificationResult) -> bool:
        """The fence: whether a result is for the verification in flight. The rule checks its shape."""
        flying = self.in_flight
        if flying is None:
            return False
        return answer.incarnation == flying.incarnation and answer.round_index == flying.round_index

    def on_verdict(
        self,
        verdict: Verdict,
        answer: VerificationResult,
        kept_count: int,
        ends: bool,
        times: RoundTimes = NO_TIMES,
    ) -> tuple[RoundRecord, list[Action]]:
        """Commits the first `kept_count` tokens of the round (all unless the text `ends`) and begins the next one.

        `times`: of the record, from the owner's clock. The next round's plan is
        fixed here, by a policy that knows the rounds before this one: the owner gives it this record once the actions
        are carried out.
        """
        flying, plan, is_speculating = self.in_flight, self.plan, self.is_speculating
        assert flying is not None, "a verdict needs a verification in flight"
        tokens = [*(flying.draft_token_ids[index] for index in verdict.accepted), verdict.next_token_id]
        assert 1 <= kept_count <= len(tokens) and (ends or kept_count == len(tokens))
        del tokens[kept_count:]
        last, path = self.tree.node(tokens[:-1]), self.tree.proposal_path(NODE_COUNT_MAX)
        was_looked_up = last is not None and bool(last.children)
        was_found = self._commit(tokens, flying)
        in_hand_count = len(self.tree.proposal_path(DRAFT_LENGTH_LIMIT))
        offer, accepted, had_heads = self.offer, verdict.accepted, bool(self._head_runs)
        self._learn(offer, accepted)
        heads = answer.output.head_proposals
        self._head_runs = head_runs(heads, self.vocabulary_size)
        self.asks_heads = self.asks_heads and not (flying.wants_heads and heads is None)
        record = RoundRecord(
            flying.round_index,
            plan,
            RoundTokens(
                len(flying.draft_token_ids),
                verdict.accepted_count,
                kept_count,
                verdict.next_kind,
                offer.proposers,
                tuple(map(offer.proposers.__getitem__, accepted)),
                offer.local_count(accepted),
                offer.path_count,
                had_heads,
            ),
            TreeUse(was_looked_up, was_found, in_hand_count, sum(not node.alive for node in path)),
            times,
            TargetStep.of(answer),
            is_speculating,
            self.draft_state is DraftState.PAUSED,
        )
        return record, self.end() if ends else self._commit_to_draft() + self._verify_when_ready()

    def _learn(self, offer: Offer, accepted: tuple[int, ...]) -> None:
        """Counts the guesses whose parent's path was accepted. What lies below a rejection enters no estimate."""
        if not offer.token_ids:
            return
        following = children(offer.parents, len(offer.token_ids))
        for row in (0, *(index + 1 for index in accepted)):
            for index in following[row]:
                for _, features in offer.guesses[index]:
                    self.calibration.record(features, index in accepted)

    def _commit(self, tokens: list[int], flying: Verification) -> bool:
        """Commits the tokens of the round in flight; returns whether the last was in the tree."""
        self._target_known_length = flying.base_position
        self.in_flight = None
        self._draft_answer_count = 0
        self.round_index += 1
        self.committed += tokens
        was_found = self.tree.commit(tokens)
        self._fix_plan()
        return was_found

    def _fix_plan(self) -> None:
        """Takes the policy's decisions for the next round, all at once: a wait must not change them."""
        policy = self.policy
        self.plan, self.is_speculating = policy.plan(self.positions_left), policy.is_speculating
        self._reach, self._wants_heads = (policy.reach_min, policy.path_reach_min), policy.wants_heads

    def on_target_missing(self, missing: MissingTokens) -> list[Action]:
        """The target holds fewer tokens than assumed: sends the rest, and the same round again."""
        flying = self.in_flight
        if flying is None or missing.incarnation != flying.incarnation:
            return []
        actions: list[Action] = []
        if missing.unknown:
            self.target_incarnation += 1
            actions.append(ToTarget(self._open(self.target_incarnation, self.cache_salt)))
        self._target_known_length = 0 if missing.unknown else min(missing.known_length, len(self.committed) - 1)
        return actions + self._send_verification(self.offer)

    def on_draft_up(self) -> list[Action]:
        """A draft is connected: opens the session there and lets it draft from the current commit on."""
        if self.finished or self.policy.draft_length_cap == 0:
            return []
        self.draft_incarnation += 1
        self._draft(DraftEvent.UP)
        self._draft_known_length = self._draft_resent_length = self._draft_window = 0
        self.tree.clear()
        actions = [ToDraft(self._open(self.draft_incarnation)), *self._commit_to_draft()]
        return actions + (self._verify_now() if self.waiting else [])

    def on_draft_down(self) -> list[Action]:
        """The draft is lost: its nodes stay usable, and the session waits for no more."""
        self._draft(DraftEvent.DOWN)
        return self._verify_when_ready() if self.waiting else []

    def on_draft_missing(self, missing: MissingTokens) -> list[Action]:
        """The draft holds fewer tokens than assumed: sends the rest, or opens the session there again; once a commit,
        so that a draft gets no more than it is sent anyway. What it lacks then, it says at the next commit. One that
        lacks tokens again and again and sends no nodes is paused."""
        length = len(self.committed)
        if not self._is_current_draft(missing.incarnation) or self._draft_resent_length == length:
            return []
        self._draft_resend_count += 1
        if self._draft_resend_count > RESEND_COUNT_MAX:
            return self._pause_draft()
        if missing.unknown:
            actions = self.on_draft_up()
        else:
            self._draft_known_length = min(missing.known_length, length - 1)
            actions = self._commit_to_draft()
        self._draft_resent_length = length
        return actions

    def on_draft_failure(self, failure: Failure) -> list[Action]:
        """The draft cannot draft for this session (its context, vocabulary or cache): continues without it."""
        return self._pause_draft() if self._is_current_draft(failure.incarnation) else []

    def on_wait_expired(self, wait_index: int) -> list[Action]:
        """The wait for draft tokens expired: verifies those in hand; the draft state is LATE."""
        if not self.waiting or wait_index != self.wait_index:
            return []
        self._draft(DraftEvent.WAIT_EXPIRED)
        return self._verify_now()

    def end(self) -> list[Action]:
        """Ends the session in any state; idempotent."""
        if self.finished:
            return []
        self._move(PhaseEvent.ENDED)
        self.in_flight = None
        actions: list[Action] = []
        if self.target_incarnation:
            actions.append(ToTarget(Close(self.number, self.target_incarnation)))
        if self.has_draft:
            actions.append(ToDraft(Close(self.number, self.draft_incarnation)))
        return actions

    def _open(self, incarnation: int, cache_salt: str = "") -> Open:
        size = self.vocabulary_size
        return Open(self.number, incarnation, self.params, self.length_max, size, cache_salt=cache_salt)

    def _verify_when_ready(self) -> list[Action]:
        """Verifies at once, or waits if the plan waits and a READY draft still owes tokens."""
        plan = self.plan
        if not plan.wait_length:
            return self._verify_now()
        in_hand = len(self.tree.proposal_path(plan.draft_length_max))
        if self.draft_state is DraftState.LATE and plan.wait_length <= in_hand:
            self._draft(DraftEvent.KEPT_UP)
        if self.draft_state is DraftState.READY and in_hand < plan.wait_length:
            if self.waiting:
                return []
            self._move(PhaseEvent.HELD)
            self.wait_index += 1
            return [AwaitDraft(self.wait_index, plan.wait_s)]
        return self._verify_now()

    def _verify_now(self) -> list[Action]:
        plan = self.plan
        self.offer = NOTHING
        if plan.draft_length_max:
            runs = [run for proposer in self.proposers for run in proposer.propose(self.committed)] + self._head_runs
            most = plan.draft_length_max, self.positions_left - 1, self.path_max, plan.siblings
            limits = Limits(*most, *self._reach)
            self.offer = make_offer(self.tree.root, runs, self.params.rule, limits, self.calibration)
        return self._send_verification(self.offer)

    def _send_verification(self, offer: Offer) -> list[Action]:
        base_position = len(self.committed)
        extends, suffix = catch_up(self.number, self.target_incarnation, self.committed, self._target_known_length)
        self._move(PhaseEvent.SENT)
        name = (self.number, self.target_incarnation, self.round_index)
        tree = offer.token_ids, offer.draft_probs
        wants_heads = self.asks_heads and self._wants_heads
        self.in_flight = Verification(
            *name, base_position, suffix, *tree, parents=offer.parents, wants_heads=wants_heads
        )
        return [*map(ToTarget, extends), ToTarget(self.in_flight)]

    def _commit_to_draft(self) -> list[Action]:
        plan = self.plan
        if not self.has_draft or plan.window == self._draft_window == 0:
            return []
        extends, suffix = catch_up(self.number, self.draft_incarnation, self.committed, self._draft_known_length)
        name = (self.number, self.draft_incarnation)
        length, count = len(self.committed), max(1, plan.nodes_per_step)
        commit = Commit(*name, length, suffix, plan.window, count, NO_TRACE, plan.siblings, plan.wait_length)
        self._draft_known_length, self._draft_window = len(self.committed), plan.window
        return [*map(ToDraft, extends), ToDraft(commit)]

    def check(self) -> None:
        """Raises AssertionError naming the broken invariant."""
        flying = self.in_flight
        assert len(self.committed) <= self.length_max, "committed tokens fit"
        assert self.tree.committed is self.committed, "the tree reads the session's committed tokens"
        self.tree.check()
        if flying is not None:
            assert flying.base_position == len(self.committed), "the base position is the committed length"
            most = max(0, min(self.policy.draft_length_cap, self.positions_left - 1))
            assert len(flying.draft_token_ids) <= most, "a round offers what was planned and fits the positions left"
            check_shape(flying.parents, flying.draft_token_ids)
            assert self.path_max > 1 or not flying.parents, "trees are offered where they are allowed"
            if self.params.rule is Rule.REJECTION:
                assert len(flying.draft_probs) == len(flying.draft_token_ids), "one distribution per draft token"
        assert not (self.waiting and flying), "a waiting session has nothing in flight"
        assert not self.waiting or self.draft_state is DraftState.READY, "only a READY draft is waited for"
        assert not (self.finished and (self.waiting or flying)), "nothing goes on after the end"
