"""One generation as a state machine: an event in, one `Ready` out; no clock, no I/O, no torch.

It owns the committed tokens, the draft tree received so far, the plan in force and the verification in flight, and
rejects late, duplicate and stale items. Its owner does what `Ready` says, applies the verification rule to the results
that the session expects, and reports the end of a wait. A target may be lost and found: the round in flight stays as it
is, so another target, or the same one restarted, gives the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.protocol.calibration import Calibration
from specdec.protocol.events import (
    NOTHING_READY,
    Concluded,
    DraftFound,
    DraftLost,
    End,
    Event,
    FromDraft,
    FromTarget,
    Note,
    Ready,
    TargetFound,
    TargetLost,
    Wait,
    WaitExpired,
    noting_late,
)
from specdec.protocol.heads import NO_HEAD_PLAN
from specdec.protocol.items import (
    NO_TRACE,
    Close,
    Commit,
    DraftItem,
    MissingTokens,
    Nodes,
    Open,
    Verification,
    VerificationResult,
    catch_up,
)
from specdec.protocol.limits import DRAFT_LENGTH_LIMIT
from specdec.protocol.offer import NOTHING, Limits, Offer, make_offer
from specdec.protocol.plan import Plan
from specdec.protocol.policy import Policy
from specdec.protocol.proposers import LocalProposer, Run, head_runs
from specdec.protocol.records import RoundRecord, RoundTokens, TargetStep, TreeUse
from specdec.protocol.states import DRAFT_MOVES, PHASE_MOVES, DraftEvent, DraftState, Phase, PhaseEvent
from specdec.protocol.tree import NODE_COUNT_MAX, ReceivedTree, head_epoch
from specdec.protocol.types import Proposer, ResolvedSamplingParams

ANSWERS_PER_COMMIT_MAX = 1024  # items of a draft between two commits: many times the steps that a window needs
RESEND_COUNT_MAX = 64  # times without nodes that a draft lacks tokens: commits that may be on the way to it


@dataclass(slots=True)
class Session:
    """One generation. `step` takes every event at any time, and none fails.

    `plan`, with its limits, comes from the policy once a round, at the commit of the round before, until the next.
    `proposers` are those of the coordinator; `path_max`: most paths of a verification, 1 without trees. `calibration`
    learns the worth of guesses. `offer`: the draft tokens of the verification in flight, or of the last one.
    `asks_heads`: verifications ask for the proposals of the target's heads, until it shows that it has none.
    `head_drafts`: its feature head drafts the plan's trees, unless a draft does, or its nodes were malformed
    (`is_head_refused`).
    `scored_index`: of the prompt token whose log-probabilities come next, 0 for none: its owner counts them.
    `legal_runs`: cuts runs that may follow the committed tokens where the request's grammar makes a token illegal.
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
    asks_heads: bool = False
    legal_runs: Callable[[Sequence[int], Sequence[Run]], list[Run]] | None = None
    scored_index: int = 0
    head_drafts: bool = False
    is_head_refused: bool = False
    offer: Offer = NOTHING
    round_index: int = 0
    in_flight: Verification | None = None
    wait_index: int = 0
    phase: Phase = Phase.NEW
    draft_state: DraftState = DraftState.ABSENT
    draft_incarnation: int = 0
    target_incarnation: int = 0
    malformed_node_count: int = 0
    tree: ReceivedTree = field(init=False)
    plan: Plan = field(init=False)
    is_speculating: bool = field(init=False)
    _reach: tuple[float, float] = field(init=False)
    _wants_heads: bool = field(init=False)
    _wants_local: bool = field(init=False)
    _draft_known_length: int = 0
    _draft_resent_length: int = 0  # of the commit at which tokens that the draft lacked were last sent again
    _draft_window: int = 0
    _draft_answer_count: int = 0  # since the last commit
    _draft_resend_count: int = 0  # since the last nodes
    _target_known_length: int = 0
    _head_runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = ReceivedTree(self.committed)
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

    def expects(self, answer: VerificationResult) -> bool:
        """The fence: whether a result is for the verification in flight. The rule checks its shape."""
        flying = self.in_flight
        if flying is None or self.phase is not Phase.VERIFYING:
            return False
        return answer.incarnation == flying.incarnation and answer.round_index == flying.round_index

    def step(self, event: Event) -> Ready:
        """Takes one event; returns what is to be done now. After the end nothing is."""
        if self.phase is Phase.FINISHED:
            return NOTHING_READY
        ready: Ready = getattr(self, HANDLERS[type(event)])(event)
        return ready

    def _on_target_found(self, _event: TargetFound) -> Ready:
        """Opens the session on the target and sends the round in flight again; the first round, and one that was held
        back, begins now."""
        if self.phase not in (Phase.NEW, Phase.SEEKING):
            return NOTHING_READY
        opened = Ready(to_target=self._open_on_target())
        if self.in_flight is not None:
            return self._send_verification(opened)
        return self._verify_now(opened) if self.phase is Phase.NEW else self._verify_when_ready(opened)

    def _open_on_target(self) -> tuple[Open]:
        self.target_incarnation, self._target_known_length = self.target_incarnation + 1, 0
        return (self._open(self.target_incarnation, self.cache_salt),)

    def _on_target_lost(self, _event: TargetLost) -> Ready:
        if self.phase is not Phase.NEW:
            self._move(PhaseEvent.LOST)
        return NOTHING_READY

    def _on_target_item(self, event: FromTarget) -> Ready:
        """The target holds fewer tokens than assumed: sends the rest, and the same round again."""
        flying, missing = self.in_flight, event.item
        if not isinstance(missing, MissingTokens) or self.phase is Phase.SEEKING:
            return NOTHING_READY
        if flying is None or missing.incarnation != flying.incarnation:
            return NOTHING_READY
        opened: tuple[Open, ...] = self._open_on_target() if missing.unknown else ()
        if not missing.unknown:
            self._target_known_length = min(missing.known_length, len(self.committed) - 1)
        note = Note("target re-opened" if missing.unknown else "target behind", {"known_length": missing.known_length})
        return self._send_verification(Ready(to_target=opened, note=note))

    def _on_draft_item(self, event: FromDraft) -> Ready:
        """An answer of the draft; of another incarnation it changes nothing."""
        item = event.item
        if not self.has_draft or item.incarnation != self.draft_incarnation:
            return NOTHING_READY
        if isinstance(item, Nodes):
            return self._on_nodes(item)
        if isinstance(item, MissingTokens):
            return self._on_draft_missing(item)
        return self._pause_draft(Note("draft refused", {"reason": item.reason}))

    def _on_nodes(self, nodes: Nodes) -> Ready:
        """Adds draft tokens to the tree. Drops and counts them from the first malformed one on, or from the one that
        NODE_COUNT_MAX does not admit, and ends drafting; so does a flood of items."""
        self._draft_answer_count += 1
        if self._draft_answer_count > ANSWERS_PER_COMMIT_MAX:
            return self._pause_draft()
        taken = nodes.epoch, nodes.root_length, nodes.nodes, self.params.rule, self.vocabulary_size
        late_count, malformed_count = self.tree.take(*taken)
        if malformed_count := malformed_count + nodes.malformed_count:
            self.malformed_node_count += malformed_count
            return self._pause_draft()
        self._draft_resend_count = 0
        self._draft(DraftEvent.NODES)
        ready = noting_late(late_count)
        return self._verify_when_ready(ready) if self.waiting else ready

    def _draft(self, event: DraftEvent) -> None:
        self.draft_state = DRAFT_MOVES[self.draft_state, event]

    def _move(self, event: PhaseEvent) -> None:
        self.phase = PHASE_MOVES[self.phase, event]

    def _pause_draft(self, note: Note | None = None) -> Ready:
        """Ends drafting for this session by this draft, which cannot draft for it, and closes the session there."""
        self._draft(DraftEvent.REFUSED)
        ready = Ready((Close(self.number, self.draft_incarnation),), note=note)
        return self._verify_when_ready(ready) if self.waiting else ready

    def _on_concluded(self, event: Concluded) -> Ready:
        """Commits the tokens of the round and begins the next one. The next round's plan is fixed here, by a policy
        that knows the rounds before this one: the owner gives it this record once `Ready` is carried out."""
        flying, plan, is_speculating = self.in_flight, self.plan, self.is_speculating
        verdict, answer = event.verdict, event.answer
        assert flying is not None, "a verdict needs a verification in flight"
        tokens, kept_count, most = event.token_ids, len(event.token_ids), verdict.accepted_count + 1
        assert kept_count == most or event.ends and 1 <= kept_count < most, "only the end of a text drops tokens"
        last, path = self.tree.node(tokens[:-1]), self.tree.proposal_path(NODE_COUNT_MAX)
        was_looked_up, was_found = last is not None and bool(last.children), self._commit(tokens, flying)
        discarded_count = sum(not node.alive for node in path) if path else 0
        self._take_head_nodes(flying, answer)
        in_hand_count = len(self.tree.proposal_path(DRAFT_LENGTH_LIMIT))
        offer, accepted, had_heads = self.offer, verdict.accepted, bool(self._head_runs)
        offer.learn(self.calibration, accepted)
        heads = answer.output.head_proposals
        self._head_runs = head_runs(heads, self.vocabulary_size)
        self.asks_heads = self.asks_heads and not (flying.wants_heads and heads is None)
        counts = len(offer.token_ids), verdict.accepted_count, kept_count, verdict.next_kind
        drafter = Proposer.HEADS if self.head_drafts else Proposer.DRAFT
        tokens_of_round = RoundTokens(*counts, *offer.sources(accepted, drafter), had_heads, drafter)
        tree = TreeUse(was_looked_up, was_found, in_hand_count, discarded_count, offer.names, accepted[:kept_count])
        round_parts = flying.round_index, plan, tokens_of_round, tree, event.times, TargetStep.of(answer)
        is_refused = self.draft_state is DraftState.PAUSED or self.is_head_refused
        record = RoundRecord(*round_parts, is_speculating, is_refused)
        note = None
        if self.is_speculating != is_speculating:
            why, now = self.policy.prediction.reason, self.is_speculating
            note = Note("policy switched", {"speculating": now, "why": why, "round": self.round_index})
        if event.ends:
            return self._on_end()._replace(record=record, note=note)
        return self._verify_when_ready(Ready(self._commit_to_draft(), record=record, note=note))

    def _commit(self, tokens: tuple[int, ...], flying: Verification) -> bool:
        """Commits the tokens of the round in flight; returns whether the last was in the tree."""
        self._target_known_length = flying.base_position
        self.in_flight, self._draft_answer_count = None, 0
        self.round_index += 1
        self.committed += tokens
        was_found = self.tree.commit(tokens)
        self._fix_plan()
        return was_found

    def _take_head_nodes(self, flying: Verification, answer: VerificationResult) -> None:
        """Adds the nodes of the target's feature head below the tokens committed now; they replace those of the round
        before, but none of a draft. A head that sends malformed ones is asked no more."""
        if flying.head_plan.window:
            if not self.has_draft:
                self.tree.clear()
            taken = head_epoch(flying.round_index), len(self.committed), answer.output.head_nodes, self.params.rule
            malformed_count = self.tree.take(*taken, self.vocabulary_size)[1] + answer.malformed_count
            self.malformed_node_count += malformed_count
            self.is_head_refused = malformed_count > 0

    def _fix_plan(self) -> None:
        """Takes the policy's decisions for the next round, all at once: a wait must not change them."""
        policy = self.policy
        self.plan, self.is_speculating = policy.plan(self.positions_left), policy.is_speculating
        self._reach = policy.reach_min, policy.path_reach_min
        self._wants_heads, self._wants_local = policy.wants_heads, policy.wants_local

    def _on_draft_found(self, event: DraftFound) -> Ready:
        return self._open_on_draft(Note("draft connected") if event.is_late else None)

    def _open_on_draft(self, note: Note | None) -> Ready:
        """Opens the session on the draft and lets it draft from the current commit on."""
        if self.policy.draft_length_cap == 0:
            return Ready(note=note)
        self.draft_incarnation += 1
        self._draft(DraftEvent.UP)
        self._draft_known_length = self._draft_resent_length = self._draft_window = 0
        self.tree.clear()
        items = (self._open(self.draft_incarnation), *self._commit_to_draft())
        ready = Ready(items, note=note)
        return self._verify_now(ready) if self.waiting else ready

    def _on_draft_lost(self, _event: DraftLost) -> Ready:
        """The draft's nodes stay usable, and the session waits for no more."""
        self._draft(DraftEvent.DOWN)
        ready = Ready(note=Note("draft lost"))
        return self._verify_when_ready(ready) if self.waiting else ready

    def _on_draft_missing(self, missing: MissingTokens) -> Ready:
        """The draft holds fewer tokens than assumed: sends the rest, or opens the session there again; once a commit,
        so that a draft gets no more than it is sent anyway. What it lacks then, it says at the next commit. One that
        lacks tokens again and again and sends no nodes is paused."""
        length = len(self.committed)
        if self._draft_resent_length == length:
            return NOTHING_READY
        self._draft_resend_count += 1
        if self._draft_resend_count > RESEND_COUNT_MAX:
            return self._pause_draft()
        known: dict[str, str | int] = {"known_length": missing.known_length}
        if missing.unknown:
            ready = self._open_on_draft(Note("draft re-opened", known))
        else:
            self._draft_known_length = min(missing.known_length, length - 1)
            ready = Ready(self._commit_to_draft(), note=Note("draft behind", known))
        self._draft_resent_length = length
        return ready

    def _on_wait_expired(self, event: WaitExpired) -> Ready:
        """Verifies the draft tokens in hand; the draft state is LATE."""
        if not self.waiting or event.wait_index != self.wait_index:
            return NOTHING_READY
        self._draft(DraftEvent.WAIT_EXPIRED)
        return self._verify_now(Ready(note=Note("wait expired")))

    def _on_end(self, _event: End | None = None) -> Ready:
        self._move(PhaseEvent.ENDED)
        self.in_flight = None
        to_draft = (Close(self.number, self.draft_incarnation),) if self.has_draft else ()
        to_target = (Close(self.number, self.target_incarnation),) if self.target_incarnation else ()
        return Ready(to_draft, to_target)

    def _open(self, incarnation: int, cache_salt: str = "") -> Open:
        size = self.vocabulary_size
        return Open(self.number, incarnation, self.params, self.length_max, size, cache_salt=cache_salt)

    def _verify_when_ready(self, so_far: Ready = NOTHING_READY) -> Ready:
        """Verifies at once, or waits if the plan waits and a READY draft still owes tokens. `so_far`: what is to be
        done beside it."""
        plan = self.plan
        if plan.wait_length:
            in_hand = len(self.tree.proposal_path(plan.draft_length_max))
            if self.draft_state is DraftState.LATE and plan.wait_length <= in_hand:
                self._draft(DraftEvent.KEPT_UP)
            if self.draft_state is DraftState.READY and in_hand < plan.wait_length:
                if self.waiting:
                    return so_far
                self._move(PhaseEvent.HELD)
                self.wait_index += 1
                return so_far._replace(wait=Wait(self.wait_index, plan.wait_s))
        return self._verify_now(so_far)

    def _verify_now(self, so_far: Ready = NOTHING_READY) -> Ready:
        plan, self.offer = self.plan, NOTHING
        if plan.draft_length_max:
            proposers = self.proposers if self._wants_local else ()
            runs = [run for proposer in proposers for run in proposer.propose(self.committed)] + self._head_runs
            runs = self.legal_runs(self.committed, runs) if self.legal_runs is not None else runs
            limits = Limits(plan.draft_length_max, self.positions_left - 1, self.path_max, plan.siblings, *self._reach)
            self.offer = make_offer(self.tree.root, runs, self.params.rule, limits, self.calibration)
        return self._send_verification(so_far)

    def _send_verification(self, so_far: Ready) -> Ready:
        """Sends the round, again if it is in flight: with the same draft tokens."""
        number, incarnation, offer = self.number, self.target_incarnation, self.offer
        extends, suffix = catch_up(number, incarnation, self.committed, self._target_known_length)
        self._move(PhaseEvent.SENT)
        name = (number, incarnation, self.round_index, len(self.committed))
        is_head_asked = self.head_drafts and not (self.has_draft or self.is_head_refused)
        head_plan = self.plan.of_head(self.positions_left) if is_head_asked else NO_HEAD_PLAN
        asked = self.asks_heads and self._wants_heads, self.scored_index, head_plan
        draft = offer.token_ids, offer.draft_probs, NO_TRACE, offer.parents
        self.in_flight = Verification(*name, suffix, *draft, *asked)
        return so_far._replace(to_target=(*so_far.to_target, *extends, self.in_flight), wait=None)

    def _commit_to_draft(self) -> tuple[DraftItem, ...]:
        plan = self.plan
        if not self.has_draft or plan.window == self._draft_window == 0:
            return ()
        extends, suffix = catch_up(self.number, self.draft_incarnation, self.committed, self._draft_known_length)
        name, length, count = (self.number, self.draft_incarnation), len(self.committed), max(1, plan.nodes_per_step)
        commit = Commit(*name, length, suffix, plan.window, count, NO_TRACE, plan.siblings, plan.wait_length)
        self._draft_known_length, self._draft_window = len(self.committed), plan.window
        return (*extends, commit)


HANDLERS = {
    TargetFound: "_on_target_found",
    TargetLost: "_on_target_lost",
    FromTarget: "_on_target_item",
    Concluded: "_on_concluded",
    DraftFound: "_on_draft_found",
    DraftLost: "_on_draft_lost",
    FromDraft: "_on_draft_item",
    WaitExpired: "_on_wait_expired",
    End: "_on_end",
}
