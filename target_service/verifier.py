"""Turns verifications into engine work and engine work into evidence.

Holds the fences of design section 4: a round below the last is dropped, the same round with equal content is answered
from memory, with other content it is refused. It runs on the engine thread and decides nothing about acceptance.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from specdec.decoding.evidence import EvidenceRequest
from specdec.engine.feed import Feed, StepTiming
from specdec.errors import InvalidRequest
from specdec.protocol.items import UINT32_MAX, EvidenceAnswer, Extend, Open, Short, Verification
from specdec.policy.step_curve import StepCurve
from specdec.protocol.types import Evidence, check_token_ids
from specdec.replica.handler import ItemHandler, check_law_tokens
from specdec.replica.sessions import Reply
from specdec.telemetry.tracing import Tracing
from target_service.gathering import Gathering
from target_service.room import GrowingSession, GrowingSessions
from target_service.tracing import Served, StepSpans


@dataclass(slots=True, eq=False)
class VerifiedSession(GrowingSession):
    """A held session and the last round asked of it; `last_answer` is None while that round is under way."""

    last: Verification | None = None
    last_answer: EvidenceAnswer | None = None


class Verifier(ItemHandler):
    """All sessions of a target replica. Every method runs on the engine thread."""

    _sessions: GrowingSessions

    def __init__(self, sessions: GrowingSessions) -> None:
        super().__init__(sessions)
        self._step_curve = StepCurve()
        self._gathering = Gathering(self._step_curve.seconds)
        self._active_count = 0
        self._spans: StepSpans | None = None
        sessions.dropped = self._gathering.left
        sessions.fed = self._expect

    def work(self, held: VerifiedSession, item: Extend | Verification) -> Short | None:
        """Holds committed tokens, or reports evidence."""
        return self._sessions.extend(held, item) if isinstance(item, Extend) else self._verify(held, item)

    def open(self, stream: object, item: Open, reply: Reply) -> None:
        """Checks what can be said before there are tokens; room is taken with the first verification. Raises
        SpecdecError."""
        size, positions_max = self._description.vocabulary_size, self._description.positions_max
        check_law_tokens(item.law, size)
        if item.vocabulary_size != size:
            raise InvalidRequest("vocabulary_size", item.vocabulary_size, f"the target's own, {size}")
        if item.length_max > positions_max:
            raise InvalidRequest("length_max", item.length_max, f"at most the model's {positions_max}")
        self._sessions.open(stream, item, reply, VerifiedSession)

    def _verify(self, held: VerifiedSession, item: Verification) -> Short | None:
        last = held.last
        if last is not None and item.round_index <= last.round_index:
            return self._repeat(held, item)
        self._check(held, item)
        if not held.hold(item.suffix_start, item.suffix_token_ids):
            return Short(*held.name, len(held.tokens))
        del held.tokens[item.base_position :]
        held.last, held.last_answer = item, None
        request = EvidenceRequest(held.opened.law, item.round_index, held.tokens[:], item.draft_token_ids, item.rows)
        wanted = [*held.tokens, *item.draft_token_ids]
        arrived_s = self._arrived_s
        self._sessions.submit(
            held,
            held.lanes[0],
            wanted,
            len(item.draft_token_ids) + 1,
            request,
            lambda evidence, timing: self._answer(held, item, arrived_s, evidence, timing),
        )
        return None

    def _expect(self, held: VerifiedSession, feed: Feed) -> None:
        rows = min(len(feed.token_ids), self._sessions.engine.chunk_size)
        self._gathering.arrived(held, rows, time.perf_counter())

    def before_step(self) -> float:
        """Lets sessions that wait for room go on, and holds a step for those expected back where a fuller one pays."""
        if self._spans is not None:
            self._spans.flush()
        wake_s = self._sessions.take_turn()
        if not self._sessions.engine.waiting_count:
            return wake_s
        now_s = time.perf_counter()
        hold_s = self._gathering.hold_s(now_s)
        self._active_count = self._gathering.active_count(now_s)
        return hold_s

    def trace_to(self, tracing: Tracing) -> None:
        self._spans = StepSpans(tracing) if tracing.is_on else None

    def counters(self) -> dict[str, int]:
        """What became of the cache's room."""
        return asdict(self._sessions.counters)

    def _check(self, held: VerifiedSession, item: Verification) -> None:
        check_token_ids("suffix_token_ids", item.suffix_token_ids, self._description.vocabulary_size)
        check_token_ids("draft_token_ids", item.draft_token_ids, self._description.vocabulary_size)
        item.check_rows(held.opened.law.rule, self._description.vocabulary_size)
        length = item.base_position + len(item.draft_token_ids)
        if length > held.opened.length_max:
            limit = f"with its draft tokens at most length_max {held.opened.length_max}"
            raise InvalidRequest("base_position", length, limit)

    @staticmethod
    def _repeat(held: VerifiedSession, item: Verification) -> None:
        last = held.last
        assert last is not None
        if item.round_index < last.round_index:
            return
        if item.content != last.content:
            raise InvalidRequest("round_index", item.round_index, "higher: this round was asked with other tokens")
        if held.last_answer is not None:
            held.reply(held.last_answer)

    def _answer(
        self, held: VerifiedSession, item: Verification, arrived_s: float, evidence: Evidence, timing: StepTiming
    ) -> None:
        now_s = time.perf_counter()
        self._gathering.answered(held, now_s)
        if timing.step_count == 1:
            self._step_curve.add(timing.row_count, timing.forward_s + timing.evidence_s)
        held.last_answer = EvidenceAnswer(
            *held.name,
            item.round_index,
            evidence,
            queue_us=min(round(timing.queue_s * 1e6), UINT32_MAX),
            forward_us=round(timing.forward_s * 1e6),
            evidence_us=round(timing.evidence_s * 1e6),
            step_rows=timing.row_count,
            step_sessions=timing.feed_count,
            active_sessions=self._active_count,
            cached_prompt_tokens=held.cached_count,
            step_count=timing.step_count,
            evictions=held.evictions,
            server_us=round((now_s - arrived_s) * 1e6) if item.trace.sampled else 0,
        )
        held.cached_count = held.evictions = 0
        held.reply(held.last_answer)
        if self._spans is not None and item.trace.sampled:
            self._spans.add(Served(item, timing, arrived_s, now_s))
