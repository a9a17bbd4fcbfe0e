"""One generation from start to end: an event of a peer in, the session's step, items and output out.

`take` is the loop: the rule concludes a result, the output takes its tokens, the session steps, what it returns is
sent, and observers are told. Where its replicas are is the matter of `Placement`. Everything here runs on the event
loop and never blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from specdec.coordinator.fleet import Choice, Fleet
from specdec.coordinator.output import Appended, Ending, OutputProcessor
from specdec.coordinator.placement import Lost, Placement
from specdec.coordinator.recording import Recorder
from specdec.coordinator.statistics import RequestStatistics
from specdec.errors import InvalidRequest, ReplicaUnavailable, SpecdecError
from specdec.protocol import events
from specdec.protocol.items import Failure, Nodes, Open, PromptPart, VerificationResult
from specdec.protocol.limits import UINT32_MAX
from specdec.protocol.records import RoundRecord, RoundTimes
from specdec.protocol.rejection import conclude, logprobs_of
from specdec.protocol.report import Delta, Event, Finished, Round, Started
from specdec.protocol.session import Session
from specdec.protocol.types import FinishReason, Proposer, Rule, TokenKind
from specdec.telemetry.logs import get_logger

NETWORK_ROUNDS = 4  # of plain decoding, between two records of the draft's network time: only pings measure it then
UNDELIVERED_DELTA_COUNT_MAX = 64  # further deltas are merged into the last: a slow client costs no memory per token


class Reader:
    """Who reads the events of a generation, or of the choices of one request. Has one caller."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Returns at the next event of one of them."""
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    def wake(self) -> None:
        """One of them has an event."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class Generation(Placement):
    """One generation. Its `reader`, which those of one request share, takes its events; `close()` may be called at any
    time."""

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
        reader: Reader | None = None,
    ) -> None:
        super().__init__(session, choice, fleet, request, target_wait_s)
        self._own_start = len(session.committed)  # before it are the client's words: prompt and resumed tokens
        self._output = output
        self._reports_rounds, self._reports_statistics = reports_rounds, reports_statistics
        self._times = RoundTimes(time.monotonic())  # of the round under way; `sent_s` is of the first time
        self._wait_began_s = 0.0  # 0: it does not wait
        self._wait_timer: asyncio.TimerHandle | None = None
        self._undelivered: deque[Event | SpecdecError] = deque([started])
        self.reader = reader or Reader()

    def begin(self, ending: Ending | None = None) -> None:
        """Opens the session on the peers and requests the first token; or ends it if the resumed tokens reached the
        end (`ending`). The target must be up: call it in the turn of the event loop in which `Peer.usable` returned."""
        if ending is not None:
            self._step(events.End())
            self._finish(ending)
            return
        self._attach()

    def follow(self, first: Generation) -> None:
        """Begins as a further choice of a request at the target of its first one, which has the prompt in its cache
        now. It is not new there: if it finds no space it waits as a text under way does. One without output ends."""
        if not self._output.max_tokens:
            self.begin(Ending(FinishReason.LENGTH))
            return
        self._attach_after(first)

    def record(self, recorder: Recorder, deltas: Sequence[Delta]) -> None:
        """Records the text: prompt and resumed tokens, and these deltas."""
        if deltas:
            session = self._session
            before = session.committed[: session.params.prompt_length + deltas[0].first_output_index]
            recorder.add(before, session.params.temperature, deltas)

    def close(self) -> None:
        """Stops all work for this generation; idempotent."""
        self._step(events.End())
        self._stop_timer()
        self._leave_fleet()

    @property
    def _output_count(self) -> int:
        return self._output.count

    def take_event(self) -> Event | SpecdecError | None:
        """Returns started, then deltas, then finished, each once, or the error that ended the generation; None while
        there is nothing new."""
        return self._undelivered.popleft() if self._undelivered else None

    async def next_event(self) -> Event:
        """Returns the next of `take_event`. Raises the error that ended the generation."""
        while not self._undelivered:
            await self.reader.wait()
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
        if isinstance(event, events.DraftStops):
            self._on_draft_changed(event)
            return
        asked, appended = session.in_flight, None
        try:
            if isinstance(event, events.TargetLost):
                raise Lost(event.reason, event.cause)
            if isinstance(event, events.FromTarget) and isinstance(event.item, Failure):
                self._on_failure(event.item)
                return
            if isinstance(event, events.FromTarget) and isinstance(event.item, PromptPart):
                self._on_prompt_part(event.item)
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
                times = record.times
                self._target.health.answered(times.round_trip_s, record.step.active_sessions, times.end_s)
            self._loop.call_soon(self._learn, record)  # after the task of the link has written the next verification

    def _on_prompt_part(self, item: PromptPart) -> None:
        """Hands log-probabilities of the prompt to the client; the last end a text without output. Raises Lost."""
        session, part, length = self._session, item.logprobs, self._session.params.prompt_length
        if item.incarnation != session.target_incarnation:
            return
        start, end, size = part.first_index, part.end_index, session.vocabulary_size
        top_count = min(session.params.prompt_logprobs or 0, size)
        is_next = start == session.scored_index > 0 and end <= length
        if not is_next or list(part.token_ids) != session.committed[start:end]:
            self._malformed("log-probabilities of other prompt tokens than the next")
        if len(part.top_token_ids) != top_count * len(part.token_ids) or max(part.top_token_ids, default=0) >= size:
            self._malformed("other likeliest tokens than asked for")
        if self._loss_count or self._is_moving:
            self._on_answered(self._output.count)
        session.scored_index = end if end < length else 0
        self._emit(part)
        if not session.scored_index and not self._output.max_tokens:
            self._step(events.End())
            self._finish(Ending(FinishReason.LENGTH))

    def _malformed(self, error: str) -> NoReturn:
        """An answer is the target's fault, not the request's."""
        get_logger().error("malformed verification result", **self.names, error=error)
        raise Lost("the target sent a malformed answer", "malformed") from None

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
        if self._session.scored_index:
            self._malformed("log-probabilities of the prompt are missing")
        try:
            verdict = conclude(self._session.params, flying, answer.output)
        except InvalidRequest as error:
            self._malformed(str(error))
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
            if isinstance(asked, Open) and (self._is_follower or asked.incarnation > 1):  # not new to its target
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
        self.reader.wake()

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

    def _fail(self, error: SpecdecError) -> None:
        self._request.failed(error)
        self._step(events.End())
        self._emit(error)

    def _how_to_resume(self) -> str:
        params = self._session.params
        seed = f" and seed {params.seed}" if params.rule is Rule.COUPLED else ""
        return f"send the request again with resume.output_token_ids, the {self._output.count} received so far{seed}"
