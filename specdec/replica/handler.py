"""The items of a replica's streams: finds the session of each and calls the replica's service.

A session belongs to the stream that opened it, so no other stream can name it. Items of one message are handled in
order; the failure of one is answered and affects no other session. All of it runs on the engine thread.

When all places are taken, a session without work gives its place to a new one; if its coordinator still wants it, it
opens it again. And while one stream is refused, streams that hold their share of the places get no further ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.scheduling.scheduler import Turn
from specdec.errors import CacheExhausted, InvalidRequest, ReplicaUnavailable, SpecdecError
from specdec.protocol.items import Close, DraftItem, Extend, MissingTokens, Open, TargetItem
from specdec.protocol.limits import check_token_ids
from specdec.protocol.types import Description, ResolvedSamplingParams
from specdec.rpc.status import failure_from_error
from specdec.telemetry.logs import get_logger

STOPPING = "the replica stops and takes no more sessions"
ABANDONED_S = (
    10.0  # a session at work pauses for milliseconds; opened again after a longer pause it costs its cache only
)
HELD_S = 60.0  # then a place beyond its stream's share goes to another stream that asks: the text there can be resumed
ASKING_S = 2.0  # from a refusal on: twice the pause after which a coordinator's client tries again

Reply = Callable[[object], None]


@dataclass(eq=False)
class ReplicaSession:
    """A session of any replica: its Open item, its table of cache blocks, its committed tokens.

    `opened_s`: when it took its place. `active_s`: when its last item with tokens arrived, or its last work ended; a
    session that never had any may be ended for another at once.
    """

    opened: Open
    table: BlockTable
    reply: Reply
    tokens: list[int] = field(default_factory=list, init=False)
    opened_s: float = field(default=0.0, init=False)
    active_s: float = field(default=-math.inf, init=False)

    @property
    def is_busy(self) -> bool:
        """Whether it works on a request that is not answered yet."""
        return False

    @property
    def name(self) -> tuple[int, int]:
        """(session, incarnation), as every item names it."""
        return self.opened.session, self.opened.incarnation

    @property
    def encoder_length(self) -> int:
        """The number of its tokens, the first ones, that are an encoder's input; 0 for a decoder alone."""
        return self.opened.params.encoder_length

    def hold(self, start_position: int, token_ids: Sequence[int]) -> MissingTokens | None:
        """Stores committed tokens from `start_position` on; returns MissingTokens if tokens before it are missing.

        The coordinator owns the committed tokens: tokens that disagree replace the stored ones from there on.
        """
        if start_position > len(self.tokens):
            return MissingTokens(*self.name, len(self.tokens))
        known = self.tokens[start_position : start_position + len(token_ids)]
        if known != list(token_ids[: len(known)]):
            self.cut(start_position)
            known = []
        self.tokens += token_ids[len(known) :]
        return None

    def extend(self, item: Extend, vocabulary_size: int) -> MissingTokens | None:
        """Stores committed tokens; returns MissingTokens if tokens before them are missing. Raises InvalidRequest."""
        check_token_ids("token_ids", item.token_ids, vocabulary_size)
        end, length_max = item.start_position + len(item.token_ids), self.opened.length_max
        if end > length_max:
            raise InvalidRequest("start_position", end, f"with its tokens at most length_max {length_max}")
        return self.hold(item.start_position, item.token_ids)

    def cut(self, length: int) -> None:
        """Drops committed tokens from `length` on, and all state derived from them."""
        del self.tokens[length:]

    def fail(self, error: SpecdecError) -> None:
        """Answers the session's request with an error; the text of an exception stays in the log."""
        defect = SpecdecError("the replica failed at this request; its log says why")
        self.reply(failure_from_error(defect if type(error) is SpecdecError else error, *self.name))
        get_logger().warning("work failed", **log_names(self.opened), reason=error.reason, error=str(error))


