"""What a replica does with the items of a stream: finds the session each means and hands it to the replica's service.

A session belongs to the stream that opened it, so no other stream can name it. Items of one message are carried out in
order; what goes wrong with one is answered and costs nobody else anything. All of it runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.engine.block_table import BlockTable
from specdec.engine.scheduler import Turn
from specdec.errors import CacheExhausted, InvalidRequest, ReplicaUnavailable, SpecdecError
from specdec.protocol.items import Close, DraftAsk, Extend, Open, Short, TargetAsk
from specdec.protocol.types import Description, Law, check_token_ids
from specdec.rpc.status import failure_from_error
from specdec.telemetry.logs import get_logger

STOPPING = "the replica stops and takes no more sessions"

Reply = Callable[[object], None]


@dataclass(eq=False)
class ReplicaSession:
    """A session as every replica holds it: what it was opened with, its place in the cache, its committed tokens."""

    opened: Open
    table: BlockTable
    reply: Reply
    tokens: list[int] = field(default_factory=list, init=False)

    @property
    def name(self) -> tuple[int, int]:
        """(session, incarnation), as every item names it."""
        return self.opened.session, self.opened.incarnation

    def hold(self, start_position: int, token_ids: Sequence[int]) -> Short | None:
        """Takes committed tokens from `start_position` on; Short when tokens before it are missing.

        The coordinator is the only truth: tokens that disagree replace what was held from there on.
        """
        if start_position > len(self.tokens):
            return Short(*self.name, len(self.tokens))
        known = self.tokens[start_position : start_position + len(token_ids)]
        if known != list(token_ids[: len(known)]):
            self.cut(start_position)
            known = []
        self.tokens += token_ids[len(known) :]
        return None

    def cut(self, length: int) -> None:
        """Forgets committed tokens from `length` on, and what follows from them."""
        del self.tokens[length:]

    def fail(self, error: SpecdecError) -> None:
        """Answers that what it was asked could not be done."""
        get_logger().warning("work failed", **log_names(self.opened), reason=error.reason)
        self.reply(failure_from_error(error, *self.name))


class ReplicaService(Protocol):
    """What tells a draft from a target: what is done for a session. Every method is called on the engine thread."""

    description: Description

    @property
    def waiting_count(self) -> int:
        """Sessions that wait for room in the cache."""
        return 0

    def check(self, item: Open) -> None:
        """Raises SpecdecError for a session that could never be opened here."""

    def open(self, item: Open, reply: Reply) -> Any:
        """A checked session, with the room it needs from the start. Raises SpecdecError; then nothing was allocated."""

    def extend(self, session: Any, item: Extend) -> Short | None:
        """Holds committed tokens; Short when tokens before them are missing. Raises InvalidRequest."""
        check_token_ids("token_ids", item.token_ids, self.description.vocabulary_size)
        end, length_max = item.start_position + len(item.token_ids), session.opened.length_max
        if end > length_max:
            raise InvalidRequest("start_position", end, f"with its tokens at most length_max {length_max}")
        short: Short | None = session.hold(item.start_position, item.token_ids)
        return short

    def work(self, session: Any, item: Any, arrived_s: float) -> Short | None:
        """Does what any other item asks of a session; Short when tokens before it are missing. Raises SpecdecError;
        CacheExhausted ends the session."""

    def close(self, session: Any) -> None:
        """Releases what a session holds; what was asked for it is not answered any more."""

    def next_step(self) -> Turn[Any, Any]:
        """Its turn before every step of the engine."""

    def counters(self) -> Mapping[str, int]:
        """What it has counted, by name; statistics for logs and metrics when read from another thread."""
        return {}


class ItemHandler:
    """The sessions of one replica, at most `session_count_max`, and the service that works for them.

    `sessions`: by stream and number, oldest first.
    """

    def __init__(self, service: ReplicaService, session_count_max: int) -> None:
        self.service = service
        self.session_count_max = session_count_max
        self.sessions: dict[tuple[object, int], Any] = {}
        self._emptied: Callable[[], object] | None = None

    def handle(self, stream: object, items: list[TargetAsk | DraftAsk], reply: Reply, arrived_s: float = 0.0) -> None:
        """Carries out the items of one message in order; answers come through `reply`, some of them later."""
        for item in items:
            try:
                short = self._handle(stream, item, reply, arrived_s)
                if short is not None:
                    reply(short)
            except SpecdecError as error:
                get_logger().info("item refused", **self._log_names(stream, item), reason=error.reason)
                if isinstance(error, CacheExhausted) and not isinstance(item, Open):
                    self._end(stream, Close(item.session, item.incarnation))
                reply(failure_from_error(error, item.session, item.incarnation))
            except Exception:
                get_logger().exception("an item failed", **self._log_names(stream, item))
                defect = SpecdecError("the replica failed at this item; its log says why")
                reply(failure_from_error(defect, item.session, item.incarnation))
        self._say_when_empty()

    def drain(self, emptied: Callable[[], object]) -> None:
        """Takes no more sessions; those open go on, and `emptied` is called when the last has ended."""
        self._emptied = emptied
        self._say_when_empty()

    def close_stream(self, stream: object) -> None:
        """Ends all sessions of a stream that is gone."""
        for key in [key for key in self.sessions if key[0] is stream]:
            self.service.close(self.sessions.pop(key))
        self._say_when_empty()

    def _handle(self, stream: object, item: Any, reply: Reply, arrived_s: float) -> Short | None:
        if isinstance(item, Open):
            self._open(stream, item, reply)
            return None
        if isinstance(item, Close):
            self._end(stream, item)
            return None
        session = self._find(stream, item)
        if session is None or isinstance(session, Short):
            return session
        if isinstance(item, Extend):
            return self.service.extend(session, item)
        return self.service.work(session, item, arrived_s)

    def _find(self, stream: object, item: Any) -> Any:
        """The session an item names; None when the item is older than it, Short when it has to be opened again."""
        session = self.sessions.get((stream, item.session))
        if session is None or session.opened.incarnation < item.incarnation:
            return Short(item.session, item.incarnation, 0, unknown=True)
        return session if session.opened.incarnation == item.incarnation else None

    def _end(self, stream: object, item: Open | Close) -> bool:
        """Ends the session that an item ends, one of its own or an older incarnation; False where there is none. An
        Open ends older ones only."""
        session = self.sessions.get((stream, item.session))
        newest = item.incarnation - isinstance(item, Open)
        if session is None or session.opened.incarnation > newest:
            return False
        del self.sessions[stream, item.session]
        self.service.close(session)
        return True

    def _open(self, stream: object, item: Open, reply: Reply) -> None:
        """Opens a session in place of an older incarnation; nothing for one that is open already, or older."""
        self.service.check(item)
        is_known = (stream, item.session) in self.sessions
        if not is_known and self._emptied is not None:
            raise ReplicaUnavailable(STOPPING)
        if not self._end(stream, item) and is_known:
            return
        if len(self.sessions) >= self.session_count_max:
            raise CacheExhausted(f"all {self.session_count_max} session slots are taken; raise --max-num-seqs")
        self.sessions[stream, item.session] = self.service.open(item, reply)

    def _log_names(self, stream: object, item: Any) -> dict[str, object]:
        """What a line about an item carries: what its session does, where it is open."""
        if isinstance(item, Open):
            return log_names(item)
        session = self.sessions.get((stream, item.session))
        return {"session": item.session} if session is None else log_names(session.opened)

    def _say_when_empty(self) -> None:
        if self._emptied is not None and not self.sessions:
            self._emptied()


def log_names(opened: Open) -> dict[str, object]:
    """What every line about a session carries."""
    return {"trace_id": opened.trace.trace_id.hex(), "session": opened.session}


def check_law_tokens(law: Law, vocabulary_size: int) -> None:
    """Raises InvalidRequest for a token id in a law that the vocabulary does not have."""
    check_token_ids("law.stop_token_ids", law.stop_token_ids, vocabulary_size)
    check_token_ids("law.logit_bias", tuple(token_id for token_id, _ in law.logit_bias), vocabulary_size)
