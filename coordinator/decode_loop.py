"""The decode loop of one generation: verification result, rule, commit, output, next verification.

It carries out the session's actions: items go to the replicas, waits become timers, verdicts come from the rule,
committed tokens become deltas for the client, and every round's record goes to the statistics and the trace of its
request. Everything here runs on the event loop and never blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from specdec.coordinator.output import Ending, OutputWalker
from specdec.coordinator.recording import Recorder
from specdec.coordinator.replicas import Replica
from specdec.coordinator.speculation import Speculation
from specdec.coordinator.statistics import RequestStatistics
from specdec.errors import CacheExhausted, InvalidRequest, NumericsError, ReplicaUnavailable, SpecdecError
from specdec.protocol.items import (
    NO_TRACE,
    Close,
    DraftAnswer,
    DraftItem,
    Extend,
    Failure,
    MissingTokens,
    Nodes,
    TargetAnswer,
    TargetItem,
    VerificationResult,
    within,
)
from specdec.protocol.records import RoundRecord, RoundTimes
from specdec.protocol.rejection import conclude, logprobs_of
from specdec.protocol.report import Delta, Event, Finished, Started
from specdec.protocol.session import Action, AwaitDraft, Session, ToTarget
from specdec.protocol.types import Proposer, Rule, TokenKind
from specdec.rpc.status import error_from_failure
from specdec.telemetry.logs import get_logger

UNDELIVERED_DELTA_COUNT_MAX = 64  # further deltas are merged into the last: a slow client costs no memory per token


class Generation:
    """One generation from start to end. `next_event()` has one caller; `close()` may be called at any time."""

    def __init__(
        self,
        session: Session,
        walker: OutputWalker,
        started: Started,
        target: Replica,
        draft: Replica | None,
        speculation: Speculation,
        request: RequestStatistics,
    ) -> None:
        self._session = session
        self._own_start = len(session.committed)  # before it are the client's words: prompt and resumed tokens
        self._walker = walker
        self._target = target
        self._draft = draft
        self._speculation = speculation
        self._request = request
        self.statistics = request.statistics
        self._loop = asyncio.get_running_loop()
        self._verdict_s = time.monotonic()
        self._sent_s: float | None = None  # the verification in flight, for the first time
        self._wait_began_s: float | None = None
        self._wait_timer: asyncio.TimerHandle | None = None
        self._waited_s = 0.0  # for draft tokens, since the last verdict
        self.names = {"trace_id": request.context.trace_id.hex(), "session": session.number}  # in logs
        self._undelivered: deque[Event | SpecdecError] = deque([started])
        self._reader: asyncio.Future[None] | None = None

    def begin(self, ending: Ending | None = None) -> None:
        """Opens the session on the replicas and requests the first token; or ends it if the resumed tokens reached the
        end (`ending`). The target must be up: call it in the turn of the event loop in which `Replica.usable` returned.
        """
        if ending is not None:
            self._perform(self._session.end())
            self._finish(ending)
            return
        self._target.attach(self._session.number, self)
        if self._draft is not None:
            self._draft.attach(self._session.number, self)
        self._request.began(self._session)
        self._perform(self._session.begin())
        if self._draft is not None and self._draft.is_up:
            self._on_draft_up(self._draft)

    def record(self, recorder: Recorder, deltas: Sequence[Delta]) -> None:
        """Records the text: prompt and resumed tokens, and these deltas."""
        if deltas:
            session = self._session
            before = session.committed[: session.params.prompt_length + deltas[0].first_output_index]
            recorder.add(before, session.params.temperature, deltas)

    def close(self) -> None:
        """Stops all work for this generation; idempotent."""
        self._perform(self._session.end())
        self._stop_timer()
        self._target.detach(self._session.number)
        self._request.left()
        if self._draft is not None:
            self._draft.detach(self._session.number)

    async def next_event(self) -> Event:
        """Returns started, then deltas, then finished, each once. Raises the error that ended the generation."""
        while not self._undelivered:
            self._reader = self._loop.create_future()
            await self._reader
        event = self._undelivered.popleft()
        if isinstance(event, SpecdecError):
            raise event
        return event

    def on_up(self, replica: Replica) -> None:
        """A replica is connected, or connected again."""
        if replica is self._draft:
            self._request.note("draft connected")
            self._on_draft_up(replica)

    def _on_draft_up(self, draft: Replica) -> None:
        if draft.description is not None:
            self._request.drafted_by(draft.description)
        self._perform(self._session.on_draft_up())

    def on_down(self, replica: Replica) -> None:
        """A replica is lost: without a draft the generation continues, without a target it ends."""
        if replica is self._draft:
            self._request.note("draft lost")
            self._perform(self._session.on_draft_down())
        else:
            self._fail(ReplicaUnavailable(f"the target was lost; {self._how_to_resume()}"))

    def on_overdue(self, target: Replica, reason: str) -> None:
        """The target left a verification unanswered: the generation ends, and may be resumed."""
        if not self._session.finished:
            self._fail(ReplicaUnavailable(f"{reason}; {self._how_to_resume()}"))

    def give_up(self) -> None:
        """Ends the generation because the service stops; nothing if its text has ended."""
        if not self._session.finished:
            self._fail(ReplicaUnavailable(f"the coordinator stops; {self._how_to_resume()}"))

    def on_defect(self) -> None:
        """Handling an answer for this generation failed: it ends, the others continue."""
        cause = "the coordinator failed at this generation, and its log contains the cause"
        self._fail(SpecdecError(f"{cause}; {self._how_to_resume()}"))

    def on_item(self, replica: Replica, item: TargetAnswer | DraftAnswer, byte_count: int) -> None:
        """Handles one answer of a replica; after the end it is dropped."""
        session = self._session
        if session.finished:
            return
        if replica is self._draft:
            self.statistics.draft_link_bytes += byte_count
            self._on_draft_item(replica, item, byte_count)
        else:
            self.statistics.target_link_bytes += byte_count
            if not isinstance(item, VerificationResult):
                self._on_target_trouble(item)
            elif session.expects(item):
                self._on_result(item)

    def _on_draft_item(self, draft: Replica, item: TargetAnswer | DraftAnswer, byte_count: int) -> None:
        session, request = self._session, self._request
        if isinstance(item, Nodes):
            count = self.statistics.on_nodes(item)
            if item.step_us:
                network_s = draft.link.stamps.network_s
                self._speculation.on_draft_step(item, count, session.params.rule, byte_count, network_s)
            actions = session.on_nodes(item)
            request.nodes(session, item, draft.link)
            self._perform(actions)
        elif isinstance(item, MissingTokens):
            if actions := session.on_draft_missing(item):
                request.note("draft re-opened" if item.unknown else "draft behind", known_length=item.known_length)
                self._perform(actions)
        elif isinstance(item, Failure):
            if actions := session.on_draft_failure(item):
                request.note("draft refused", reason=item.reason)
                self.statistics.draft_refusals += 1
                self._perform(actions)

    def _on_target_trouble(self, item: TargetAnswer | DraftAnswer) -> None:
        if isinstance(item, MissingTokens):
            self._request.note("target re-opened" if item.unknown else "target behind", known_length=item.known_length)
            self._perform(self._session.on_target_missing(item))
        elif isinstance(item, Failure) and item.incarnation == self._session.target_incarnation:
            error = error_from_failure(item)
            cause = error
            if is_defect := type(error) is SpecdecError:  # the text of an exception is for the log
                error = SpecdecError("the target failed at this generation, and its log contains the cause")
            if isinstance(error, CacheExhausted) and self._walker.count:
                error = CacheExhausted(f"{error}; {self._how_to_resume()}", error.retry_after_s)
            elif isinstance(error, (ReplicaUnavailable, NumericsError)) or type(error) is SpecdecError:
                error = type(error)(f"{error}; {self._how_to_resume()}")
            self._fail(error)
            if is_defect:
                get_logger().error("the target failed", **self.names, error=str(cause))

    def _on_result(self, answer: VerificationResult) -> None:
        """Finishes the round: rule, commit, next verification, output."""
        session, flying = self._session, self._session.in_flight
        assert flying is not None and self._sent_s is not None
        round_trip_s = time.monotonic() - self._sent_s
        try:
            verdict = conclude(session.params, flying, answer.output)
        except InvalidRequest as error:  # the target's fault, not the request's
            self._fail(ReplicaUnavailable(f"the target sent a malformed answer; {self._how_to_resume()}"))
            get_logger().error("malformed verification result", **self.names, error=str(error))
            return
        except SpecdecError as error:
            self._fail(error)
            return
        tokens = (*map(flying.draft_token_ids.__getitem__, verdict.accepted), verdict.next_token_id)
        first_output_index = self._walker.count
        texts, ending = self._walker.walk(tokens)
        now_s = time.monotonic()
        times = RoundTimes(self._verdict_s, now_s, self._waited_s, round_trip_s)
        self._verdict_s, self._waited_s, self._sent_s = now_s, 0.0, None
        kept = len(texts)
        record, actions = session.on_verdict(verdict, answer, kept, ending is not None, times)
        self._request.on_round(session, record, self._target.link)
        self._perform(actions)
        kinds = (*[TokenKind.ACCEPTED] * verdict.accepted_count, verdict.next_kind)[:kept]
        logprobs = logprobs_of(answer.output, verdict)[:kept]
        proposers = (*record.tokens.accepted_proposers, Proposer.NONE)[:kept]
        parts = "".join(texts), tuple(map(len, texts)), logprobs, proposers
        self._emit(Delta(first_output_index, tokens[:kept], kinds, *parts))
        if ending is not None:
            self._finish(ending)
            return
        self._loop.call_soon(self._learn, record)  # after the task of the link has written the next verification

    def _learn(self, record: RoundRecord) -> None:
        """Hands a round to the policy, which may take a moment: the target runs the next round meanwhile."""
        self._session.policy.on_round(record)
        if self._draft is not None and not record.is_speculating and self._draft.is_up:
            self._speculation.on_network(self._draft.link.stamps.network_s)

    def _perform(self, actions: list[Action]) -> None:
        """Carries out the session's actions, in order."""
        for action in actions:
            if isinstance(action, ToTarget):
                self.statistics.target_link_bytes += self._target.send(self._outgoing(action.item))
            elif isinstance(action, AwaitDraft):
                self._wait_began_s = time.monotonic()
                self._wait_timer = self._loop.call_later(action.wait_s, self._on_timer, action.wait_index)
            elif self._draft is not None:
                self.statistics.draft_link_bytes += self._draft.send(self._outgoing(action.item))

    def _outgoing(self, item: TargetItem | DraftItem) -> TargetItem | DraftItem:
        """Returns an item about to be sent, in its trace context; the round trip of a verification begins here."""
        if item is self._session.in_flight:
            now_s = time.monotonic()
            if self._wait_began_s is not None:
                self._waited_s += now_s - self._wait_began_s
                self._wait_began_s = None
                self._stop_timer()
            if self._sent_s is None:
                self._sent_s = now_s
            self._request.sent(self._session, now_s)
        context = self._request.context_of(item)
        return item if context is NO_TRACE or isinstance(item, (Extend, Close)) else within(item, context)

    def _stop_timer(self) -> None:
        """The wait is over: its timer must not hold this generation any longer; idempotent."""
        if self._wait_timer is not None:
            self._wait_timer.cancel()

    def _on_timer(self, wait_index: int) -> None:
        actions = self._session.on_wait_expired(wait_index)
        if actions:
            self.statistics.draft_waits_expired += 1
            self._request.note("wait expired")
        self._perform(actions)

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
        session, statistics = self._session, self.statistics
        prediction = session.policy.prediction
        statistics.predicted_tokens_per_s = prediction.tokens_per_s or 0.0
        statistics.policy_reason = prediction.reason
        statistics.num_rounds_exploring, statistics.exploration_loss_s = (
            prediction.num_rounds_exploring,
            prediction.exploration_loss_s,
        )
        statistics.count_rate()
        how = ending.reason, ending.stop_string, ending.stop_token_id
        usage = session.params.prompt_length, self._walker.count
        finished = Finished(*how, *usage, statistics, self._request.context.trace_id.hex())
        self._request.finished(finished)
        self._speculation.remember(session, self._own_start, self._loop.call_soon)
        self._emit(finished)
        if session.malformed_node_count:
            get_logger().warning("malformed draft nodes", **self.names, count=session.malformed_node_count)

    def _fail(self, error: SpecdecError) -> None:
        self._request.failed(error)
        self._perform(self._session.end())
        self._emit(error)

    def _how_to_resume(self) -> str:
        params = self._session.params
        seed = f" and seed {params.seed}" if params.rule is Rule.COUPLED else ""
        return f"send the request again with resume.output_token_ids, the {self._walker.count} received so far{seed}"
