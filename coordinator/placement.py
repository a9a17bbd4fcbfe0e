"""Where a text is: its target and its draft, and how it moves to others.

A text whose target is lost, stops, refuses it or sends malformed answers moves: its session is opened on another one
and the round in flight sent there; without any it waits. A draft that is lost, stops or cannot draft for the text is
changed the same way. No result of a round that was lost was seen, so the text is as if nothing had happened
(docs/fleet.md).
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod

from specdec.coordinator.fleet import Choice, Fleet
from specdec.coordinator.replicas import Draft, Target
from specdec.coordinator.statistics import RequestStatistics
from specdec.errors import CacheExhausted, NumericsError, ReplicaUnavailable, SpecdecError
from specdec.protocol import events
from specdec.protocol.items import Close, Failure
from specdec.protocol.records import RoundRecord
from specdec.protocol.report import Event, Moved
from specdec.protocol.session import Session
from specdec.protocol.states import DraftState
from specdec.protocol.types import Proposer
from specdec.rpc.status import error_from_failure
from specdec.telemetry.logs import get_logger

LOSS_COUNT_MAX = 3  # targets lost in a row that end a text
ALIVE_AFTER_S = 0.1  # targets that end together are not all heard to end at one moment
ASK_AGAIN_S = 0.5  # before a target that failed a text, or refused it without naming a time, is asked again


class Lost(Exception):
    """The target failed this text, which goes on at another one; the message is the reason, `cause` a word for it.
    `error`: what it is to the client where none is left."""

    def __init__(self, reason: str, cause: str, error: type[SpecdecError] = ReplicaUnavailable) -> None:
        super().__init__(reason)
        self.cause, self.error = cause, error


class Placement(ABC):
    """The replicas of one text, and its moves; the generation is its subclass. `began_s`: by its age."""

    def __init__(
        self, session: Session, choice: Choice, fleet: Fleet, request: RequestStatistics, target_wait_s: float
    ) -> None:
        self._session = session
        self._fleet = fleet
        self._request = request
        self._target, self._draft = choice.target, choice.draft
        self._key, self._has_heads = choice.key, Proposer.HEADS in choice.proposers
        self._model = self._next_model = choice.model  # of the targets that its last and its next tokens come from
        self._target_wait_s = target_wait_s
        self.began_s = time.monotonic()
        self.names = {"trace_id": request.context.trace_id.hex(), "session": session.number}  # in logs
        self._loop = asyncio.get_running_loop()
        self._lost_s = 0.0  # when it lost the last
        self._loss_count = 0  # targets lost in a row, without an answered round between
        # Targets that refused or failed it since the last answer: until when, and the losses of that connection's peer.
        self._avoided: dict[Target, tuple[float, int]] = {}
        self._left: set[Draft] = set()  # drafts that could not draft for it
        self._is_moving = False  # the round in flight was sent to more than one target, or to another than its choice's
        self._is_follower = False  # a further choice of a request that has begun: no new text to any target
        self._lost: Lost | None = None  # why it seeks a target
        self._target_timer: asyncio.TimerHandle | None = None
        self._draft_timer: asyncio.TimerHandle | None = None

    @property
    @abstractmethod
    def _output_count(self) -> int:
        """Output tokens so far, resumed ones included."""

    @abstractmethod
    def take(self, event: events.Event, byte_count: int = 0) -> None:
        """Takes what a peer tells of the session."""

    @abstractmethod
    def on_defect(self) -> None:
        """Taking an event failed."""

    @abstractmethod
    def _step(self, event: events.Event) -> RoundRecord | None:
        """Steps the session and does what it is ready with."""

    @abstractmethod
    def _emit(self, event: Event | SpecdecError) -> None:
        """Hands an event to the client."""

    @abstractmethod
    def _fail(self, error: SpecdecError) -> None:
        """Ends the text with an error."""

    @abstractmethod
    def _how_to_resume(self) -> str:
        """Returns what the client can do, in words."""

    def _attach(self) -> None:
        """Opens the session on its first replicas."""
        self._fleet.movers[self] = None
        self._target.attach(self._session.number, self)
        self._step(events.TargetFound())
        self._attach_draft(is_late=False)

    def _attach_after(self, first: Placement) -> None:
        """Opens the session, a further choice of a request, at the target of the first one; if that takes no new text,
        at another one."""
        target, self._is_follower = first._target, True
        if target is self._target and target.is_up:
            self._attach()
            return
        self._fleet.movers[self] = None
        self._lost = Lost("the target of the first choice is another one", "lost")
        self._seek(target if target.is_up else None)
        self._attach_draft(is_late=False)

    def _on_failure(self, failure: Failure) -> None:
        """A failure of the target's current session. Raises Lost if another target may do better, and what it is to the
        client if none can."""
        if failure.incarnation != self._session.target_incarnation:
            return
        error = error_from_failure(failure)
        if isinstance(error, (ReplicaUnavailable, CacheExhausted)):
            self._on_refused(error)
            return
        if type(error) is SpecdecError:  # the text of an exception is for the log
            get_logger().error("the target failed", **self.names, error=str(error))
            raise Lost("the target failed at this generation, and its log contains the cause", "failed", SpecdecError)
        raise NumericsError(f"{error}; {self._how_to_resume()}") if isinstance(error, NumericsError) else error

    def _on_refused(self, error: ReplicaUnavailable | CacheExhausted) -> None:
        """The target takes no more sessions, or has no space: the next one is asked. Raises the refusal of a new text
        beyond the budget of retries; a text under way waits then."""
        self._avoid_target(error.retry_after_s or ASK_AGAIN_S)
        self._target.refused_one()
        is_new, other = not (self._is_follower or self._output_count or self._loss_count), self._next_target()
        if is_new and (other is None or not self._fleet.may_retry(len(self._avoided))):
            raise error
        if other is None and not self._target_wait_s:
            raise type(error)(f"{error}; {self._how_to_resume()}", error.retry_after_s)
        self._move(Lost(f"the target refused it: {error}", "refused"), other)

    def _on_loss(self, lost: Lost, is_link_lost: bool) -> None:
        """The target is lost to this text. The third loss in a row ends it, since it may be the cause, and so does a
        failure of the only target."""
        self._loss_count += 1
        self._lost_s = time.monotonic()
        if not is_link_lost:
            self._target.health.fault(time.monotonic())
        others = any(peer is not self._target for peer in self._fleet.targets.peers)
        is_last = self._loss_count >= LOSS_COUNT_MAX or not (others or is_link_lost and self._target_wait_s)
        if is_last:
            self._fail(lost.error(f"{lost}; {self._how_to_resume()}"))
            return
        if not is_link_lost:
            self._avoid_target(ASK_AGAIN_S)
        self._move(lost)

    def _move(self, lost: Lost, target: Target | None = None) -> None:
        """Leaves the target for another one, or for one that it seeks."""
        session, old = self._session, self._target
        self._lost = self._lost or lost
        incarnation = session.target_incarnation
        old.detach(session.number)
        if old.link.is_up:
            old.send(Close(session.number, incarnation))
        self._step(events.TargetLost(str(lost), lost.cause))
        self._seek(target)

    def _seek(self, target: Target | None = None) -> None:
        """Goes on at this target, or another one, or waits for one."""
        self._is_moving = True
        self._fleet.wait(self)
        self.on_target_up(target)
        if self in self._fleet.waiting and self._target_timer is None:
            self._target_timer = self._loop.call_later(self._target_wait_s, self._on_no_target)

    def _avoid_target(self, for_s: float) -> None:
        """Asks other targets for a time, unless this one is connected anew meanwhile."""
        self._avoided[self._target] = time.monotonic() + for_s, self._target.loss_count

    def _next_target(self) -> Target | None:
        """Returns the target to go on at, if one is there now. Texts that lost several go to a target one by one, and
        to one that was heard since: of targets that are lost together, as with their network, none counts as its
        third."""
        now_s, fleet = time.monotonic(), self._fleet
        avoided = {
            one for one, (until_s, count) in self._avoided.items() if until_s > now_s and count == one.loss_count
        }
        if self._loss_count > 1:
            alive_s = self._lost_s + ALIVE_AFTER_S
            peers = fleet.targets.peers
            avoided |= {target for target in peers if target.suspect is not None or target.link.heard_s < alive_s}
        return fleet.next_target(self._model, self._session.length_max, self._key, avoided)

    def on_target_up(self, target: Target | None = None) -> None:
        """Goes on at this target, or another one if there is one; it waits for one."""
        session, fleet = self._session, self._fleet
        target = None if session.finished else target or self._next_target()
        if target is None:
            return
        del fleet.waiting[self]
        if self._target_timer is not None:
            self._target_timer.cancel()
            self._target_timer = None
        if self._loss_count > 1:
            target.suspect = self
        self._request.on_moved(
            target, str(self._lost), "" if self._lost is None else self._lost.cause, time.monotonic()
        )
        self._target, self._lost, self._next_model = target, None, target.usable()
        session.asks_heads, session.is_head_refused = self._has_heads, False
        get_logger().info("generation moved", **self.names, peer=target.address)
        target.attach(session.number, self)
        self._step(events.TargetFound())

    def _on_no_target(self) -> None:
        """No target was there for too long."""
        self._target_timer = None
        reason = f"{self._lost}, and none was there for {self._target_wait_s:g} s"
        self._fail(ReplicaUnavailable(f"{reason}; {self._how_to_resume()}"))

    def _on_answered(self, output_index: int) -> None:
        """A round was answered after losses: this text did not cause them. `output_index`: of its first token."""
        model, self._model = self._model, self._next_model
        if self._model.numerics != model.numerics:
            self._emit(Moved(output_index, self._model))
        was_suspect = self._target.suspect is self
        self._loss_count, self._is_moving = 0, False
        self._avoided.clear()
        if was_suspect:
            self._target.suspect = None
            self._loop.call_soon(self._fleet.place_waiting)

    def _attach_draft(self, is_late: bool) -> None:
        """Drafts with the draft, if it is usable now."""
        draft = self._draft
        if draft is not None:
            draft.attach(self._session.number, self)
            if draft.is_up:
                self._step(events.DraftFound(is_late))

    def _on_draft_changed(self, event: events.Event) -> None:
        """After an event of the draft: if it is lost, stops, or cannot draft for this text, another one of its model
        does."""
        state, draft = self._session.draft_state, self._draft
        if draft is None or self._session.finished:
            return
        if state is DraftState.PAUSED:
            self._left.add(draft)
            if isinstance(event, events.FromDraft) and isinstance(event.item, Failure) and event.item.retry_after_ms:
                retry_s = event.item.retry_after_ms / 1000
                self._draft_timer = self._loop.call_later(retry_s, self.on_draft_up, draft)
            if self._session.malformed_node_count:
                draft.health.fault(time.monotonic())
        elif not isinstance(event, (events.DraftLost, events.DraftStops)):
            return
        self.on_draft_up()

    def on_draft_up(self, found: Draft | None = None) -> None:
        """Changes to another draft, if this one is of no use and another is usable; `found` was connected again."""
        if found is not None:
            self._left.discard(found)
        session, draft = self._session, self._draft
        if draft is None or session.finished or session.has_draft and draft.is_up:
            return
        other = self._fleet.next_draft(draft, session.params.rule, self._left)
        if other is None:
            return
        if session.has_draft:
            draft.send(Close(session.number, session.draft_incarnation))
            self._step(events.DraftLost())
        draft.detach(session.number)
        self._draft = other
        if other is not draft:
            cause = "refused" if draft in self._left else "lost" if draft.description is None else "stopped"
            self._request.on_draft_changed(other, cause)
        self._attach_draft(is_late=True)

    def _leave_fleet(self) -> None:
        """Leaves its replicas, and all that it waits for; idempotent."""
        self._fleet.movers.pop(self, None)
        self._fleet.waiting.pop(self, None)
        for timer in (self._target_timer, self._draft_timer):
            if timer is not None:
                timer.cancel()
        for peer in (self._target, self._draft):
            if peer is not None:
                peer.detach(self._session.number)
