"""Turns verifications into feeds of the engine and its sampler outputs into verification results.

Fences (docs/protocol.md): a round below the last is dropped, the same round with equal content is answered from memory,
with other content it is refused. Runs on the engine thread and makes no decision about acceptance.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from specdec.decoding.prompt_logprobs import PromptRows, TargetOutput, TargetWork
from specdec.decoding.token_path import TokenPath
from specdec.decoding.verification import VerificationRequest
from specdec.engine.interface import tree_paths
from specdec.engine.scheduling.feed import Feed, StepTiming
from specdec.engine.scheduling.scheduler import NOTHING, Engine, Turn
from specdec.errors import GrammarFailed, InvalidRequest, SpecdecError
from specdec.grammar.jobs import Masks, MasksLate, MaskThreads, session_grammar
from specdec.protocol.items import Extend, MissingTokens, Open, PromptPart, Verification, VerificationResult
from specdec.protocol.limits import UINT32_MAX, check_token_ids
from specdec.protocol.rejection import conclude
from specdec.protocol.types import Description, PromptLogprobs, SamplerOutput
from specdec.replica.handler import Reply, check_input, check_params_tokens
from specdec.replica.masks import posting
from specdec.step_curve import StepCurve
from specdec.target_service.admission import TURNAROUND_S, Admission
from specdec.target_service.session import TargetSession
from specdec.target_service.step_delay import StepDelay
from specdec.target_service.tracing import Served, spans_of
from specdec.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedRequest(VerificationRequest):
    """A verification under a grammar."""

    masks: Masks


class Verifier:
    """All sessions of a target replica. Engine thread only. `grammars`: without them a session may have none."""

    def __init__(
        self,
        engine: Engine[TargetWork, TargetOutput],
        description: Description,
        shares_prefixes: bool = True,
        tracing: Tracing | None = None,
        grammars: MaskThreads | None = None,
    ) -> None:
        self.description = description
        self._engine = engine
        self._tracing = tracing or Tracing()
        self._grammars = grammars
        self._step_curve = StepCurve()
        self._step_delay = StepDelay(self._step_curve.seconds)
        self._admission = Admission(engine.cache, shares_prefixes, self._step_delay.left)
        self._active_count = 0
        self._served: list[Served] = []  # rounds of sampled requests that the last step answered

    @property
    def waiting_count(self) -> int:
        """The number of sessions that wait for cache blocks."""
        return len(self._admission.waiting)

    def counters(self) -> dict[str, int]:
        """Returns the counters of the admission."""
        return dict(self._admission.counters)

    def usage(self) -> float:
        """Returns the share of the cache blocks that sessions hold."""
        return self._engine.cache.usage

    def admit(self, item: Open, now_s: float) -> None:
        """Admits every session: its first verification tells its length, and is refused or waits."""

    def check(self, item: Open) -> None:
        """Raises InvalidRequest for a session that this target cannot serve, as far as known before its tokens."""
        size, positions_max = self.description.vocabulary_size, self.description.positions_max
        check_input(item.params, self.description)
        check_params_tokens(item.params, size)
        if item.vocabulary_size != size:
            raise InvalidRequest("vocabulary_size", item.vocabulary_size, f"the target's own, {size}")
        if item.length_max > positions_max:
            raise InvalidRequest("length_max", item.length_max, f"at most the model's {positions_max}")
        if item.length_max > self._engine.cache.position_count:
            everything = f"{self._engine.cache.position_count}, all positions of the target's cache"
            raise InvalidRequest("length_max", item.length_max, f"at most {everything}; raise --kv-cache-bytes")

    def open(self, item: Open, reply: Reply) -> TargetSession:
        """Returns a session without blocks; its first verification allocates them. Raises CacheExhausted where too many
        grammars wait."""
        grammar = session_grammar(self._grammars, item.params, item.vocabulary_size)
        session = self._admission.open(item, reply)
        session.grammar = grammar
        return session

    def close(self, session: TargetSession) -> None:
        """Releases a session's blocks; its pending feed will not run."""
        session.drop_work()
        if session.grammar is not None:
            session.grammar.close()
        self._step_delay.left(session)
        self._admission.leave(session)

    def extend(self, session: TargetSession, item: Extend) -> MissingTokens | None:
        """Stores committed tokens, none beyond the base of a verification that waits. Raises InvalidRequest."""
        end = item.start_position + len(item.token_ids)
        if session.work is not None and end > len(session.work.committed):
            limit = f"with its tokens at most {len(session.work.committed)}, the base of the verification in progress"
            raise InvalidRequest("start_position", end, limit)
        return session.extend(item, self.description.vocabulary_size)

    def work(self, session: TargetSession, item: Verification, arrived_s: float) -> MissingTokens | None:
        """Submits a verification to the engine, once its session has blocks. Raises SpecdecError."""
        if session.last is not None and item.round_index <= session.last.round_index:
            return self._repeat(session, session.last, item)
        self._check(session, item)
        missing = session.hold(item.suffix_start, item.suffix_token_ids)
        if missing is not None:
            return missing
        session.cut(item.base_position)
        session.last, session.last_answer = item, None
        session.scored_index, session.timing = item.prompt_logprobs_start, None
        session.arrived_s, session.requested_s = arrived_s, time.perf_counter()
        cache = self._engine.cache
        session.follow(cache)
        cache.truncate(session.table, min(session.agreement(), session.reused_max))
        if session.encoder_length and not session.table.length:
            cache.give_input(session.table, session.tokens[: session.encoder_length])
        committed = TokenPath(session.tokens, item.base_position, counts=session.counts)
        params, tree = session.opened.params, (item.draft_token_ids, item.draft_probs, item.parents)
        asked = params, item.round_index, committed, *tree, item.wants_heads, item.head_plan, session.head_secret
        if session.grammar is None:
            session.work = VerificationRequest(*asked)
        else:
            masks = session.grammar.verification(session.tokens, item.draft_token_ids, item.parents)
            session.work = MaskedRequest(*asked, masks=masks)
        if self._admission.give(session):
            self._feed(session)
        return None

    def next_step(self) -> Turn[TargetWork, TargetOutput]:
        """Resumes sessions that wait for blocks, and delays a step for the sessions expected back if that pays."""
        if self._served and (spans := spans_of(self._served)):
            self._tracing.record(spans)
        self._served.clear()
        while (session := self._admission.next_waiting()) is not None:
            self._feed(session)
        if not self._engine.waiting_count:
            return Turn(wake_s=TURNAROUND_S) if self._admission.waiting else NOTHING
        now_s = time.perf_counter()
        delay_s = self._step_delay.delay_s(now_s)
        self._active_count = self._step_delay.active_count(now_s)
        return Turn(delay_s=delay_s) if delay_s else NOTHING

    def _feed(self, session: TargetSession) -> None:
        """Submits a session's verification to the engine, from its cached length on; before it, the rows of its prompt
        whose log-probabilities are wanted."""
        work, length, tokens = session.work, session.table.length, session.tokens
        if work is None:  # tokens that disagree cancelled it while it waited for blocks
            return
        if isinstance(work, MaskedRequest) and not session.scored_index and not self._begin_masks(session, work):
            return
        base, end, scored = len(tokens), session.opened.params.prompt_length, session.scored_index
        payload: TargetWork = work
        if not scored:
            fed, logit_count = [*tokens[length:], *work.draft_token_ids], work.row_count
        elif length < scored - 1:  # rows whose log-probabilities were sent before this session was opened
            fed, logit_count = tokens[length : scored - 1], 0
        else:
            fed, logit_count = tokens[length : end - 1], end - scored
            payload = PromptRows(scored, tokens[scored:end], session.opened.params.prompt_logprobs or 0)
        feed: Feed[TargetWork, TargetOutput] = Feed(
            session.table,
            length,
            fed,
            logit_count,
            payload,
            done=partial(self._ran, session),
            failed=session.fail,
            is_current=lambda: session.feed is feed,
            paths=() if scored else tree_paths(work.parents, base),
            part=payload.part if isinstance(payload, PromptRows) else None,
        )
        feed.timing = session.timing or feed.timing
        session.feed = feed
        session.holds(base)
        self._engine.submit(feed)
        feed.submitted_s = session.requested_s
        rows = min(feed.row_count, self._engine.chunk_size)
        self._step_delay.arrived(session, rows, time.perf_counter())

    def _begin_masks(self, session: TargetSession, work: MaskedRequest) -> bool:
        """Whether a verification may run whose masks are needed; if not, it is fed once it may."""

        def feed() -> None:
            if session.work is work and session.feed is None and session not in self._admission.waiting:
                self._feed(session)

        try:
            return work.masks.begin(posting(self._engine, feed))
        except SpecdecError as error:
            session.fail(error)
            return False

    def _check(self, session: TargetSession, item: Verification) -> None:
        check_token_ids("suffix_token_ids", item.suffix_token_ids, self.description.vocabulary_size)
        check_token_ids("draft_token_ids", item.draft_token_ids, self.description.vocabulary_size)
        item.check_rows(session.opened.params.rule, self.description.vocabulary_size)
        params, start = session.opened.params, item.prompt_logprobs_start
        if item.base_position <= params.encoder_length:
            raise InvalidRequest("base_position", item.base_position, f"above encoder_length {params.encoder_length}")
        if 0 < start <= params.encoder_length:
            raise InvalidRequest("prompt_logprobs_start", start, f"above encoder_length {params.encoder_length}, or 0")
        end = 0 if params.prompt_logprobs is None else min(params.prompt_length, item.base_position)
        if start >= max(end, 1):
            raise InvalidRequest("prompt_logprobs_start", start, f"below {end}, the prompt tokens to score, or 0")
        length = item.base_position + item.depth
        if length > session.opened.length_max:
            limit = f"with its draft tokens at most length_max {session.opened.length_max}"
            raise InvalidRequest("base_position", length, limit)
        if item.base_position + len(item.draft_token_ids) > session.table.capacity:
            limit = f"fewer draft tokens: beside {item.base_position} committed ones the cache lacks their blocks"
            raise InvalidRequest("parents", len(item.parents), limit)

    @staticmethod
    def _repeat(session: TargetSession, last: Verification, item: Verification) -> None:
        if item.round_index < last.round_index:
            return
        if item.content != last.content:
            raise InvalidRequest("round_index", item.round_index, "higher: this round was asked with other tokens")
        if session.last_answer is not None:
            session.reply(session.last_answer)

    def _ran(self, session: TargetSession, output: TargetOutput | None, timing: StepTiming) -> None:
        """A session's feed has run, or a part of it: sends the log-probabilities of prompt tokens, and feeds what
        follows them, or answers the verification."""
        if isinstance(output, SamplerOutput):
            self._answer(session, output, timing)
            return
        if isinstance(output, PromptLogprobs):
            session.reply(PromptPart(*session.name, output))
            end, session.active_s = output.end_index, time.monotonic()
            session.scored_index = end if end < session.opened.params.prompt_length else 0
            if session.scored_index:
                return
        session.timing = timing
        self._feed(session)

    def _is_masked(self, session: TargetSession, work: MaskedRequest, output: SamplerOutput) -> bool:
        """Whether a verification under a grammar has its masks. If not, it is run again where they were late, else it
        fails."""
        try:
            dead = work.masks.result().dead
            if dead and conclude(work.params, work, output).last_row in dead:
                raise GrammarFailed("after the last draft token the grammar cannot be followed any further")
        except MasksLate:
            session.feed = None
            self._engine.cache.truncate(session.table, min(session.table.length, session.reused_max))
            self._feed(session)
            return False
        except GrammarFailed as error:
            session.fail(error)
            return False
        return True

    def _answer(self, session: TargetSession, output: SamplerOutput, timing: StepTiming) -> None:
        """Answers the verification of a session."""
        item, work = session.last, session.work
        assert item is not None, "a feed runs for the last verification"
        if isinstance(work, MaskedRequest) and not self._is_masked(session, work, output):
            return
        now_s = session.quiet_since_s = time.perf_counter()
        session.drop_work()
        session.holds(session.fed_length, item.draft_token_ids, item.parents)
        session.active_s = time.monotonic()
        self._admission.cache_prefix(session)
        self._step_delay.answered(session, now_s)
        if timing.step_count == 1:
            self._step_curve.add(timing.row_count, timing.forward_s + timing.sampling_s)
        answer = session.last_answer = VerificationResult(
            *session.name,
            item.round_index,
            output,
            queue_us=microseconds(timing.queue_s),
            forward_us=microseconds(timing.forward_s),
            sampling_us=microseconds(timing.sampling_s - timing.hidden_s),
            step_rows=timing.row_count,
            step_sessions=timing.feed_count,
            active_sessions=self._active_count,
            cached_prompt_tokens=session.cached_count,
            step_count=timing.step_count,
            preemptions=session.preemptions,
            server_us=round((now_s - session.arrived_s) * 1e6),
            head_us=microseconds(timing.hidden_s),
        )
        session.cached_count = session.preemptions = 0
        session.reply(answer)
        if item.trace.sampled and self._tracing.is_on:
            self._served.append(Served(item, timing, session.arrived_s, now_s, len(output.head_nodes)))


def microseconds(seconds: float) -> int:
    """Returns a duration as the wire has it, in 32 bits: 71 minutes for anything longer."""
    return min(round(seconds * 1e6), UINT32_MAX)
