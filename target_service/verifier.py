"""Turns verifications into engine work and engine work into evidence.

Holds the fences of design section 4: a round below the last is dropped, the same round with equal content is answered
from memory, with other content it is refused. It runs on the engine thread and decides nothing about acceptance.
"""

from __future__ import annotations

import time
from functools import partial

from specdec.decoding.evidence import EvidenceRequest
from specdec.decoding.paths import TokenPath
from specdec.engine.feed import Feed, StepTiming
from specdec.engine.scheduler import NOTHING, Engine, Turn
from specdec.errors import InvalidRequest
from specdec.policy.steps import StepCurve
from specdec.protocol.items import UINT32_MAX, EvidenceAnswer, Open, Short, Verification
from specdec.protocol.types import Description, Evidence, check_token_ids
from specdec.replica.handler import ReplicaService, Reply, check_law_tokens
from specdec.telemetry.tracing import Tracing
from target_service.gathering import Gathering
from target_service.room import IDLE_S, Room
from target_service.session import TargetSession
from target_service.tracing import Served, spans_of


class Verifier(ReplicaService):
    """All sessions of a target replica. Engine thread only."""

    def __init__(
        self,
        engine: Engine[EvidenceRequest, Evidence],
        description: Description,
        shares_prefixes: bool = True,
        tracing: Tracing | None = None,
    ) -> None:
        self.description = description
        self._engine = engine
        self._tracing = tracing or Tracing()
        self._step_curve = StepCurve()
        self._gathering = Gathering(self._step_curve.seconds)
        self._room = Room(engine.cache, shares_prefixes, self._gathering.left)
        self._active_count = 0
        self._served: list[Served] = []  # rounds of sampled requests that the last step answered

    @property
    def waiting_count(self) -> int:
        """Sessions that wait for room in the cache."""
        return len(self._room.waiting)

    def counters(self) -> dict[str, int]:
        """What became of the cache's room."""
        return dict(self._room.counters)

    def check(self, item: Open) -> None:
        """Raises InvalidRequest for what can be said before there are tokens."""
        size, positions_max = self.description.vocabulary_size, self.description.positions_max
        check_law_tokens(item.law, size)
        if item.vocabulary_size != size:
            raise InvalidRequest("vocabulary_size", item.vocabulary_size, f"the target's own, {size}")
        if item.length_max > positions_max:
            raise InvalidRequest("length_max", item.length_max, f"at most the model's {positions_max}")
        if item.length_max > self._engine.cache.position_count:
            everything = f"{self._engine.cache.position_count}, all positions of the target's cache"
            raise InvalidRequest("length_max", item.length_max, f"at most {everything}; raise --kv-cache-bytes")

    def open(self, item: Open, reply: Reply) -> TargetSession:
        """A session without any block: room is taken with its first verification."""
        return self._room.open(item, reply)

    def close(self, session: TargetSession) -> None:
        """Gives its blocks back; a feed of it that has not run never will."""
        session.work = session.feed = None
        self._gathering.left(session)
        self._room.leave(session)

    def work(self, session: TargetSession, item: Verification, arrived_s: float) -> Short | None:
        """Asks the engine for what evidence needs. Raises SpecdecError."""
        if session.last is not None and item.round_index <= session.last.round_index:
            return self._repeat(session, session.last, item)
        self._check(session, item)
        short = session.hold(item.suffix_start, item.suffix_token_ids)
        if short is not None:
            return short
        session.cut(item.base_position)
        session.last, session.last_answer = item, None
        session.arrived_s, session.asked_s = arrived_s, time.perf_counter()
        committed, drafted = TokenPath(session.tokens, item.base_position), item.draft_token_ids
        session.work = EvidenceRequest(session.opened.law, item.round_index, committed, drafted, item.rows)
        self._engine.cache.truncate(session.table, min(session.agreement(drafted), item.base_position - 1))
        if self._room.give(session):
            self._feed(session)
        return None

    def next_step(self) -> Turn[EvidenceRequest, Evidence]:
        """Lets sessions that wait for room go on, and delays a step for those expected back where a fuller one pays."""
        if self._served and (spans := spans_of(self._served)):
            self._tracing.record(spans)
        self._served.clear()
        while (session := self._room.next_waiting()) is not None:
            self._feed(session)
        if not self._engine.waiting_count:
            return Turn(wake_s=IDLE_S) if self._room.waiting else NOTHING
        now_s = time.perf_counter()
        delay_s = self._gathering.hold_s(now_s)
        self._active_count = self._gathering.active_count(now_s)
        return Turn(delay_s=delay_s) if delay_s else NOTHING

    def _feed(self, session: TargetSession) -> None:
        """Hands what a session was asked to the engine, from its cached length on."""
        work, length = session.work, session.table.length
        if work is None:  # tokens that disagree took it back while it waited for room
            return
        feed = Feed(
            table=session.table,
            start_position=length,
            token_ids=[*session.tokens[length:], *work.draft_token_ids],
            logit_count=work.row_count,
            payload=work,
            done=partial(self._answer, session),
            failed=session.fail,
            is_current=lambda: session.feed is feed,
        )
        session.feed = feed
        session.fed_length, session.fed_draft = len(session.tokens), work.draft_token_ids
        self._engine.submit(feed)
        feed.submitted_s = session.asked_s
        rows = min(len(feed.token_ids), self._engine.chunk_size)
        self._gathering.arrived(session, rows, time.perf_counter())

    def _check(self, session: TargetSession, item: Verification) -> None:
        check_token_ids("suffix_token_ids", item.suffix_token_ids, self.description.vocabulary_size)
        check_token_ids("draft_token_ids", item.draft_token_ids, self.description.vocabulary_size)
        item.check_rows(session.opened.law.rule, self.description.vocabulary_size)
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

    def _answer(self, session: TargetSession, evidence: Evidence, timing: StepTiming) -> None:
        """A session's feed has run: what it was asked is answered."""
        item = session.last
        assert item is not None, "a feed runs for what was asked last"
        now_s = session.quiet_since_s = time.perf_counter()
        session.work = session.feed = None
        self._room.publish(session)
        self._gathering.answered(session, now_s)
        if timing.step_count == 1:
            self._step_curve.add(timing.row_count, timing.forward_s + timing.evidence_s)
        answer = session.last_answer = EvidenceAnswer(
            *session.name,
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
            server_us=round((now_s - session.arrived_s) * 1e6) if item.trace.sampled else 0,
        )
        session.cached_count = session.evictions = 0
        session.reply(answer)
        if item.trace.sampled and self._tracing.is_on:
            self._served.append(Served(item, timing, session.arrived_s, now_s))
