"""One generation as a state machine: events in, actions out; no clock, no I/O, no torch.

It owns the committed tokens, the draft tree received so far, the plan in force and what is in flight, and fences
everything that is late, doubled or meant for an earlier incarnation. Its owner sends what it is told to send, applies
the verification rule to the evidence the session lets through, and says when a wait is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.policy.policy import Plan, Policy
from specdec.protocol.items import (
    Close,
    Commit,
    DraftAsk,
    DraftNode,
    EvidenceAnswer,
    Failure,
    Nodes,
    Open,
    Short,
    TargetAsk,
    Verification,
    catch_up,
)
from specdec.protocol.report import RoundRecord
from specdec.protocol.states import DRAFT_MOVES, PHASE_MOVES, DraftEvent, DraftState, Phase, PhaseEvent
from specdec.protocol.tree import DraftTree
from specdec.protocol.types import DRAFT_LENGTH_LIMIT, Law, Row, Rule, Verdict

NODE_COUNT_MAX = 4096  # names of nodes held at once: many times what the largest window grows between two commits


class ToTarget(NamedTuple):
    """Send this item to the target."""

    item: TargetAsk


class ToDraft(NamedTuple):
    """Send this item to the draft."""

    item: DraftAsk


class AwaitDraft(NamedTuple):
    """Start a timer; after `wait_s` seconds, call `on_wait_expired(wait_index)`. It need not be cancelled."""

    wait_index: int
    wait_s: float


Action = ToTarget | ToDraft | AwaitDraft


@dataclass(slots=True)
class Session:
    """One generation. Every method returns the actions to carry out, in order; none of them fails.

    `plan` is asked of the policy once a round, when the round before it is committed, and kept until the next commit.
    """

    number: int
    law: Law
    length_max: int
    vocabulary_size: int
    policy: Policy
    committed: list[int]
    cache_salt: str = ""
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
    _draft_known_length: int = 0
    _draft_window: int = 0
    _target_known_length: int = 0

    def __post_init__(self) -> None:
        self.tree = DraftTree(self.committed)
        self.plan = self.policy.plan(self.room)

    @property
    def waiting(self) -> bool:
        """Whether a verification is held back for draft tokens."""
        return self.phase is Phase.WAITING

    @property
    def finished(self) -> bool:
        """Whether the text has ended, or the generation was given up."""
        return self.phase is Phase.FINISHED

    @property
    def has_draft(self) -> bool:
        """Whether the session is open on a draft."""
        return self.draft_state not in (DraftState.ABSENT, DraftState.PAUSED)

    @property
    def room(self) -> int:
        """Tokens the session can still hold."""
        return self.length_max - len(self.committed)

    def begin(self) -> list[Action]:
        """Opens the session on the target and asks for the first token; no draft is waited for."""
        self.target_incarnation += 1
        actions: list[Action] = [ToTarget(self._open(self.target_incarnation, self.cache_salt))]
        return actions + self._verify_now()

    def on_nodes(self, nodes: Nodes) -> list[Action]:
        """Draft tokens came. Malformed ones are dropped from the first on and counted; drafting pauses for good."""
        if not self._hears_draft(nodes.incarnation):
            return []
        sound_count = next((i for i, node in enumerate(nodes.nodes) if not self._is_sound(node)), len(nodes.nodes))
        for node in nodes.nodes[:sound_count]:
            self.tree.add(nodes.epoch, nodes.root_length, node)
        malformed_count = nodes.malformed_count + len(nodes.nodes) - sound_count
        self.malformed_node_count += malformed_count
        if malformed_count or len(self.tree.named) > NODE_COUNT_MAX:
            return self._pause_draft()
        self._draft(DraftEvent.NODES)
        return self._verify_when_ready() if self.waiting else []

    def _draft(self, event: DraftEvent) -> None:
        self.draft_state = DRAFT_MOVES[self.draft_state, event]

    def _move(self, event: PhaseEvent) -> None:
        self.phase = PHASE_MOVES[self.phase, event]

    def _hears_draft(self, incarnation: int) -> bool:
        """The fence of the draft's answers."""
        return self.has_draft and not self.finished and incarnation == self.draft_incarnation

    def _pause_draft(self) -> list[Action]:
        """No more drafting for this session by this draft; what it holds for the session is released."""
        self._draft(DraftEvent.REFUSED)
        close: list[Action] = [ToDraft(Close(self.number, self.draft_incarnation))]
        return close + (self._verify_when_ready() if self.waiting else [])

    def _is_sound(self, node: DraftNode) -> bool:
        if not 0 <= node.token_id < self.vocabulary_size:
            return False
        if self.law.rule is not Rule.REJECTION or not node.proposal:
            return node.row is None
        row = node.row
        return row is not None and row.token_ids[-1] < self.vocabulary_size and node.token_id in row.token_ids

    def expects(self, answer: EvidenceAnswer) -> bool:
        """The fence: whether this evidence is for the verification in flight. Its shape is the rule's to check."""
        flying = self.in_flight
        if flying is None:
            return False
        return answer.incarnation == flying.incarnation and answer.round_index == flying.round_index

    def on_verdict(
        self,
        verdict: Verdict,
        answer: EvidenceAnswer,
        kept_count: int,
        ends: bool,
        times: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    ) -> tuple[RoundRecord, list[Action]]:
        """Commits the first `kept_count` tokens of the round (all of them unless the text `ends`) and goes on.

        `times`: what the session cannot know, start_s, end_s, wait_s and round_trip_s of the record. The next round's
        plan is fixed here, by a policy that was told of the rounds before this one: its owner tells it of this one once
        the actions are carried out.
        """
        flying, plan, is_speculating = self.in_flight, self.plan, self.policy.is_speculating
        assert flying is not None, "a verdict needs a verification in flight"
        tokens = [*flying.draft_token_ids[: verdict.accepted_count], verdict.next_token_id]
        assert 1 <= kept_count <= len(tokens) and (ends or kept_count == len(tokens))
        del tokens[kept_count:]
        last, path = self.tree.place(tokens[:-1]), self.tree.proposal_path(NODE_COUNT_MAX)
        was_looked_up = last is not None and bool(last.children)
        was_found = self._commit(tokens, flying)
        in_hand_count = len(self.tree.proposal_path(DRAFT_LENGTH_LIMIT))
        counts = (len(flying.draft_token_ids), verdict.accepted_count, kept_count, verdict.next_kind)
        found = (was_looked_up, was_found, in_hand_count, sum(not place.alive for place in path))
        step = (answer.queue_us / 1e6, answer.forward_us / 1e6, answer.evidence_us / 1e6, answer.step_rows)
        sessions = (answer.step_sessions, answer.active_sessions, answer.step_count)
        cache = (answer.cached_prompt_tokens, answer.evictions, answer.server_us / 1e6)
        told = (*counts, *found, *times, *step, *sessions, *cache)
        record = RoundRecord(flying.round_index, plan, *told, is_speculating)
        return record, self.end() if ends else self._commit_to_draft() + self._verify_when_ready()

    def _commit(self, tokens: list[int], flying: Verification) -> bool:
        """The round in flight is over; whether its last token was in the tree."""
        self._target_known_length = flying.base_position
        self.in_flight = None
        self.round_index += 1
        self.committed += tokens
        was_found = self.tree.commit(tokens)
        self.plan = self.policy.plan(self.room)
        return was_found

    def on_target_short(self, short: Short) -> list[Action]:
        """The target holds less than assumed: send it the rest, and the same round again."""
        flying = self.in_flight
        if flying is None or short.incarnation != flying.incarnation:
            return []
        actions: list[Action] = []
        if short.unknown:
            self.target_incarnation += 1
            actions.append(ToTarget(self._open(self.target_incarnation, self.cache_salt)))
        self._target_known_length = 0 if short.unknown else min(short.known_length, len(self.committed) - 1)
        return actions + self._send_verification(flying.draft_token_ids, flying.rows)

    def on_draft_up(self) -> list[Action]:
        """A draft is connected: open the session there and let it draft from here on."""
        if self.finished or self.policy.draft_length_cap == 0:
            return []
        self.draft_incarnation += 1
        self._draft(DraftEvent.UP)
        self._draft_known_length = self._draft_window = 0
        self.tree.clear()
        actions = [ToDraft(self._open(self.draft_incarnation)), *self._commit_to_draft()]
        return actions + (self._verify_now() if self.waiting else [])

    def on_draft_down(self) -> list[Action]:
        """The draft is gone: what it sent stays usable, nothing more is waited for."""
        self._draft(DraftEvent.DOWN)
        return self._verify_when_ready() if self.waiting else []

    def on_draft_short(self, short: Short) -> list[Action]:
        """The draft holds less than assumed: send it the rest, or open the session there again."""
        if not self._hears_draft(short.incarnation):
            return []
        if short.unknown:
            return self.on_draft_up()
        self._draft_known_length = min(short.known_length, len(self.committed) - 1)
        return self._commit_to_draft()

    def on_draft_failure(self, failure: Failure) -> list[Action]:
        """The draft cannot draft for this session (its context, vocabulary or cache): go on without."""
        return self._pause_draft() if self._hears_draft(failure.incarnation) else []

    def on_wait_expired(self, wait_index: int) -> list[Action]:
        """The wait for draft tokens is over: verify what is in hand, and wait no more until nodes come again."""
        if not self.waiting or wait_index != self.wait_index:
            return []
        self._draft(DraftEvent.WAIT_EXPIRED)
        return self._verify_now()

    def end(self) -> list[Action]:
        """Ends the session, wherever it stands; idempotent."""
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
        return Open(self.number, incarnation, self.law, self.length_max, size, cache_salt=cache_salt)

    def _verify_when_ready(self) -> list[Action]:
        """Verifies at once, or waits when the plan says so and a READY draft still owes tokens."""
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
        path = self.tree.proposal_path(self.plan.draft_length_max)
        rows = self.tree.proposal_rows(len(path)) if self.law.rule is Rule.REJECTION else ()
        return self._send_verification(tuple(place.token_id for place in path), rows)

    def _send_verification(self, draft_token_ids: tuple[int, ...], rows: tuple[Row, ...]) -> list[Action]:
        base_position = len(self.committed)
        extends, suffix = catch_up(self.number, self.target_incarnation, self.committed, self._target_known_length)
        self._move(PhaseEvent.SENT)
        name = (self.number, self.target_incarnation, self.round_index)
        self.in_flight = Verification(*name, base_position, suffix, draft_token_ids, rows)
        return [*map(ToTarget, extends), ToTarget(self.in_flight)]

    def _commit_to_draft(self) -> list[Action]:
        plan = self.plan
        if not self.has_draft or plan.window == self._draft_window == 0:
            return []
        extends, suffix = catch_up(self.number, self.draft_incarnation, self.committed, self._draft_known_length)
        name = (self.number, self.draft_incarnation)
        commit = Commit(*name, len(self.committed), suffix, plan.window, max(1, plan.leaves))
        self._draft_known_length, self._draft_window = len(self.committed), plan.window
        return [*map(ToDraft, extends), ToDraft(commit)]

    def check(self) -> None:
        """Raises AssertionError naming the broken invariant."""
        flying = self.in_flight
        assert len(self.committed) <= self.length_max, "committed tokens fit"
        assert self.tree.committed == self.committed, "the tree agrees with the committed tokens"
        self.tree.check()
        if flying is not None:
            assert flying.base_position == len(self.committed), "the base position is the committed length"
            most = max(0, min(self.policy.draft_length_cap, self.room - 1))
            assert len(flying.draft_token_ids) <= most, "a round offers what was planned and fits the room left"
            if self.law.rule is Rule.REJECTION:
                assert len(flying.rows) == len(flying.draft_token_ids), "there is one row per draft token"
        assert not (self.waiting and flying), "a waiting session has nothing in flight"
        assert not self.waiting or self.draft_state is DraftState.READY, "only a READY draft is waited for"
        assert not (self.finished and (self.waiting or flying)), "nothing goes on after the end"
