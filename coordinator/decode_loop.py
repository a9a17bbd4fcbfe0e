"""The loop of one generation: evidence, rule, commit, emit, next verification.

It carries out what the session decides: items go to the replicas, waits become timers, verdicts come from the rule,
committed tokens become deltas for the reader. Everything here runs on the event loop and never blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator

from coordinator.figures import Figures, RequestFigures
from coordinator.output import Ending, OutputWalker
from coordinator.rejection import conclude, logprobs_of
from coordinator.replicas import Replica
from coordinator.speculation import Speculation
from coordinator.tracing import GenerationTrace
from specdec.errors import ReplicaUnavailable, SpecdecError
from specdec.policy.plan import PLAIN, Plan
from specdec.protocol.actions import Action, AwaitDraft, ToDraft, ToTarget
from specdec.protocol.items import EvidenceAnswer, Failure, Nodes, Short
from specdec.protocol.report import Delta, Event, Finished, Started, Statistics
from specdec.protocol.round_record import RoundRecord
from specdec.protocol.session import Session
from specdec.protocol.types import Rule, TokenKind
from specdec.rpc.status import error_from_failure
from specdec.telemetry.logs import get_logger

UNDELIVERED_DELTA_COUNT_MAX = 64  # further deltas are merged into the last, so a slow reader costs no memory per token


class Generation:
    """One generation from start to end. `events()` is read by one reader; `close()` may be called at any time."""

    def __init__(
        self,
        session: Session,
        walker: OutputWalker,
        started: Started,
        target: Replica,
        draft: Replica | None,
        speculation: Speculation,
        trace: GenerationTrace | None = None,
        figures: RequestFigures | None = None,
    ) -> None:
        self._session = session
        self._walker = walker
        self._first_output_index = walker.count
        self._target = target
        self._draft = draft
        self._speculation = speculation
        self._trace = trace or GenerationTrace(session.trace, started.request_id)
        self._figures = figures or Figures().request(session.trace)
        self._loop = asyncio.get_running_loop()
        self._born_s = time.monotonic()
        self._sent_s = self._verdict_s = self._born_s
        self._wait_began_s: float | None = None
        self._sent_plan, self._waited_s = PLAIN, 0.0  # for draft tokens, since the last verdict
        self.statistics = Statistics()
        self.names = {"trace_id": session.trace.trace_id.hex(), "session": session.number}  # in logs
        self._started = started
        self._undelivered: deque[Event | SpecdecError] = deque([started])
        self._news = asyncio.Event()

    def begin(self, ending: Ending | None = None) -> None:
        """Opens the session on the replicas and asks for the first token; or ends it where resumed tokens did.

        The target must be up: call it in the same turn of the event loop in which `Replica.usable` said so.
        """
        self._figures.began(self.statistics, self._session.law.prompt_length)
        if ending is not None:
            self._perform(self._session.end())
            self._finish(ending)
            return
        self._target.attach(self._session.number, self)
        if self._draft is not None:
            self._draft.attach(self._session.number, self)
        self._trace.began(self._session)
        self._perform(self._session.begin())
        if self._draft is not None and self._draft.is_up:
            self._perform(self._session.on_draft_up())

    def close(self) -> None:
        """Stops all work for this generation; idempotent."""
        self._perform(self._session.end())
        self._target.detach(self._session.number)
        if self._draft is not None:
            self._draft.detach(self._session.number)
        self._trace.left(self._session, self._draft)

    async def events(self) -> AsyncIterator[Event]:
        """Started, deltas, finished; or raises the error that ended the generation."""
        while True:
            await self._news.wait() if not self._undelivered else None
            self._news.clear()
            while self._undelivered:
                event = self._undelivered.popleft()
                if isinstance(event, SpecdecError):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return

    def on_up(self, replica: Replica) -> None:
        """A replica is connected again."""
        if replica is self._draft:
            self._trace.note("draft connected")
            self._perform(self._session.on_draft_up())

    def on_down(self, replica: Replica, reason: str) -> None:
        """A replica is gone: without a draft it goes on, without a target it ends."""
        if replica is self._draft:
            self._trace.note("draft lost")
            self._perform(self._session.on_draft_down())
        else:
            self._fail(ReplicaUnavailable(f"the target was lost ({reason}); {self._how_to_resume()}"))

    def give_up(self) -> None:
        """The service stops and cannot wait for this generation; nothing where its text has ended."""
        if not self._session.finished:
            self._fail(ReplicaUnavailable(f"the coordinator stops; {self._how_to_resume()}"))

    def on_defect(self) -> None:
        """Handling an answer for this generation failed: it ends, and no other."""
        self._fail(SpecdecError("the coordinator failed at this generation; its log says why"))

    def on_item(self, replica: Replica, item, byte_count: int) -> None:
        """One answer of a replica; after the end it is nobody's."""
        if self._session.finished:
            return
        if replica is self._draft:
            self.statistics.draft_link_bytes += byte_count
            self._on_draft_item(item, byte_count)
        else:
            self.statistics.target_link_bytes += byte_count
            self._on_target_item(item)

    def on_sent(self, replica: Replica, byte_count: int) -> None:
        """Payload that left for a replica on behalf of this generation."""
        if replica is self._draft:
            self.statistics.draft_link_bytes += byte_count
        else:
            self.statistics.target_link_bytes += byte_count

    def _on_draft_item(self, item, byte_count: int) -> None:
        if isinstance(item, Nodes):
            self.statistics.count_nodes(item)
            network_s = self._draft.link.stamps.network_s
            self._speculation.on_draft_step(item, self._session.law.rule, byte_count, network_s)
            actions = self._session.on_nodes(item)
            self._trace.nodes(self._session, item, self._draft.link)
            self._perform(actions)
        elif isinstance(item, Short):
            self._trace.note("draft re-opened" if item.unknown else "draft behind", known_length=item.known_length)
            self._perform(self._session.on_draft_short(item))
        elif isinstance(item, Failure):
            self._trace.note("draft refused", reason=item.reason)
            self._figures.draft_refused()
            self._perform(self._session.on_draft_failure(item))

    def _on_target_item(self, item) -> None:
        if isinstance(item, EvidenceAnswer):
            if self._session.expects(item):
                self._on_evidence(item)
        elif isinstance(item, Short):
            self._trace.note("target re-opened" if item.unknown else "target behind", known_length=item.known_length)
            self._perform(self._session.on_target_short(item))
        elif isinstance(item, Failure) and item.incarnation == self._session.target_incarnation:
            error = error_from_failure(item)
            is_lost = isinstance(error, ReplicaUnavailable)
            self._fail(ReplicaUnavailable(f"{error}; {self._how_to_resume()}") if is_lost else error)

    def _on_evidence(self, answer: EvidenceAnswer) -> None:
        """The round: rule, commit, emit, next verification."""
        session = self._session
        flying = session.in_flight
        assert flying is not None
        self._trace.answered()
        try:
            verdict = conclude(session.law, flying, answer)
        except SpecdecError as error:
            self._fail(error)
            return
        tokens = (*flying.draft_token_ids[: verdict.accepted_count], verdict.next_token_id)
        first_output_index, walked = self._walker.count, self._walker.walk(tokens)
        now_s = time.monotonic()
        start_s, waited_s, round_trip_s, plan = self._verdict_s, self._waited_s, now_s - self._sent_s, self._sent_plan
        round_s, self._verdict_s, self._waited_s = now_s - start_s, now_s, 0.0
        is_after_hit = session.outcome is not None and session.outcome.is_branch_hit
        self._trace.verdict(session, answer, now_s, waited_s, walked.ending is not None)
        actions = session.on_verdict(verdict, walked.kept_count, walked.ending is not None)
        self._count(answer, now_s, is_after_hit)
        self._figures.round(answer, walked.kept_count, round_s)
        self._trace.committed(session, self._target.link)
        self._perform(actions)
        kept = walked.kept_count
        kinds = (*[TokenKind.ACCEPTED] * verdict.accepted_count, verdict.next_kind)[:kept]
        logprobs = logprobs_of(answer.evidence, verdict)[:kept]
        lengths = tuple(map(len, walked.texts))
        self._emit(Delta(first_output_index, tokens[:kept], kinds, "".join(walked.texts), lengths, logprobs))
        if walked.ending is not None:
            self._finish(walked.ending)
            return
        record = self._record(answer, plan, kept, start_s, now_s, waited_s, round_trip_s)
        self._session.policy.on_round(record)  # while the target works on the next round: it may think for a moment
        self._perform(self._session.on_plan_changed())
        if self._draft is not None and not self._session.policy.is_speculating:
            self._speculation.on_network(self._draft.link.stamps.network_s)

    def _record(self, answer: EvidenceAnswer, plan: Plan, kept_count: int, *times_s: float) -> RoundRecord:
        outcome = self._session.outcome
        assert outcome is not None
        found = outcome.next_kind, outcome.was_looked_up, outcome.was_found, outcome.in_hand_count, 0
        step_s = answer.queue_us / 1e6, answer.forward_us / 1e6, answer.evidence_us / 1e6
        step = answer.step_rows, answer.step_sessions, answer.active_sessions, answer.step_count
        counts = plan, outcome.offered_count, outcome.accepted_count, kept_count
        return RoundRecord(answer.round_index, *counts, *found, *times_s, *step_s, *step)

    def _count(self, answer: EvidenceAnswer, now_s: float, follows_branch_hit: bool) -> None:
        statistics, outcome = self.statistics, self._session.outcome
        assert outcome is not None
        statistics.count_round(outcome, follows_branch_hit)
        statistics.num_rounds_off += not self._session.policy.is_speculating
        statistics.count_answer(answer, now_s - self._sent_s)
        statistics.total_s = now_s - self._born_s
        if not statistics.time_to_first_token_s:
            statistics.time_to_first_token_s = statistics.total_s

    def _perform(self, actions: list[Action]) -> None:
        """Carries out what the session decided, in order."""
        for action in actions:
            if isinstance(action, ToTarget):
                if action.item is self._session.in_flight:
                    self._note_verification()
                self._target.send(action.item)
            elif isinstance(action, ToDraft):
                self._draft.send(action.item)
            elif isinstance(action, AwaitDraft):
                self._wait_began_s = time.monotonic()
                self._loop.call_later(action.wait_s, self._on_timer, action.wait_index)

    def _note_verification(self) -> None:
        self._sent_s = time.monotonic()
        self._sent_plan = self._session.policy.plan(self._session.room)
        if self._wait_began_s is not None:
            self._waited_s += self._sent_s - self._wait_began_s
            self.statistics.draft_wait_s += self._sent_s - self._wait_began_s
            self._wait_began_s = None
        self._trace.sent(self._session, self._sent_s)

    def _on_timer(self, wait_index: int) -> None:
        actions = self._session.on_wait_expired(wait_index)
        if actions:
            self.statistics.draft_waits_expired += 1
            self._trace.note("wait expired")
        self._perform(actions)

    def _emit(self, event: Event | SpecdecError) -> None:
        last = self._undelivered[-1] if len(self._undelivered) >= UNDELIVERED_DELTA_COUNT_MAX else None
        if isinstance(last, Delta) and isinstance(event, Delta):
            self._undelivered[-1] = last.merged(event)
        else:
            self._undelivered.append(event)
        self._news.set()

    def _finish(self, ending: Ending) -> None:
        session, statistics = self._session, self.statistics
        prediction = session.policy.prediction
        statistics.predicted_tokens_per_s = prediction.tokens_per_s or 0.0
        statistics.policy_reason = prediction.reason
        statistics.num_rounds_trial, statistics.trial_loss_s = prediction.num_rounds_trial, prediction.trial_loss_s
        statistics.rule, statistics.rule_reason = self._started.rule, self._started.rule_reason
        statistics.count_rate(self._walker.count - self._first_output_index)
        if session.malformed_node_count:
            get_logger().warning("malformed draft nodes", **self.names, count=session.malformed_node_count)
        finished = Finished(
            ending.reason,
            ending.stop_string,
            ending.stop_token_id,
            session.law.prompt_length,
            self._walker.count,
            statistics,
            session.trace.trace_id.hex(),
        )
        self._trace.finished(session, finished)
        self._figures.finished(finished)
        self._emit(finished)

    def _fail(self, error: SpecdecError) -> None:
        self._trace.failed(error)
        self._perform(self._session.end())
        self._emit(error)

    def _how_to_resume(self) -> str:
        law = self._session.law
        seed = f" and seed {law.seed}" if law.rule is Rule.COUPLED else ""
        return f"send the request again with resume.output_token_ids, the {self._walker.count} received so far{seed}"
