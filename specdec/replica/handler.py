"""What a replica does with the items of a stream, as far as draft and target do the same.

Items of one message are carried out in order; what goes wrong with one is answered and costs nobody else anything. All
of it runs on the engine thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from specdec.errors import SpecdecError
from specdec.protocol.items import Close, DraftAsk, Open, Short, TargetAsk
from specdec.protocol.types import Law, check_token_ids
from specdec.replica.figures import SessionCounts
from specdec.replica.sessions import HeldSessions, Reply
from specdec.rpc.status import failure_from_error
from specdec.telemetry.logs import get_logger
from specdec.telemetry.tracing import Tracing


class ItemHandler(ABC):
    """All sessions of a replica. A subclass says how one is opened and what is done for it."""

    def __init__(self, sessions: HeldSessions) -> None:
        self._sessions = sessions
        self._description = sessions.description
        self._arrived_s = 0.0  # when the message being handled arrived

    def handle(self, stream: object, items: list[TargetAsk | DraftAsk], reply: Reply, arrived_s: float = 0.0) -> None:
        """Carries out the items of one message in order; answers come through `reply`, some of them later."""
        self._arrived_s = arrived_s
        for item in items:
            try:
                short = self._handle(stream, item, reply)
                if short is not None:
                    reply(short)
            except SpecdecError as error:
                names = self._sessions.log_names(stream, item)
                get_logger().info("item refused", **names, reason=error.reason)
                reply(failure_from_error(error, item.session, item.incarnation))
            except Exception:
                get_logger().exception("an item failed", **self._sessions.log_names(stream, item))
                defect = SpecdecError("the replica failed at this item; its log says why")
                reply(failure_from_error(defect, item.session, item.incarnation))
        self._sessions.say_when_empty()

    def before_step(self) -> float:
        """Its turn before every step of the engine: it may submit feeds. Seconds to hold the step, 0 for none."""
        return 0.0

    def counters(self) -> dict[str, int]:
        """What it has counted, by name; figures for logs and metrics when read from another thread."""
        return {}

    def session_counts(self) -> SessionCounts:
        """How many sessions there are; a figure for metrics when read from another thread."""
        return self._sessions.counts()

    def drain(self, emptied: Callable[[], None]) -> None:
        """Takes no more sessions; those open go on, and `emptied` is called when the last has ended."""
        self._sessions.drain(emptied)

    @abstractmethod
    def trace_to(self, tracing: Tracing) -> None:
        """Spans of what is in detail go there from now on; told before the engine starts."""

    def close_stream(self, stream: object) -> None:
        """Ends all sessions of a stream that is gone."""
        self._sessions.close_stream(stream)
        self._sessions.say_when_empty()

    def _handle(self, stream: object, item: Any, reply: Reply) -> Short | None:
        if isinstance(item, Open):
            self.open(stream, item, reply)
            return None
        if isinstance(item, Close):
            self._sessions.close(stream, item)
            return None
        held = self._sessions.find(stream, item)
        return held if held is None or isinstance(held, Short) else self.work(held, item)

    @abstractmethod
    def open(self, stream: object, item: Open, reply: Reply) -> None:
        """Opens a session. Raises SpecdecError; then nothing was allocated."""

    @abstractmethod
    def work(self, held: Any, item: Any) -> Short | None:
        """Does what any other item asks of an open session; Short when tokens before it are missing."""


def check_law_tokens(law: Law, vocabulary_size: int) -> None:
    """Raises InvalidRequest for a token id in a law that the vocabulary does not have."""
    check_token_ids("law.stop_token_ids", law.stop_token_ids, vocabulary_size)
    check_token_ids("law.logit_bias", tuple(token_id for token_id, _ in law.logit_bias), vocabulary_size)
