"""The planted bugs of pools and moves; see bugs.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from specdec.coordinator.fleet import Fleet
from specdec.coordinator.generation import Generation
from specdec.coordinator.peers import Peer
from specdec.coordinator.replicas import Target
from specdec.coordinator.statistics import RequestStatistics
from specdec.protocol.items import Close
from specdec.protocol.report import Moved
from specdec.protocol.session import Session
from specdec.protocol.states import Phase
from tests.simulation.planting import Bug, after, instead, keeping


def nothing(*_arguments: Any, **_named: Any) -> None:
    """What should happen does not."""


def without_close_of_a_move(real: Callable) -> Callable:
    """A Close is not sent where the session has been detached."""

    def mutant(self: Target, item: Any) -> int:
        return 0 if isinstance(item, Close) and item.session not in self._listeners else real(self, item)

    return mutant


def still_attached(real: Callable) -> Callable:
    """A session stays attached until its text has ended."""

    def mutant(self: Peer, session: int) -> None:
        listener = self._listeners.get(session)
        if listener is None or listener._session.finished:
            real(self, session)

    return mutant


def without_close_of_a_draft(real: Callable) -> Callable:
    """The draft that is left gets no Close."""

    def mutant(self: Generation, *found: Any) -> None:
        draft = self._draft
        if draft is None:
            return
        draft.send = lambda item: 0 if isinstance(item, Close) else type(draft).send(draft, item)
        try:
            real(self, *found)
        finally:
            del draft.send

    return mutant


class Whatever(int):
    """A number that equals all others."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def avoided_for_ever(real: Callable) -> Callable:
    """A target that failed a text is avoided until the next answer, also when it was connected anew."""

    def mutant(self: Generation, for_s: float) -> None:
        self._avoided[self._target] = math.inf, Whatever()

    return mutant


def unannounced(real: Callable) -> Callable:
    """Moves to other numerics are not told."""
    return lambda self, event: None if isinstance(event, Moved) else real(self, event)


def younger_after_a_move(real: Callable) -> Callable:
    """The session is opened with the prompt only, as a new one."""

    def mutant(self: Session) -> Any:
        opened = real(self)
        self._target_known_length = max(0, len(self.committed) - 1) if self.phase is Phase.SEEKING else 0
        return opened

    return mutant


MOVES = (
    Bug("a new target is believed to know the text", Session, "_open_on_target", younger_after_a_move),
    Bug("a target that is left gets no Close", Target, "send", without_close_of_a_move),
    Bug("a text stays attached to the target that it left", Peer, "detach", still_attached),
    Bug("a draft that is left gets no Close", Generation, "on_draft_up", without_close_of_a_draft),
    Bug("a draft that stops is not left", Generation, "_on_draft_changed", instead(nothing)),
    Bug(
        "losses count on after an answer", Generation, "_on_answered", keeping("_loss_count", lambda self, _index: self)
    ),
    Bug("a waiting text is forgotten", Fleet, "place_waiting", instead(nothing)),
    Bug("a waiting text is tried at connections only", Fleet, "_try_again", instead(nothing)),
    Bug("a text waits for a target without end", Generation, "_on_no_target", instead(nothing)),
    Bug("a target that refused is asked at once again", Generation, "_avoid_target", instead(nothing)),
    Bug("a target is avoided for ever", Generation, "_avoid_target", avoided_for_ever),
    Bug("a replica is removed while it serves", Peer, "is_idle", instead(property(lambda self: True))),
    Bug(
        "the policy learns of a moved round",
        Generation,
        "_move",
        after(lambda generation: setattr(generation, "_is_moving", False)),
    ),
    Bug("other numerics are not announced", Generation, "_emit", unannounced),
    Bug(
        "equal numerics are not preferred",
        Fleet,
        "next_target",
        lambda real: lambda self, *arguments, **named: real(self, *arguments, **{**named, "is_new": True}),
    ),
    Bug("moves are not counted", RequestStatistics, "on_moved", instead(nothing)),
    Bug("changes of draft are not counted", RequestStatistics, "on_draft_changed", instead(nothing)),
)
