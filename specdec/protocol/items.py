"""What services say to each other, one value per item of `proto/specdec/v1`; `specdec.rpc.convert` encodes them.

A value that came from elsewhere obeys every limit that does not depend on the model served: what is made seldom is
checked at construction, what is made every round is a named tuple, checked when it is read from a message (`checked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

from specdec.errors import InvalidRequest, ReplicaUnavailable
from specdec.protocol.types import (
    DRAFT_LENGTH_LIMIT,
    LEAVES_LIMIT,
    TOKENS_MAX,
    Evidence,
    Law,
    Row,
    Rule,
    check_integer,
    check_salt,
)

UINT32_MAX = (1 << 32) - 1
EXTEND_TOKEN_COUNT_MAX = 2048


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
    """Sessions and incarnations count from 1."""
    check_integer("session", session, 1, UINT32_MAX)
    check_integer("incarnation", incarnation, 1, UINT32_MAX)


def check_suffix(length: int, suffix_token_ids: tuple[int, ...]) -> None:
    """A committed suffix is never empty: the newest token is never validly cached."""
    if not 1 <= len(suffix_token_ids) <= min(EXTEND_TOKEN_COUNT_MAX, length):
        limit = f"1 to {min(EXTEND_TOKEN_COUNT_MAX, length)} committed tokens"
        raise InvalidRequest("suffix_token_ids", len(suffix_token_ids), limit)


@dataclass(frozen=True, slots=True)
class Open:
    """Opens a session on a replica for at most `length_max` positions; computes nothing.

    Cached prefixes are shared only among sessions of the same `cache_salt`.
    """

    session: int
    incarnation: int
    law: Law
    length_max: int
    vocabulary_size: int
    trace: Trace = NO_TRACE
    cache_salt: str = ""

    def __post_init__(self) -> None:
        check_name(self.session, self.incarnation)
        check_integer("length_max", self.length_max, 2, TOKENS_MAX)
        check_integer("vocabulary_size", self.vocabulary_size, 2, TOKENS_MAX)
        check_salt(self.cache_salt)
        if self.law.prompt_length >= self.length_max:
            raise InvalidRequest("law.prompt_length", self.law.prompt_length, f"below length_max {self.length_max}")


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
    """Asks for evidence at draft length + 1 positions from `base_position` on (named by session and round_index)."""

    session: int
    incarnation: int
    round_index: int
    base_position: int
    suffix_token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...] = ()
    rows: tuple[Row, ...] = ()
    trace: Trace = NO_TRACE

    def checked(self) -> Verification:
        """Itself. Raises InvalidRequest where it breaks a limit."""
        check_name(self.session, self.incarnation)
        check_integer("round_index", self.round_index, 0, UINT32_MAX)
        check_integer("base_position", self.base_position, 1, TOKENS_MAX)
        check_suffix(self.base_position, self.suffix_token_ids)
        if len(self.draft_token_ids) > DRAFT_LENGTH_LIMIT:
            raise InvalidRequest("draft_token_ids", len(self.draft_token_ids), f"at most {DRAFT_LENGTH_LIMIT} tokens")
        if self.rows and len(self.rows) != len(self.draft_token_ids):
            raise InvalidRequest("rows", len(self.rows), f"one per draft token, {len(self.draft_token_ids)}, or none")
        return self

    @property
    def suffix_start(self) -> int:
        """Position of the first suffix token."""
        return self.base_position - len(self.suffix_token_ids)

    @property
    def content(self) -> tuple[int, tuple[int, ...], tuple[Row, ...]]:
        """What decides the answer: re-sent unchanged, a round gets the same one (the suffix may differ)."""
        return self.base_position, self.draft_token_ids, self.rows

    def check_rows(self, rule: Rule, vocabulary_size: int) -> None:
        """Raises InvalidRequest unless rows fit the rule and hold their draft tokens."""
        if rule is Rule.REJECTION:
            if len(self.rows) != len(self.draft_token_ids):
                raise InvalidRequest("rows", len(self.rows), f"one per draft token, {len(self.draft_token_ids)}")
            for row, token_id in zip(self.rows, self.draft_token_ids):
                row.check_proposal(token_id, vocabulary_size)
        elif self.rows:
            raise InvalidRequest("rows", len(self.rows), f"none with rule {rule.name}")


class Commit(NamedTuple):
    """Tokens became final up to `committed_length`; the tree may reach `window` positions further.

    `leaves`: nodes of this session that one draft step may evaluate; 1 grows a chain without branches.
    """

    session: int
    incarnation: int
    committed_length: int
    suffix_token_ids: tuple[int, ...]
    window: int
    leaves: int = 1
    trace: Trace = NO_TRACE

    def checked(self) -> Commit:
        """Itself. Raises InvalidRequest where it breaks a limit."""
        check_name(self.session, self.incarnation)
        check_integer("committed_length", self.committed_length, 1, TOKENS_MAX)
        check_suffix(self.committed_length, self.suffix_token_ids)
        check_integer("window", self.window, 0, DRAFT_LENGTH_LIMIT)
        check_integer("leaves", self.leaves, 1, LEAVES_LIMIT)
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
class Short:
    """The replica holds only `known_length` tokens, or does not know the session at all."""

    session: int
    incarnation: int
    known_length: int
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """One item could not be done. `code` is a google.rpc.Code number."""

    session: int
    incarnation: int
    code: int
    reason: str
    message: str
    field: str = ""
    retry_after_ms: int = 0


def is_farewell(item: object) -> TypeGuard[Failure]:
    """Whether a replica says, of no session, that it stops: it takes no more sessions, those it has go on."""
    return isinstance(item, Failure) and item.session == 0 and item.reason == ReplicaUnavailable.reason


class EvidenceAnswer(NamedTuple):
    """Evidence of one verification, and where its time went.

    `step_sessions` were in the same forward pass, of `active_sessions` with work to do or just answered. `step_count`:
    forward passes it took, 1 but for prompts and what is opened again. `cached_prompt_tokens`: found in the cache, told
    with the first evidence. `evictions`: since the evidence before. `server_us`: from arrival to answer, where traced.
    """

    session: int
    incarnation: int
    round_index: int
    evidence: Evidence
    queue_us: int = 0
    forward_us: int = 0
    evidence_us: int = 0
    step_rows: int = 0
    step_sessions: int = 0
    active_sessions: int = 0
    cached_prompt_tokens: int = 0
    step_count: int = 0
    evictions: int = 0
    server_us: int = 0


class DraftNode(NamedTuple):
    """One draft token at one place; `parent` 0 is the root. `row` only on a proposal child under REJECTION."""

    node: int
    parent: int
    token_id: int
    proposal: bool
    row: Row | None = None

    def checked(self) -> DraftNode:
        """Itself. Raises InvalidRequest where it breaks a limit."""
        check_integer("node", self.node, 1, UINT32_MAX)
        check_integer("parent", self.parent, 0, self.node - 1)
        return self


class Nodes(NamedTuple):
    """Nodes one draft step added to one session's tree.

    `malformed_count`: nodes dropped while reading, that is the first malformed one and all after it. `step_began_us`:
    by the draft's own clock, where it recorded a span of the step, 0 elsewhere.
    """

    session: int
    incarnation: int
    epoch: int
    root_length: int
    nodes: tuple[DraftNode, ...]
    step_us: int = 0
    step_rows: int = 0
    malformed_count: int = 0
    step_began_us: int = 0


def within(item: Open | Verification | Commit, trace: Trace) -> Open | Verification | Commit:
    """The same in a trace context."""
    return replace(item, trace=trace) if isinstance(item, Open) else item._replace(trace=trace)


TargetAsk = Open | Extend | Verification | Close
DraftAsk = Open | Extend | Commit | Close
TargetAnswer = Short | Failure | EvidenceAnswer
DraftAnswer = Short | Failure | Nodes


def catch_up(
    session: int, incarnation: int, committed: Sequence[int], known_length: int
) -> tuple[list[Extend], tuple[int, ...]]:
    """What a replica that knows `known_length` committed tokens lacks: items for all but the last piece, and that one.

    The last piece is a committed suffix, never empty: `known_length` is below the committed length.
    """
    size = EXTEND_TOKEN_COUNT_MAX
    if len(committed) - known_length <= size:
        return [], tuple(committed[known_length:])
    starts = range(known_length, len(committed), size)
    extends = [Extend(session, incarnation, start, tuple(committed[start : start + size])) for start in starts[:-1]]
    return extends, tuple(committed[starts[-1] :])
