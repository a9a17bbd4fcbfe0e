"""The items that services exchange, one value per item of `proto/specdec/v1`; `specdec.rpc.convert` encodes them.

A received value obeys every limit that does not depend on the served model: rare items are checked at construction,
those of every round are named tuples, checked when read from a message (`checked`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

from specdec.errors import InvalidRequest, ReplicaUnavailable
from specdec.protocol.heads import HEAD_PASSES_MAX, NO_HEAD_PLAN, HeadPlan
from specdec.protocol.limits import (
    DRAFT_LENGTH_LIMIT,
    EXTEND_TOKEN_COUNT_MAX,
    NODES_PER_STEP_LIMIT,
    SIBLINGS_MAX,
    TOKENS_MAX,
    UINT32_MAX,
    check_integer,
    check_salt,
)
from specdec.protocol.tree_shape import check_shape, depth_of
from specdec.protocol.types import DraftNode, DraftProbs, PromptLogprobs, ResolvedSamplingParams, Rule, SamplerOutput


@dataclass(frozen=True, slots=True)
class Trace:
    """W3C trace context of a request; `trace_id` is 16 bytes, or empty for none."""

    trace_id: bytes = b""
    span_id: bytes = b""
    sampled: bool = False
    detailed: bool = False

    def __post_init__(self) -> None:
        if len(self.trace_id) not in (0, 16):
            raise InvalidRequest("trace.trace_id", self.trace_id, "16 bytes, or empty")
        if len(self.span_id) not in (0, 8):
            raise InvalidRequest("trace.span_id", self.span_id, "8 bytes, or empty")


NO_TRACE = Trace()


def check_name(session: int, incarnation: int) -> None:
    """Raises InvalidRequest unless session and incarnation are at least 1."""
    check_integer("session", session, 1, UINT32_MAX)
    check_integer("incarnation", incarnation, 1, UINT32_MAX)


def check_suffix(length: int, suffix_token_ids: tuple[int, ...]) -> None:
    """Raises InvalidRequest for an empty or too long committed suffix: the newest token is never validly cached."""
    if not 1 <= len(suffix_token_ids) <= min(EXTEND_TOKEN_COUNT_MAX, length):
        limit = f"1 to {min(EXTEND_TOKEN_COUNT_MAX, length)} committed tokens"
        raise InvalidRequest("suffix_token_ids", len(suffix_token_ids), limit)


@dataclass(frozen=True, slots=True)
class Open:
    """Opens a session on a replica for at most `length_max` positions; computes nothing.

    Cached prefixes are shared only among sessions of the same `cache_salt`. `age_ms`: since the admission of a text
    under way, 0 of a new one.
    """

    session: int
    incarnation: int
    params: ResolvedSamplingParams
    length_max: int
    vocabulary_size: int
    trace: Trace = NO_TRACE
    cache_salt: str = ""
    age_ms: int = 0

    def __post_init__(self) -> None:
        check_name(self.session, self.incarnation)
        check_integer("age_ms", self.age_ms, 0, UINT32_MAX)
        check_integer("length_max", self.length_max, 2, TOKENS_MAX)
        check_integer("vocabulary_size", self.vocabulary_size, 2, TOKENS_MAX)
        check_salt(self.cache_salt)
        if self.params.prompt_length >= self.length_max:
            raise InvalidRequest(
                "params.prompt_length", self.params.prompt_length, f"below length_max {self.length_max}"
            )


@dataclass(frozen=True, slots=True)
class Extend:
    """Committed tokens from `start_position` on."""

    session: int
    incarnation: int
    start_position: int
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        check_name(self.session, self.incarnation)
        check_integer("start_position", self.start_position, 0, TOKENS_MAX)
        if not 1 <= len(self.token_ids) <= EXTEND_TOKEN_COUNT_MAX:
            raise InvalidRequest("token_ids", len(self.token_ids), f"1 to {EXTEND_TOKEN_COUNT_MAX} tokens")


class Verification(NamedTuple):
    """Requests sampler output after the committed tokens and after each draft token (named by session, round_index).

    Draft tokens are the nodes of a tree in depth-first order; `parents`: see `protocol.tree_shape`. Under REJECTION
    each has the draft distribution it was drawn from, that of its siblings if they were drawn together; all weight on a
    token that was not drawn. `wants_heads`: the result shall have the proposals of the target's heads, if it has any.
    `head_plan`: what its feature head shall draft below the token that the round commits last, if it has one.
    `prompt_logprobs_start`: index of the first prompt token whose log-probabilities are wanted, with all after it;
    0: none.
    """

    session: int
    incarnation: int
    round_index: int
    base_position: int
    suffix_token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...] = ()
    draft_probs: tuple[DraftProbs, ...] = ()
    trace: Trace = NO_TRACE
    parents: tuple[int, ...] = ()
    wants_heads: bool = False
    prompt_logprobs_start: int = 0
    head_plan: HeadPlan = NO_HEAD_PLAN

    def checked(self) -> Verification:
        """Itself. Raises InvalidRequest where it breaks a limit."""
        check_name(self.session, self.incarnation)
        check_integer("round_index", self.round_index, 0, UINT32_MAX)
        check_integer("base_position", self.base_position, 1, TOKENS_MAX)
        check_suffix(self.base_position, self.suffix_token_ids)
        if len(self.draft_token_ids) > DRAFT_LENGTH_LIMIT:
            raise InvalidRequest("draft_token_ids", len(self.draft_token_ids), f"at most {DRAFT_LENGTH_LIMIT} tokens")
        if self.draft_probs and len(self.draft_probs) != len(self.draft_token_ids):
            raise InvalidRequest(
                "draft_probs", len(self.draft_probs), f"one per draft token, {len(self.draft_token_ids)}, or none"
            )
        check_shape(self.parents, self.draft_token_ids)
        check_integer("prompt_logprobs_start", self.prompt_logprobs_start, 0, TOKENS_MAX)
        check_integer("head_window", self.head_plan.window, 0, HEAD_PASSES_MAX)
        check_integer("head_nodes_per_step", self.head_plan.nodes_per_step, 1, NODES_PER_STEP_LIMIT)
        check_integer("head_siblings", self.head_plan.siblings, 0, SIBLINGS_MAX)
        return self

    @property
    def suffix_start(self) -> int:
        """Position of the first suffix token."""
        return self.base_position - len(self.suffix_token_ids)

    @property
    def content(self) -> tuple[Hashable, ...]:
        """The fields that determine the answer: a round sent again with equal content gets the same one (the suffix may
        differ)."""
        rows = self.base_position, self.draft_token_ids, self.draft_probs, self.parents
        return *rows, self.wants_heads, self.prompt_logprobs_start, self.head_plan

    @property
    def depth(self) -> int:
        """Draft tokens on the longest path."""
        return depth_of(self.parents, len(self.draft_token_ids))

    def check_rows(self, rule: Rule, vocabulary_size: int) -> None:
        """Raises InvalidRequest unless the draft distributions fit the rule and contain their draft tokens."""
        if rule is Rule.REJECTION:
            if len(self.draft_probs) != len(self.draft_token_ids):
                raise InvalidRequest(
                    "draft_probs", len(self.draft_probs), f"one per draft token, {len(self.draft_token_ids)}"
                )
            for probs, token_id in zip(self.draft_probs, self.draft_token_ids):
                probs.check_proposal(token_id, vocabulary_size)
        elif self.draft_probs:
            raise InvalidRequest("draft_probs", len(self.draft_probs), f"none with rule {rule.name}")


class Commit(NamedTuple):
    """Tokens became final up to `committed_length`; the tree may reach `window` positions further.

    `nodes_per_step`: nodes of this session that one draft step may evaluate; 1 grows a chain without branches.
    `siblings`: further children sent with each proposal child. `wait_length`: the next verification may wait for a
    proposal path of that length; 0: it does not wait.
    """

    session: int
    incarnation: int
    committed_length: int
    suffix_token_ids: tuple[int, ...]
    window: int
    nodes_per_step: int = 1
    trace: Trace = NO_TRACE
    siblings: int = 0
    wait_length: int = 0

    def checked(self) -> Commit:
        """Itself. Raises InvalidRequest where it breaks a limit."""
        check_name(self.session, self.incarnation)
        check_integer("committed_length", self.committed_length, 1, TOKENS_MAX)
        check_suffix(self.committed_length, self.suffix_token_ids)
        check_integer("window", self.window, 0, DRAFT_LENGTH_LIMIT)
        check_integer("nodes_per_step", self.nodes_per_step, 1, NODES_PER_STEP_LIMIT)
        check_integer("siblings", self.siblings, 0, SIBLINGS_MAX)
        check_integer("wait_length", self.wait_length, 0, DRAFT_LENGTH_LIMIT)
        return self

    @property
    def suffix_start(self) -> int:
        """Position of the first suffix token."""
        return self.committed_length - len(self.suffix_token_ids)


@dataclass(frozen=True, slots=True)
class Close:
    """Ends a session on a replica."""

    session: int
    incarnation: int

    def __post_init__(self) -> None:
        check_name(self.session, self.incarnation)


@dataclass(frozen=True, slots=True)
class MissingTokens:
    """The replica holds only `known_length` tokens, or does not know the session at all."""

    session: int
    incarnation: int
    known_length: int
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """One item failed. `code` is a google.rpc.Code number."""

    session: int
    incarnation: int
    code: int
    reason: str
    message: str
    field: str = ""
    retry_after_ms: int = 0


def is_farewell(item: object) -> TypeGuard[Failure]:
    """Whether an item announces that its replica stops: it accepts no more sessions, those it has continue."""
    return isinstance(item, Failure) and item.session == 0 and item.reason == ReplicaUnavailable.reason


class VerificationResult(NamedTuple):
    """The verification result: the sampler output of one verification, and its times in microseconds.

    `step_sessions` shared its last forward pass, of `active_sessions` with work or just answered. `step_count`: its
    forward passes, above 1 for prompts and reopened sessions only. `cached_prompt_tokens`: found in the cache, in the
    first result only. `preemptions`: since the result before. `server_us`: from arrival to answer. `head_us`:
    of heads after that step, for all its sessions. `malformed_count`: of the nodes of the feature head, as in `Nodes`.
    """

    session: int
    incarnation: int
    round_index: int
    output: SamplerOutput
    queue_us: int = 0
    forward_us: int = 0
    sampling_us: int = 0
    step_rows: int = 0
    step_sessions: int = 0
    active_sessions: int = 0
    cached_prompt_tokens: int = 0
    step_count: int = 0
    preemptions: int = 0
    server_us: int = 0
    head_us: int = 0
    malformed_count: int = 0


class PromptPart(NamedTuple):
    """A part of the log-probabilities of a prompt that a verification asked for; the last comes before its result."""

    session: int
    incarnation: int
    logprobs: PromptLogprobs


class Nodes(NamedTuple):
    """Nodes one draft step added to one session's tree.

    `malformed_count`: nodes dropped while reading: the first malformed one and all after it. `is_detailed`: the draft
    recorded a span of the step. `worked_us`: of all steps for the session since the item before, 0 unless the draft
    records spans of the request. `active_sessions`: that the draft drafts for, with `step_us`.
    """

    session: int
    incarnation: int
    epoch: int
    root_length: int
    nodes: tuple[DraftNode, ...]
    step_us: int = 0
    step_rows: int = 0
    malformed_count: int = 0
    is_detailed: bool = False
    worked_us: int = 0
    active_sessions: int = 0


def within(item: Open | Verification | Commit, trace: Trace) -> Open | Verification | Commit:
    """Returns the item with a trace context."""
    return replace(item, trace=trace) if isinstance(item, Open) else item._replace(trace=trace)


TargetItem = Open | Extend | Verification | Close
DraftItem = Open | Extend | Commit | Close
TargetAnswer = MissingTokens | Failure | VerificationResult | PromptPart
DraftAnswer = MissingTokens | Failure | Nodes


def catch_up(
    session: int, incarnation: int, committed: Sequence[int], known_length: int
) -> tuple[list[Extend], tuple[int, ...]]:
    """Returns the committed tokens from `known_length` on, which a replica lacks: items for all but the last piece, and
    that piece, a committed suffix; it is never empty, for `known_length` is below the committed length.
    """
    size = EXTEND_TOKEN_COUNT_MAX
    if len(committed) - known_length <= size:
        return [], tuple(committed[known_length:])
    starts = range(known_length, len(committed), size)
    extends = [Extend(session, incarnation, start, tuple(committed[start : start + size])) for start in starts[:-1]]
    return extends, tuple(committed[starts[-1] :])
