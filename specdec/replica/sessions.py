"""The sessions of all streams of one replica: which are open, and which one an item means.

A session belongs to the stream that opened it, so no other stream can name it. What it holds is its service's to know.
Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from specdec.errors import CacheExhausted
from specdec.protocol.items import Close, Open, Short

Reply = Callable[[object], None]


class ReplicaSession(Protocol):
    """A session as the store sees it: what it was opened with."""

    opened: Open


Session = TypeVar("Session", bound=ReplicaSession)


def name_of(opened: Open) -> tuple[int, int]:
    """(session, incarnation), as every item names it."""
    return opened.session, opened.incarnation


def log_names(opened: Open) -> dict[str, object]:
    """What every line about a session carries."""
    return {"trace_id": opened.trace.trace_id.hex(), "session": opened.session}


class SessionStore(Generic[Session]):
    """Sessions by stream and number, at most `count_max`. Those that leave it are the caller's to release."""

    def __init__(self, count_max: int) -> None:
        self.count_max = count_max
        self._sessions: dict[tuple[object, int], Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> Iterable[Session]:
        """The sessions of all streams, oldest first."""
        return self._sessions.values()

    def get(self, stream: object, number: int) -> Session | None:
        """The session of that number on a stream, whatever its incarnation."""
        return self._sessions.get((stream, number))

    def find(self, stream: object, item) -> Session | Short | None:
        """The session an item names; None when the item is older than it, Short when it has to be opened again."""
        session = self.get(stream, item.session)
        if session is None or session.opened.incarnation < item.incarnation:
            return Short(item.session, item.incarnation, 0, unknown=True)
        return session if session.opened.incarnation == item.incarnation else None

    def add(self, stream: object, session: Session) -> None:
        """Files a session whose number is free on its stream."""
        self._sessions[stream, session.opened.session] = session

    def check_room(self) -> None:
        """Raises CacheExhausted where one more would be too many."""
        if len(self._sessions) >= self.count_max:
            raise CacheExhausted(f"all {self.count_max} session slots are taken; raise --max-num-seqs")

    def take(self, stream: object, item: Open | Close) -> Session | None:
        """The session that an item ends, which is no longer filed: one of its own or an older incarnation. An Open
        ends older ones only."""
        session = self.get(stream, item.session)
        newest = item.incarnation - isinstance(item, Open)
        if session is None or session.opened.incarnation > newest:
            return None
        return self._sessions.pop((stream, item.session))

    def take_all(self, stream: object) -> list[Session]:
        """The sessions of a stream that is gone, which are no longer filed."""
        return [self._sessions.pop(key) for key in [key for key in self._sessions if key[0] is stream]]
