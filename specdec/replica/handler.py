"""What a replica does with the items of a stream: finds the session each means and hands it to the replica's service.

Items of one message are carried out in order; what goes wrong with one is answered and costs nobody else anything. All
of it runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from specdec.engine.scheduler import Turn
from specdec.errors import CacheExhausted, InvalidRequest, ReplicaUnavailable, SpecdecError
from specdec.protocol.items import Close, DraftAsk, Extend, Open, Short, TargetAsk
from specdec.protocol.types import Law, check_token_ids
from specdec.replica.figures import SessionCounts
from specdec.replica.sessions import Reply, SessionStore, log_names
from specdec.rpc.status import failure_from_error
from specdec.telemetry.logs import get_logger

STOPPING = "the replica stops and takes no more sessions"


class ReplicaService(Protocol):
    """What tells a draft from a target: what is done for a session. Every method is called on the engine thread."""

    def check(self, item: Open) -> None:
        """Raises SpecdecError for a session that could never be opened here."""

    def open(self, item: Open, reply: Reply) -> Any:
        """A checked session, with the room it needs from the start. Raises SpecdecError; then nothing was allocated."""

    def extend(self, session: Any, item: Extend) -> Short | None:
        """Holds committed tokens; Short when tokens before them are missing. Raises SpecdecError."""

    def work(self, session: Any, item: Any, arrived_s: float) -> Short | None:
        """Does what any other item asks of a session; Short when tokens before it are missing. Raises SpecdecError;
        CacheExhausted ends the session."""

    def close(self, session: Any) -> None:
        """Releases what a session holds; what was asked for it is not answered any more."""

    def next_step(self) -> Turn:
        """Its turn before every step of the engine."""

    def counters(self) -> Mapping[str, int]:
        """What it has counted, by name; statistics for logs and metrics when read from another thread."""

    @property
    def waiting_count(self) -> int:
        """Sessions that wait for room in the cache."""


class ItemHandler:
    """The sessions of one replica, and the service that works for them."""

    def __init__(self, service: ReplicaService, session_count_max: int) -> None:
        self.service = service
        self.sessions: SessionStore = SessionStore(session_count_max)
        self._emptied: Callable[[], None] | None = None

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
                    self._close(stream, Close(item.session, item.incarnation))
                reply(failure_from_error(error, item.session, item.incarnation))
            except Exception:
                get_logger().exception("an item failed", **self._log_names(stream, item))
                defect = SpecdecError("the replica failed at this item; its log says why")
                reply(failure_from_error(defect, item.session, item.incarnation))
        self._say_when_empty()

    def session_counts(self) -> SessionCounts:
        """How many sessions there are; statistics for metrics when read from another thread."""
        return SessionCounts(len(self.sessions), self.service.waiting_count, self.sessions.count_max)

    def drain(self, emptied: Callable[[], None]) -> None:
        """Takes no more sessions; those open go on, and `emptied` is called when the last has ended."""
        self._emptied = emptied
        self._say_when_empty()

    def close_stream(self, stream: object) -> None:
        """Ends all sessions of a stream that is gone."""
        for session in self.sessions.take_all(stream):
            self.service.close(session)
        self._say_when_empty()

    def _handle(self, stream: object, item: Any, reply: Reply, arrived_s: float) -> Short | None:
        if isinstance(item, Open):
            self._open(stream, item, reply)
            return None
        if isinstance(item, Close):
            self._close(stream, item)
            return None
        session = self.sessions.find(stream, item)
        if session is None or isinstance(session, Short):
            return session
        if isinstance(item, Extend):
            return self.service.extend(session, item)
        return self.service.work(session, item, arrived_s)

    def _close(self, stream: object, item: Open | Close) -> bool:
        """Ends the session that an item ends; False where there is none."""
        ended = self.sessions.take(stream, item)
        if ended is not None:
            self.service.close(ended)
        return ended is not None

    def _open(self, stream: object, item: Open, reply: Reply) -> None:
        """Opens a session in place of an older incarnation; nothing for one that is open already, or older."""
        self.service.check(item)
        known = self.sessions.get(stream, item.session)
        if known is None and self._emptied is not None:
            raise ReplicaUnavailable(STOPPING)
        if not self._close(stream, item) and known is not None:
            return
        self.sessions.check_room()
        self.sessions.add(stream, self.service.open(item, reply))

    def _log_names(self, stream: object, item: Any) -> dict[str, object]:
        """What a line about an item carries: what its session does, where it is open."""
        if isinstance(item, Open):
            return log_names(item)
        session = self.sessions.get(stream, item.session)
        return {"session": item.session} if session is None else log_names(session.opened)

    def _say_when_empty(self) -> None:
        if self._emptied is not None and not self.sessions:
            self._emptied()


def check_law_tokens(law: Law, vocabulary_size: int) -> None:
    """Raises InvalidRequest for a token id in a law that the vocabulary does not have."""
    check_token_ids("law.stop_token_ids", law.stop_token_ids, vocabulary_size)
    check_token_ids("law.logit_bias", tuple(token_id for token_id, _ in law.logit_bias), vocabulary_size)


def check_extend(item: Extend, opened: Open, vocabulary_size: int) -> None:
    """Raises InvalidRequest for tokens that the vocabulary or the session's length does not hold."""
    check_token_ids("token_ids", item.token_ids, vocabulary_size)
    end = item.start_position + len(item.token_ids)
    if end > opened.length_max:
        raise InvalidRequest("start_position", end, f"with its tokens at most length_max {opened.length_max}")