class ReplicaService(Protocol):
    """The work for sessions, which differs between draft and target. Every method is called on the engine thread."""

    description: Description

    @property
    def waiting_count(self) -> int:
        """The number of sessions that wait for cache blocks."""

    def check(self, item: Open) -> None:
        """Raises SpecdecError for a session that this replica can never open."""

    def usage(self) -> float:
        """Returns the share that is taken of what its sessions need beside places, 0 to 1: at 1 there is no space
        for one more. May be called from another thread."""

    def admit(self, item: Open, now_s: float) -> None:
        """Raises CacheExhausted if there is no space for the new session, as far as known before its tokens."""

    def open(self, item: Open, reply: Reply) -> Any:
        """Returns a checked session with its first allocation. Raises SpecdecError; then nothing was allocated."""

    def extend(self, session: Any, item: Extend) -> MissingTokens | None:
        """Stores committed tokens; returns MissingTokens if tokens before them are missing. Raises InvalidRequest."""

    def work(self, session: Any, item: Any, arrived_s: float) -> MissingTokens | None:
        """Handles any other item of a session; returns MissingTokens if tokens before it are missing. Raises
        SpecdecError; CacheExhausted ends the session."""

    def close(self, session: Any) -> None:
        """Releases a session's cache; its pending request is not answered."""

    def next_step(self) -> Turn[Any, Any]:
        """Returns the service's turn before every step of the engine."""

    def counters(self) -> Mapping[str, int]:
        """Returns its counters by name, for logs and metrics; may be read from another thread."""


