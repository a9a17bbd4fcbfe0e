"""One generation from start to end: an event of a peer in, the session's step, items and output out.

`take` is the loop: the rule concludes a result, the output takes its tokens, the session steps, what it returns is
sent, and observers are told. A text whose target is lost, stops, refuses it or answers nonsense moves: its session is
opened on another one, and the round in flight sent there; a draft is changed the same way. Everything here runs on the
event loop and never blocks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from specdec.coordinator.fleet import Choice, Fleet
from specdec.coordinator.output import Appended, Ending, OutputProcessor
from specdec.coordinator.peers import Draft, Target
from specdec.coordinator.recording import Recorder
from specdec.coordinator.statistics import RequestStatistics
from specdec.errors import CacheExhausted, InvalidRequest, NumericsError, ReplicaUnavailable, SpecdecError
from specdec.protocol import events
from specdec.protocol.items import UINT32_MAX, Close, Failure, Nodes, Open, VerificationResult
from specdec.protocol.records import RoundRecord, RoundTimes
from specdec.protocol.rejection import conclude, logprobs_of
from specdec.protocol.report import Delta, Event, Finished, Moved, Round, Started
from specdec.protocol.session import Session
from specdec.protocol.states import DraftState
from specdec.protocol.types import Proposer, Rule, TokenKind
from specdec.rpc.status import error_from_failure
from specdec.telemetry.logs import get_logger

NETWORK_ROUNDS = 4  # of plain decoding, between two records of the draft's network time: only pings measure it then
LOSS_COUNT_MAX = 3  # targets lost in a row that end a text
ALIVE_AFTER_S = 0.1  # targets that end together are not all heard to end at one moment
ROOM_RETRY_S = 0.5  # after a refusal that names no time
UNDELIVERED_DELTA_COUNT_MAX = 64  # further deltas are merged into the last: a slow client costs no memory per token


class Lost(Exception):
    """The target failed this text, which goes on at another one; the message is the reason, `cause` a word for it.
    `error`: what it is to the client where none is left."""

    def __init__(self, reason: str, cause: str, error: type[SpecdecError] = ReplicaUnavailable) -> None:
        super().__init__(reason)
        self.cause, self.error = cause, error


class Generation:
    """One generation. `next_event()` has one caller; `close()` may be called at any time."""

    def __init__(
        self,
        session: Session,
        output: OutputProcessor,
        started: Started,
        choice: Choice,
        fleet: Fleet,
        request: RequestStatistics,
        reports_rounds: bool = False,
        reports_statistics: bool = False,
        target_wait_s: float = 0.0,
    ) -> None:
        self._session = session
        self._own_start = len(session.committed)  # before it are the client's words: prompt and resumed tokens
        self._output = output
        self._target, self._draft = choice.target, choice.draft
        self._has_heads = Proposer.HEADS in choice.proposers
        self._key = choice.key
        self._model = self._next_model = choice.model  # of the targets that its last and its next tokens come from
        self._fleet = fleet
        self._request = request
        self._reports_rounds, self._reports_statistics = reports_rounds, reports_statistics
        self._target_wait_s = target_wait_s
        self.began_s = time.monotonic()
        self._lost_s = 0.0  # when it lost the last
        self._loss_count = 0  # targets lost in a row, without an answered round between
        self._avoided: dict[Target, float] = {}  # targets that refused or failed it since the last answer, until when
        self._left: set[Draft] = set()  # drafts that could not draft for it
        self._is_moving = False  # the round in flight was sent to more than one target
        self._lost: Lost | None = None  # why it seeks a target
        self._target_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._times = RoundTimes(time.monotonic())  # of the round under way; `sent_s` is of the first time
        self._wait_began_s = 0.0  # 0: it does not wait
        self._wait_timer: asyncio.TimerHandle | None = None
        self.names = {"trace_id": request.context.trace_id.hex(), "session": session.number}  # in logs
        self._undelivered: deque[Event | SpecdecError] = deque([started])
        self._reader: asyncio.Future[None] | None = None

    def begin(self, ending: Ending | None = None) -> None:
        """Opens the session on the peers and requests the first token; or ends it if the resumed tokens reached the
        end (`ending`). The target must be up: call it in the turn of the event loop in which `Peer.usable` returned."""
        if ending is not None:
            self._step(events.End())
            self._finish(ending)
            return
        self._fleet.movers[self] = None
        self._target.attach(self._session.number, self)
        self._step(events.TargetFound())
        self._attach_draft(is_late=False)

    def record(self, recorder: Recorder, deltas: Sequence[Delta]) -> None:
        """Records the text: prompt and resumed tokens, and these deltas."""
        if deltas:
            session = self._session
            before = session.committed[: session.params.prompt_length + deltas[0].first_output_index]
            recorder.add(before, session.params.temperature, deltas)

    def close(self) -> None:
        """Stops all work for this generation; idempotent."""
        self._step(events.End())
        self._leave_fleet()
        for peer in (self._target, self._draft):
            if peer is not None:
                peer.detach(self._session.number)

    async def next_event(self) -> Event:
        """Returns started, then deltas, then finished, each once. Raises the error that ended the generation."""
        while not self._undelivered:
            self._reader = self._loop.create_future()
            await self._reader
        event = self._undelivered.popleft()
        if isinstance(event, SpecdecError):
            raise event
        return event

    def take(self, event: events.Event, byte_count: int = 0) -> None:
        """Takes what a peer tells of the session; after the end nothing. An answer has its share of a message."""
        session = self._session
        if session.finished:
            return
        self._count_received(event, byte_count)
        asked, appended = session.in_flight, None
        try:
            if isinstance(event, events.TargetLost):
                raise Lost(event.reason, event.cause)
            if isinstance(event, events.FromTarget) and isinstance(event.item, Failure):
                self._on_failure(event.item)
                return
            if isinstance(event, events.FromTarget) and isinstance(event.item, VerificationResult):
                if not session.expects(event.item):
                    return
                event, appended = self._conclude(event.item)
        except Lost as lost:
            self._on_loss(lost, is_link_lost=not self._target.link.is_up)
            return
        except SpecdecError as error:
            self._fail(error)
            return
        record = self._step(event)
        if appended is None or record is None or asked is None or not isinstance(event, events.Concluded):
            if not isinstance(event, events.FromTarget):
                self._on_draft_changed(event)
            return
        rounds = (Round.of(record, asked, event.verdict.accepted),) if self._reports_rounds else ()
        is_moved = self._is_moving
        if self._loss_count or is_moved:
            self._on_answered(self._output.count - len(event.token_ids))
        self._emit(self._delta(event, record, appended.texts, rounds))
        if appended.ending is not None:
            self._finish(appended.ending)
        elif not is_moved:  # the time of a move is no measurement of a plan
            if record.round_index and record.step.step_count == 1:
                self._target.health.answered(record.times.round_trip_s, record.times.end_s)
            self._loop.call_soon(self._learn, record)  # after the task of the link has written the next verification

    def _count_received(self, event: events.Event, byte_count: int) -> None:
        draft = self._draft
        if isinstance(event, events.FromDraft) and draft is not None:
            self._request.statistics.draft_link_bytes += byte_count
            if isinstance(event.item, Nodes):
                draft.measure_step(event.item, self._session.params.rule, byte_count)
        else:
            self._request.statistics.target_link_bytes += byte_count

    def _conclude(self, answer: VerificationResult) -> tuple[events.Concluded, Appended]:
        """Applies the rule to a result and appends its tokens to the output. Raises SpecdecError."""
        flying, answered_s = self._session.in_flight, time.monotonic()
        assert flying is not None
        try:
            verdict = conclude(self._session.params, flying, answer.output)
        except InvalidRequest as error:  # the target's fault, not the request's
            get_logger().error("malformed verification result", **self.names, error=str(error))
            raise Lost("the target sent a malformed answer", "malformed") from None
        tokens = (*map(flying.draft_token_ids.__getitem__, verdict.accepted), verdict.next_token_id)
        appended = self._output.append(tokens)
        times = self._times._replace(end_s=time.monotonic(), round_trip_s=answered_s - self._times.sent_s)
        self._times = RoundTimes(times.end_s)
        kept, ends = tokens[: appended.kept_count], appended.ending is not None
        return events.Concluded(verdict, answer, kept, ends, times), appended

    def _delta(
        self, event: events.Concluded, record: RoundRecord, texts: tuple[str, ...], rounds: tuple[Round, ...]
    ) -> Delta:
        verdict, count = event.verdict, len(event.token_ids)
        kinds = (*[TokenKind.ACCEPTED] * verdict.accepted_count, verdict.next_kind)[:count]
        logprobs = logprobs_of(event.answer.output, verdict)[:count]
        proposers = (*record.tokens.accepted_proposers, Proposer.NONE)[:count]
        text = "".join(texts), tuple(map(len, texts))
        statistics = None
        if self._reports_statistics:
            self._request.statistics.conclude(self._session.policy.prediction)
            statistics = self._request.statistics.snapshot()
        return Delta(self._output.count - count, event.token_ids, kinds, *text, logprobs, proposers, rounds, statistics)

    def _learn(self, record: RoundRecord) -> None:
        """Hands a round to the policy, which may take a moment: the target runs the next round meanwhile."""
        self._session.policy.on_round(record)
        if self._draft is not None and not record.is_speculating and record.round_index % NETWORK_ROUNDS == 0:
            self._draft.measure_network()

    def _step(self, event: events.Event) -> RoundRecord | None:
        """Steps the session, does what it is ready with, and tells the observers; returns the round that ended."""
        session, statistics, target, draft = self._session, self._request.statistics, self._target, self._draft
        ready = session.step(event)
        now_s = time.monotonic()
        if ready.to_target and ready.to_target[-1] is session.in_flight:
            self._on_sent(now_s)
        self._request.on_step(event, ready, now_s)
        if draft is not None:
            for item in ready.to_draft:
                statistics.draft_link_bytes += draft.send(self._request.in_context(item))
        for asked in ready.to_target:
            if isinstance(asked, Open) and asked.incarnation > 1:  # a text under way is not new to its target
                asked = replace(asked, age_ms=min(UINT32_MAX, 1 + round(1000 * (now_s - self.began_s))))
            statistics.target_link_bytes += target.send(self._request.in_context(asked))
        if ready.wait is not None:
            self._wait_began_s = now_s
            expired = events.WaitExpired(ready.wait.wait_index)
            self._wait_timer = self._loop.call_later(ready.wait.wait_s, self._step, expired)
        return ready.record

    def _on_sent(self, now_s: float) -> None:
        """A verification is sent: a wait is over, and its round trip begins, unless it is sent again."""
        wait_s = self._times.wait_s
        if self._wait_began_s:
            wait_s += now_s - self._wait_began_s
            self._wait_began_s = 0.0
            self._stop_timer()
        self._times = self._times._replace(wait_s=wait_s, sent_s=self._times.sent_s or now_s)

    def _stop_timer(self) -> None:
        """The wait is over: its timer must not hold this generation any longer; idempotent."""
        if self._wait_timer is not None:
            self._wait_timer.cancel()

    def _emit(self, event: Event | SpecdecError) -> None:
        last = self._undelivered[-1] if len(self._undelivered) >= UNDELIVERED_DELTA_COUNT_MAX else None
        if isinstance(last, Delta) and isinstance(event, Delta):
            self._undelivered[-1] = last.merged(event)
        else:
            self._undelivered.append(event)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _finish(self, ending: Ending) -> None:
        session = self._session
        statistics = self._request.statistics
        statistics.conclude(session.policy.prediction)
        how = ending.reason, ending.stop_string, ending.stop_token_id
        usage = session.params.prompt_length, self._output.count
        finished = Finished(*how, *usage, statistics, self._request.context.trace_id.hex())
        self._request.finished(finished)
        self._fleet.remember(session, self._own_start, self._loop.call_soon)
        self._emit(finished)
        if session.malformed_node_count:
            get_logger().warning("malformed draft nodes", **self.names, count=session.malformed_node_count)

    def give_up(self) -> None:
        """Ends the generation because the service stops; nothing if its text has ended."""
        if not self._session.finished:
            self._fail(ReplicaUnavailable(f"the coordinator stops; {self._how_to_resume()}"))

    def on_defect(self) -> None:
        """Taking an event failed: this generation ends, the others continue."""
        cause = "the coordinator failed at this generation, and its log contains the cause"
        self._fail(SpecdecError(f"{cause}; {self._how_to_resume()}"))

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
        """The target takes no more sessions, or has no room: the next one is asked. Raises the refusal of a new text
        that REFUSAL_COUNT_MAX targets refused; a text under way waits then."""
        self._avoided[self._target] = time.monotonic() + (error.retry_after_s or ROOM_RETRY_S)
        is_new, other = not self._output.count, self._next_target()
        if is_new and (other is None or not self._fleet.may_retry(len(self._avoided))):
            raise error
        if other is None and not self._target_wait_s:
            raise type(error)(f"{error}; {self._how_to_resume()}", error.retry_after_s)
        self._move(Lost(f"the target refused it: {error}", "refused"))

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
            self._avoided[self._target] = math.inf
        self._move(lost)

    def _move(self, lost: Lost) -> None:
        """Leaves the target and seeks another one."""
        session, old = self._session, self._target
        self._lost = self._lost or lost
        incarnation = session.target_incarnation
        old.detach(session.number)
        if old.link.is_up:
            old.send(Close(session.number, incarnation))
        self._is_moving = True
        self._step(events.TargetLost(str(lost), lost.cause))
        self._fleet.wait(self)
        self.on_target_up()
        if self in self._fleet.waiting and self._target_timer is None:
            self._target_timer = self._loop.call_later(self._target_wait_s, self._on_no_target)

    def _next_target(self) -> Target | None:
        """Returns the target to go on at, if one is there now. Texts that lost several go to a target one by one, and
        to one that was heard since: of targets that are lost together, as with their network, none counts as its
        third."""
        now_s, fleet = time.monotonic(), self._fleet
        avoided = {target for target, until_s in self._avoided.items() if until_s > now_s}
        if self._loss_count > 1:
            alive_s = self._lost_s + ALIVE_AFTER_S
            peers = fleet.targets.peers
            avoided |= {target for target in peers if target.suspect is not None or target.link.heard_s < alive_s}
        return fleet.next_target(self._model, self._session.length_max, self._key, avoided)

    def on_target_up(self, found: Target | None = None) -> None:
        """Goes on at another target, if one is there: it waits for one, and `found` was connected again."""
        session, fleet = self._session, self._fleet
        if found is not None:
            self._avoided.pop(found, None)
        target = self._next_target()
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
        session.asks_heads = self._has_heads
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
        self._stop_timer()
        self._fleet.movers.pop(self, None)
        self._fleet.waiting.pop(self, None)
        if self._target_timer is not None:
            self._target_timer.cancel()

    def _fail(self, error: SpecdecError) -> None:
        self._request.failed(error)
        self._step(events.End())
        self._emit(error)

    def _how_to_resume(self) -> str:
        params = self._session.params
        seed = f" and seed {params.seed}" if params.rule is Rule.COUPLED else ""
        return f"send the request again with resume.output_token_ids, the {self._output.count} received so far{seed}"
