"""The states of a generation, as tables: the state of its draft, and the phase of the session.

`Session` moves by these tables and by nothing else, and docs/protocol.md draws them. A move that a table lacks is a
defect and raises.
"""

from __future__ import annotations

import enum


class State(enum.Enum):
    """A member of the tables below: hashed by identity, since a round looks several of them up."""

    __hash__ = object.__hash__


class DraftState(State):
    """The state of the session's draft. The session waits for a READY draft only."""

    ABSENT = "no draft is connected, or the request does not speculate"
    COLD = "opened; nothing came yet"
    READY = "nodes come"
    LATE = "a wait expired: later nodes are used, but no round waits until one starts complete"
    PAUSED = "this draft cannot draft for this session any more"


class DraftEvent(State):
    """The events of the session's draft."""

    UP = "a draft is connected"
    DOWN = "the connection is lost"
    NODES = "nodes came"
    WAIT_EXPIRED = "a wait expired"
    KEPT_UP = "a round starts with all it would wait for"
    REFUSED = "it failed, or sent malformed nodes"


class Phase(State):
    """The phase of the session."""

    NEW = "nothing was sent yet"
    VERIFYING = "a verification is in flight"
    WAITING = "a verification is held back for draft tokens"
    SEEKING = "the target is lost; the round in flight stays for the next one"
    FINISHED = "the text has ended, or the generation was given up"


class PhaseEvent(State):
    """The events that change the phase."""

    SENT = "a verification was sent"
    HELD = "the plan says to wait, and a READY draft still owes tokens"
    LOST = "the target is lost"
    ENDED = "a stop, the last token, a cancellation or an error"


DRAFT_MOVES: dict[tuple[DraftState, DraftEvent], DraftState] = {
    **{(state, DraftEvent.UP): DraftState.COLD for state in DraftState},
    **{(state, DraftEvent.DOWN): DraftState.ABSENT for state in DraftState},
    (DraftState.COLD, DraftEvent.NODES): DraftState.READY,
    (DraftState.READY, DraftEvent.NODES): DraftState.READY,
    (DraftState.LATE, DraftEvent.NODES): DraftState.LATE,
    (DraftState.READY, DraftEvent.WAIT_EXPIRED): DraftState.LATE,
    (DraftState.LATE, DraftEvent.KEPT_UP): DraftState.READY,
    (DraftState.COLD, DraftEvent.REFUSED): DraftState.PAUSED,
    (DraftState.READY, DraftEvent.REFUSED): DraftState.PAUSED,
    (DraftState.LATE, DraftEvent.REFUSED): DraftState.PAUSED,
}

PHASE_MOVES: dict[tuple[Phase, PhaseEvent], Phase] = {
    (Phase.NEW, PhaseEvent.SENT): Phase.VERIFYING,
    (Phase.NEW, PhaseEvent.ENDED): Phase.FINISHED,
    (Phase.VERIFYING, PhaseEvent.SENT): Phase.VERIFYING,
    (Phase.VERIFYING, PhaseEvent.HELD): Phase.WAITING,
    (Phase.VERIFYING, PhaseEvent.ENDED): Phase.FINISHED,
    (Phase.VERIFYING, PhaseEvent.LOST): Phase.SEEKING,
    (Phase.WAITING, PhaseEvent.SENT): Phase.VERIFYING,
    (Phase.WAITING, PhaseEvent.LOST): Phase.SEEKING,
    (Phase.WAITING, PhaseEvent.ENDED): Phase.FINISHED,
    (Phase.SEEKING, PhaseEvent.LOST): Phase.SEEKING,
    (Phase.SEEKING, PhaseEvent.SENT): Phase.VERIFYING,
    (Phase.SEEKING, PhaseEvent.HELD): Phase.WAITING,
    (Phase.SEEKING, PhaseEvent.ENDED): Phase.FINISHED,
}