class ItemHandler:
    """The sessions of one replica, at most `session_count_max`, and the service that works for them.

    `sessions`: by stream and number, oldest first.
    """

    def __init__(self, service: ReplicaService, session_count_max: int) -> None:
        self.service = service
        self.session_count_max = session_count_max
        self.sessions: dict[tuple[object, int], Any] = {}
        self._emptied: Callable[[], object] | None = None
        self._refused_s: dict[object, float] = {}  # streams that found no place, and when
        self.worked: set[object] = set()  # streams that brought work for a session of theirs

    def load(self) -> tuple[int, float]:
        """Returns the number of sessions, and the load: the larger of the share of places taken and `usage`, and the
        share of places whose sessions wait for blocks. May be called from another thread."""
        count, places, service = len(self.sessions), self.session_count_max, self.service
        return count, max(count / places, service.usage()) + service.waiting_count / places

    def handle(self, stream: object, items: list[TargetItem | DraftItem], reply: Reply, arrived_s: float = 0.0) -> None:
        """Handles the items of one message in order; answers go to `reply`, some later."""
        for item in items:
            try:
                missing = self._handle(stream, item, reply, arrived_s)
                if missing is not None:
                    reply(missing)
            except SpecdecError as error:
                names = self._log_names(stream, item)
                if isinstance(error, CacheExhausted) and not isinstance(item, Open):
                    self._end(stream, Close(item.session, item.incarnation))
                reply(failure_from_error(error, item.session, item.incarnation))
                get_logger().info("item refused", **names, reason=error.reason)
            except Exception:
                defect = SpecdecError("the replica failed at this item; its log says why")
                reply(failure_from_error(defect, item.session, item.incarnation))
                get_logger().exception("an item failed", **self._log_names(stream, item))
        self._say_when_empty()

    def drain(self, emptied: Callable[[], object]) -> None:
        """Accepts no more sessions; open ones continue, and `emptied` is called when the last has ended."""
        self._emptied = emptied
        self._say_when_empty()

    def close_stream(self, stream: object) -> None:
        """Ends all sessions of a closed stream."""
        for key in [key for key in self.sessions if key[0] is stream]:
            self.service.close(self.sessions.pop(key))
        self._refused_s.pop(stream, None)
        self.worked.discard(stream)
        self._say_when_empty()

    def _handle(self, stream: object, item: Any, reply: Reply, arrived_s: float) -> MissingTokens | None:
        if isinstance(item, Open):
            self._open(stream, item, reply, arrived_s)
            return None
        if isinstance(item, Close):
            self._end(stream, item)
            return None
        session = self._find(stream, item)
        if session is None or isinstance(session, MissingTokens):
            return session
        session.active_s = arrived_s
        self.worked.add(stream)
        if isinstance(item, Extend):
            return self.service.extend(session, item)
        return self.service.work(session, item, arrived_s)

    def _find(self, stream: object, item: Any) -> Any:
        """Returns the session of an item; None for an older item, MissingTokens if the session must be opened again."""
        session = self.sessions.get((stream, item.session))
        if session is None or session.opened.incarnation < item.incarnation:
            return MissingTokens(item.session, item.incarnation, 0, unknown=True)
        return session if session.opened.incarnation == item.incarnation else None

    def _end(self, stream: object, item: Open | Close) -> bool:
        """Ends the session of the item's own or an older incarnation, for an Open of an older one only; False if there
        is none."""
        session = self.sessions.get((stream, item.session))
        newest = item.incarnation - isinstance(item, Open)
        if session is None or session.opened.incarnation > newest:
            return False
        del self.sessions[stream, item.session]
        self.service.close(session)
        return True

    def _open(self, stream: object, item: Open, reply: Reply, now_s: float) -> None:
        """Opens a session in place of an older incarnation; no effect if this or a newer one is open."""
        self.service.check(item)
        is_known = (stream, item.session) in self.sessions
        if not is_known and self._emptied is not None:
            raise ReplicaUnavailable(STOPPING)
        opened_s = self.sessions[stream, item.session].opened_s if is_known else now_s
        if not self._end(stream, item) and is_known:
            return
        if not is_known:
            self.service.admit(item, now_s)
            self._admit(stream, now_s)
        session = self.service.open(item, reply)
        session.opened_s = opened_s
        self.sessions[stream, item.session] = session

    def _admit(self, stream: object, now_s: float) -> None:
        """Makes sure that there is a place for a new session of a stream. Raises CacheExhausted."""
        most, is_full = self.session_count_max, len(self.sessions) >= self.session_count_max
        self._refused_s = {one: at_s for one, at_s in self._refused_s.items() if now_s - at_s < ASKING_S}
        others = self._refused_s.keys() - {stream}
        if others or is_full:
            counts = Counter(holder for holder, _ in self.sessions)
            share = max(1, most // len({*counts, *others, stream}))
            if counts[stream] >= share and any(counts[other] < share for other in others):
                raise CacheExhausted(f"{counts[stream]} of {most} session slots are taken, and other coordinators wait")
            beyond = [key for key in self.sessions if counts[stream] < share < counts[key[0]]]
            if is_full and not self._end_idle(now_s) and not self._end_held(beyond, now_s):
                self._refused_s[stream] = now_s
                raise CacheExhausted(f"all {most} session slots are taken; raise --max-num-seqs")
        self._refused_s.pop(stream, None)

    def _end_idle(self, now_s: float) -> bool:
        """Ends the session that has been without work for longest; False if all are at work."""
        idle = [key for key, session in self.sessions.items() if not session.is_busy]
        key = min(idle, key=lambda one: self.sessions[one].active_s, default=None)
        if key is None or now_s - self.sessions[key].active_s < ABANDONED_S:
            return False
        self._end_for_another(key, "idle session ended")
        return True

    def _end_held(self, keys: Sequence[tuple[object, int]], now_s: float) -> bool:
        """Ends the oldest of some sessions, and says so to its coordinator; False if none is HELD_S old."""
        key = min(keys, key=lambda one: self.sessions[one].opened_s, default=None)
        if key is None or now_s - self.sessions[key].opened_s < HELD_S:
            return False
        session = self._end_for_another(key, "session of a stream beyond its share ended")
        opened = session.opened
        session.reply(MissingTokens(opened.session, opened.incarnation, 0, unknown=True))
        return True

    def _end_for_another(self, key: tuple[object, int], event: str) -> Any:
        session = self.sessions.pop(key)
        self.service.close(session)
        get_logger().info(event, **log_names(session.opened))
        return session

    def _log_names(self, stream: object, item: Any) -> dict[str, object]:
        """Returns the log fields of an item: those of its session, if it is open."""
        if isinstance(item, Open):
            return log_names(item)
        session = self.sessions.get((stream, item.session))
        return {"session": item.session} if session is None else log_names(session.opened)

    def _say_when_empty(self) -> None:
        if self._emptied is not None and not self.sessions:
            self._emptied()


def log_names(opened: Open) -> dict[str, object]:
    """Returns the log fields of a session."""
    return {"trace_id": opened.trace.trace_id.hex(), "session": opened.session}


def check_input(params: ResolvedSamplingParams, description: Description) -> None:
    """Raises InvalidRequest for an encoder's input to a decoder alone, and to an encoder-decoder model for none, or for
    one beyond the encoder's positions."""
    length, most = params.encoder_length, description.encoder_positions_max
    if (length > 0) != description.has_encoder:
        limit = f"{'at least 1' if description.has_encoder else 0}: {description.model_name} is {description.kind}"
        raise InvalidRequest("params.encoder_length", length, limit)
    if length > most:
        raise InvalidRequest("params.encoder_length", length, f"at most {most}, the positions of the encoder")


def check_params_tokens(params: ResolvedSamplingParams, vocabulary_size: int) -> None:
    """Raises InvalidRequest for a token id in sampling parameters outside the vocabulary."""
    check_token_ids("params.stop_token_ids", params.stop_token_ids, vocabulary_size)
    check_token_ids("params.logit_bias", tuple(token_id for token_id, _ in params.logit_bias), vocabulary_size)
    check_token_ids("params.allowed_token_ids", params.allowed_token_ids, vocabulary_size)
    for index, word in enumerate(params.bad_words):
        check_token_ids(f"params.bad_words[{index}]", word, vocabulary_size)
