"""Turns verifications into engine work and engine work into evidence.

Holds the fences of design section 4: a round below the last is dropped, the same round with equal content is answered
from memory, with other content it is refused. It runs on the engine thread and decides nothing about acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.decoding.evidence import EvidenceRequest
from specdec.engine.scheduler import StepTiming
from specdec.errors import InvalidRequest
from specdec.protocol.items import Close, EvidenceAnswer, Extend, Open, Short, TargetAsk, Verification
from specdec.protocol.types import Evidence, Law, check_token_ids
from specdec.replica.sessions import HeldSession, HeldSessions, Reply, answer


@dataclass(slots=True, eq=False)
class VerifiedSession(HeldSession):
    """A held session and the last round asked of it; `last_answer` is None while that round is under way."""

    last: Verification | None = None
    last_answer: EvidenceAnswer | None = None


class Verifier:
    """All sessions of a target replica. Every method runs on the engine thread."""

    def __init__(self, sessions: HeldSessions) -> None:
        self._sessions = sessions
        self._vocabulary_size = sessions.description.vocabulary_size

    def handle(self, stream: object, items: list[TargetAsk], reply: Reply) -> None:
        """Carries out the items of one message in order; answers come through `reply`, some of them later."""
        for item in items:
            answer(item, reply, lambda item=item: self._handle(stream, item, reply))

    def close_stream(self, stream: object) -> None:
        """Ends all sessions of a stream that is gone."""
        self._sessions.close_stream(stream)

    def _handle(self, stream: object, item: TargetAsk, reply: Reply) -> Short | None:
        if isinstance(item, Open):
            self._open(stream, item, reply)
            return None
        if isinstance(item, Close):
            self._sessions.close(stream, item)
            return None
        held = self._sessions.find(stream, item)
        if held is None or isinstance(held, Short):
            return held
        if isinstance(item, Extend):
            return self._sessions.extend(held, item)
        return self._verify(held, item)

    def _open(self, stream: object, item: Open, reply: Reply) -> None:
        description = self._sessions.description
        check_law_tokens(item.law, self._vocabulary_size)
        if item.vocabulary_size != self._vocabulary_size:
            raise InvalidRequest("vocabulary_size", item.vocabulary_size, f"the target's own, {self._vocabulary_size}")
        if item.length_max > description.positions_max:
            raise InvalidRequest("length_max", item.length_max, f"at most the model's {description.positions_max}")
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
        self._sessions.submit(
            held,
            wanted,
            len(item.draft_token_ids) + 1,
            request,
            lambda evidence, timing: self._answer(held, item, evidence, timing),
        )
        return None

    def _check(self, held: VerifiedSession, item: Verification) -> None:
        check_token_ids("suffix_token_ids", item.suffix_token_ids, self._vocabulary_size)
        check_token_ids("draft_token_ids", item.draft_token_ids, self._vocabulary_size)
        item.check_rows(held.opened.law.rule, self._vocabulary_size)
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

    @staticmethod
    def _answer(held: VerifiedSession, item: Verification, evidence: Evidence, timing: StepTiming) -> None:
        held.last_answer = EvidenceAnswer(
            *held.name,
            item.round_index,
            evidence,
            queue_us=round(timing.queue_s * 1e6),
            forward_us=round(timing.forward_s * 1e6),
            evidence_us=round(timing.evidence_s * 1e6),
            step_rows=timing.row_count,
        )
        held.reply(held.last_answer)


def check_law_tokens(law: Law, vocabulary_size: int) -> None:
    """Raises InvalidRequest for a token id in a law that the model does not have."""
    check_token_ids("law.stop_token_ids", law.stop_token_ids, vocabulary_size)
    check_token_ids("law.logit_bias", tuple(token_id for token_id, _ in law.logit_bias), vocabulary_size)
