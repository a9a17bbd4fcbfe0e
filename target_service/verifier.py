"""Turns verifications into engine work and engine work into evidence.

Holds the fences of design section 4: a round below the last is dropped, the same round with equal content is answered
from memory, with other content it is refused. It runs on the engine thread and decides nothing about acceptance.
"""

from __future__ import annotations

import time
from dataclasses import asdict

from specdec.decoding.evidence import EvidenceRequest
from specdec.decoding.paths import TokenPath
from specdec.engine.feed import Feed, StepTiming
from specdec.engine.scheduler import Engine, Turn
from specdec.errors import InvalidRequest, SpecdecError
from specdec.policy.step_curve import StepCurve
from specdec.protocol.items import UINT32_MAX, EvidenceAnswer, Extend, Open, Short, Verification
from specdec.protocol.types import Description, Evidence, check_token_ids
from specdec.replica.handler import check_extend, check_law_tokens
from specdec.replica.sessions import Reply, log_names, name_of
from specdec.rpc.status import failure_from_error
from specdec.telemetry.logs import get_logger
from specdec.telemetry.tracing import Tracing
from target_service.gathering import Gathering
from target_service.room import IDLE_S, Room
from target_service.session import TargetSession, Work
from target_service.tracing import Served, StepSpans


class Verifier:
    """All sessions of a target replica: a `ReplicaService`. Every method runs on the engine thread."""

    def __init__(
        self, engine: Engine, description: Description, shares_prefixes: bool = True, tracing: Tracing | None = None
    ) -> None:
        self._engine = engine
        self._description = description
        self._room = Room(engine.cache, shares_prefixes)
        self._step_curve = StepCurve()
        self._gathering = Gathering(self._step_curve.seconds)
        self._active_count = 0
        self._spans = StepSpans(tracing) if tracing is not None and tracing.is_on else None

    @property
    def waiting_count(self) -> int:
        """Sessions that wait for room in the cache."""
        return self._room.waiting_count

    def counters(self) -> dict[str, int]:
        """What became of the cache's room."""
        return asdict(self._room.counters)

    def check(self, item: Open) -> None:
        """Raises InvalidRequest for what can be said before there are tokens."""
        size, positions_max = self._description.vocabulary_size, self._description.positions_max
        check_law_tokens(item.law, size)
        if item.vocabulary_size != size:
            raise InvalidRequest("vocabulary_size", item.vocabulary_size, f"the target's own, {size}")
        if item.length_max > positions_max:
            raise InvalidRequest("length_max", item.length_max, f"at most the model's {positions_max}")
        self._room.check(item)

    def open(self, item: Open, reply: Reply) -> TargetSession:
        """A session without any block: room is taken with its first verification."""
        session = TargetSession(item, self._room.open(item), reply)
        self._room.add(session)
        return session

    def close(self, session: TargetSession) -> None:
        """Gives its blocks back; a feed of it that has not run never will."""
        session.work = session.feed = None
        self._gathering.left(session)
        self._room.leave(session)

    def extend(self, session: TargetSession, item: Extend) -> Short | None:
        """Holds committed tokens; Short when tokens before them are missing. Raises InvalidRequest."""
        check_extend(item, session.opened, self._description.vocabulary_size)
        is_held = session.hold(item.start_position, item.token_ids)
        return None if is_held else Short(*name_of(session.opened), len(session.tokens))

    def work(self, session: TargetSession, item: Verification, arrived_s: float) -> Short | None:
        """Asks the engine for what evidence needs. Raises SpecdecError."""
        last = session.last
        if last is not None and item.round_index <= last.round_index:
            return self._repeat(session, last, item)
        self._check(session, item)
        if not session.hold(item.suffix_start, item.suffix_token_ids):
            return Short(*name_of(session.opened), len(session.tokens))
        if len(session.tokens) > item.base_position:
            session.cut(item.base_position)
        session.last, session.last_answer = item, None
        committed = TokenPath(session.tokens, item.base_position)
        session.work = Work(
            item.draft_token_ids,
            EvidenceRequest(session.opened.law, item.round_index, committed, item.draft_token_ids, item.rows),
            lambda evidence, timing: self._answer(session, item, arrived_s, evidence, timing),
            time.perf_counter(),
        )
        session.feed = None
        start = min(session.agreement(item.draft_token_ids), session.wanted_length - session.work.logit_count)
        self._engine.cache.truncate(session.table, start)
        if self._room.give(session):
            self._feed(session)
        else:
            self._gathering.left(session)
        self._leave_displaced()
        return None

    def next_step(self) -> Turn:
        """Lets sessions that wait for room go on, and delays a step for those expected back where a fuller one pays."""
        if self._spans is not None:
            self._spans.flush()
        while (session := self._room.next_waiting()) is not None:
            self._feed(session)
        self._leave_displaced()
        if not self._engine.waiting_count:
            return Turn(wake_s=IDLE_S if self._room.waiting_count else None)
        now_s = time.perf_counter()
        delay_s = self._gathering.hold_s(now_s)
        self._active_count = self._gathering.active_count(now_s)
        return Turn(delay_s=delay_s)

    def _leave_displaced(self) -> None:
        for session in self._room.take_displaced():
            self._gathering.left(session)

    def _feed(self, session: TargetSession) -> None:
        """Hands what a session was asked to the engine, from its cached length on."""
        work = session.work
        assert work is not None, "a session is fed what it was asked"

        def failed(error: SpecdecError) -> None:
            session.work = session.feed = None
            get_logger().warning("work failed", **log_names(session.opened), reason=error.reason)
            session.reply(failure_from_error(error, *name_of(session.opened)))

        def finished(result: object, timing: StepTiming) -> None:
            session.work = session.feed = None
            session.quiet_since_s = time.perf_counter()
            self._room.publish(session)
            work.done(result, timing)

        feed = Feed(
            table=session.table,
            start_position=session.table.length,
            token_ids=session.lacking(work.draft_token_ids),
            logit_count=work.logit_count,
            payload=work.payload,
            done=finished,
            failed=failed,
            is_current=lambda: session.feed is feed,
        )
        session.feed = feed
        session.fed_length, session.fed_draft = len(session.tokens), work.draft_token_ids
        self._engine.submit(feed)
        feed.submitted_s = work.asked_s
        rows = min(len(feed.token_ids), self._engine.chunk_size)
        self._gathering.arrived(session, rows, time.perf_counter())

    def _check(self, session: TargetSession, item: Verification) -> None:
        check_token_ids("suffix_token_ids", item.suffix_token_ids, self._description.vocabulary_size)
        check_token_ids("draft_token_ids", item.draft_token_ids, self._description.vocabulary_size)
        item.check_rows(session.opened.law.rule, self._description.vocabulary_size)
        length = item.base_position + len(item.draft_token_ids)
        if length > session.opened.length_max:
            limit = f"with its draft tokens at most length_max {session.opened.length_max}"
            raise InvalidRequest("base_position", length, limit)

    @staticmethod
    def _repeat(session: TargetSession, last: Verification, item: Verification) -> None:
        if item.round_index < last.round_index:
            return
        if item.content != last.content:
            raise InvalidRequest("round_index", item.round_index, "higher: this round was asked with other tokens")
        if session.last_answer is not None:
            session.reply(session.last_answer)

    def _answer(
        self, session: TargetSession, item: Verification, arrived_s: float, evidence: Evidence, timing: StepTiming
    ) -> None:
        now_s = time.perf_counter()
        self._gathering.answered(session, now_s)
        if timing.step_count == 1:
            self._step_curve.add(timing.row_count, timing.forward_s + timing.evidence_s)
        answer = session.last_answer = EvidenceAnswer(
            *name_of(session.opened),
            item.round_index,
            evidence,
            queue_us=min(round(timing.queue_s * 1e6), UINT32_MAX),
            forward_us=round(timing.forward_s * 1e6),
            evidence_us=round(timing.evidence_s * 1e6),
            step_rows=timing.row_count,
            step_sessions=timing.feed_count,
            active_sessions=self._active_count,
            cached_prompt_tokens=session.cached_count,
            step_count=timing.step_count,
            evictions=session.evictions,
            server_us=round((now_s - arrived_s) * 1e6) if item.trace.sampled else 0,
        )
        session.cached_count = session.evictions = 0
        session.reply(answer)
        if self._spans is not None and item.trace.sampled:
            self._spans.add(Served(item, timing, arrived_s, now_s))
