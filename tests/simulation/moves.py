"""Where one text is: the replicas that it was opened and closed on, what it lost, and what follows for it.

A restatement from items and events alone of what `Generation`, `Fleet` and `Pool` do when replicas come and go. A
property that does not hold raises Violation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specdec.coordinator.placement import ALIVE_AFTER_S, ASK_AGAIN_S, LOSS_COUNT_MAX
from specdec.errors import CacheExhausted, ReplicaUnavailable, SpecdecError
from specdec.protocol.events import Event, FromDraft, FromTarget, TargetLost
from specdec.protocol.items import Failure, PromptPart, VerificationResult
from specdec.protocol.report import Statistics
from specdec.protocol.session import Session
from specdec.protocol.states import DraftState, Phase
from tests.simulation.clock import Violation
from tests.simulation.network import SimulatedLink, Stream
from tests.simulation.wandering import WanderingPolicy

NOTICED_S = 0.3  # after a target is free, a text that seeks one is there
REFUSALS = (CacheExhausted.reason, ReplicaUnavailable.reason)


def is_sound(answer: VerificationResult, draft_count: int) -> bool:
    """Whether a result has a row for each draft token and one more."""
    return len(answer.output.recovered_token_ids) == draft_count + 1


@dataclass(slots=True, eq=False)
class Moves:
    """The replicas of one text. `others`: those of all texts that run. `losses`: in a row; `refused`: targets that
    refused or failed it since the last answer, by their connection, and until when."""

    coordinator: Any
    session: Session
    others: Iterable[Moves]
    generation: Any = None
    statistics: Statistics = field(default_factory=Statistics)
    losses: int = 0
    lost_s: float = 0.0
    target_changes: int = 0
    draft_changes: int = 0
    rounds: int = 0
    left_s: float | None = None  # since when it has no target
    free_s: float | None = None  # since when one is free that it might go on at
    was_refused: bool = False  # last of all
    was_link_lost: bool = False
    is_moved: bool = False  # the round under way
    moved_rounds: set[int] = field(default_factory=set)
    refused: dict[Stream | None, float] = field(default_factory=dict)
    left_drafts: dict[Stream | None, float] = field(default_factory=dict)  # that could not draft for it, until when
    open_at: dict[bool, set[Stream]] = field(default_factory=lambda: {False: set(), True: set()})
    last_draft: SimulatedLink | None = None
    opened_count: int = 0
    was_suspect: bool = False
    has_failed: bool = False
    refusal_count: int = 0
    profile_changes: int = 0
    last_table: int | None = None

    def begin(self, generation: Any, statistics: Statistics) -> None:
        """Its generation is about to begin."""
        self.generation, self.statistics = generation, statistics
        self.last_draft = None if generation._draft is None else generation._draft.link

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.coordinator.clock.now_s

    @property
    def is_suspect(self) -> bool:
        """Whether it lost several targets in a row, and is at one."""
        return self.losses > 1 and any(stream.is_open for stream in self.open_at[False]) and not self.session.finished

    def told(self, event: Event) -> None:
        """A peer tells its generation something."""
        session, generation = self.session, self.generation
        if session.finished:
            return
        if isinstance(event, FromDraft):
            self._told_by_draft(event.item)
        elif isinstance(event, TargetLost):
            self._lose(not generation._target.link.is_up)
        elif not isinstance(event, FromTarget):
            return
        elif isinstance(event.item, Failure) and event.item.incarnation == session.target_incarnation:
            if event.item.reason in REFUSALS:
                self._leave((event.item.retry_after_ms / 1000 or ASK_AGAIN_S) + self.now_s)
                self.was_refused = True
                self.refusal_count += 1
            else:
                self._lose(False)
        elif isinstance(event.item, PromptPart) and event.item.incarnation == session.target_incarnation:
            if event.item.logprobs.first_index == session.scored_index:
                self._heard()
            else:  # one before it was lost, and soon its connection is
                self._lose(False)
        elif isinstance(event.item, VerificationResult) and session.expects(event.item):
            if is_sound(event.item, len(session.in_flight.draft_token_ids)) and not session.scored_index:
                self._answered()
            else:
                self._lose(False)

    def _told_by_draft(self, item: Any) -> None:
        session = self.session
        if isinstance(item, Failure) and session.has_draft and item.incarnation == session.draft_incarnation:
            retry_s = item.retry_after_ms / 1000 or math.inf
            self.left_drafts[self.generation._draft.link.stream] = self.now_s + retry_s

    def _lose(self, is_link_lost: bool) -> None:
        self.losses += 1
        self.lost_s = self.now_s
        self.was_suspect |= self.losses > 1
        self.was_refused, self.was_link_lost = False, is_link_lost
        self._leave(None if is_link_lost else self.now_s + ASK_AGAIN_S)

    def _leave(self, until_s: float | None) -> None:
        if until_s is not None:
            self.refused[self.generation._target.link.stream] = until_s
        self.is_moved = True
        if self.left_s is None:
            self.left_s = self.now_s

    def _answered(self) -> None:
        if self.is_moved:
            self.moved_rounds.add(self.session.round_index)
        self.rounds += 1
        self._heard()

    def _heard(self) -> None:
        self.losses, self.is_moved = 0, False
        self.last_table = self.generation._target.link.process.traits.table
        self.refused.clear()

    def opened(self, stream: Stream) -> None:
        """The session is opened on a replica."""
        is_draft = stream.process.traits.is_draft
        streams = self.open_at[is_draft]
        others = [other for other in streams if other.is_open and other is not stream]
        if others:
            raise Violation(f"session {self.session.number} is opened on {stream} and works on {others}")
        if self.refused.get(stream, 0.0) > self.now_s + 1e-6:
            raise Violation(f"session {self.session.number} is opened on {stream}, which refused or failed it")
        if is_draft:
            self.draft_changes += stream.link is not self.last_draft
            self.last_draft = stream.link
        elif stream not in streams:
            self.target_changes += self.opened_count > 0
            self.opened_count += 1
            self.left_s = self.free_s = None
            table = stream.process.traits.table
            if self.last_table not in (None, table):
                self._check_profile()
            self.profile_changes += self.last_table not in (None, table)
            self.last_table = table if self.last_table is None else self.last_table
        streams.add(stream)
        if not is_draft and self.is_suspect:
            rivals = [own for own in self.others if own is not self and own.is_suspect and stream in own.open_at[False]]
            if rivals:
                raise Violation(f"sessions {self.session.number} and {rivals[0].session.number} are suspects together")

    def _check_profile(self) -> None:
        """It goes on with other numerics where none of equal ones is free."""
        for peer in self.coordinator.fleet.targets.up():
            if self._is_free(peer) and peer.link.process.traits.table == self.last_table:
                raise Violation(f"session {self.session.number} gets other numerics, and {peer.address} is free")

    def closed(self, stream: Stream) -> None:
        """The session is closed on a replica."""
        self.open_at[stream.process.traits.is_draft].discard(stream)

    def failed(self, error: SpecdecError) -> None:
        """Its generation ends with an error, which must be one of those that it may end with."""
        generation, now_s = self.generation, self.now_s
        self.has_failed = True
        if str(error).startswith("the coordinator failed"):
            raise Violation(f"session {self.session.number} met a defect")
        peers = self.coordinator.fleet.targets.peers
        is_alone = all(peer is generation._target for peer in peers)
        waited_s = math.inf if self.left_s is None else now_s - self.left_s
        if self.was_refused:
            is_due = generation._output.count == 0 or not self.coordinator.wait_s
        else:
            is_due = self.losses >= LOSS_COUNT_MAX or is_alone and not (self.was_link_lost and self.coordinator.wait_s)
        if not is_due and (self.left_s is None or waited_s < self.coordinator.wait_s - 1e-9):
            raise Violation(f"session {self.session.number} fails after {self.losses} losses in {waited_s} s: {error}")

    def check(self) -> None:
        """After every event."""
        session = self.session
        if session.finished:
            return
        if session.phase is Phase.SEEKING:
            self._check_seeking()
        else:
            self.free_s = None
        self._check_draft()

    def _check_seeking(self) -> None:
        """A text without a target goes on where one is free, and does not wait for too long."""
        now_s, wait_s = self.now_s, self.coordinator.wait_s
        if self.left_s is None or now_s - self.left_s > wait_s + 1e-9:
            raise Violation(f"session {self.session.number} waits for a target since {self.left_s}, for {wait_s} s")
        free = any(map(self._is_free, self.coordinator.fleet.targets.up()))
        self.free_s = (now_s if self.free_s is None else self.free_s) if free else None
        if self.free_s is not None and now_s - self.free_s > NOTICED_S:
            raise Violation(f"session {self.session.number} seeks a target, and one is free since {self.free_s}")

    def _is_free(self, peer: Any) -> bool:
        link = peer.link
        if not is_usable(peer) or self.refused.get(link.stream, 0.0) > self.now_s:
            return False
        if self.losses < 2:
            return True
        if link.heard_s < self.lost_s + ALIVE_AFTER_S:
            return False
        return not any(own.is_suspect and link.stream in own.open_at[False] for own in self.others if own is not self)

    def _check_draft(self) -> None:
        """A lost draft is not used, and another of its model is, if there is one that can draft for the text."""
        session, own = self.session, self.generation._draft
        if own is None or session.policy.draft_length_cap == 0:
            return
        state = session.draft_state
        if state not in (DraftState.ABSENT, DraftState.PAUSED):
            if not own.link.is_up:
                raise Violation(f"session {session.number} says its draft is {state.name}, and it is lost")
            return
        for peer in self.coordinator.fleet.drafts.up():
            is_left = self.left_drafts.get(peer.link.stream, 0.0) > self.now_s - NOTICED_S
            if is_usable(peer) and peer.model_key == own.model_key and not is_left:
                raise Violation(f"session {session.number} says its draft is {state.name}; {peer.address} is there")

    def check_statistics(self) -> None:
        """At the end of its text: the statistics are what happened."""
        counted = (self.rounds, self.target_changes, self.draft_changes)
        own = self.statistics
        if (own.rounds, own.num_target_changes, own.num_draft_changes) != counted:
            told = f"{own.rounds}, {own.num_target_changes}, {own.num_draft_changes}"
            raise Violation(f"rounds, changes of target and draft were {counted}, the statistics say {told}")
        policy = self.session.policy
        if isinstance(policy, WanderingPolicy):
            expected = [index for index in range(self.session.round_index - 1) if index not in self.moved_rounds]
            if [index for index in policy.learned if index < self.session.round_index - 1] != expected:
                raise Violation(f"the policy learnt of rounds {policy.learned}, of {expected} alone it should")


def is_usable(peer: Any) -> bool:
    """Whether a peer takes new texts, by its link and its process's own words."""
    return peer.link.is_up and peer.description is not None and peer.is_listed and not peer.is_stopping
